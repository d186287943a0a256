"""Turns selected calls into a program with readable names, and divides it into layers and layer classes."""

import builtins
import keyword
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from planner.arguments import BatchInt, ParamRef, Ref, leaves, map_argument
from planner.errors import CaptureError
from planner.model_profile import Edge, Layer
from planner.profiler.functions import OPAQUE_HINT
from planner.profiler.recording import Call, Unsupported, is_leaf
from planner.program import Node, Program, Tensor
from planner.records import reason

_RESERVED = {
    *dir(builtins),
    "self",
    "torch",
    "nn",
    "F",
    "operator",
    "math",
    "layer",
    "layers",
    "batch",
    "device",
    "dtype",
    "dist",
    "enter",
    "sum_ranks",
    "scatter_sum",
    "gather_slices",
    "take_slice",
    "on_first",
    "recompute",
    "named_tuple",
    "Output",
}


class _Names:
    """Gives values readable, unique identifiers."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self.taken = {*taken, *_RESERVED}

    def make(self, base: str) -> str:
        """Return `base` as an identifier, numbered if it is taken."""
        base = re.sub(r"\W+", "_", base).strip("_").lower() or "value"
        base = f"v_{base}" if base[0].isdigit() else base
        name, count = base, 1
        while name in self.taken or keyword.iskeyword(name):
            count += 1
            name = f"{base}_{count}"
        self.taken.add(name)
        return name


# Names that emitted code has for other things; an argument of that name would hide them.
_HELPERS = {"self", "torch", "nn", "F", "operator", "math", "dist", "layer", "layers", "enter", "recompute", "Output"}
_HELPERS |= {"named_tuple", "range", "tuple", "slice", "float", "getattr"}


def variable_names(inputs: Iterable[str]) -> dict[str, str]:
    """Return for each name of an input of the model the variable that stands for it: the name itself where it can."""
    inputs = list(inputs)
    found: dict[str, str] = {}
    for name in inputs:
        variable = re.sub(r"\W+", "_", name) or "value"
        variable = variable if variable.isidentifier() and variable == name else f"input_{variable}"
        while variable in _HELPERS or keyword.iskeyword(variable) or (variable != name and variable in inputs):
            variable += "_"
        found[name] = variable
    return found


def build_program(
    calls: Iterable[Call],
    inputs: dict[str, str],
    output: Any,
    tensors: Mapping[str, Tensor],
    *,
    relative_to: str = "",
) -> Program:
    """Return calls as a program; `inputs` maps value numbers to names, module names are made relative to a module."""
    calls = list(calls)
    names = _Names(inputs.values())
    named = dict(inputs)
    nodes = []

    def rename(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            return Ref(named[leaf.name])
        if isinstance(leaf, ParamRef):
            return ParamRef(_relative(leaf.name, relative_to))
        return leaf

    for call in calls:
        where = f"{call.location or call.scope or 'the model'}: `{call.target or call.kind}`"
        if call.opaque and call.kind != "module":
            raise CaptureError(f"{where} {call.opaque}", hint=OPAQUE_HINT)
        for leaf in leaves((call.args, call.kwargs, call.result)):
            if isinstance(leaf, Unsupported):
                raise CaptureError(
                    f"{where} takes or returns a {leaf.description}, which no program can hold",
                    hint="pass tensors, numbers, text, tuples or dicts between modules",
                )
        args, kwargs = (
            map_argument(call.args, rename),
            {key: map_argument(item, rename) for key, item in call.kwargs.items()},
        )
        base = _base_name(call)
        fresh = [leaf.name for leaf in leaves(call.result) if isinstance(leaf, Ref) and leaf.name not in named]
        for position, number in enumerate(fresh):
            named[number] = names.make(base if len(fresh) == 1 else f"{base}_{position}")
        result = map_argument(call.result, rename)
        name = result.name if fresh and isinstance(result, Ref) else names.make(base)
        try:
            nodes.append(
                Node(
                    name=name,
                    kind=call.kind,
                    target=_relative(call.target, relative_to) if call.kind == "module" else call.target,
                    args=args,
                    kwargs=kwargs,
                    result=result,
                    in_place=call.in_place,
                    written=tuple(named[ref.name] for ref in call.written if ref.name in named),
                    no_grad=call.no_grad,
                    random=call.random,
                )
            )
        except ValueError as error:
            raise CaptureError(
                f"{where} can't be part of a program: {reason(error)}", hint="put that code into a module of its own"
            ) from None
    described = {name: tensors[number] for number, name in named.items()}
    return Program(
        inputs=tuple(inputs.values()), nodes=tuple(nodes), output=map_argument(output, rename), tensors=described
    )


def _relative(name: str, module: str) -> str:
    """Return a name relative to a module; names outside it stay whole."""
    if not module:
        return name
    return "" if name == module else name.removeprefix(f"{module}.")


def _base_name(call: Call) -> str:
    if call.name:
        return call.name
    if call.kind == "module":
        parts = [part for part in call.target.split(".") if not part.isdigit()]
        digits = re.findall(r"\.(\d+)$", call.target)
        return "_".join([*parts[-1:], *digits]) or "output"
    if call.kind == "getitem":
        return "item"
    return re.split(r"[.:]", call.target)[-1].strip("_") or call.kind


def input_only_values(program: Program, model: nn.Module, whole: Container[str] = ()) -> frozenset[str]:
    """Return the values computed from the model's inputs alone, without parameters, randomness or the modules `whole`.

    Every stage that reads such a value makes it anew, so none is sent. Writes in place disqualify what they write.
    """
    derived = set(program.inputs)
    changed_inputs: set[str] = set()  # what is computed from one after that is the work of one layer
    for node in program.nodes:
        made_anew = all(name in derived and name not in changed_inputs for name in node.reads())
        if node.target not in whole and _is_pure(node, model) and made_anew:
            derived.update(node.writes())
        changed_inputs.update(name for name in node.changes() if name in program.inputs)
    for node in program.nodes:
        if node.in_place:
            derived.difference_update(name for name in (*node.writes(), *node.reads()) if name not in program.inputs)
    changed = True
    while changed:  # what is computed from a disqualified value is disqualified too
        changed = False
        for node in program.nodes:
            if any(name in derived and name not in program.inputs for name in node.writes()) and not all(
                n in derived for n in node.reads()
            ):
                derived.difference_update(name for name in node.writes() if name not in program.inputs)
                changed = True
    return frozenset(derived)


def _is_pure(node: Node, model: nn.Module) -> bool:
    if node.random:
        return False
    if node.kind == "module":
        return not any(True for _ in model.get_submodule(node.target).parameters())
    trainable = dict(model.named_parameters(remove_duplicate=False))
    return not any(name in trainable for name in node.params())


@dataclass(frozen=True)
class Segment:
    """A layer as nodes [start, stop) of a program: the call of `module` and the glue that follows."""

    name: str
    module: str
    start: int
    stop: int


def divide(program: Program, model: nn.Module, derived: frozenset[str]) -> list[Segment]:
    """Return the layers: each begins with the call of a module with parameters; glue belongs to the layer before."""
    starts = [
        index
        for index, node in enumerate(program.nodes)
        if node.kind == "module"
        and any(True for _ in model.get_submodule(node.target).parameters())
        and not all(name in derived for name in node.writes())
    ]
    if not starts and is_leaf(model):
        name = type(model).__name__
        raise CaptureError(
            f"the whole model is one {name} that calls no submodule: there are no layers to place",
            hint=f"wrap it in a module that calls it: return nn.Sequential({name}(...)) from build_model",
        )
    if not starts:
        raise CaptureError(
            "the model calls no module with parameters",
            hint="put parameters into submodules, so that there is something to place",
        )
    bounds = [0, *starts[1:], len(program.nodes)]
    segments: list[Segment] = []
    seen: dict[str, int] = {}
    for index, start in enumerate(starts):
        module = program.nodes[start].target
        seen[module] = seen.get(module, 0) + 1
        name = module if seen[module] == 1 else f"{module}@{seen[module]}"
        segments.append(Segment(name, module, bounds[index], bounds[index + 1]))
    return segments


def make_layers(program: Program, segments: list[Segment], classes: list[str], model: nn.Module) -> list[Layer]:
    """Return the layers with their classes and parameters (buffers included).

    The last layer also reads what the model returns as it is.
    """
    layers = []
    returned = [leaf.name for leaf in leaves(program.output) if isinstance(leaf, ParamRef)]
    for segment, layer_class in zip(segments, classes, strict=True):
        names: dict[str, None] = {}
        for node in program.nodes[segment.start : segment.stop]:
            names.update(dict.fromkeys(node_parameters(node, model)))
        names.update(dict.fromkeys(returned if segment is segments[-1] else ()))
        layers.append(
            Layer(
                name=segment.name,
                layer_class=layer_class,
                module=segment.module,
                start=segment.start,
                stop=segment.stop,
                parameters=tuple(names),
            )
        )
    return layers


def node_parameters(node: Node, model: nn.Module) -> list[str]:
    """Return the parameters and buffers a node reads: those of the module it calls, and those among its arguments."""
    names = list(node.params())
    if node.kind == "module":
        module = model.get_submodule(node.target)
        for local, _ in [
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ]:
            names.append(f"{node.target}.{local}" if node.target else local)
    return names


def make_edges(program: Program, segments: list[Segment], derived: frozenset[str]) -> list[Edge]:
    """Return the values that cross layers. The producer of a read is the last layer that made or wrote the value."""
    owner = [index for index, segment in enumerate(segments) for _ in range(segment.start, segment.stop)]
    last_writer: dict[str, int] = {}
    consumers: dict[tuple[str, int], list[int]] = {}
    for position, node in enumerate(program.nodes):
        layer = owner[position]
        for name in node.reads():
            if name in derived or name in program.inputs:
                continue
            if last_writer[name] != layer:
                consumers.setdefault((name, last_writer[name]), []).append(layer)
        for name in (*node.writes(), *node.written):
            last_writer[name] = layer
    final = len(segments) - 1
    for leaf in leaves(program.output):
        if (
            isinstance(leaf, Ref)
            and leaf.name in last_writer
            and leaf.name not in derived
            and last_writer[leaf.name] != final
        ):
            consumers.setdefault((leaf.name, last_writer[leaf.name]), []).append(final)
    edges = []
    for (name, producer), readers in consumers.items():
        tensor = program.tensors[name]
        per_row, fixed = bytes_by_row(tensor)
        edges.append(
            Edge(
                value=name,
                producer=producer,
                consumers=tuple(sorted(set(readers))),
                bytes_per_row=per_row,
                fixed_bytes=fixed,
                needs_grad=tensor.requires_grad,
            )
        )
    return sorted(edges, key=lambda edge: (edge.producer, edge.consumers, edge.value))


def bytes_by_row(tensor: Tensor) -> tuple[float, int]:
    """Return the bytes of a tensor as (per row, fixed); exact where one dimension grows with the batch."""
    if not any(isinstance(dim, BatchInt) for dim in tensor.shape):
        return 0.0, tensor.num_bytes(1)
    first, second = tensor.num_bytes(1), tensor.num_bytes(2)
    return float(second - first), max(0, 2 * first - second)

"""Writes what a stage counts over a step, and the loss that divides by it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from planner.arguments import BatchFloat, BatchInt, Ref, leaves
from planner.emitter.expressions import Renderer, attribute_path, parameter_path, value_paths
from planner.emitter.rows import batch_expression, local_name, name_tuple
from planner.emitter.stages import StageCode
from planner.model_profile import Loss, ModelProfile
from planner.program import Node, Tensor

INDENT = "    "
# Counts are made in float32 at least: bfloat16 has no odd numbers beyond 256.
_COUNT_DTYPE = "torch.promote_types(self.dtype, torch.float32)"


@dataclass(frozen=True)
class Counting:
    """What one stage counts, from which inputs; on the last stage, where loss_fn was changed, also the loss."""

    counts: dict[str, str]
    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    forward_counts: tuple[str, ...]
    loss_counts: tuple[str, ...]
    loss_nodes: tuple[Node, ...]
    loss: Loss
    output: Any
    tensors: dict[str, Tensor]

    @property
    def parameters(self) -> tuple[str, ...]:
        """The parameters and buffers that the nodes read (weights of classes)."""
        return tuple(dict.fromkeys(name for node in (*self.nodes, *self.loss_nodes) for name in node.params()))


def stage_counting(stage: StageCode, profile: ModelProfile) -> Counting | None:
    """Return what a stage counts, None where nothing."""
    loss = profile.loss
    if loss is None:
        return None
    counted = {count.value: count.over for count in loss.counts}
    loss_nodes: tuple[Node, ...] = ()
    loss_counts: tuple[str, ...] = ()
    if stage.is_last and loss.nodes:
        loss_nodes = _needed(loss.nodes, _names(loss.value), set(counted))
        read = {name for node in loss_nodes for name in node.reads()} | set(_names(loss.value))
        loss_counts = tuple(name for name in counted if name in read)
    wanted = {*stage.forward_counts, *loss_counts}
    if not wanted and not loss_nodes:
        return None
    made_anew = {*profile.input_only_values, *profile.program.inputs}
    derived = [node for node in profile.program.nodes if _all_in(node, made_anew)]
    nodes = _needed([*derived, *loss.nodes], wanted, set())
    read = {name for node in nodes for name in node.reads()}
    inputs = [name for name in profile.program.inputs if BatchInt(1) in profile.program.tensors[name].shape]
    if inputs and not read & set(inputs) and _takes_rows(nodes):
        read.add(inputs[0])  # the number of rows is read off it
    return Counting(
        counts={name: over for name, over in counted.items() if name in wanted},
        nodes=nodes,
        inputs=tuple(name for name in profile.program.inputs if name in read | wanted),
        forward_counts=stage.forward_counts,
        loss_counts=loss_counts,
        loss_nodes=loss_nodes,
        loss=loss,
        output=profile.program.output,
        tensors={**profile.program.tensors, **loss.tensors},
    )


def _all_in(node: Node, names: set[str]) -> bool:
    writes = list(node.writes())
    return bool(writes) and all(name in names for name in writes)


def _takes_rows(nodes: Iterable[Node]) -> bool:
    return any(isinstance(leaf, BatchInt | BatchFloat) for node in nodes for leaf in leaves((node.args, node.kwargs)))


def _names(value: Any) -> list[str]:
    return [leaf.name for leaf in leaves(value) if isinstance(leaf, Ref)]


def _needed(nodes: Iterable[Node], wanted: Iterable[str], given: set[str]) -> tuple[Node, ...]:
    """Return the nodes that make the wanted values; those `given` need not be made."""
    needed, kept = set(wanted) - given, []
    for node in reversed(list(nodes)):
        if any(name in needed for name in node.writes()):
            kept.append(node)
            needed.update(name for name in node.reads() if name not in given)
    return tuple(reversed(kept))


def counting_attributes(counting: Counting) -> Iterator[str]:
    """Yield the attributes of a stage class that tell the runtime what it counts."""
    if counting.counts:
        items = ", ".join(f'"{name}": "{over}"' for name, over in counting.counts.items())
        yield f"{INDENT}step_counts = {{{items}}}"
    for attribute in ("forward_counts", "loss_counts"):
        if names := getattr(counting, attribute):
            yield f"{INDENT}{attribute} = {name_tuple(names)}"
    if counting.inputs:
        yield f"{INDENT}count_inputs = {name_tuple(counting.inputs)}"


def counting_methods(counting: Counting) -> Iterator[str]:
    """Yield the methods that count in a microbatch, and that compute its loss from counts of the step."""
    pad = INDENT * 2
    taken = {*counting.tensors}
    target = local_name("target", taken - {"target"} if counting.loss.targets == Ref("target") else taken)
    if counting.counts:
        yield ""
        yield f"{INDENT}def count_microbatch(self, {', '.join([*counting.inputs, target])}):"
        given = {name: counting.tensors[name] for name in counting.inputs}
        yield from _body(counting, counting.nodes, given, {target: counting.loss.targets}, dtype=_COUNT_DTYPE)
        names = list(counting.counts)
        yield f"{pad}return {', '.join(names)}{',' if len(names) == 1 else ''}"
    if counting.loss_nodes:
        output = local_name("output", taken - {"output"} if counting.output == Ref("output") else taken)
        yield ""
        yield f"{INDENT}def microbatch_loss(self, {', '.join([output, target, *counting.loss_counts])}):"
        yield f'{pad}"""Return the loss of a microbatch: its mean over the step is the loss of the whole batch."""'
        opened = {output: counting.output, target: counting.loss.targets}
        yield from _body(counting, counting.loss_nodes, {}, opened, results=_names(counting.loss.value))
        renderer = Renderer(module=str, parameter=str)
        yield f"{pad}return {renderer.argument(counting.loss.value)}"


def _body(
    counting: Counting,
    nodes: tuple[Node, ...],
    given: dict[str, Tensor],
    opened: dict[str, Any],
    *,
    dtype: str | None = None,
    results: Iterable[str] = (),
) -> Iterator[str]:
    """Yield the statements of nodes, after those that take the values they read out of the arguments `opened`."""
    pad = INDENT * 2
    used = {name for node in nodes for name in node.reads()} | {*counting.counts, *results}
    given = dict(given)
    lines: list[str] = []
    for argument, structure in opened.items():
        for name, path in value_paths(structure, argument):
            if name in used and name not in given:
                given[name] = counting.tensors[name]
                lines += [f"{name} = {path}"] if name != path else []
    for line in lines:
        yield f"{pad}{line}"
    batch = local_name("batch", {*given, *opened, *counting.counts})
    if _takes_rows(nodes):
        yield f"{pad}{batch} = {batch_expression(given)}"
    if dtype is None:  # what a loss computes in is up to its caller
        floating = next((name for name, tensor in given.items() if tensor.follows_model_dtype), None)
        dtype = f"{floating}.dtype" if floating else "self.dtype"
    renderer = Renderer(
        module=lambda name: attribute_path(name, "self"),
        parameter=lambda name: parameter_path(name, "self"),
        dtype=dtype,
        batch=batch,
    )
    for line in renderer.body(nodes, lambda name: name in used):
        yield f"{pad}{line}"

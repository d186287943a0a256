"""At which tensor-parallel degrees a layer class may be divided, and why it stays whole at the others.

A degree must divide the heads of a block: half a head can't be computed. Heads are told from the recorded body: the
output of a linear layer that is viewed as (..., heads, head size). One head alone is shared, and may stay whole.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from planner.arguments import Ref, leaves
from planner.errors import UsageError
from planner.model_profile import WholeAt
from planner.profiler.classes import OpenedClass
from planner.program import Node, Program
from planner.tp_rules import LayerBody, ModuleInfo, refusals

_VIEWS = {"view", "reshape", "unflatten"}
_PARTS = {"chunk", "split", "tensor_split", "unbind", "split_with_sizes"}
_MAX_PARTS = 3  # of a fused projection that is viewed as (..., parts, heads, head size), or with the two turned
_HEADS_NAME = re.compile(r"heads?(_kv|_q)?$|^n_?heads?|^num_.*heads$")


@dataclass(frozen=True)
class Heads:
    """The heads that a linear layer's output is viewed as, and the dimensions they may be told from."""

    module: str
    count: int
    dims: tuple[int, ...]

    def divide_by(self, degree: int) -> bool:
        """Return whether a degree divides the heads: one head alone is shared, and may stay whole."""
        return self.count == 1 or any(dim % degree == 0 for dim in self.dims)


def find_heads(opened: OpenedClass) -> tuple[Heads, ...]:
    """Return the heads of every linear layer of a class whose output is viewed by heads, in the order of the calls."""
    body = opened.body
    found: dict[Heads, None] = {}
    for node in body.nodes if body is not None else ():
        info = opened.modules.get(node.target) if node.kind == "module" else None
        if body is None or info is None or info.kind != "linear":
            continue
        for dims in _viewed_heads(body, list(node.writes())):
            several = [dim for dim in dims if dim > _MAX_PARTS]
            found[Heads(node.target, several[0] if several else dims[0], dims)] = None
    return tuple(found)


def _viewed_heads(body: Program, values: list[str]) -> Iterator[tuple[int, ...]]:
    """Yield the dimensions before the head size of every view of the values, or of the parts they are taken into."""
    followed = set(values)
    for node in body.nodes:
        if node.kind == "module" or not followed & set(node.reads()):
            continue
        operation = node.target.rpartition(".")[2]
        if operation in _PARTS or (node.kind == "getitem" and not isinstance(node.args[1], tuple)):
            followed.update(node.writes())
        elif operation in _VIEWS:
            yield from _heads_of_view(body, node)


def _heads_of_view(body: Program, node: Node) -> Iterator[tuple[int, ...]]:
    """Yield the dimensions that a view takes the last one apart into, but for the last of them, the head size."""
    source = next((leaf for leaf in leaves(node.args) if isinstance(leaf, Ref)), None)
    writes = list(node.writes())
    if source is None or len(writes) != 1:
        return
    last, after = body.tensors[source.name].shape[-1], body.tensors[writes[0]].shape
    taken: list[int] = []
    for size in reversed(after):
        if not isinstance(size, int) or math.prod(taken) == last:
            break
        taken.insert(0, size)
    if len(taken) < 2 or math.prod(taken) != last:
        return
    yield tuple(taken[:-1])


def forbidden_at(opened: OpenedClass, degree: int, model: nn.Module, module: str) -> WholeAt | None:
    """Return why no plan may divide a class, whose first layer is `module`, over a degree; None where one may."""
    for heads in find_heads(opened):
        if not heads.divide_by(degree):
            where = f"{module}.{heads.module}" if module else heads.module
            named = _configured(model, where, heads.count)
            shown = f"{heads.count} heads" + (f" ({named})" if named else "")
            return WholeAt(tp_degree=degree, reason=f"{where} gives {shown}, not divisible by {degree}", forbidden=True)
    return None


def allowed_by_others(classes: Sequence[tuple[OpenedClass, Sequence[WholeAt]]]) -> set[int]:
    """Return the degrees that the heads of one class forbid and those of another divide.

    There the first stays whole, as what has no heads does: in a pyramid of widths only some levels may divide.
    """
    divided = [(opened, {item.tp_degree for item in whole if item.forbidden}) for opened, whole in classes]
    headed = [found for opened, found in divided if any(heads.count > 1 for heads in find_heads(opened))]
    return {degree for found in headed for degree in found if any(degree not in other for other in headed)}


def undivided_at(opened: OpenedClass, layer: LayerBody, degree: int) -> WholeAt:
    """Return why a class, for which no sharding was found, stays whole at a degree."""
    divisible = [name for name, info in opened.modules.items() if info.kind in ("linear", "embedding")]
    if opened.body is None:
        return WholeAt(tp_degree=degree, reason=_reason(opened, divisible, degree))
    known = refusals(layer, degree)
    if not divisible:  # matrices that code reads by itself, as of a linear layer with a forward of its own
        divisible = [name.removesuffix(".weight") for name in known if len(layer.parameter_shapes[name]) > 1]
    why = next(((name, known[key]) for name in divisible for key in (f"{name}.weight", name) if key in known), None)
    reason = _reason(opened, divisible, degree) + (f"; {why[0]}: {why[1]}" if why is not None else "")
    return WholeAt(tp_degree=degree, reason=reason)


def _configured(model: nn.Module, module: str, count: int) -> str:
    """Return 'num_key_value_heads=4': the settings of the module's owners, or of the model, with that many heads."""
    parts = module.split(".")
    owners = [model.get_submodule(".".join(parts[:length])) for length in range(len(parts) - 1, -1, -1)]
    sources = [vars(owner) for owner in owners] + [_settings(owner) for owner in owners]
    for source in sorted(sources, key=lambda values: "num_key_value_heads" not in values):
        names = [
            name
            for name, value in source.items()
            if isinstance(value, int) and not isinstance(value, bool) and value == count and _HEADS_NAME.search(name)
        ]
        if names:
            return ", ".join(f"{name}={count}" for name in names)
    return ""


def _settings(module: nn.Module) -> dict[str, Any]:
    config = getattr(module, "config", None)
    return dict(config) if isinstance(config, dict) else dict(getattr(config, "__dict__", {}))


def _reason(opened: OpenedClass, divisible: Sequence[str], degree: int) -> str:
    if not divisible:
        return "it has no linear or embedding layer"
    if opened.body is None:
        info = opened.modules[""]
        size, what = _size(info)
        if size % degree:
            return f"its {size} {what} do not divide by {degree}"
    names = ", ".join(name or "its weight" for name in divisible)
    return f"no division of {names} over {degree} was found that computes the same"


def _size(info: ModuleInfo) -> tuple[int, str]:
    weight = info.parameters["weight"]
    return (weight[0], "rows") if info.kind == "embedding" else (weight[info.weight_out_dim], "output features")


def check_degrees(asked: Sequence[int], classes: Sequence[tuple[str, OpenedClass, Sequence[WholeAt]]]) -> None:
    """Raise UsageError for the first degree that the heads of a class (name, opened, why whole) forbid."""
    counts = [heads.count for _, opened, _ in classes for heads in find_heads(opened) if heads.count > 1]
    for name, _, whole in classes:
        for item in whole:
            if item.forbidden and item.tp_degree in asked:
                common = math.gcd(*counts)
                allowed = ", ".join(str(number) for number in range(1, common + 1) if common % number == 0)
                raise UsageError(
                    f"--tp {item.tp_degree} does not divide layer class {name}: {item.reason}; "
                    f"degrees that divide all heads of the model: {allowed}",
                    hint=f"leave {item.tp_degree} out of --tp",
                )

"""The states a value can be in under tensor parallelism, and what is known of the modules of a layer.

WHOLE     every rank holds the value; the gradient that reaches it on every rank is the whole one
ENTERED   every rank holds the value; the gradients that reach it on the ranks add up to the whole one
PARTIAL   the ranks' values add up to the value; each gets the whole gradient
Shard     every rank holds, and gets the gradient of, its slice along one dimension
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from planner.arguments import BatchInt
from planner.program import Program

ModuleKind = Literal["linear", "embedding", "elementwise", "normalization", "recorded", "opaque"]


@dataclass(frozen=True, kw_only=True)
class ModuleInfo:
    """A leaf module of a layer: what kind of function it is, and its parameters.

    `linear` has `weight_out_dim` (0 for nn.Linear, 1 for a transposed weight such as Hugging Face's Conv1D) and maybe a
    bias. `embedding` has (rows, columns). `normalization` works over the last `normalized_dims`
    dimensions. `elementwise` maps every element by itself; with `additive` it maps sums to sums (dropout).
    `recorded` has a body of its own to propagate through; `opaque` takes whole values only. `constants` are the shapes
    of its buffers and plain tensors, which stay whole.
    """

    kind: ModuleKind
    parameters: dict[str, tuple[int, ...]]
    num_bytes: int = 0
    weight_out_dim: int = 0
    normalized_dims: int = 1
    additive: bool = False
    body: Program | None = None
    constants: dict[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Shard:
    """Divided along dimension `dim` (counted from the front); that dimension is `parts` parts, each divided.

    `sizes` are the whole sizes of the parts where they differ (q, k and v of fewer key-value heads in one weight).
    `sequence` marks a dimension that is divided for the memory of activations alone, beside all parameters.
    """

    dim: int
    parts: int = 1
    sizes: tuple[int, ...] = ()
    sequence: bool = False

    def at(self, dim: int) -> "Shard":
        """Return the same division of another dimension: where an operation moves it to."""
        return replace(self, dim=dim)


WHOLE: Literal["whole"] = "whole"
ENTERED: Literal["entered"] = "entered"
PARTIAL: Literal["partial"] = "partial"

State = Shard | Literal["whole", "entered", "partial"]
# What a rule sees of an operand and says of a result: None where every rank holds the whole value.
RuleState = Shard | Literal["partial"] | None


class IllegalShardingError(Exception):
    """An operation can't work on a divided value; the message says which and why."""


def product_of(dims: tuple[int | BatchInt, ...]) -> tuple[int, int]:
    """Return the product of dimensions at two batch sizes: equal products are equal at both."""
    return (
        math.prod(dim.at(2) if isinstance(dim, BatchInt) else dim for dim in dims),
        math.prod(dim.at(3) if isinstance(dim, BatchInt) else dim for dim in dims),
    )


def divided(size: Any, degree: int, parts: int | Shard = 1) -> int:
    """Return a dimension's local size; IllegalShardingError if it does not divide."""
    sizes = parts.sizes if isinstance(parts, Shard) else ()
    count = parts.parts if isinstance(parts, Shard) else parts
    if not isinstance(size, int) or isinstance(size, bool):
        raise IllegalShardingError(f"a dimension that grows with the batch does not divide by {degree}")
    if sizes and sum(sizes) == size:
        odd = next((part for part in sizes if part % degree), None)
        if odd is not None:
            raise IllegalShardingError(f"part {odd} of dimension {size} does not divide by {degree}")
    elif sizes or size % (degree * count):
        raise IllegalShardingError(
            f"dimension {size} does not divide by {count} x {degree}"
            if count > 1
            else f"dimension {size} does not divide by {degree}"
        )
    return size // degree

"""The states a value can be in under tensor parallelism, and what is known of the modules of a layer."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from planner.program import BatchInt, Program

ModuleKind = Literal["linear", "embedding", "elementwise", "normalization", "recorded", "opaque"]


@dataclass(frozen=True, kw_only=True)
class ModuleInfo:
    """A leaf module of a layer: what kind of function it is, and its parameters.

    `linear` has `weight_out_dim` (0 for nn.Linear, 1 for a transposed weight such as Hugging Face's Conv1D) and maybe a
    bias. `embedding` has (rows, columns). `normalization` works over the last `normalized_dims`
    dimensions. `recorded` has a body of its own to propagate through; `opaque` takes replicated values only.
    `constants` are the shapes of its buffers and plain tensors, which stay whole.
    """

    kind: ModuleKind
    parameters: dict[str, tuple[int, ...]]
    num_bytes: int = 0
    weight_out_dim: int = 0
    normalized_dims: int = 1
    body: Program | None = None
    constants: dict[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Shard:
    """Divided along dimension `dim` (counted from the front); that dimension is `parts` equal parts, each divided."""

    dim: int
    parts: int = 1


State = Shard | None  # None: every rank holds the whole value


class IllegalShardingError(Exception):
    """An operation can't work on a divided value; the message says which and why."""


def product_of(dims: tuple[int | BatchInt, ...]) -> tuple[int, int]:
    """Return the product of dimensions at two batch sizes: equal products are equal at both."""
    return (
        math.prod(dim.at(2) if isinstance(dim, BatchInt) else dim for dim in dims),
        math.prod(dim.at(3) if isinstance(dim, BatchInt) else dim for dim in dims),
    )


def divided(size: Any, degree: int, parts: int = 1) -> int:
    """Return a dimension's local size; IllegalShardingError if it does not divide."""
    if not isinstance(size, int) or isinstance(size, bool) or size % (degree * parts):
        raise IllegalShardingError(
            f"dimension {size!r} does not divide by {parts} x {degree}"
            if parts > 1
            else f"dimension {size!r} does not divide by {degree}"
        )
    return size // degree

"""One way to divide a layer class over tensor-parallel ranks, as the profile keeps it and the emitter writes it."""

from typing import Any, Literal

from planner.arguments import ParamRef, Ref
from planner.program import Encoded, Identifier, QualifiedName
from planner.records import ByteCount, NonNegativeFloat, NonNegativeInt, PositiveInt, Record

Style = Literal["column", "row", "vocabulary"]
Collective = Literal["all_reduce", "all_gather", "reduce_scatter"]
MoveKind = Literal[
    "enter",
    "sum_ranks",
    "scatter_sum",
    "gather_slices",
    "gather_entered",
    "take_slice",
    "take_entered",
    "on_first",
]


class ShardedParameter(Record):
    """How a parameter is divided over tensor-parallel ranks: dimension `dim`, within each of `parts` equal parts.

    `parts` > 1 is a fused projection (q, k and v in one weight): every rank holds its slice of each part; `sizes` are
    the whole sizes of the parts where they differ.
    """

    dim: NonNegativeInt
    parts: PositiveInt = 1
    sizes: tuple[PositiveInt, ...] = ()


class CollectiveCall(Record):
    """A collective over the tensor-parallel group: bytes of the full tensor, per row of the microbatch and fixed."""

    kind: Collective
    bytes_per_row: NonNegativeFloat
    fixed_bytes: ByteCount = 0
    phase: Literal["forward", "backward"]


class Rewrite(Record):
    """A constant of the layer's body that changes with the degree: argument `path` of node `node` becomes `value`.

    `path` is the position in args, or the name in kwargs, then positions inside containers.
    """

    node: Identifier
    path: tuple[int | str, ...]
    value: Encoded


class Move(Record):
    """A value of the body in another form, as `name`, for some of its readers: a collective, or a slice.

    `source` is a value, a parameter or an earlier move. After node `after` (None: first of all) it is made:

        enter             a whole value for divided computation: backward adds up the ranks' gradients
        sum_ranks         the sum of what the ranks have
        scatter_sum       this rank's slice of that sum; backward gathers
        gather_slices     the whole of the ranks' slices, for computation that every rank repeats
        gather_entered    the same for divided computation: backward adds up and scatters
        take_slice        this rank's slice of a whole value; backward gathers
        take_entered      the same of an entered value: backward is zero outside of the slice
        on_first          the value on the first rank, zeros elsewhere: a term of a sum over ranks

    Slices are of dimension `dim`, within each of `parts` parts (of `sizes`, where these differ).
    """

    name: Identifier
    kind: MoveKind
    source: Encoded
    after: Identifier | None = None
    dim: NonNegativeInt = 0
    parts: PositiveInt = 1
    sizes: tuple[PositiveInt, ...] = ()
    readers: tuple[Identifier, ...] = ()
    output: bool = False

    def model_post_init(self, context: Any) -> None:
        """Refuse a source that is neither a value nor a parameter."""
        if not isinstance(self.source, Ref | ParamRef):
            raise ValueError(f"move {self.name!r} has no value or parameter as its source")


class Sharding(Record):
    """One way to divide a layer class over a tensor-parallel group of a given degree.

    `styles` and `parameters` are keyed by names relative to the layer ('attn.c_attn', 'attn.c_attn.weight').
    `moves` bring values of the body from one form to another; a module divided by rows or vocabulary sums its output
    itself unless `unreduced` names it. `gather` names modules whose output is gathered again; `partial_gradients`
    whole parameters whose gradient must be summed over the group; `replicated` what stays whole, and why. `draws_apart`
    names nodes of the body that draw random numbers for a divided value, which must differ from rank to rank.
    """

    name: Identifier
    tp_degree: PositiveInt
    styles: dict[QualifiedName, Style] = {}
    parameters: dict[QualifiedName, ShardedParameter] = {}
    moves: tuple[Move, ...] = ()
    unreduced: tuple[QualifiedName, ...] = ()
    gather: tuple[QualifiedName, ...] = ()
    rewrites: tuple[Rewrite, ...] = ()
    partial_gradients: tuple[QualifiedName, ...] = ()
    collectives: tuple[CollectiveCall, ...] = ()
    replicated: dict[QualifiedName, str] = {}
    draws_apart: tuple[Identifier, ...] = ()

"""Who sends what to whom where two stages are divided differently: row slices of a microbatch, slices of a parameter.

What is divided lies in equal pieces, in order, and each piece is whole on all ranks of its group:

    rows          one piece per replica, on the ranks of its tensor-parallel group: dp_degree pieces of tp_degree copies
    a parameter   one piece per tensor-parallel index (where the stage divides it) and shard, on the replicas that hold
                  that shard: neighbouring replicas form a shard group, so replica i holds shard i % shard_degree

A rank gets every part of its piece from one rank that has it. The ranks that have a piece take the receivers of it in
turn, so that none sends to more than one receiver more than another:

    tp 2 -> 2     0 -> 0, 1 -> 1                 dp 1 -> 2     0 -> 0 and 0 -> 1, half of the rows each
    tp 2 -> 1     0 -> 0                         dp 2 -> 1     0 -> 0 and 1 -> 0
    tp 1 -> 2     0 -> 0, 0 -> 1                 dp 2 -> 3     0 -> 0 (two thirds), 0 -> 1 and 1 -> 1 (one each), 1 -> 2

Ranks are told by their position in `Stage.gpus`: replica * tp_degree + tensor-parallel index.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Slice:
    """[start, stop) of what is divided, from the rank at position `source` of a stage to position `target` of another.

    Counted in rows of the microbatch of all replicas together, or in parts of a parameter (see `parameter_slices`).
    """

    source: int
    target: int
    start: int
    stop: int


def slices(source: Sequence[Sequence[int]], target: Sequence[Sequence[int]], length: int) -> tuple[Slice, ...]:
    """Return who sends what to whom, in the order of pieces; `source` and `target` list who holds each piece.

    ValueError where the pieces of either don't divide `length`.
    """
    if length % len(source) or length % len(target):
        raise ValueError(f"{length} is not divided by {len(source)} and by {len(target)} pieces")
    size, other = length // len(source), length // len(target)
    found = []
    for index, holders in enumerate(source):
        first, stop = index * size, (index + 1) * size
        turn = 0
        for piece in range(first // other, -(-stop // other)):
            for receiver in target[piece]:
                sender = holders[turn % len(holders)]
                turn += 1
                found.append(Slice(sender, receiver, max(first, piece * other), min(stop, (piece + 1) * other)))
    return tuple(found)


@lru_cache(maxsize=4096)
def row_slices(
    source_tp: int, source_dp: int, target_tp: int, target_dp: int, rows: int | None = None
) -> tuple[Slice, ...]:
    """Return which rows of every microbatch each rank of a stage sends to each rank of another, for given degrees.

    `rows` are those of all replicas together, microbatch_size * dp_degree of either stage; without them, the least
    number that both divide. Gradients go back by the same rule, with the stages in each other's place.
    """
    return slices(
        _replicas(source_tp, source_dp), _replicas(target_tp, target_dp), rows or math.lcm(source_dp, target_dp)
    )


def _replicas(tp_degree: int, dp_degree: int) -> list[range]:
    return [range(replica * tp_degree, (replica + 1) * tp_degree) for replica in range(dp_degree)]


@dataclass(frozen=True, slots=True)
class Layout:
    """How a stage holds a parameter's reduced gradient; `divided` where tensor parallelism divides it."""

    tp_degree: int
    dp_degree: int
    shard_degree: int
    divided: bool

    @property
    def num_pieces(self) -> int:
        """Into how many pieces it is divided."""
        return self.shard_degree * (self.tp_degree if self.divided else 1)

    @property
    def holders(self) -> list[list[int]]:
        """The positions that hold each piece, ascending; pieces in the order of tensor-parallel index, then shard."""
        found: list[list[int]] = [[] for _ in range(self.num_pieces)]
        for replica in range(self.dp_degree):
            for index in range(self.tp_degree):
                slot = index * self.shard_degree if self.divided else 0
                found[slot + replica % self.shard_degree].append(replica * self.tp_degree + index)
        return found


@lru_cache(maxsize=4096)
def parameter_slices(source: Layout, target: Layout) -> tuple[Slice, ...]:
    """Return which parts of a shared parameter's gradient the ranks of a stage send to those of another.

    Parts are counted in 1 / lcm of the two numbers of pieces.
    """
    return slices(source.holders, target.holders, math.lcm(source.num_pieces, target.num_pieces))

"""The down-sets of a graph: what can have been computed at a cut between two stages.

A chain of down-sets, each inside the next, divides a graph into stages that only wait for earlier ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


class TooManyStatesError(Exception):
    """A graph has more down-sets than were asked for."""


@dataclass(frozen=True)
class Lattice:
    """Down-sets of a graph, the smallest first: `members[i, v]` tells whether node v is in down-set i.

    The first is empty and the last is everything.
    """

    members: Bools

    @property
    def num_states(self) -> int:
        """The number of down-sets."""
        return len(self.members)

    @cached_property
    def floats(self) -> Floats:
        """The members as numbers, for sums over them."""
        return self.members.astype(np.float64)

    def sums(self, weights: Sequence[float] | Floats) -> Floats:
        """Return the sum of the nodes' weights in each down-set."""
        return self.floats @ np.asarray(weights, dtype=np.float64)

    @cached_property
    def inside(self) -> Bools:
        """`inside[i, j]`: down-set i is smaller than j and inside it, so that the nodes between can be a stage."""
        small = self.members.astype(np.float32)  # counts are exact below 2**24
        sizes = small.sum(axis=1)
        return np.asarray((small @ small.T == sizes[:, None]) & (sizes[:, None] < sizes[None, :]))


def down_sets(successors: Sequence[Sequence[int]], *, limit: int) -> Lattice:
    """Return the down-sets of a graph without cycles; TooManyStatesError beyond `limit` of them."""
    count = len(successors)
    needs = [0] * count
    for node, after in enumerate(successors):
        for other in after:
            needs[other] |= 1 << node
    ready = frozenset(node for node in range(count) if not needs[node])
    found: dict[int, frozenset[int]] = {0: ready}
    level = [0]
    listed = [0]
    while level:  # by size: every down-set is one of a node less, and that node
        following: dict[int, frozenset[int]] = {}
        for state in level:
            for node in found[state]:
                larger = state | 1 << node
                if larger not in following:
                    new = [other for other in successors[node] if needs[other] & ~larger == 0]
                    following[larger] = (found[state] - {node}).union(new)
            if len(listed) + len(following) > limit:
                raise TooManyStatesError(f"more than {limit} down-sets")
        found = following
        level = list(following)
        listed += level
    if listed[-1] != (1 << count) - 1:
        raise ValueError("the graph has a cycle")
    num_bytes = (count + 7) // 8
    packed = np.frombuffer(b"".join(state.to_bytes(num_bytes, "little") for state in listed), dtype=np.uint8)
    bits = np.unpackbits(packed.reshape(len(listed), num_bytes), axis=1, bitorder="little")
    return Lattice(bits[:, :count].astype(np.bool_))

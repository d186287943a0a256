"""What the stages of a graph cost where each tensor that crosses a stage's boundary costs it something: a cost oracle.

A tensor has a maker and readers. The stage between down-sets I and J, S = J - I, pays for a tensor if it has some of
them and not all. With open(D) the tensors made in D and not yet read by all, and n(D) how many of a tensor's nodes D
holds, a tensor is paid

    by its maker's stage       if it is open at J, and not at I
    by a stage of readers      if it is open at I, and n(J) > n(I)

so that, with c(D) the sum of what is open at D,

    load(I, J) = time(J) - time(I) + c(I) + c(J) - sum over tensors open at I of
                 cost * ([open at J] + [n(J) = n(I)])

which is a matrix product over the few tensors that are open on both sides.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from planner.solver.core.lattice import Bools, Floats

Ints = NDArray[np.int64]
_CHUNK = 8192  # rows of what is made for all down-sets
_OUTSIDE = 1e30  # more than any load: what a row that is not inside its column costs, for every node too many


class StateLoads(Protocol):
    """The loads of stages between given down-sets."""

    @property
    def times(self) -> Floats:
        """For each down-set a sum over its nodes: a stage costs at least the difference."""

    @property
    def crossing(self) -> Floats:
        """For each down-set what all stages before it, and all behind it, cost at least beyond their times."""

    def block(self, rows: Ints, columns: Ints, *, exact: bool) -> NDArray[np.floating]:
        """Return the loads of the stages from `rows` to `columns`; huge or inf where a row is not inside its column.

        In double precision if `exact`, else in single: near the rows' times, to less than 1e-6 of a load.
        """


class LoadOracle(Protocol):
    """A graph, and what its stages cost."""

    @property
    def successors(self) -> Sequence[Sequence[int]]:
        """The nodes that each node comes before."""

    @property
    def node_times(self) -> Sequence[float]:
        """What every stage pays for having a node."""

    def of_states(self, members: Bools) -> StateLoads:
        """Return the loads between down-sets, `members[i, v]` telling whether node v is in down-set i."""


@dataclass(frozen=True)
class Tensor:
    """What one node makes and others read, and what a stage pays that has some of these nodes and not all."""

    maker: int
    readers: frozenset[int]
    cost: float


@dataclass(frozen=True)
class TensorLoads:
    """A graph whose edges are tensors; see the module's docstring."""

    node_times: tuple[float, ...]
    successors: tuple[tuple[int, ...], ...]
    tensors: tuple[Tensor, ...]

    def of_states(self, members: Bools) -> "TensorStates":
        """Return the loads between down-sets."""
        return TensorStates(self, members)


class TensorStates:
    """Loads between down-sets of `TensorLoads`."""

    def __init__(self, graph: TensorLoads, members: Bools) -> None:
        tensors = [tensor for tensor in graph.tensors if tensor.readers and tensor.cost]
        self._members = members
        self._costs = np.array([tensor.cost for tensor in tensors], dtype=np.float64)
        nodes = np.zeros((members.shape[1], len(tensors)), dtype=np.float32)
        for index, tensor in enumerate(tensors):
            nodes[[tensor.maker, *tensor.readers], index] = 1.0
        sizes = nodes.sum(axis=0)
        self._most_held = (sizes - 1).astype(np.int64)  # of an open one
        count, node_times = len(members), np.asarray(graph.node_times, dtype=np.float64)
        self._held = np.empty((count, len(tensors)), dtype=np.uint8 if len(nodes) < 256 else np.uint16)
        self._open: Bools = np.empty((count, len(tensors)), dtype=np.bool_)
        self.times: Floats = np.empty(count)
        self.crossing: Floats = np.empty(count)
        makers = [tensor.maker for tensor in tensors]
        for first in range(0, count, _CHUNK):
            rows = slice(first, first + _CHUNK)
            self._held[rows] = members[rows].astype(np.float32) @ nodes  # counts are exact below 2**24
            self._open[rows] = members[rows][:, makers] & (self._held[rows] < sizes)
            self.times[rows] = members[rows].astype(np.float64) @ node_times
            self.crossing[rows] = self._open[rows].astype(np.float64) @ self._costs

    def block(self, rows: Ints, columns: Ints, *, exact: bool) -> NDArray[np.floating]:
        """Return the loads of the stages from `rows` to `columns`, huge where a row is not inside its column."""
        dtype = np.float64 if exact else np.float32
        first, last = self._members[rows], self._members[columns]
        differing = np.flatnonzero(first.any(axis=0) & ~last.all(axis=0))
        first_open, last_open = self._open[rows], self._open[columns]
        both = np.flatnonzero(first_open.any(axis=0) & last_open.any(axis=0))
        left = [first[:, differing].astype(dtype)]
        right = [np.where(last[:, differing], 0.0, _OUTSIDE).astype(dtype)]
        single = both[self._most_held[both] == 1]  # one reader: open at both means untouched between
        several = both[self._most_held[both] > 1]
        left += [first_open[:, single].astype(dtype), first_open[:, several].astype(dtype)]
        right += [
            (last_open[:, single] * (-2.0 * self._costs[single])).astype(dtype),
            (last_open[:, several] * -self._costs[several]).astype(dtype),
        ]
        if len(several):
            before, behind = self._held[rows][:, several], self._held[columns][:, several]
            for held in range(1, int(self._most_held[several].max()) + 1):
                some = np.flatnonzero(((before == held) & first_open[:, several]).any(axis=0))
                left.append(((before == held) & first_open[:, several])[:, some].astype(dtype))
                right.append(((behind == held)[:, some] * -self._costs[several[some]]).astype(dtype))
        loads = np.concatenate(left, axis=1) @ np.concatenate(right, axis=1).T
        zero = self.times[rows[0]]  # what is near cancels in single precision too
        loads += (self.crossing[rows] - (self.times[rows] - zero)).astype(dtype)[:, None]
        loads += (self.crossing[columns] + (self.times[columns] - zero)).astype(dtype)[None, :]
        return loads


def load_of(graph: TensorLoads, nodes: frozenset[int]) -> float:
    """Return what a stage of these nodes costs, by the definition."""
    paid = [
        tensor.cost
        for tensor in graph.tensors
        if not nodes.isdisjoint(tensor.readers | {tensor.maker}) and not tensor.readers | {tensor.maker} <= nodes
    ]
    return sum(graph.node_times[node] for node in sorted(nodes)) + sum(paid)

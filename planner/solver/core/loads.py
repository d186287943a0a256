"""What the stages of a graph cost where each tensor that crosses a stage's boundary costs it something: a cost oracle.

A tensor has a maker and readers. The stage between down-sets I and J, S = J - I, pays for a tensor if it has some of
them and not all. With open(D) the tensors made in D and not yet read by all, and n(D) how many of a tensor's nodes D
holds, a tensor is paid

    by its maker's stage       if it is open at J, and not at I
    by a stage of readers      if it is open at I, and n(J) > n(I)

so that, with c(D) the sum of what is open at D,

    load(I, J) = time(J) - time(I) + c(I) + c(J) - sum over tensors open at I of
                 cost * ([open at J] + [n(J) = n(I)])

which is a sum over the few tensors that are open on both sides.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from planner.solver.core.lattice import Bools, Floats

Ints = NDArray[np.int64]
_CHUNK = 8192  # rows of what is made for all down-sets
_PAIRS = 16384  # of down-sets, that are looked at together
_FEW = 0.02  # of all pairs: fewer are looked at one by one
_OUTSIDE = 1e30  # more than any load: what a row that is not inside its column costs, for every node too many


class StateLoads(Protocol):
    """The loads of stages between given down-sets."""

    @property
    def times(self) -> Floats:
        """For each down-set a sum over its nodes: a stage costs at least the difference."""

    @property
    def crossing(self) -> Floats:
        """For each down-set what all stages before it, and all behind it, cost at least beyond their times."""

    def block(self, rows: Ints, columns: Ints, *, exact: bool, limit: float = float("inf")) -> NDArray[np.floating]:
        """Return the loads of the stages from `rows` to `columns`; huge or inf where a row is not inside its column.

        In double precision if `exact`, else in single: near the rows' times, to less than 1e-6 of a load. What is
        above the `limit` may be anything above it.
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

    def block(self, rows: Ints, columns: Ints, *, exact: bool, limit: float = float("inf")) -> NDArray[np.floating]:
        """Return the loads of the stages from `rows` to `columns`, huge where a row is not inside its column.

        What is open on both sides is taken to be untouched between, as a matrix product; where that leaves a load
        within the limit, it is looked at which tensors are not.
        """
        dtype = np.float64 if exact else np.float32
        first, last = self._members[rows], self._members[columns]
        differing = np.flatnonzero(first.any(axis=0) & ~last.all(axis=0))
        first_open, last_open = self._open[rows], self._open[columns]
        both = np.flatnonzero(first_open.any(axis=0) & last_open.any(axis=0))
        left = [first[:, differing].astype(dtype), first_open[:, both].astype(dtype)]
        right = [
            np.where(last[:, differing], 0.0, _OUTSIDE).astype(dtype),
            (last_open[:, both] * (-2.0 * self._costs[both])).astype(dtype),
        ]
        loads = np.concatenate(left, axis=1) @ np.concatenate(right, axis=1).T
        zero = self.times[rows[0]]  # what is near cancels in single precision too
        loads += (self.crossing[rows] - (self.times[rows] - zero)).astype(dtype)[:, None]
        loads += (self.crossing[columns] + (self.times[columns] - zero)).astype(dtype)[None, :]
        several = both[self._most_held[both] > 1]  # with one reader, open at both means untouched
        i, j = np.nonzero(loads <= min(limit, _OUTSIDE / 2)) if len(several) else (rows[:0], rows[:0])
        if not len(i):
            return loads
        before, behind = self._held[rows][:, several], self._held[columns][:, several]
        is_open, still, costs = first_open[:, several], last_open[:, several], self._costs[several].astype(dtype)
        if len(i) <= _FEW * loads.size:
            for start in range(0, len(i), _PAIRS):
                a, b = i[start : start + _PAIRS], j[start : start + _PAIRS]
                touched = is_open[a] & still[b] & (before[a] != behind[b])
                loads[a, b] += touched.astype(dtype) @ costs
            return loads
        left, right = [is_open.astype(dtype)], [still * costs]
        for held in range(1, int(before.max()) + 1):  # those untouched, of which as many are held on both sides
            here, there = is_open & (before == held), still & (behind == held)
            some = np.flatnonzero(here.any(axis=0) & there.any(axis=0))
            left.append(here[:, some].astype(dtype))
            right.append(there[:, some] * -costs[some])
        loads += np.concatenate(left, axis=1) @ np.concatenate(right, axis=1).T
        return loads


def load_of(graph: TensorLoads, nodes: frozenset[int]) -> float:
    """Return what a stage of these nodes costs, by the definition."""
    paid = [
        tensor.cost
        for tensor in graph.tensors
        if not nodes.isdisjoint(tensor.readers | {tensor.maker}) and not tensor.readers | {tensor.maker} <= nodes
    ]
    return sum(graph.node_times[node] for node in sorted(nodes)) + sum(paid)

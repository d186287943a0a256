"""Every stage that Piper can make of a graph, as tables: work, memory, what crosses, and what recomputation adds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.peers.knapsack import greedy_cover
from planner.peers.piper import PiperProblem
from planner.solver.core.lattice import Bools, Floats, down_sets

MAX_STATES = 5_000
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Items:
    """What recomputing each node costs in seconds, and frees in bytes: for each microbatch in flight, and once."""

    cost: Floats
    freed_a: Floats
    freed_b: Floats

    def freed(self, in_flight: int) -> Floats:
        """Return the bytes that recomputing each node frees; zero where it can't be, or frees none."""
        return np.maximum(self.freed_a * in_flight + self.freed_b, 0.0)


class Rows:
    """Every stage there can be, by its pair of down-sets and tensor-parallel degree, and what it takes.

    That is, with d replicas and y microbatches in flight, (work + extra[y] + (sent + 4 (d - 1) weights / N) / b) / d,
    where `extra` is what recomputation adds so that it fits: `at_least`, and `reached` by a choice of nodes.
    """

    def __init__(
        self, problem: PiperProblem, tp_degrees: Sequence[int], *, recompute: bool, max_in_flight: int
    ) -> None:
        self.problem = problem
        count = len(problem.configs)
        after: list[list[int]] = [[] for _ in range(count)]
        for source, target, _ in problem.edges:
            after[source].append(target)
        self.lattice = down_sets(after, limit=MAX_STATES)
        first, last = np.nonzero(self.lattice.inside)
        members = self.lattice.members[last] & ~self.lattice.members[first]
        self.first, self.last = np.tile(first, len(tp_degrees)), np.tile(last, len(tp_degrees))
        self.tp = np.repeat(np.array(tp_degrees), len(first))
        self.members = members
        self.items = {degree: _items(problem, degree, recompute=recompute) for degree in tp_degrees}
        columns = [self._columns(degree, members, max_in_flight) for degree in tp_degrees]
        self.work, self.weights, self.sent = (np.concatenate([column[k] for column in columns]) for k in range(3))
        self.at_least, self.reached = (np.concatenate([column[k] for column in columns]) for k in (3, 4))

    def _columns(self, degree: int, members: Bools, max_in_flight: int) -> tuple[Floats, ...]:
        kept = [node[degree][0] for node in self.problem.configs]
        inside = members.astype(np.float64)
        work = inside @ np.array([config.time for config in kept])
        weights = inside @ np.array([config.parameter_bytes for config in kept])
        a, b = (inside @ np.array([getattr(c, name) for c in kept]) for name in ("memory_a", "memory_b"))
        at_least, reached = _extra_times(self.items[degree], inside, a, b, self.problem.memory_bytes, max_in_flight)
        return work, weights, self._sent(degree, members), at_least, reached

    def _sent(self, degree: int, members: Bools) -> Floats:
        sent = np.zeros(len(members))
        for source, target, size in self.problem.edges:
            into = size + self.problem.incoming[target][degree].get(source, 0.0)
            out = size + self.problem.outgoing[source][degree].get(target, 0.0)
            sent += 2 * into * (members[:, target] & ~members[:, source])
            sent += 2 * out * (members[:, source] & ~members[:, target])
        return sent

    def time(self, row: Ints | int | slice, dp_degree: int, extra: Floats | float) -> Any:
        """Return the seconds of stages."""
        bytes_sent = self.sent[row] + 4 * (dp_degree - 1) * self.weights[row] / self.problem.num_microbatches
        return (self.work[row] + extra + bytes_sent / self.problem.bandwidth) / dp_degree


def _items(problem: PiperProblem, degree: int, *, recompute: bool) -> Items:
    found: list[tuple[float, float, float]] = []
    for node in problem.configs:
        kept, *others = node[degree]
        other = others[0] if others and recompute else kept
        found.append((other.time - kept.time, kept.memory_a - other.memory_a, kept.memory_b - other.memory_b))
    cost, freed_a, freed_b = (np.array(column) for column in zip(*found, strict=True))
    return Items(cost, freed_a, freed_b)


def _extra_times(
    items: Items, inside: Floats, a: Floats, b: Floats, memory_bytes: float, max_in_flight: int
) -> tuple[Floats, Floats]:
    """Return, by row and microbatches in flight less one, what recomputation adds: at least, and by a greedy choice.

    Nodes are taken by the bytes they free for each second. A part of a node gives the bound; a choice takes whole ones,
    and of those that would do as the last the cheapest.
    """
    at_least = np.full((len(inside), max_in_flight), np.inf)
    reached = at_least.copy()
    for in_flight in range(1, max_in_flight + 1):
        excess = a * in_flight + b - memory_bytes
        freed = items.freed(in_flight)
        fits = excess <= 0
        at_least[fits, in_flight - 1] = reached[fits, in_flight - 1] = 0.0
        short = np.flatnonzero(~fits & (inside @ freed >= excess))
        if not len(short):
            if not fits.any():
                break
            continue
        found = greedy_cover(freed, items.cost, inside[short], excess[short])
        at_least[short, in_flight - 1], reached[short, in_flight - 1] = found
    # what holds fewer microbatches may recompute as much
    return at_least, np.minimum.accumulate(reached[:, ::-1], axis=1)[:, ::-1]

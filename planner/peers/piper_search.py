"""Piper's objective solved: a search over limits of the slowest stage, with the fewest devices for each.

A limit that no plan of a relaxation keeps is a bound. The relaxation recomputes parts of nodes; where that matters, the
exact choice of whole nodes takes its place, and the search goes on until both agree.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.peers.knapsack import cheapest_cover
from planner.peers.piper import PiperPlan, PiperProblem, PiperStage
from planner.peers.piper_rows import Ints, Rows
from planner.solver.core.lattice import Floats

_MAX_REFINEMENTS = 60
_NEAR = 1e-3  # bisection ends at such a gap: then plans themselves lead to the optimum
_ANY = 1e300  # a limit that every time is below, infinite ones apart
_EXACT = 1e-9  # times nearer than this, relatively, are one

Chosen = tuple[int, int, int]  # a row, replicas, microbatches in flight


class Search:
    """Finds plans within a limit of the slowest stage: the fewest devices for each suffix of the graph."""

    def __init__(self, rows: Rows, dp_degrees: Sequence[int], num_devices: int) -> None:
        self.rows, self.num_devices = rows, num_devices
        self.max_replicas = min(num_devices, rows.problem.num_microbatches)  # of all stages together
        self.dp_degrees = [degree for degree in dp_degrees if degree <= num_devices]
        self.fixed = {d: rows.time(slice(None), d, 0.0) * d for d in self.dp_degrees}
        order = np.argsort(rows.first, kind="stable")
        bounds = np.searchsorted(rows.first[order], np.arange(rows.lattice.num_states + 1))
        self.of_state = [order[bounds[i] : bounds[i + 1]] for i in range(rows.lattice.num_states)]

    def plan(self, limit: float, extra: Floats) -> list[Chosen] | None:
        """Return the stages (row, d, microbatches in flight) of a plan whose stages take at most `limit`, or None.

        g[I][s] = min over rows (I, J, t) and d with ceil(s / d) <= y of g[J][s - d] + d t, where s are the replicas of
        all stages from there on, and y as many microbatches as fit.
        """
        count, top = self.rows.lattice.num_states, self.max_replicas
        none = 2 * self.num_devices + 1
        fewest = np.full((count, top + 1), none, dtype=np.int32)
        fewest[-1, 0] = 0
        most = {d: (extra <= (limit * d - self.fixed[d])[:, None]).sum(axis=1) * d for d in self.dp_degrees}
        totals = np.arange(top + 1)
        for state in reversed(range(count - 1)):
            rows = self.of_state[state]
            for d in self.dp_degrees:
                usable = rows[most[d][rows] >= d]
                if len(usable):
                    reached = fewest[self.rows.last[usable], : top + 1 - d] + (d * self.rows.tp[usable])[:, None]
                    reached = np.where(totals[None, d:] <= most[d][usable, None], reached, none)
                    np.minimum(fewest[state, d:], reached.min(axis=0), out=fewest[state, d:])
        total = int(fewest[0].argmin())
        if fewest[0, total] > self.num_devices:
            return None
        return self._followed(fewest, most, total)

    def _followed(self, fewest: NDArray[np.int32], most: dict[int, Ints], total: int) -> list[Chosen]:
        stages: list[Chosen] = []
        state = 0
        while state < len(fewest) - 1:
            row, d = next(
                (int(rows[found[0]]), d)
                for rows in [self.of_state[state]]
                for d in self.dp_degrees
                if d <= total
                for found in [
                    np.flatnonzero(
                        (most[d][rows] >= total)
                        & (fewest[self.rows.last[rows], total - d] + d * self.rows.tp[rows] == fewest[state, total])
                    )
                ]
                if len(found)
            )
            stages.append((row, d, -(-total // d)))
            state, total = int(self.rows.last[row]), total - d
        return stages


def solve_piper(
    problem: PiperProblem, *, data_parallel: bool = True, tensor_parallel: bool = True, recompute: bool = True
) -> PiperPlan:
    """Return the best plan by Piper's objective, with a proven bound."""
    count, batch = problem.num_devices, problem.num_microbatches
    degrees = sorted(set.intersection(*(set(node) for node in problem.configs)))
    tp_degrees = [degree for degree in degrees if degree <= count and (tensor_parallel or degree == 1)]
    dp_degrees = [d for d in range(1, min(batch, count) + 1) if batch % d == 0 and (data_parallel or d == 1)]
    rows = Rows(problem, tp_degrees, recompute=recompute, max_in_flight=count)
    search = Search(rows, dp_degrees, count)
    if search.plan(_ANY, rows.at_least) is None:
        return PiperPlan(np.inf, np.inf, ())
    # each node's work divided evenly over all devices
    lower = sum(min(t * node[t][0].time for t in tp_degrees) for node in problem.configs) / count
    return _Refinement(search, rows, lower).run()


class _Refinement:
    """Narrows the bottleneck down: `best` is the plan at hand, `upper` its price, `lower` what no plan is below."""

    def __init__(self, search: Search, rows: Rows, lower: float) -> None:
        self.search, self.rows, self.lower = search, rows, lower
        self.best: list[Chosen] = []
        self.upper = np.inf

    def run(self) -> PiperPlan:
        """Return the best plan."""
        self._start()
        low = self.lower
        while self.upper > low * (1 + _NEAR):
            middle = (low + self.upper) / 2
            if not self._improve(middle):
                low = middle
        for _ in range(_MAX_REFINEMENTS):
            if not self._improve(self.upper * (1 - _EXACT)):
                break
        for _ in range(_MAX_REFINEMENTS):
            found = self.search.plan(self.upper * (1 - _EXACT), self.rows.at_least)
            if found is None:
                self.lower = self.upper
                break
            changed = [_settle(self.rows, row, in_flight) for row, _, in_flight in found]
            if not self._improve(self.upper * (1 - _EXACT)) and not any(changed):
                break
        stages = tuple(_stage(self.rows, *chosen) for chosen in self.best)
        return PiperPlan(self.upper, self.lower, stages)

    def _start(self) -> None:
        """Find a first plan: limits grow from the bound, which rises with those that the relaxation can't keep."""
        limit = max(self.lower, np.finfo(float).tiny)
        while not self._improve(limit):
            limit *= 1.5

    def _improve(self, limit: float) -> bool:
        found = self.search.plan(limit, self.rows.reached)
        if found is None:
            return False
        price = max(float(self.rows.time(row, d, self.rows.reached[row, y - 1])) for row, d, y in found)
        if price < self.upper:
            self.best, self.upper = found, price
        return True


def _settle(rows: Rows, row: int, in_flight: int) -> bool:
    """Put the exact cost of recomputation in the place of its bounds; return whether one of them changed."""
    low, high = rows.at_least[row, in_flight - 1], rows.reached[row, in_flight - 1]
    if high - low <= 1e-12 * max(1.0, high):
        return False
    _, exact = _cover(rows, row, in_flight)
    rows.at_least[row, in_flight - 1 :] = np.maximum(rows.at_least[row, in_flight - 1 :], exact)
    rows.reached[row, :in_flight] = np.minimum(rows.reached[row, :in_flight], exact)
    return True


def _cover(rows: Rows, row: int, in_flight: int) -> tuple[list[int], float]:
    """Return the cheapest nodes to recompute so that a stage fits, and what that costs."""
    degree = int(rows.tp[row])
    items = rows.items[degree]
    nodes = np.flatnonzero(rows.members[row % len(rows.members)])
    kept = [rows.problem.configs[node][degree][0] for node in nodes]
    excess = sum(c.memory_a * in_flight + c.memory_b for c in kept) - rows.problem.memory_bytes
    chosen, cost = cheapest_cover(items.freed(in_flight)[nodes].tolist(), items.cost[nodes].tolist(), excess)
    return [int(nodes[position]) for position in chosen], cost


def _stage(rows: Rows, row: int, d: int, in_flight: int) -> PiperStage:
    nodes = np.flatnonzero(rows.members[row % len(rows.members)])
    chosen, _ = _cover(rows, row, in_flight)
    return PiperStage(tuple(map(int, nodes)), d, int(rows.tp[row]), tuple(chosen))

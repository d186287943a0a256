"""Candidate stages of one setting that a fast plan may have, as arrays [s, a, k]: layers [a, a + 1 + k) at position s.

A stage that is at work for longer than a step may take is left out, so that hundreds of layers and stages are a few
candidates each. `backward` includes the recomputation that a candidate needs: at least, until `settle` says it exactly;
inf where it can't be.
"""

from collections.abc import Callable

import numpy as np

from planner.solver.problem import Problem
from planner.solver.tables import Bools, Floats, Ints


class Candidates:
    """The candidates of a problem that are at work for at most `limit_s`, all of them where that is inf."""

    def __init__(self, problem: Problem, limit_s: float) -> None:
        self.problem, self.limit_s = problem, limit_s
        count, stages = problem.num_layers, problem.setting.pp_degree
        self.width = self._width(limit_s)
        first, index = np.arange(count)[:, None], np.arange(self.width)[None, :]
        self.stop: Ints = np.minimum(first + 1 + index, count)
        exists = first + 1 + index <= count
        self.forward: Floats = np.empty((stages, count, self.width))
        self.backward, self.ready, self.tail = (np.empty_like(self.forward) for _ in range(3))
        self._settled: Bools = np.zeros(self.forward.shape, dtype=bool)
        alike: dict[tuple[int, int], list[int]] = {}
        for s, position in enumerate(problem.positions):
            alike.setdefault((id(position.layers), id(position.states)), []).append(s)
        for positions in alike.values():
            table, states = problem.positions[positions[0]].layers, problem.positions[positions[0]].states
            self.forward[positions] = table.forward_sum[self.stop] - table.forward_sum[first]
            self.backward[positions] = table.backward_sum[self.stop] - table.backward_sum[first]
            extra = self._least_extra(positions, first)
            self.backward[positions] += extra
            self._settled[positions] = (extra == 0) & (not table.any_forced)
            self.ready[positions] = states.ready_s[first, self.stop]
            self.tail[positions] = states.tail_s[first, self.stop]
        allowed = np.stack([position.allowed[first, self.stop] for position in problem.positions]) & exists
        self.backward[~allowed] = np.inf
        self.forward[~np.isfinite(self.backward)] = np.inf
        self._settled |= np.isinf(self.backward)

    def _width(self, limit_s: float) -> int:
        """Return the most layers that a stage may have."""
        problem, width = self.problem, 1
        m, count = problem.setting.num_microbatches, problem.num_layers
        for table in {id(p.layers): p.layers for p in problem.positions}.values():
            work = m * (table.forward_sum + table.backward_sum)
            stops = np.searchsorted(work, work + limit_s * (1 + 1e-9), side="right") - 1
            width = max(width, int((stops - np.arange(count + 1)).max()))
        return min(width, count - problem.setting.pp_degree + 1)

    def _least_extra(self, positions: list[int], first: Ints) -> Floats:
        """Return seconds of recomputation that candidates need at least, at positions of the same tables."""
        problem, stop = self.problem, self.stop
        position = problem.positions[positions[0]]
        table = position.layers
        in_flight = np.array([problem.positions[s].in_flight for s in positions], dtype=np.int64)[:, None, None]
        room = position.budget_bytes - position.states.fixed_bytes[first, stop]
        transient = table.transient[first, stop]
        need = in_flight * table.kept_all[first, stop] + transient - room
        with np.errstate(divide="ignore", invalid="ignore"):
            extra = np.where(need > 0, need / (in_flight * table.best_ratio[first, stop]), 0.0)
        if table.any_forced:
            extra = np.broadcast_to(table.forced_sum[stop] - table.forced_sum[first], need.shape)
        fits = in_flight * table.kept_least[first, stop] + transient <= room
        fits &= extra <= problem.most_extra(table)[first, stop]
        found: Floats = np.where(fits, np.nan_to_num(extra, nan=np.inf, posinf=np.inf), np.inf)
        return found

    def settle(self, wanted: Bools, check: Callable[[], None]) -> bool:
        """Make the recomputation of the wanted candidates exact; return whether any was not. `check` may raise."""
        unknown = wanted & ~self._settled
        for s, a, k in zip(*np.nonzero(unknown), strict=True):
            check()
            choice = self.problem.recompute(int(s), int(a), int(self.stop[a, k]))
            if choice is None:
                self.forward[s, a, k] = self.backward[s, a, k] = np.inf
            else:
                table = self.problem.positions[s].layers
                plain = table.backward_sum[self.stop[a, k]] - table.backward_sum[a]
                self.backward[s, a, k] = plain + choice.seconds
        self._settled |= unknown
        return bool(unknown.any())

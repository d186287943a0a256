"""A lower bound of one setting over cuts and recomputation together, and the plan that attains it.

Where each layer waits for the one before it, a stage's round trip takes what all stages behind it take. So from the
last stage to the first, with R[s][a] the least seconds of one microbatch through stages s.. that hold layers a..,

    (8)  R[s][a] = min over b of c(s, a, b) + message + R[s + 1][b]
                   over the stages [a, b) whose bound (1), with D = message + R[s + 1][b], is at most U

is exact for what it bounds: less R is never worse for the stages in front. If no stages reach layer 0, every plan of
the setting takes longer than U. What is in front of a stage counts with its least: the sums of forwards, and of
backwards with the recomputation that those positions need, by the same recursion from the first stage on.
"""

from collections.abc import Callable, Sequence

import numpy as np

from planner.solver.candidates import Candidates
from planner.solver.problem import Span
from planner.solver.tables import Bools


class Corridor:
    """The recursion (8) over the candidates of a problem whose layers are chained."""

    def __init__(self, candidates: Candidates) -> None:
        self.candidates, self.problem = candidates, candidates.problem
        self._hops = [self.problem.hop(s) for s in range(self.problem.setting.pp_degree - 1)]
        self._in_front()

    def _in_front(self) -> None:
        """Find by position the least path from the start to layer a, and from there back to the end of the step."""
        problem, of = self.problem, self.candidates
        size, stops = problem.num_layers + 1, of.stop
        self._heads, self._afters = [np.zeros(size)], [np.zeros(size)]
        for s in range(problem.setting.pp_degree - 1):
            forward, backward = of.forward[s], of.backward[s]
            if s == 0:  # stage 0 has its own work before and after all microbatches
                forward = forward + of.ready[0]
                backward = backward + of.tail[0] + problem.least_tied_s
            paths = []
            for before, seconds in ((self._heads[-1], forward), (self._afters[-1], backward)):
                path = np.full(size, np.inf)
                np.minimum.at(path, stops, before[:-1, None] + seconds)
                paths.append(path)
            sent, back = self._hops[s]
            self._heads.append(paths[0] + sent)
            self._afters.append(paths[1] + back)

    def stages_within(self, limit_s: float, within: "list[Bools] | None" = None) -> list[Span] | None:
        """Return stages none of which is bounded above `limit_s` by (8); None where there are none: no plan is.

        Which candidates are bounded by `limit_s` is put in `within`, from the first position on.
        """
        problem, of, last = self.problem, self.candidates, self.problem.setting.pp_degree - 1
        rest = np.full(problem.num_layers + 1, np.inf)
        rest[-1] = 0.0
        choices = []
        for s in range(last, -1, -1):
            forward, backward = of.forward[s], of.backward[s]
            behind = rest + sum(self._hops[s]) if s < last else rest
            trip = behind[of.stop]
            head = np.maximum(self._heads[s][:-1, None], of.ready[s])
            after = np.maximum(self._afters[s][:-1, None], of.tail[s] + (problem.least_tied_s if s == 0 else 0.0))
            bound = head + problem.within(s, forward, backward, trip) + after
            total = np.where(bound <= limit_s, forward + backward + trip, np.inf)
            if within is not None:
                within.insert(0, np.isfinite(total))
            choices.append(total.argmin(axis=1))
            rest = np.append(total.min(axis=1), np.inf)
            if not np.isfinite(rest).any():
                return None
        if not np.isfinite(rest[0]):
            return None
        spans, first = [], 0
        for choice in reversed(choices):
            stop = int(of.stop[first, choice[first]])
            spans.append((first, stop))
            first = stop
        return spans

    def settle(self, limit_s: float, check: Callable[[], None]) -> None:
        """Make the recomputation of all candidates exact that a plan within `limit_s` may have."""
        changed = True
        while changed:
            within: list[Bools] = []
            if self.stages_within(limit_s, within) is None:
                return
            reached = np.zeros(self.problem.num_layers + 1, dtype=bool)
            reached[0] = True
            for mask in within:
                mask &= reached[:-1, None]
                reached = np.zeros_like(reached)
                reached[self.candidates.stop[mask]] = True
            changed = self.candidates.settle(np.stack(within), check)
            if changed:
                self._in_front()

    def tighten(self, low_s: float, high_s: float, precision: float) -> tuple[float, list[Span] | None]:
        """Return a proven bound of at least `low_s`, within `precision` (relative) of the best, and its stages.

        Where even `high_s` is refuted, it is the bound, and there are no stages.
        """
        spans = self.stages_within(high_s)
        if spans is None:
            return high_s, None
        while high_s - low_s > precision * low_s and high_s > 0:
            middle = (low_s + high_s) / 2
            found = self.stages_within(middle)
            if found is None:
                low_s = middle
            else:
                high_s, spans = middle, found
        return low_s, spans


def cuts_of(spans: Sequence[Span]) -> list[int]:
    """Return the first layers of the stages, and the number of layers."""
    return [first for first, _ in spans] + [spans[-1][1]]

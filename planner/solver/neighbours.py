"""Better cuts near given ones: the neighbours of a plan priced together, the best one taken, until none is better."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from planner.solver.candidates import Candidates
from planner.solver.corridor import cuts_of
from planner.solver.incumbent import Incumbent
from planner.solver.problem import Span
from planner.solver.tables import Floats, Ints
from planner.solver.waves import Suffixes, stage_ends

MAX_SHIFTED = 8  # neighbouring cuts that move together
MAX_WORSE = 1.03  # than the best plan: further away, no neighbour is looked at
MIN_GAIN = 1e-4  # less than this, relatively, is not worth another round


def improve(candidates: Candidates, starts: Sequence[Sequence[Span]], incumbent: Incumbent) -> list[Span] | None:
    """Return the best stages found from any of `starts`: one cut, or up to eight neighbouring ones, moved at once.

    For chains. None where they are not better than the best plan known.
    """
    found = [_descend(candidates, spans, incumbent) for spans in starts]
    best_s, cuts = min(found, key=lambda item: item[0])
    return list(pairwise(cuts.tolist())) if best_s < incumbent.limit_s(0.0) else None


def _descend(candidates: Candidates, spans: Sequence[Span], incumbent: Incumbent) -> tuple[float, Ints]:
    """Return the step time and the cuts of the best neighbour of the best neighbour ... of given stages."""
    check = incumbent.budget.check
    moved = np.array([cuts_of(spans)], dtype=np.int64)
    cuts, best_s = moved[0], float("inf")
    while len(moved):
        check()
        found = _price(candidates, moved, check)
        index = int(found.argmin())
        if not found[index] < best_s * (1 - MIN_GAIN):
            break
        cuts, best_s = moved[index], float(found[index])
        if best_s > incumbent.step_time_s * MAX_WORSE:
            break
        moved = _moved(cuts)
    return best_s, cuts


def _moved(cuts: Ints) -> Ints:
    found = []
    for first in range(1, len(cuts) - 1):
        for last in range(first, min(len(cuts) - 1, first + MAX_SHIFTED)):
            for step in (-1, 1):
                moved = cuts.copy()
                moved[first : last + 1] += step
                if moved[first - 1] < moved[first] and moved[last] < moved[last + 1]:
                    found.append(moved)
    return np.array(found, dtype=np.int64).reshape(-1, len(cuts))


def _price(of: Candidates, cuts: Ints, check: Callable[[], None]) -> Floats:
    """Return the step time for every row of cuts; inf where a stage does not fit. Exact where only neighbours talk."""
    problem, stages = of.problem, of.problem.setting.pp_degree
    first, length = cuts[:, :-1], np.diff(cuts, axis=1)
    narrow = (length <= of.width).all(axis=1)  # a stage that is no candidate takes too long
    at = (np.arange(stages)[None, :], first, np.minimum(length, of.width) - 1)
    wanted = np.zeros(of.forward.shape, dtype=bool)
    wanted[at] = True
    of.settle(wanted, check)
    fits = narrow & np.isfinite(of.backward[at]).all(axis=1)
    if not fits.any():
        return np.full(len(cuts), np.inf)
    forward, backward, ready, tail = (
        np.where(fits[:, None], array[at], 0.0) for array in (of.forward, of.backward, of.ready, of.tail)
    )
    shape = (len(cuts), stages - 1)
    sent, back, latency = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    crossing = problem.positions[0].layers.crossing.crossing_bytes
    for s in range(stages - 1):
        route = problem.routes[s, s + 1]
        sent[:, s], back[:, s] = crossing[:, cuts[:, s + 1]] / route.bandwidth_bytes_per_s
        latency[:, s] = route.latency_s
    suffix = Suffixes(forward, backward, sent, latency, back, latency, np.ones(shape, dtype=bool), ready)
    nothing = np.zeros(len(cuts))
    ends = stage_ends(problem.setting.schedule, problem.setting.num_microbatches, suffix, nothing, nothing)
    tail[:, 0] += problem.least_tied_s
    step_s: Floats = (ends + tail).max(axis=1)
    return np.where(fits, step_s, np.inf)

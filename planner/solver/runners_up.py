"""The plans that lost, and why: of really different decisions, each the best of its kind.

Plans differ where their degrees (pp, tp, dp) do; another microbatch or another cut is no other plan. So the first
runner-up is the best plan of all degrees but the winner's, the second of all but theirs, and so on: each is found by a
search of its own, with its own gap. Where degrees run out, schedules and modes of data parallelism are told apart.
"""

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from planner.plan import Origin, Plan, RunnerUp
from planner.solver.differences import SAME, reason, slower_fraction, step_time_s, summary
from planner.solver.find import Found, find, silent
from planner.solver.orders import space_in_order_of
from planner.solver.request import WORDS, Pins
from planner.solver.search import Progress
from planner.solver.space import Space

MAX_NODES = 500  # of one search

Degrees = tuple[int, int, int]


def runners_up(
    space: Space,
    origin: Origin,
    winner: Found,
    top: int,
    *,
    progress: Progress = silent,
    time_limit_s: float | None = None,
) -> tuple[RunnerUp, ...]:
    """Return the `top` best plans of other decisions than the winner's: of other degrees first, the best of them first.

    A search that was ended is followed by no other: then those are shown that it had priced.
    """
    best = winner.plan
    if best is None or top < 1:
        return ()
    others: list[tuple[Plan, float]] = []
    space = space_in_order_of(space, best)
    if not winner.outcome.was_ended:
        with suppress(KeyboardInterrupt):  # those that are found will do
            _search(space, origin, best, others, top, progress, time_limit_s)
    else:
        others += [(plan, 0.0) for plan in _priced(winner, best)]
    others.sort(key=lambda item: (_degrees(item[0]) == _degrees(best), step_time_s(item[0])))
    return tuple(_runner_up(plan, gap, best) for plan, gap in others[:top])


def _search(
    space: Space,
    origin: Origin,
    best: Plan,
    others: list[tuple[Plan, float]],
    top: int,
    progress: Progress,
    time_limit_s: float | None,
) -> None:
    """Add to `others` the best plans of other decisions, and their gaps."""
    deadline = None if time_limit_s is None else time.monotonic() + time_limit_s
    for label, other in _others(space, best, others, top):
        left_s = None if deadline is None else deadline - time.monotonic()
        if left_s is not None and left_s <= 0:
            return
        progress(label, 0, 0)
        found = find(
            other,
            origin,
            progress=lambda _, done, total, label=label: progress(label, done, total),  # type: ignore[misc]
            time_limit_s=left_s,
            max_nodes=MAX_NODES,
        )
        known = {_degrees(plan) for plan in (best, *(plan for plan, _ in others))}
        if found.plan is not None and (_degrees(found.plan) not in known or other.pins != space.pins):
            others.append((found.plan, found.gap_fraction))
        if found.was_stopped(MAX_NODES):
            return  # its time is up, or people want no more


def _others(space: Space, best: Plan, found: list[tuple[Plan, float]], top: int) -> Iterator[tuple[str, Space]]:
    """Yield spaces without the best plans so far, `found` among them; then those of the best one's degrees."""
    passed = {_degrees(best)}
    while len(found) < top:
        count = len(found)
        yield f"runner-up {count + 1}", replace(space, passed_over=frozenset(passed))
        if len(found) == count:
            break
        passed.add(_degrees(found[-1][0]))
    if len(found) == top:
        return
    pins = {key: frozenset([getattr(best, key)]) for key in ("pp_degree", "tp_degree", "dp_degree")}
    for schedule in WORDS["schedule"] if best.pp_degree > 1 else (best.schedule,):
        for mode in WORDS["data_parallel"] if best.dp_degree > 1 else (best.data_parallel,):
            free = space.admits("schedule", schedule) and space.admits("data_parallel", mode)
            if free and (schedule, mode) != (best.schedule, best.data_parallel):
                words = {"schedule": frozenset([schedule]), "data_parallel": frozenset([mode])}
                yield f"{schedule}, {mode}", replace(space, pins=_pinned(space.pins, pins, words))


def _pinned(pins: Pins, values: dict[str, frozenset[int]], words: dict[str, frozenset[str]]) -> Pins:
    return replace(pins, values=pins.values | values, words=pins.words | words)


def _degrees(plan: Plan) -> Degrees:
    return plan.pp_degree, plan.tp_degree, plan.dp_degree


def _priced(winner: Found, best: Plan) -> list[Plan]:
    """Return the fastest plan that the search happened to price for each of the other degrees, best first."""
    found: dict[Degrees, Plan] = {}
    priced = winner.outcome.incumbent.by_setting
    for _, plan in sorted(priced.items(), key=lambda item: (step_time_s(item[1]), item[0])):
        if _degrees(plan) != _degrees(best):
            found.setdefault(_degrees(plan), plan)
    return list(found.values())


def _runner_up(plan: Plan, gap: float, best: Plan) -> RunnerUp:
    assert plan.prediction is not None
    return RunnerUp(
        summary=summary(plan),
        pp_degree=plan.pp_degree,
        num_chunks=plan.num_chunks,
        tp_degree=plan.tp_degree,
        dp_degree=plan.dp_degree,
        microbatch_size=plan.microbatch_size,
        num_microbatches=plan.num_microbatches,
        schedule=plan.schedule,
        data_parallel=plan.data_parallel,
        step_time_s=plan.prediction.step_time_s,
        gap_fraction=gap,
        peak_bytes=plan.prediction.peak_bytes,
        reason="as fast; less regular" if slower_fraction(plan, best) < SAME else reason(plan, best),
    )

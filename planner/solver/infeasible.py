"""Why there is no plan: the constraint in conflict by name, with its numbers."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import numpy as np

from planner.cluster import Cluster
from planner.graph import shared_updates
from planner.plan import EMITTED_SCHEDULES, SCHEDULES, Origin
from planner.solver.arithmetic import arithmetic_conflict
from planner.solver.problem import Problem, Setting, Span
from planner.solver.problems import Problems
from planner.solver.request import described
from planner.solver.solution import Conflict
from planner.solver.space import Space
from planner.solver.tables import Floats
from planner.units import counted, format_bytes

MAX_ROUNDS = 40


def find_conflict(space: Space, origin: Origin) -> Conflict:
    """Return the constraint that leaves no plan."""
    problems = Problems(space, origin)
    least: tuple[int, Setting, list[Span]] | None = None
    settings = list(_lean_settings(space))
    if not settings:
        return arithmetic_conflict(space)
    limits: list[tuple[float, Setting, Problem]] = []
    for setting in settings:
        problem = problems.of(setting)
        bound, spans = _least_peak(problem, float("inf"), exact=False)
        if spans:
            limits.append((bound, setting, problem))
            peak = max(_need(problem, s, *span) for s, span in enumerate(spans))
            if least is None or peak < least[0]:
                least = (peak, setting, spans)
    for bound, setting, problem in sorted(limits, key=lambda item: item[:2]):
        if least is None or bound >= least[0]:
            break
        found, spans = _least_peak(problem, float(least[0]), exact=True)
        if spans:
            least = (int(found), setting, spans)
    if least is None:
        forbidden = shared_updates(space.pricer.profile)
        if forbidden:
            shared = next(iter(forbidden.values()))
            layers = [space.pricer.profile.layers[index].name for index in shared.layers]
            return Conflict(
                constraint="buffers",
                message=(
                    f"no stages of consecutive layers satisfy the pins: layers {layers[0]!r} and {layers[-1]!r} read "
                    f"buffer {shared.name!r}, which forward updates, so they must be on one stage"
                ),
                layers=tuple(layers),
            )
        pins = ", ".join(map(described, space.request.constraints))
        return Conflict(constraint="pins", message=f"no stages of consecutive layers satisfy {pins} together")
    _, setting, spans = least
    problem = problems.of(setting)
    needs = [_need(problem, s, *span) for s, span in enumerate(spans)]
    fullest = max(range(len(needs)), key=lambda s: needs[s] - problem.positions[s].budget_bytes)
    peak = needs[fullest]
    names = [layer.name for layer in space.pricer.profile.layers]
    first, stop = spans[fullest]
    available = problem.positions[fullest].budget_bytes
    where = f"layers {names[first]} to {names[stop - 1]}" if stop - first > 1 else f"layer {names[first]}"
    layout = f"pp {setting.pp_degree} x tp {setting.tp_degree} x dp {setting.dp_degree}, {setting.data_parallel}"
    over = [s for s, need in enumerate(needs) if need > problem.positions[s].budget_bytes]
    which = (
        f"; {counted(len(over), 'stage')} of {len(needs)} would not fit: {', '.join(map(str, over))}" if over else ""
    )
    less = f", {format_bytes(peak - available)} less" if peak > available else ""
    given = dict(space.request.limits)
    leanest = f"the leanest plan ({layout}, microbatch_size {setting.microbatch_size}) needs {format_bytes(peak)} "
    if peak <= available and "recompute" in given:  # it fits, and runs more again than it may
        return Conflict(
            constraint="recompute",
            message=(
                f"{leanest}per GPU where all is recomputed that can be; --limit recompute={given['recompute']} leaves "
                f"no plan within {format_bytes(available)}"
            ),
            least_peak_bytes=peak,
            available_bytes=available,
            layers=tuple(names[first:stop]),
        )
    have = f"--limit memory={given['memory']} leaves" if "memory" in given else "the GPUs have"
    return Conflict(
        constraint="memory",
        message=(
            f"{leanest}per GPU, in stage {fullest} with {where}; {have} {format_bytes(available)}"
            f"{less}, reserve of {format_bytes(space.pricer.cluster.memory_reserve)} included in both{which}"
        ),
        least_peak_bytes=peak,
        available_bytes=available,
        layers=tuple(names[first:stop]),
    )


def _lean_settings(space: Space) -> Iterator[Setting]:
    """Yield the settings that can need least memory: the smallest microbatch under 1f1b, every one under gpipe."""
    seen = set()
    straight = (setting for setting in space.settings() if setting.schedule in EMITTED_SCHEDULES)
    for setting in sorted(straight, key=lambda s: (s.microbatch_size, s)):
        key = (*setting.degrees, setting.data_parallel, setting.num_shards)
        if setting.schedule == SCHEDULES[0]:
            if key in seen:
                continue
            seen.add(key)
        elif key in seen:
            continue
        over = space.stage_routes(*setting.degrees)
        routes = tuple(dict.fromkeys(over.tensor))
        for shardings in space.combinations(setting.tp_degree, setting.microbatch_size, routes)[0]:
            yield replace(setting, shardings=shardings)


def _need(problem: Problem, s: int, a: int, b: int) -> int:
    """Return the least peak bytes of stage [a, b) at position s."""
    position = problem.positions[s]
    received = int(position.layers.crossing.received[a, b])
    choices = position.layers.choices
    assert choices is not None
    return int(position.states.fixed_bytes[a, b]) + choices.leanest(a, b, received, position.in_flight)


def _least_peak(problem: Problem, limit: float, *, exact: bool) -> tuple[float, list[Span]]:
    """Return the least over cuts of the fullest stage's bytes, and the stages; a lower bound unless `exact`.

    With `exact`, (inf, []) where no stages need less than `limit`. What a stage needs exactly takes long to say, and is
    asked only of stages that the bounds make best: once these are exact, no others are better.
    """
    needs = []
    for position in problem.positions:
        table = position.layers
        bounds = (position.states.fixed_bytes + position.in_flight * table.kept_least + table.transient).astype(float)
        needs.append(np.where(position.allowed, bounds, np.inf))
    known: set[tuple[int, Span]] = set()
    for rounds in count():
        peak, spans = _fullest(needs, problem.num_layers)
        if not spans or (exact and peak >= limit):
            return float("inf"), []
        asked = [(s, span) for s, span in enumerate(spans) if (s, span) not in known]
        if not exact or not asked:
            return peak, spans
        if rounds == MAX_ROUNDS:  # the bounds are far off: all that may count is asked for
            inside = (zip(*np.nonzero(need < limit), strict=True) for need in needs)
            every = [(s, (int(a), int(b))) for s, spans in enumerate(inside) for a, b in spans]
            asked = [one for one in every if one not in known]
        for s, span in asked:
            needs[s][span] = _need(problem, s, *span)
        known.update(asked)
    raise AssertionError


def _fullest(needs: list[Floats], num_layers: int) -> tuple[float, list[Span]]:
    """Return the least over cuts of the most bytes, and the stages; (inf, []) where there are none."""
    best = np.full(num_layers + 1, np.inf)
    best[0] = 0.0
    parents = []
    for need in needs:
        through = np.maximum(best[:, None], need)
        parents.append(np.argmin(through, axis=0))
        best = np.min(through, axis=0)
    if not np.isfinite(best[num_layers]):
        return float("inf"), []
    spans, stop = [], num_layers
    for parent in reversed(parents):
        first = int(parent[stop])
        spans.append((first, stop))
        stop = first
    return float(best[num_layers]), spans[::-1]


def with_memory(cluster: Cluster, num_bytes: int) -> Cluster:
    """Return the cluster with GPUs of so much memory."""
    gpus = {name: gpu.model_copy(update={"memory": num_bytes}) for name, gpu in cluster.gpus.items()}
    return cluster.model_copy(update={"gpus": gpus})

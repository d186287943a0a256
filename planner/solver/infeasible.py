"""Why there is no plan, with numbers; and which changes would give one, each shown by solving again."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from planner.cluster import Cluster
from planner.graph import shared_updates
from planner.plan import SCHEDULES, Origin
from planner.solver.arithmetic import arithmetic_conflict
from planner.solver.branch import Span
from planner.solver.problem import Problem, Setting
from planner.solver.problems import Problems
from planner.solver.request import MAX_GLOBAL_BATCH_SIZE, MAX_NUM_GPUS, SolveRequest, described
from planner.solver.settings import with_shardings
from planner.solver.solution import Conflict, Repair
from planner.solver.space import Space, divisors
from planner.units import counted, format_bytes

MAX_REPAIRS = 4

Resolve = Callable[[Cluster, SolveRequest], float | None]  # the step time of a plan, or None


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
    peak, setting, spans = least
    problem = problems.of(setting)
    needs = [_need(problem, s, *span) for s, span in enumerate(spans)]
    fullest = max(range(len(needs)), key=lambda s: needs[s])
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
    return Conflict(
        constraint="memory",
        message=(
            f"the leanest plan ({layout}, microbatch_size {setting.microbatch_size}) needs {format_bytes(peak)} "
            f"per GPU, in stage {fullest} with {where}; the GPUs have {format_bytes(available)}"
            f"{less}, reserve of {format_bytes(space.pricer.cluster.memory_reserve)} included in both{which}"
        ),
        least_peak_bytes=peak,
        available_bytes=available,
        layers=tuple(names[first:stop]),
    )


def _lean_settings(space: Space) -> Iterator[Setting]:
    """Yield the settings that can need least memory: the smallest microbatch under 1f1b, every one under gpipe."""
    seen = set()
    for setting in sorted(space.settings(), key=lambda s: (s.microbatch_size, s)):
        key = (setting.pp_degree, setting.tp_degree, setting.dp_degree, setting.data_parallel)
        if setting.schedule == SCHEDULES[0]:
            if key in seen:
                continue
            seen.add(key)
        elif key in seen:
            continue
        over = space.stage_routes(setting.pp_degree, setting.tp_degree, setting.dp_degree)
        routes = tuple(dict.fromkeys(over.tensor))
        for shardings in space.combinations(setting.tp_degree, setting.microbatch_size, routes)[0]:
            yield with_shardings(setting, shardings)


def _need(problem: Problem, s: int, a: int, b: int) -> int:
    """Return the least peak bytes of stage [a, b) at position s."""
    position = problem.positions[s]
    received = int(position.layers.crossing.received[a, b])
    return int(position.states.fixed_bytes[a, b]) + position.layers.choices.leanest(a, b, received, position.in_flight)


def _least_peak(problem: Problem, limit: float, *, exact: bool) -> tuple[float, list[Span]]:
    """Return the least over cuts of the fullest stage's bytes, and the stages; a lower bound unless `exact`.

    With `exact`, stages that need `limit` or more are not looked at: (inf, []) where only such are left.
    """
    count, stages = problem.num_layers, problem.setting.pp_degree
    best = np.full(count + 1, np.inf)
    best[0] = 0.0
    parents = []
    for s in range(stages):
        position = problem.positions[s]
        table = position.layers
        needs = (position.states.fixed_bytes + position.in_flight * table.kept_least + table.transient).astype(float)
        needs = np.where(position.allowed & np.isfinite(best)[:, None], needs, np.inf)
        if exact:
            for a, b in zip(*np.nonzero(np.maximum(needs, best[:, None]) < limit), strict=True):
                needs[a, b] = _need(problem, s, int(a), int(b))
        through = np.maximum(best[:, None], needs)
        if exact:
            through = np.where(through < limit, through, np.inf)
        parents.append(np.argmin(through, axis=0))
        best = np.min(through, axis=0)
    if not np.isfinite(best[count]):
        return float("inf"), []
    spans, stop = [], count
    for s in reversed(range(stages)):
        first = int(parents[s][stop])
        spans.append((first, stop))
        stop = first
    return float(best[count]), spans[::-1]


def find_repairs(space: Space, conflict: Conflict, resolve: Resolve) -> tuple[Repair, ...]:
    """Return changes that give a plan, cheapest for people first; each was solved again by `resolve`."""
    found: list[Repair] = []
    for description, cluster, request in _candidates(space, conflict):
        if len(found) == MAX_REPAIRS:
            break
        step_time_s = resolve(cluster, request)
        if step_time_s is not None:
            found.append(Repair(description=description, step_time_s=step_time_s))
    return tuple(found)


def _candidates(space: Space, conflict: Conflict) -> Iterator[tuple[str, Cluster, SolveRequest]]:
    request, cluster = space.request, space.pricer.cluster
    for pair in request.pins:
        rest = tuple(other for other in request.pins if other != pair)
        yield f"leave out --pin {pair[0]}={pair[1]}", cluster, replace(request, pins=rest)
    for pair in request.exclusions:
        rest = tuple(other for other in request.exclusions if other != pair)
        yield f"leave out --exclude {pair[0]}={pair[1]}", cluster, replace(request, exclusions=rest)
    if conflict.constraint in ("batch", "warm-up"):
        for factor in divisors(request.num_gpus)[1:]:
            batch = -(-request.global_batch_size // factor) * factor
            if request.global_batch_size < batch <= MAX_GLOBAL_BATCH_SIZE:
                yield f"--global-batch-size {batch}", cluster, replace(request, global_batch_size=batch)
    if conflict.constraint in ("gpus", "batch", "layers", "buffers"):
        for num_gpus in reversed(range(max(1, request.num_gpus - 8), request.num_gpus)):
            yield f"--gpus {num_gpus}", cluster, replace(request, num_gpus=num_gpus)
    if conflict.constraint == "memory" and conflict.least_peak_bytes is not None:
        needed = conflict.least_peak_bytes
        gpus = {name: gpu.model_copy(update={"memory": needed}) for name, gpu in cluster.gpus.items()}
        yield (
            f"GPUs with a little over {format_bytes(needed)} of memory",
            cluster.model_copy(update={"gpus": gpus}),
            request,
        )
        for factor in (2, 4, 8, 16, 32):
            if needed > 2 * factor * (conflict.available_bytes or needed):
                continue  # states divide by the GPUs at best, and half of the need may be activations
            num_gpus = factor * request.num_gpus
            if num_gpus > MAX_NUM_GPUS:
                break
            groups = cluster.node_groups
            while sum(group.count * group.gpus_per_node for group in groups) < num_gpus:
                groups = (*groups, *groups)
            yield (
                f"--gpus {num_gpus}",
                cluster.model_copy(update={"node_groups": groups}),
                replace(request, num_gpus=num_gpus),
            )

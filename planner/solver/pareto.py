"""The Pareto front of step time against memory per GPU and GPUs used: each point the best plan within its limits.

From the fastest plan's memory down to the least with which any plan fits, in equal steps; a plan that fits into the
next step too is the best one there, and needs no search. Then the fastest plans on fewer GPUs. Points that another one
equals or beats in everything are left out. Models with branches are cut in the order of the fastest plan's layers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from planner.cluster import Cluster
from planner.model_profile import ModelProfile
from planner.plan import Plan
from planner.solver.differences import num_gpus, step_time_s
from planner.solver.find import EndedError, Found, find, make_space, silent
from planner.solver.infeasible import find_conflict, with_memory
from planner.solver.orders import space_in_order_of
from planner.solver.request import SolveRequest
from planner.solver.space import Space

MAX_NODES = 1000  # of one search
MEMORY_STEPS = 8
MOST_GPU_COUNTS = 16  # of fewer GPUs: all numbers, or as many parts of those given
GIVE_UP_AFTER = 3  # numbers of GPUs without a plan, one after the other

Progress = Callable[[str, int, int], None]
TimeLeft = Callable[[], float | None]


@dataclass(frozen=True, slots=True)
class Point:
    """A plan of the front; it is at most `gap_fraction` slower than the best within its memory and GPUs."""

    plan: Plan
    gap_fraction: float

    @property
    def costs(self) -> tuple[int, float, int]:
        """What a plan takes: GPUs, seconds per step, bytes per GPU."""
        return num_gpus(self.plan), step_time_s(self.plan), peak_bytes(self.plan)


@dataclass(slots=True)
class Front:
    """The points, most GPUs and fastest first; not `is_complete` where it was ended before all were tried."""

    points: list[Point] = field(default_factory=list)
    is_complete: bool = True


def peak_bytes(plan: Plan) -> int:
    """Return the memory of a priced plan's fullest GPU."""
    assert plan.prediction is not None
    return plan.prediction.peak_bytes


def pareto(
    best: Plan,
    profile: ModelProfile,
    cluster: Cluster,
    request: SolveRequest,
    *,
    gap_fraction: float = 0.0,
    progress: Progress = silent,
    left_s: TimeLeft = lambda: None,
) -> Front:
    """Return the front of what a request leaves, from its best plan on.

    Ctrl-C, or no time left, gives the points found so far.
    """
    found, answer = [Point(best, gap_fraction)], Front()
    try:
        for point in _points(found[0], profile, cluster, request, progress, left_s):
            found.append(point)  # noqa: PERF402 - what was found before an error is kept
    except (EndedError, KeyboardInterrupt):
        answer.is_complete = False
    answer.points = undominated(found)
    return answer


def undominated(points: list[Point]) -> list[Point]:
    """Return the points that no other equals or beats in everything; of equal ones the first."""
    kept: list[Point] = []
    for index, point in enumerate(points):
        others = [*points[:index], *(other for other in points[index + 1 :] if other.costs != point.costs)]
        if not any(all(a <= b for a, b in zip(other.costs, point.costs, strict=True)) for other in others):
            kept.append(point)
    return sorted(kept, key=lambda point: (-point.costs[0], *point.costs[1:]))


def _points(
    best: Point,
    profile: ModelProfile,
    cluster: Cluster,
    request: SolveRequest,
    progress: Progress,
    left_s: TimeLeft,
) -> Iterator[Point]:
    def space_on(place: Cluster) -> Space:
        return space_in_order_of(make_space(profile, place, request), best.plan)

    counts = _gpu_counts(space_on(cluster), num_gpus(best.plan))
    total = MEMORY_STEPS + len(counts)

    def solved(space: Space, label: str, done: int) -> Found:
        time_left_s = left_s()
        if time_left_s is not None and time_left_s <= 0:
            raise EndedError
        progress(label, done, total)
        found = find(space, best.plan.origin, time_limit_s=time_left_s, max_nodes=MAX_NODES)
        if found.was_stopped(MAX_NODES):
            raise EndedError
        return found

    progress("least memory", 0, total)
    conflict = find_conflict(space_on(with_memory(cluster, 1)), best.plan.origin)
    most, least = peak_bytes(best.plan), conflict.least_peak_bytes
    if least is not None and least < most:
        last = best
        for step in reversed(range(MEMORY_STEPS)):
            limit = least + (most - least) * step // MEMORY_STEPS
            if peak_bytes(last.plan) <= limit:
                continue
            found = solved(space_on(with_memory(cluster, limit)), "less memory", MEMORY_STEPS - 1 - step)
            if found.plan is None:  # a limit of recomputation: the least memory is not reached
                break
            last = Point(found.plan, found.gap_fraction)
            yield last
    missed = 0
    for index, count in enumerate(counts):
        space = space_on(cluster)
        values = space.pins.values | {"num_gpus": frozenset([count])}
        found = solved(replace(space, pins=replace(space.pins, values=values)), f"{count} GPUs", MEMORY_STEPS + index)
        missed = missed + 1 if found.plan is None else 0
        if found.plan is not None:
            yield Point(found.plan, found.gap_fraction)
        elif missed == GIVE_UP_AFTER:
            break


def _gpu_counts(space: Space, used: int) -> list[int]:
    """Return the numbers of GPUs below `used` that are worth trying and admitted, most first."""
    if used <= MOST_GPU_COUNTS:
        counts = list(range(1, used))
    else:
        node = space.pricer.cluster.gpus_per_node
        parts = {max(1, used * part // MOST_GPU_COUNTS) for part in range(1, MOST_GPU_COUNTS)}
        halves = {used >> shift for shift in range(1, used.bit_length())}
        counts = [count // node * node if count > node else count for count in parts | halves]
    return sorted({count for count in counts if space.admits("num_gpus", count)}, reverse=True)

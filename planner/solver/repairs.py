"""Which changes would give a plan where there is none: each solved again, and shown with the best plan it gives.

Cheapest for people first: constraints that they gave themselves (of several, each alone, then as few together as do),
then another batch or fewer GPUs, then more memory, then the least number of GPUs that does.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations

from planner.cluster import Cluster
from planner.plan import Plan
from planner.solver.differences import step_time_s, summary
from planner.solver.find import EndedError, Found
from planner.solver.infeasible import with_memory
from planner.solver.request import MAX_GLOBAL_BATCH_SIZE, MAX_NUM_GPUS, SolveRequest, described
from planner.solver.solution import Conflict, Repair
from planner.solver.space import divisors
from planner.units import format_bytes

MAX_REPAIRS = 4
MAX_NODES = 500  # of one search
MOST_TRIED = 8  # numbers of GPUs that are tried one after the other
MOST_TIMES = 32  # the GPUs given: more are not tried
MOST_TOGETHER = 40  # sets of constraints that are tried together

Resolve = Callable[[Cluster, SolveRequest, bool], Found]
"""The best plan of another problem; any plan, if the flag is set."""
Enlarge = Callable[[int], Cluster]
"""The cluster of so many GPUs."""
Change = tuple[str, Cluster, SolveRequest]


class Repairs:
    """Tries changes of a problem that has no plan."""

    def __init__(
        self,
        request: SolveRequest,
        cluster: Cluster,
        conflict: Conflict,
        resolve: Resolve,
        enlarge: Enlarge | None,
    ) -> None:
        self.request, self.cluster, self.conflict = request, cluster, conflict
        self._resolve, self._is_ended = resolve, False
        self._enlarge = enlarge or self._larger

    def between(self) -> tuple[str, ...]:
        """Return a least set of people's constraints that can't hold together; none where they are not at fault."""
        kept = list(self.request.constraints)
        dropped: list[tuple[str, str, str]] = []
        try:
            if not kept or not self._exists(self.cluster, self.request.without(*kept)):
                return ()
            for constraint in kept:
                if not self._exists(self.cluster, self.request.without(*dropped, constraint)):
                    dropped.append(constraint)
        except (EndedError, KeyboardInterrupt):
            self._is_ended = True
            return ()
        return tuple(described(one) for one in kept if one not in dropped)

    def found(self) -> tuple[Repair, ...]:
        """Return the changes that give a plan, with the best plan of each; no more after a search that was ended."""
        repairs: list[Repair] = []
        try:
            for change in () if self._is_ended else self._changes():
                if len(repairs) == MAX_REPAIRS:
                    break
                repairs += self._tried(*change)
        except (EndedError, KeyboardInterrupt):  # those that are found will do
            pass
        return tuple(repairs)

    def _tried(self, description: str, cluster: Cluster, request: SolveRequest) -> Iterator[Repair]:
        """Yield the repair that a change is, if it is one; EndedError after a search that was ended."""
        found = self._resolve(cluster, request, False)
        if found.plan is not None:
            yield Repair(
                description=description,
                step_time_s=step_time_s(found.plan),
                gap_fraction=found.gap_fraction,
                summary=summary(found.plan),
                instead=_instead(self.request, request, found.plan),
            )
        if found.was_stopped(MAX_NODES):
            raise EndedError

    def _exists(self, cluster: Cluster, request: SolveRequest) -> bool:
        """Return whether there is a plan, as far as a short search tells; EndedError after one that was ended."""
        found = self._resolve(cluster, request, True)
        if found.plan is None and found.was_stopped(MAX_NODES):
            raise EndedError
        return found.plan is not None

    def _changes(self) -> Iterator[Change]:
        request, cluster, conflict = self.request, self.cluster, self.conflict
        yield from self._dropped()
        if conflict.constraint in ("batch", "warm-up"):
            for factor in divisors(request.num_gpus)[1:]:
                batch = -(-request.global_batch_size // factor) * factor
                if request.global_batch_size < batch <= MAX_GLOBAL_BATCH_SIZE:
                    yield f"--global-batch-size {batch}", cluster, replace(request, global_batch_size=batch)
        if conflict.constraint in ("gpus", "batch", "layers", "buffers"):
            for num_gpus in reversed(range(max(1, request.num_gpus - 8), request.num_gpus)):
                yield f"--gpus {num_gpus}", self._enlarge(num_gpus), replace(request, num_gpus=num_gpus)
        if conflict.constraint == "memory" and conflict.least_peak_bytes is not None:
            needed = conflict.least_peak_bytes
            if not any(key == "memory" for key, _ in request.limits):
                larger = with_memory(cluster, needed)
                yield f"GPUs with a little over {format_bytes(needed)} of memory", larger, request
            if (least := self._least_gpus(needed)) is not None:
                yield f"--gpus {least}", self._enlarge(least), replace(request, num_gpus=least)

    def _dropped(self) -> Iterator[Change]:
        """Yield the problem without each constraint that helps, or without as few together as do."""
        given = self.request.constraints
        for size in range(1, len(given) + 1):
            tried = list(combinations(given, size))
            if size > 1 and len(tried) > MOST_TOGETHER:
                tried = [given]
            helping = [some for some in tried if self._exists(self.cluster, self.request.without(*some))]
            for some in helping:
                text = "leave out " + " and ".join(map(described, some))
                yield text, self.cluster, self.request.without(*some)
            if helping or tried == [given]:
                break

    def _least_gpus(self, needed: int) -> int | None:
        """Return the least number of GPUs above those given with which some plan fits: whole nodes, from one node on.

        None where none was found. The next numbers are tried one after the other, then twice as many each time, and
        between what is too few and what does from the middle on.
        """
        start, node = self.request.num_gpus, self.cluster.gpus_per_node
        step = node if start >= node and start % node == 0 else 1
        available = self.conflict.available_bytes or needed

        def exists(num_gpus: int) -> bool:
            # States divide by the GPUs at best, and half of the need may be activations.
            possible = num_gpus <= MAX_NUM_GPUS and needed * start <= 2 * num_gpus * available
            return possible and self._exists(self._enlarge(num_gpus), replace(self.request, num_gpus=num_gpus))

        low = start + MOST_TRIED * step
        for count in range(start + step, low + step, step):
            if exists(count):
                return count
        high = 2 * low
        while not exists(high):
            if high > MOST_TIMES * start:
                return None
            low, high = high, 2 * high
        while (between := range(low + step, high, step)) and len(between) > MOST_TRIED:
            middle = between[len(between) // 2]
            low, high = (low, middle) if exists(middle) else (middle, high)
        return next((count for count in between if exists(count)), high)

    def _larger(self, num_gpus: int) -> Cluster:
        """Return the cluster, repeated until it has so many GPUs."""
        groups = self.cluster.node_groups
        while sum(group.count * group.gpus_per_node for group in groups) < num_gpus:
            groups = (*groups, *groups)
        return self.cluster.model_copy(update={"node_groups": groups})


def _instead(asked: SolveRequest, request: SolveRequest, plan: Plan) -> str:
    """Return what a plan does where people asked for something else, for the constraints that were left out."""
    told: dict[str, str] = {}
    for _, key, _ in (one for one in asked.constraints if one not in request.constraints):
        if key == "recompute":
            remade = [name for stage in plan.stages for name in stage.recompute]
            told[key] = f"recomputes {_listed(remade)}" if remade else "recomputes nothing"
        elif key == "cuts":
            firsts = [stage.layers[0] for stage in plan.stages[1:]]
            told[key] = f"cuts at {_listed(firsts)}" if firsts else "has one stage"
        elif key == "memory" and plan.prediction is not None:
            told[key] = f"needs {format_bytes(plan.prediction.peak_bytes)} per GPU"
        elif hasattr(plan, key):
            told[key] = f"has {key} {getattr(plan, key)}"
        elif key.startswith("stage:"):
            name = key.removeprefix("stage:")
            told[key] = f"has {name} on stage {next(i for i, s in enumerate(plan.stages) if name in s.layers)}"
    return " and ".join(told.values())


def _listed(names: list[str], most: int = 4) -> str:
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown

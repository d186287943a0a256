"""Pipelines whose stages differ in degrees, sharding and shards of states, on all GPUs or fewer.

What is searched together has one number of microbatches and one schedule. A step takes at least

    (9)  m * (GPU-seconds of a microbatch, every layer in its cheapest way) / num_gpus

and at least what `core.pipeline` does not refute, over any number of stages. Stages are on consecutive GPUs, from the
first to the last; bounds use the fastest links that a stage may have anywhere. Small problems are searched to the end
by `mixed_branch`; of larger ones the bound stays, and what it leaves open is told by the gap.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.cost.layers import REPLICATED, tie_conflict
from planner.graph import is_chained
from planner.plan import Plan, Schedule, Stage
from planner.solver.core.pipeline import Chain, Piece
from planner.solver.core.pipelines import Pipelines
from planner.solver.incumbent import Incumbent
from planner.solver.mixed_branch import search_exactly, size_of_search
from planner.solver.space import Space, divisors
from planner.solver.stage_options import StageOptions, Ways, gpus_of

MIXED_SCHEDULES: tuple[Schedule, ...] = ("1f1b", "gpipe")
MAX_SIZE = 3_000_000  # of a search to the end, in steps of its tables
PRECISION = 2e-4  # of the interval of sums in which a bound is looked for, of the step time
SHARES = (1.0, 0.99, 0.98, 0.95, 0.9)  # of the incumbent's limit, one of which is refuted
COARSE = 1.04  # by how much a limit is raised until there is a first plan


class MixedProblem:
    """One number of microbatches and one schedule."""

    def __init__(self, space: Space, options: StageOptions, m: int, schedule: Schedule) -> None:
        self.space, self.options, self.m, self.schedule = space, options, m, schedule
        cluster = space.pricer.cluster
        count = len(space.pricer.profile.layers)
        most = min(count, space.most_gpus)
        if schedule == "1f1b" and "num_microbatches" not in space.pins.values:
            most = min(most, m)
        self.chain = Chain(
            num_layers=count,
            num_gpus=space.most_gpus,
            num_microbatches=m,
            schedule=schedule,
            options=options.options(),
            remaking=options,
            latency_s=min(link.latency for group in cluster.node_groups for link in cluster.links_of(group)),
            stage_counts=frozenset(n for n in range(1, most + 1) if space.admits("pp_degree", n)),
            linked=is_chained(space.pricer.profile),
        )

    def plan(self, pieces: Sequence[Piece], incumbent: Incumbent) -> Plan | None:
        """Return the plan of stages, with the least recomputation; None where there is none that fits."""
        profile, request = self.space.pricer.profile, self.space.request
        ways = [self.options.ways[piece.option] for piece in pieces]
        if not self.space.admits("num_gpus", sum(way.gpus for way in ways)) or self._ties_differ(pieces):
            return None
        sharded = any(way.num_shards > 1 for way in ways)
        stages = []
        for s, (piece, way, gpus) in enumerate(zip(pieces, ways, gpus_of(ways), strict=True)):
            in_flight = self.chain.in_flight(len(pieces) - s)
            choice = self.options.choose(piece.option, in_flight, piece.first, piece.stop)
            if choice is None:
                return None
            layers, chosen = profile.layers[piece.first : piece.stop], dict(way.shardings)
            classes = dict.fromkeys(layer.layer_class for layer in layers)
            stages.append(
                Stage(
                    layers=tuple(layer.name for layer in layers),
                    tp_degree=way.tp_degree,
                    dp_degree=way.dp_degree,
                    microbatch_size=self.options.rows // way.dp_degree,
                    recompute=tuple(profile.layers[index].name for index in choice.layers),
                    shardings={name: chosen[name] for name in classes if name in chosen},
                    gpus=gpus,
                    shard_degree=1 if sharded and way.num_shards == 1 and way.dp_degree > 1 else None,
                )
            )
        return Plan(
            global_batch_size=request.global_batch_size,
            num_microbatches=self.m,
            schedule=self.schedule,
            data_parallel="sharded" if sharded else "replicated",
            optimizer=request.optimizer,
            precision=request.precision,
            stages=tuple(stages),
            origin=incumbent.problems.origin,
        )

    def _ties_differ(self, pieces: Sequence[Piece]) -> bool:
        """Return whether layers that share a parameter divide it in ways that don't go together."""
        profile = self.space.pricer.profile
        way_of = [self.options.ways[piece.option] for piece in pieces for _ in range(piece.first, piece.stop)]
        degrees = {layer: way.tp_degree for layer, way in enumerate(way_of)}
        shardings = {
            layer: dict(way.shardings).get(profile.layers[layer].layer_class, REPLICATED)
            for layer, way in enumerate(way_of)
        }
        return any(tie_conflict(profile, shared, degrees, shardings) for shared in self.space.pricer.shared)

    def offer(self, pieces: Sequence[Piece], incumbent: Incumbent) -> bool:
        """Offer the plan of stages; return whether it is the best one now."""
        before, plan = incumbent.step_time_s, self.plan(pieces, incumbent)
        if plan is not None:
            incumbent.offer_plan(plan)
        return incumbent.step_time_s < before


@dataclass(slots=True)
class OpenMicrobatches:
    """All pipelines of a number of microbatches, before there are tables."""

    bound: float
    m: int
    ways: Ways

    @property
    def label(self) -> str:
        """What progress shows."""
        return f"{self.m} microbatches, degrees by stage"

    def advance(self, incumbent: Incumbent, tolerance: float) -> "list[OpenMixed]":
        """Return the parts by schedule."""
        incumbent.budget.spend()
        space = self.ways.space
        rows = space.request.global_batch_size // self.m
        if not self.ways.complete(rows):
            incumbent.left_out_s = min(incumbent.left_out_s, self.bound)
        options = StageOptions(self.ways, rows)
        schedules = [schedule for schedule in MIXED_SCHEDULES if space.admits("schedule", schedule)]
        schedules = schedules[-1:] if self.m == 1 else schedules  # all run alike, and gpipe any number of stages
        problems = [MixedProblem(space, options, self.m, schedule) for schedule in schedules]
        return [OpenMixed(self.bound, problem) for problem in problems if problem.chain.options]


class OpenMixed:
    """All pipelines of a number of microbatches and a schedule."""

    def __init__(self, bound: float, problem: MixedProblem) -> None:
        self.bound, self.problem = bound, problem
        self._pipelines: Pipelines | None = None

    @property
    def label(self) -> str:
        """What progress shows."""
        return f"{self.problem.m} microbatches, degrees by stage"

    def advance(self, incumbent: Incumbent, tolerance: float) -> "list[OpenMixed]":
        """Raise the bound up to the incumbent's limit, offering plans on the way; where that fails, search to the end.

        A bound that can't be raised so far is left, where the search to the end would take too long.
        """
        incumbent.budget.spend()
        if self._pipelines is None:
            self._pipelines = Pipelines(self.problem.chain, incumbent.budget.check)
        if incumbent.step_time_s == float("inf") and not self._find_any(self._pipelines, incumbent):
            return []
        if incumbent.step_time_s < float("inf") and self._raise_bound(self._pipelines, incumbent, tolerance):
            return [self]
        small = size_of_search(self.problem.chain) <= MAX_SIZE
        if small and search_exactly(self.problem, self._pipelines, incumbent, tolerance):
            self.bound = max(self.bound, incumbent.limit_s(tolerance))
            return [self]
        incumbent.left_out_s = min(incumbent.left_out_s, self.bound)
        return []

    def _find_any(self, pipelines: Pipelines, incumbent: Incumbent) -> bool:
        """Offer a first plan, raising the limit until there is one; return False where there is proven to be none."""
        most = pipelines.most_s
        if pipelines.find(most, 0.0, most) is None:
            return False
        limit, factor = self.bound, COARSE
        while incumbent.step_time_s == float("inf") and limit < most:
            limit, factor = limit * factor, factor * factor
            pieces = pipelines.find(limit, 0.0, limit)
            if pieces is None:
                self.bound = limit
            else:
                self.problem.offer(pieces, incumbent)
        return True

    def _raise_bound(self, pipelines: Pipelines, incumbent: Incumbent, tolerance: float) -> bool:
        """Return whether the bound has reached the incumbent's limit."""

        def better(pieces: list[Piece]) -> bool:
            return self.problem.offer(pieces, incumbent)

        for share in SHARES:
            while (at := share * incumbent.limit_s(tolerance)) > self.bound:
                before = incumbent.step_time_s
                if pipelines.decide(at, PRECISION * at, better):
                    self.bound = at
                elif incumbent.step_time_s >= before:
                    break
            if self.bound >= at:
                return share == 1.0
        return False


def open_mixed(space: Space) -> Iterator[OpenMicrobatches]:
    """Yield all pipelines whose stages may differ, by number of microbatches.

    There are none on GPUs of several types, nor where people decided on the stage of a layer, the degrees of all
    stages, chunks or shards.
    """
    decided = {key for pins in (space.pins, space.exclusions) for key in pins.values} | set(space.limits.counts)
    pinned = {"tp_degree", "dp_degree"} <= set(space.pins.values) or decided & {"num_chunks", "shard_degree"}
    if len(space.gpu_types) > 1 or space.pins.stages or space.exclusions.stages or pinned or space.passed_over:
        return
    ways, most = Ways(space), max(1, space.most_gpus)
    for m in divisors(space.request.global_batch_size):
        if not space.admits("num_microbatches", m):
            continue
        seconds = ways.gpu_seconds(space.request.global_batch_size // m)
        if seconds < float("inf"):
            yield OpenMicrobatches(m * seconds / most, m, ways)

"""The outer search space: every setting of degrees, microbatches, schedule, data parallelism and sharding.

Constraints have names, which an infeasible problem quotes:

    gpus          pp_degree * tp_degree * dp_degree <= num_gpus: a plan may leave GPUs idle where that is faster
    batch         microbatch_size * num_microbatches * dp_degree = global_batch_size
    layers        pp_degree <= number of layers
    sharding      tp_degree > 1 needs a layer with costs at that degree; a block that can be divided is (whole on every
                  rank it would be computed again and again: that is what fewer GPUs are for), and tied parameters are
                  divided the same way
    heads         tp_degree divides the heads of every block's attention
    node          tp_degree <= GPUs of a node
    warm-up       num_microbatches >= pp_degree, but for gpipe, unless the number is pinned: fewer leave stages idle
    runtime       what emitted plans can't run yet, schedules and shards among it, is searched only if `theoretical`
    buffers       layers that read a buffer that forward updates are on one stage; dp_degree is 1 where its value of the
                  last forward reaches what is trained on: replicas would each go on from their own
    in place      a layer that writes over its own input is not recomputed: its input is gone
    pins          what people fixed, excluded or limited
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product

from planner.cost.communication import Route
from planner.cost.evaluate import Pricer
from planner.cost.layers import REPLICATED, LayerNumbers, parameter_sharding, tie_conflict
from planner.cost.places import DataRoutes
from planner.plan import (
    DATA_PARALLEL_MODES,
    EMITTED_SCHEDULES,
    FEWEST_CHUNKS,
    MOST_CHUNKS,
    SCHEDULES,
    DataParallel,
    Schedule,
)
from planner.solver.limits import Limits
from planner.solver.problem import PLACEMENTS, Placement, Setting
from planner.solver.request import Pins, SolveRequest
from planner.solver.routes import StageRoutes, regular_node_size, representatives

MAX_COMBINATIONS = 256
FEW_REPLICAS = 8

Shardings = tuple[tuple[str, str], ...]


@cache
def divisors(number: int) -> list[int]:
    """Return the divisors in ascending order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


@dataclass(frozen=True, slots=True)
class Space:
    """The problem's constraints, from which settings are drawn."""

    pricer: Pricer
    request: SolveRequest
    pins: Pins
    exclusions: Pins
    limits: Limits = field(default_factory=Limits)
    passed_over: frozenset[tuple[int, int, int]] = frozenset()
    """degrees (pp, tp, dp) that are left out: those of better plans, where the next best is asked for"""
    _routes: dict[tuple[int, int, int, Placement], "StageRoutes"] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )
    _data_routes: dict[tuple[int, int, int, Placement, int], tuple[DataRoutes, ...]] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )

    gpu_types: tuple[str, ...] = field(init=False, default=(), compare=False)
    """the types of the GPUs that are planned for"""
    class_counts: Counter[str] = field(init=False, default_factory=Counter, compare=False)
    """how many layers each class has"""

    def __post_init__(self) -> None:
        object.__setattr__(self, "gpu_types", self.pricer.places.types_of_first(self.request.num_gpus))
        self.class_counts.update(layer.layer_class for layer in self.pricer.profile.layers)

    def numbers(self, class_name: str, rows: int, tp_degree: int, sharding: str, route: Route) -> list[LayerNumbers]:
        """Return what a layer of that class costs on each of the GPU types."""
        return [self.pricer.numbers(class_name, rows, tp_degree, sharding, route, gpu) for gpu in self.gpu_types]

    def admits(self, key: str, value: int | str) -> bool:
        """Return whether pins, exclusions and limits leave a decision this value."""
        pinned = (self.pins.values if isinstance(value, int) else self.pins.words).get(key)
        ruled_out = (self.exclusions.values if isinstance(value, int) else self.exclusions.words).get(key, frozenset())
        limited = isinstance(value, int) and not self.limits.admits(key, value)
        return (pinned is None or value in pinned) and value not in ruled_out and not limited

    @property
    def most_gpus(self) -> int:
        """The most GPUs that a plan may use; 0 where none is left."""
        return next((count for count in range(self.request.num_gpus, 0, -1) if self.admits("num_gpus", count)), 0)

    @property
    def gpu_counts(self) -> list[int]:
        """Numbers of GPUs that a plan may use, most first."""
        return [count for count in range(self.request.num_gpus, 0, -1) if self.admits("num_gpus", count)]

    @property
    def tp_degrees(self) -> list[int]:
        """Degrees at which some layer has costs, 1 included, whatever is pinned."""
        known = {1}
        for layer_class in self.pricer.profile.layer_classes:
            known |= {
                s.tp_degree for s in layer_class.shardings if self.has_cost(layer_class.name, s.name, s.tp_degree)
            }
        return sorted(known)

    def forbidden(self, tp_degree: int) -> tuple[str, str] | None:
        """Return (layer class, reason) where a layer class forbids a degree, or None."""
        for layer_class in self.pricer.profile.layer_classes:
            whole = layer_class.whole_at(tp_degree)
            if whole is not None and whole.forbidden:
                return layer_class.name, whole.reason
        return None

    @property
    def carried(self) -> str | None:
        """A buffer that forbids dp_degree > 1; None where nothing does."""
        return next(iter(self.pricer.profile.carried_buffers), None) if not self.request.theoretical else None

    def has_cost(self, class_name: str, sharding: str, tp_degree: int) -> bool:
        """Return whether the profile has costs of a class at that degree and sharding."""
        layer_class = next(c for c in self.pricer.profile.layer_classes if c.name == class_name)
        return any(cost.sharding == sharding and cost.tp_degree == tp_degree for cost in layer_class.costs)

    def tensor_data_degrees(self) -> Iterator[tuple[int, int]]:
        """Yield (tp_degree, dp_degree) that leave a GPU for every rank of at least one stage."""
        num_gpus, batch = self.request.num_gpus, self.request.global_batch_size
        largest = num_gpus if self.request.theoretical else self.pricer.cluster.gpus_per_node
        for tp in self.tp_degrees:
            if tp > min(largest, num_gpus) or not self.admits("tp_degree", tp) or self.forbidden(tp):
                continue
            for dp in divisors(batch):
                if tp * dp <= num_gpus and self.admits("dp_degree", dp) and (dp == 1 or self.carried is None):
                    yield tp, dp

    def stage_counts(self, tp: int, dp: int) -> list[int]:
        """Return the pp_degrees that go with these degrees, the one that uses most GPUs first."""
        most = min(self.request.num_gpus // (tp * dp), len(self.pricer.profile.layers))
        return [
            pp
            for pp in range(most, 0, -1)
            if self.admits("pp_degree", pp)
            and self.admits("num_gpus", pp * tp * dp)
            and (pp, tp, dp) not in self.passed_over
            and any(self.admits_stages(pp * chunks) for chunks in self.chunks(pp))
        ]

    def chunks(self, pp: int) -> range:
        """Return how many stages a device group may have."""
        most = len(self.pricer.profile.layers) // pp
        return range(1, (most if self.request.theoretical and pp > 1 else 1) + 1)

    def admits_stages(self, num_stages: int) -> bool:
        """Return whether pinned cuts and stages go with so many stages."""
        cuts, stages = self.pins.cuts, self.pins.stages
        return (cuts is None or len(cuts) + 1 == num_stages) and all(stage < num_stages for _, stage in stages)

    def microbatches(self, dp: int) -> Iterator[tuple[int, int]]:
        """Yield (microbatch_size, num_microbatches) of a replica's part of the batch."""
        per_replica, least = self.request.global_batch_size // dp, self.pricer.profile.least_rows
        for rows in divisors(per_replica):
            m = per_replica // rows
            if rows >= least and self.admits("microbatch_size", rows) and self.admits("num_microbatches", m):
                yield rows, m

    def degrees(self) -> Iterator[tuple[int, int, int]]:
        """Yield (pp_degree, tp_degree, dp_degree) that every constraint on degrees leaves."""
        for tp, dp in self.tensor_data_degrees():
            for pp in self.stage_counts(tp, dp):
                yield pp, tp, dp

    def settings(self) -> Iterator[Setting]:
        """Yield every setting but for the choice of sharding, which is left empty."""
        for pp, tp, dp in self.degrees():
            for rows, m in self.microbatches(dp):
                yield from self.settings_of(pp, tp, dp, rows, m)

    def schedules(self, pp: int, m: int) -> list[tuple[Schedule, int]]:
        """Return the schedules, with numbers of chunks, that run `m` microbatches on that many device groups."""
        known = SCHEDULES if self.request.theoretical else EMITTED_SCHEDULES
        found = [schedule for schedule in known if self.admits("schedule", schedule)]
        if pp == 1:  # one stage runs the same whatever the schedule, and holds less under 1f1b
            found = [schedule for schedule in found if FEWEST_CHUNKS[schedule] == 1][:1]
        filled = m >= pp or "num_microbatches" in self.pins.values
        return [
            (schedule, chunks)
            for schedule in found
            if filled or schedule == "gpipe"
            for chunks in self.chunks(pp)
            if FEWEST_CHUNKS[schedule] <= chunks <= MOST_CHUNKS.get(schedule, chunks)
            if self.admits("num_chunks", chunks) and self.admits_stages(pp * chunks)
        ]

    def shards(self, tp: int, dp: int) -> list[tuple[DataParallel, int]]:
        """Return the modes of data parallelism, with numbers of shards: all replicas, or groups of them too.

        Of more than 8 replicas, the groups are those that a node holds.
        """
        modes = [mode for mode in DATA_PARALLEL_MODES if self.admits("data_parallel", mode)]
        if dp == 1:  # one replica shards nothing
            return [(mode, 1) for mode in modes[:1] if self.admits("shard_degree", 1)]
        counts = [dp]
        if self.request.theoretical:
            most = dp if dp <= FEW_REPLICAS else self.pricer.cluster.gpus_per_node // tp
            counts = [count for count in divisors(dp)[1:] if count <= most or count == dp]
        return [
            (mode, count)
            for mode in modes
            for count in ([1] if mode == "replicated" else counts)
            if self.admits("shard_degree", count)
        ]

    def settings_of(
        self, pp: int, tp: int, dp: int, rows: int, m: int, schedules: Sequence[tuple[Schedule, int]] | None = None
    ) -> Iterator[Setting]:
        """Yield the settings of given degrees, microbatches and schedules (None: all), without choices of sharding."""
        placements = PLACEMENTS if pp > 1 and dp > 1 and self.spans_nodes(pp * tp * dp) else PLACEMENTS[:1]
        for schedule, chunks in self.schedules(pp, m) if schedules is None else schedules:
            for mode, num_shards in self.shards(tp, dp):
                for placement in placements:
                    yield Setting(
                        num_idle=self.request.num_gpus - pp * tp * dp,
                        pp_degree=pp,
                        num_chunks=chunks,
                        tp_degree=tp,
                        num_microbatches=m,
                        schedule_rank=SCHEDULES.index(schedule),
                        data_parallel_rank=DATA_PARALLEL_MODES.index(mode),
                        placement_rank=PLACEMENTS.index(placement),
                        shardings=(),
                        dp_degree=dp,
                        num_shards=num_shards,
                        microbatch_size=rows,
                        schedule=schedule,
                        data_parallel=mode,
                        placement=placement,
                    )

    def spans_nodes(self, num_gpus: int) -> bool:
        """Return whether the first `num_gpus` GPUs are on several nodes."""
        return self.pricer.cluster.node_at(num_gpus - 1) > 0

    @property
    def recompute_choices(self) -> list[tuple[bool, ...]]:
        """Whether each layer may be kept, recomputed, or either, by pins and exclusions."""
        pins, exclusions = self.pins, self.exclusions
        choices: list[tuple[bool, ...]] = []
        for index in range(len(self.pricer.profile.layers)):
            allowed = {False, True}
            if pins.recompute == "none" or exclusions.recompute == "all" or index in exclusions.recomputed:
                allowed &= {False}
            if self.pricer.profile.writes_its_input(index):  # its forward can't be run again
                choices.append((False,))
                continue
            if pins.recompute == "all" or exclusions.recompute == "none":
                allowed &= {True}
            if pins.recompute == "named":
                allowed &= {index in pins.recomputed}
            choices.append(tuple(sorted(allowed)))
        return choices

    def stage_gpus(self, pp: int, tp: int, dp: int, placement: Placement) -> list[tuple[int, ...]]:
        """Return the GPUs of every stage, in the order of replicas and tensor-parallel ranks."""
        if placement == "stages":
            size = tp * dp
            return [tuple(range(stage * size, (stage + 1) * size)) for stage in range(pp)]
        starts = [range(stage * tp, pp * tp * dp, pp * tp) for stage in range(pp)]
        return [tuple(start + rank for start in of for rank in range(tp)) for of in starts]

    def stage_routes(self, pp: int, tp: int, dp: int, placement: Placement) -> StageRoutes:
        """Return the routes of every stage; kept, since looking at every GPU takes long for many."""
        key = (pp, tp, dp, placement)
        if key not in self._routes:
            pricer, gpus = self.pricer, self.stage_gpus(pp, tp, dp, placement)
            alike = self._alike(gpus, tp, placement)
            self._routes[key] = StageRoutes(
                tensor=tuple(pricer.tensor_route(stage, tp) for stage in alike),
                data=tuple(pricer.data_route(stage, tp) for stage in alike),
                messages=tuple(self._message_route(gpus[s], gpus[s + 1]) for s in range(pp - 1)),
                around=self._message_route(gpus[-1], gpus[0]),
            )
        return self._routes[key]

    def data_routes(self, pp: int, tp: int, dp: int, placement: Placement, num_shards: int) -> tuple[DataRoutes, ...]:
        """Return over what the replicas of every stage share and sum their states."""
        key = (pp, tp, dp, placement, num_shards)
        if key not in self._data_routes:
            if num_shards in (1, dp):
                data = self.stage_routes(pp, tp, dp, placement).data
                self._data_routes[key] = tuple(DataRoutes(route, route) for route in data)
            else:
                stages = self._alike(self.stage_gpus(pp, tp, dp, placement), tp, placement, num_shards)
                self._data_routes[key] = tuple(self.pricer.data_routes(gpus, tp, num_shards) for gpus in stages)
        return self._data_routes[key]

    def _alike(
        self, gpus: Sequence[tuple[int, ...]], tp: int, placement: Placement, num_shards: int = 1
    ) -> list[tuple[int, ...]]:
        """Return fewer GPUs of every stage with the same routes, where that is quick."""
        if placement == "stages":
            return [representatives(self.pricer.cluster, stage, tp * num_shards) for stage in gpus]
        size = regular_node_size(self.pricer.cluster)
        if size is not None and (len(gpus) * tp) % size == 0:  # every replica lies over its nodes as the first one does
            return [stage[: 2 * num_shards * tp] for stage in gpus]
        return list(gpus)

    def _message_route(self, source: tuple[int, ...], target: tuple[int, ...]) -> Route:
        size = regular_node_size(self.pricer.cluster)
        if size is not None and abs(target[0] - source[0]) >= size:  # no pair is inside one node
            source, target = source[:1], target[:1]
        return self.pricer.message_route(source, target)

    def combinations(self, tp: int, rows: int, routes: Sequence[Route]) -> tuple[list[Shardings], bool]:
        """Return the choices of sharding per layer class worth trying, and whether these are all.

        A candidate that another one of its class equals or beats in every number is left out, unless it divides a
        shared parameter otherwise. Classes left out of a choice are replicated: embeddings, heads and what can't be
        divided, never an opened block that can (but for one that shares parameters, which all must agree on).
        """
        if tp == 1:
            return [()], True
        profile = self.pricer.profile
        shared = {profile.layers[layer].layer_class for storage in self.pricer.shared for layer in storage.layers}
        options: list[list[str]] = []
        for layer_class in profile.layer_classes:
            names = [
                s.name
                for s in layer_class.shardings
                if s.tp_degree == tp and self.has_cost(layer_class.name, s.name, tp)
            ]
            if not names or layer_class.body is None or layer_class.name in shared:
                names.insert(0, REPLICATED)
            options.append(self._undominated(layer_class.name, names, tp, rows, routes))
        found: list[Shardings] = []
        for chosen in product(*options):
            shardings = tuple(
                (layer_class.name, name)
                for layer_class, name in zip(profile.layer_classes, chosen, strict=True)
                if name != REPLICATED
            )
            if shardings and self._ties_agree(tp, dict(shardings)):
                found.append(shardings)
        found.sort(key=lambda shardings: (-len(shardings), shardings))
        return found[:MAX_COMBINATIONS], len(found) <= MAX_COMBINATIONS

    def _ties_agree(self, tp: int, shardings: Mapping[str, str]) -> bool:
        by_layer = {
            index: shardings.get(layer.layer_class, REPLICATED)
            for index, layer in enumerate(self.pricer.profile.layers)
        }
        return all(tie_conflict(self.pricer.profile, shared, tp, by_layer) is None for shared in self.pricer.shared)

    def _undominated(
        self, class_name: str, names: Sequence[str], tp: int, rows: int, routes: Sequence[Route]
    ) -> list[str]:
        def numbers(name: str) -> list[float]:
            priced = [found for route in routes for found in self.numbers(class_name, rows, tp, name, route)]
            return [value for found in priced for value in _comparable(found)]

        def divides(name: str) -> list[object]:
            return [
                parameter_sharding(self.pricer.profile, layer, parameter, tp, name)
                for shared in self.pricer.shared
                for layer, parameter in shared.names
                if self.pricer.profile.layers[layer].layer_class == class_name
            ]

        kept: list[str] = []
        for name in sorted(names, key=lambda name: (numbers(name), names.index(name))):
            beaten = any(
                divides(other) == divides(name)
                and all(a <= b for a, b in zip(numbers(other), numbers(name), strict=True))
                for other in kept
            )
            if not beaten:
                kept.append(name)
        return kept


def _comparable(numbers: LayerNumbers) -> list[float]:
    """Return everything that a plan's time and memory grow with."""
    return [
        numbers.recompute_s,
        numbers.backward_s + numbers.backward_comm_s,
        numbers.activation_bytes,
        numbers.saved_input_bytes,
        numbers.saved_output_bytes,
        numbers.transient_bytes,
        numbers.trainable,
        numbers.trainable + numbers.frozen,
        numbers.partial,
    ]

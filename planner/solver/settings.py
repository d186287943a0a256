"""The settings of the outer search with their first bounds, before any table exists, listed only as far as needed.

Every stage prepares, runs its microbatches and finishes, so

    (6)  step time >= (sum of prepare + m * sum of (forward + backward) + sum of finish) / pp_degree

over all stages, which is linear in layers, so that cuts don't matter. Where each layer waits for the one before it, and
for the gradient of the one behind it, the stages also wait for one another. With c_j = forward + backward of a
microbatch in stage j, and p microbatches in flight in stage s, bound (1) of `problem` gives

    (7)  step time >= sum over j of A[s, j] * c_j    A[s, s] = 1 + m - p, A[s, j] = 1 before s and 2 behind it; where
                                                     p = m, 1 elsewhere and A[s, s] = 1 + max(forward, backward share)
                                                     * (m - 1); GPipe: 1 elsewhere and A[s, s] = m

for every s, so for every mean of these: with the weights that make all sums over s of weight * A[s, j] one number K,
the step takes K times the sum of all c_j, wherever the cuts are.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from planner.cluster import Cluster
from planner.cost.communication import Route, collective_s
from planner.cost.gpu_types import least_numbers
from planner.cost.layers import REPLICATED
from planner.cost.places import DataRoutes
from planner.cost.states import WORKING_BYTES, StateRules, cast_s, memory_bytes_per_s, optimizer_s
from planner.plan import Origin, Schedule
from planner.schedule import num_in_flight
from planner.solver.chains import OpenAlike, OpenSetting
from planner.solver.incumbent import Budget, Incumbent
from planner.solver.loops import OpenLoops
from planner.solver.problem import PLACEMENTS, Placement, Setting
from planner.solver.problems import Problems, state_rules
from planner.solver.routes import least_route
from planner.solver.space import Shardings, Space

STRAIGHT = ("1f1b", "gpipe")  # one stage a group, and backwards in one piece


@dataclass(slots=True)
class OpenDegrees:
    """Tensor- and data-parallel degree and microbatches; and, in a second step, the number of stages (else 0)."""

    bound: float
    microbatch_s: float
    """least seconds of a microbatch in all layers"""
    tp_degree: int
    dp_degree: int
    microbatch_size: int
    num_microbatches: int
    pp_degree: int = 0

    @property
    def label(self) -> str:
        """What progress shows."""
        return f"tp {self.tp_degree} x dp {self.dp_degree}"

    def advance(
        self, incumbent: Incumbent, tolerance: float
    ) -> "Sequence[OpenDegrees | OpenAlike | OpenSetting | OpenLoops]":
        """Return what there is of these degrees, each with its bound: by number of stages, or all settings of one."""
        incumbent.budget.check()
        if not self.pp_degree:
            return [*self.by_stages(incumbent), *self.loops(incumbent)]
        schedules = incumbent.problems.space.schedules(self.pp_degree, self.num_microbatches)
        straight = [found for found in schedules if found[0] in STRAIGHT]
        settings = [OpenSetting(bound, setting) for bound, setting in self.settings(incumbent, straight)]
        if len(settings) < 2 or not incumbent.problems.chained:
            return settings
        groups: dict[tuple[Schedule, Placement], list[OpenSetting]] = {}
        for part in settings:
            groups.setdefault((part.setting.schedule, part.setting.placement), []).append(part)
        return [OpenAlike(min(part.bound for part in parts), parts) for parts in groups.values()]

    def by_stages(self, incumbent: Incumbent) -> "list[OpenDegrees]":
        """Return these degrees with each number of stages, for straight schedules."""
        found, m = [], self.num_microbatches
        for pp in incumbent.problems.space.stage_counts(self.tp_degree, self.dp_degree):
            straight = [of for of, _ in incumbent.problems.space.schedules(pp, m) if of in STRAIGHT]
            if straight:
                factor = m / pp
                if incumbent.problems.chained:
                    factor = min(least_factor(schedule, pp, m) for schedule in straight)
                found.append(replace(self, bound=max(self.bound, factor * self.microbatch_s), pp_degree=pp))
        return found

    def loops(self, incumbent: Incumbent) -> "list[OpenLoops]":
        """Return the same for the other schedules."""
        found, m = [], self.num_microbatches
        for pp in incumbent.problems.space.stage_counts(self.tp_degree, self.dp_degree):
            others = [of for of in incumbent.problems.space.schedules(pp, m) if of[0] not in STRAIGHT]
            if others:
                bound = max(self.bound, m / pp * self.microbatch_s)
                found.append(OpenLoops(bound, replace(self, bound=bound, pp_degree=pp), others))
        return found

    def settings(
        self, incumbent: Incumbent, schedules: Sequence[tuple[Schedule, int]] | None = None
    ) -> Iterator[tuple[float, Setting]]:
        """Yield bounds (6) or (7), and settings; none whose states are more than all stages' memory."""
        space = incumbent.problems.space
        pricer = space.pricer
        memory = max(pricer.cluster.gpus[name].memory for name in space.gpu_types)
        pp, tp, dp, rows, m = (
            self.pp_degree, self.tp_degree, self.dp_degree, self.microbatch_size, self.num_microbatches
        )  # fmt: skip
        combinations: dict[tuple[Route, ...], tuple[list[Shardings], bool]] = {}
        for setting in space.settings_of(pp, tp, dp, rows, m, schedules):
            over = space.stage_routes(*setting.degrees)
            regular = space.stage_routes(pp, tp, dp, PLACEMENTS[0])
            if setting.placement_rank and len(space.gpu_types) == 1 and over == regular:
                continue  # the same links: the same plans
            routes = tuple(dict.fromkeys(over.tensor))
            if routes not in combinations:
                combinations[routes] = space.combinations(tp, rows, routes)
            choices, complete = combinations[routes]
            if not complete:
                incumbent.left_out_s = min(incumbent.left_out_s, self.bound)
            rules = state_rules(space, setting)
            data = space.data_routes(*setting.degrees, setting.num_shards)
            routes_of_states = DataRoutes(least_route([r.within for r in data]), least_route([r.across for r in data]))
            for shardings in choices:
                totals = _totals(space, setting, shardings, rules, routes, routes_of_states)
                if totals.num_bytes / pp + pricer.cluster.memory_reserve <= memory:
                    bound = max(self.bound, (totals.once_s + m * totals.microbatch_s) / pp)
                    if incumbent.problems.chained and setting.schedule in STRAIGHT:
                        factor = pipeline_factor(setting.schedule, pp, m, totals.larger_share)
                        bound = max(bound, factor * totals.microbatch_s)
                    yield bound, replace(setting, shardings=shardings)


def open_degrees(space: Space) -> list[OpenDegrees]:
    """Return all degrees and microbatches with a first bound: the least work there is, over as many GPUs as can be."""
    found = []
    for tp, dp in space.tensor_data_degrees():
        most = max(space.stage_counts(tp, dp), default=0)
        if not most:
            continue
        route = _fastest_route(space.pricer.cluster, tp)
        for rows, m in space.microbatches(dp):
            least_s = _least_microbatch_s(space, tp, rows, route)
            found.append(OpenDegrees(m * least_s / most, least_s, tp, dp, rows, m))
    return found


def settings_with_bounds(space: Space, origin: Origin) -> tuple[list[tuple[float, Setting]], float]:
    """Return every setting with its bound, in the order of bounds, and a bound of what is not listed (inf: nothing)."""
    incumbent = Incumbent(Problems(space, origin), Budget())
    found = [
        found
        for of_degrees in open_degrees(space)
        for of_stages in of_degrees.by_stages(incumbent)
        for found in of_stages.settings(incumbent)
    ]
    return sorted(found), incumbent.left_out_s


def _fastest_route(cluster: Cluster, num_ranks: int) -> Route:
    """Return a route at least as fast as that of any group of so many GPUs."""
    links = [
        link
        for group in cluster.node_groups
        for link in cluster.links_of(group)[0 if num_ranks <= group.gpus_per_node else 1 :]
    ]
    widest = cluster.fastest_bytes_per_s  # several rings share a network
    return Route(widest, min(link.latency for link in links))


@cache
def least_factor(schedule: Schedule, pp_degree: int, num_microbatches: int) -> float:
    """Return K of (7) whatever the layers' shares of forward and backward."""
    return pipeline_factor(schedule, pp_degree, num_microbatches, 0.5)


def pipeline_factor(schedule: Schedule, stages: int, count: int, larger_share: float) -> float:
    """Return K of (7): the step takes at least K times what one microbatch takes in all stages together.

    `larger_share` is what the larger of forward and backward is of both at least. Equal sums over s for j and j + 1
    need w[j] * (A[j, j] - A[j, j + 1]) = w[j + 1] * (A[j + 1, j + 1] - A[j + 1, j]).
    """
    own, behind = [], []  # A[s, s] and A[s, j] for j > s; A[s, j] is 1 for j < s
    for s in range(stages):
        in_flight = num_in_flight(schedule, stages, count, s)
        if schedule == "gpipe":
            own.append(float(count))
        else:
            own.append(1 + larger_share * (count - 1) if in_flight == count else 1.0 + count - in_flight)
        behind.append(2.0 if in_flight < count else 1.0)
    if count == 1:
        return 1.0
    weights = [1.0]
    for s in range(stages - 1):
        weights.append(weights[s] * (own[s] - behind[s]) / (own[s + 1] - 1))
    return (weights[0] * own[0] + sum(weights[1:])) / sum(weights)


@dataclass(frozen=True, slots=True)
class _Totals:
    """Of all stages: seconds once a step and for each microbatch, and the bytes of states.

    `larger_share` is what the larger of forward and backward is of both at least, the same one in all layers and with
    any recomputation, which is part of a backward.
    """

    once_s: float
    microbatch_s: float
    num_bytes: int
    larger_share: float


def _totals(
    space: Space,
    setting: Setting,
    shardings: Shardings,
    rules: StateRules,
    tp_routes: Sequence[Route],
    routes: DataRoutes,
) -> _Totals:
    """Return what (6) and (7) are made of, with the fastest GPUs and routes that any stage has."""
    pricer, chosen, tp_route = space.pricer, dict(shardings), least_route(tp_routes)
    gpu = max((pricer.cluster.gpus[name] for name in space.gpu_types), key=memory_bytes_per_s)
    seconds, trainable, frozen, partial = 0.0, 0, 0, 0
    backward_share = 1.0
    for name, count in space.class_counts.items():
        way = chosen.get(name, REPLICATED)
        on_types = space.numbers(name, setting.microbatch_size, setting.tp_degree, way, tp_route)
        for route in tp_routes:
            for found in space.numbers(name, setting.microbatch_size, setting.tp_degree, way, route):
                forward = found.forward_s + found.forward_comm_s
                backward = found.backward_s + found.backward_comm_s
                if forward + backward:
                    backward_share = min(backward_share, backward / (forward + backward))
        numbers = least_numbers(on_types)
        seconds += count * (numbers.forward_s + numbers.forward_comm_s + numbers.backward_s + numbers.backward_comm_s)
        trainable += count * numbers.trainable
        frozen += count * numbers.frozen
        partial += count * numbers.partial
    for readers, is_trainable, elements in pricer.repeats(setting.tp_degree, chosen):
        if is_trainable:
            trainable -= (len(readers) - 1) * elements
        else:
            frozen -= (len(readers) - 1) * elements
    trainable, frozen = max(trainable, 0), max(frozen, 0)
    finish = routes.reduce_s(trainable * rules.grad_bytes_per_element, rules)
    finish += collective_s("all_reduce", partial * rules.grad_bytes_per_element, setting.tp_degree, tp_route)
    finish += optimizer_s(trainable, rules, gpu)
    prepare = cast_s(trainable + frozen, rules, gpu)
    prepare += routes.gather_s((trainable + frozen) * WORKING_BYTES[rules.precision], rules)
    states = rules.param_bytes(trainable + frozen) + rules.grad_bytes(trainable) + rules.optimizer_bytes(trainable)
    states -= 3 * setting.pp_degree  # rounded up per stage
    return _Totals(prepare + finish, seconds, states, max(0.5, backward_share))


def _least_microbatch_s(space: Space, tp: int, rows: int, route: Route) -> float:
    """Return the least seconds of a microbatch in all layers, over all ways to divide each."""
    total, counts = 0.0, space.class_counts
    for layer_class in space.pricer.profile.layer_classes:
        names = [REPLICATED, *(s.name for s in layer_class.shardings if s.tp_degree == tp)]
        priced = [
            least_numbers(space.numbers(layer_class.name, rows, tp, name, route))
            for name in names
            if name == REPLICATED or space.has_cost(layer_class.name, name, tp)
        ]
        total += counts.get(layer_class.name, 0) * min(
            n.forward_s + n.forward_comm_s + n.backward_s + n.backward_comm_s for n in priced
        )
    return total

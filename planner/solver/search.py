"""The outer search: settings in the order of their bounds, one incumbent for all, until none can beat it.

The bound of a setting, before its tables exist: every stage prepares, runs its microbatches and finishes, so

    (6)  step time >= (sum of prepare + m * sum of (forward + backward) + sum of finish) / pp_degree

over all stages, which is linear in layers, so that cuts don't matter. Then (5) of `branch` over its tables, then the
inner search. A setting is dropped as soon as one of these reaches the best plan's step time.
"""

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.cost.communication import Route, collective_s
from planner.cost.states import WORKING_BYTES, StateRules, cast_s, optimizer_s
from planner.graph import spine
from planner.plan import Origin, Plan, Stage
from planner.solver.branch import TOLERANCE, Branch, Budget, OutOfTimeError, Span
from planner.solver.problem import Position, Problem, Setting
from planner.solver.recompute import Choice
from planner.solver.space import Space, least_route, tensor_routes
from planner.solver.tables import Bools, Crossing, LayerTable, StateTable

Progress = Callable[[str, int, int], None]


def settings_with_bounds(space: Space) -> tuple[list[tuple[float, Setting]], float]:
    """Return every setting with bound (6), and the least bound of settings left out (inf: none).

    Settings whose parameters, gradients and optimizer states fit in no stage's memory are not listed: no plan fits.
    """
    memory = max(space.pricer.cluster.gpu_at(rank).memory for rank in range(space.request.num_gpus))
    found: list[tuple[float, Setting]] = []
    left_out = float("inf")
    pricer = space.pricer
    counts: dict[str, int] = {}
    for layer in pricer.profile.layers:
        counts[layer.layer_class] = counts.get(layer.layer_class, 0) + 1
    combinations: dict[tuple[int, int, tuple[Route, ...]], tuple[list[tuple[tuple[str, str], ...]], bool]] = {}
    for setting in space.settings():
        pp, tp, dp, rows = setting.pp_degree, setting.tp_degree, setting.dp_degree, setting.microbatch_size
        gpus = space.stage_gpus(pp, tp, dp)
        routes = tuple(dict.fromkeys(tensor_routes(pricer, gpus, tp)))
        if (tp, rows, routes) not in combinations:
            combinations[tp, rows, routes] = space.combinations(tp, rows, routes)
        choices, complete = combinations[tp, rows, routes]
        rules = StateRules(space.request.optimizer, space.request.precision, setting.data_parallel, dp)
        tp_route = least_route(routes)
        dp_route = least_route([pricer.data_route(stage, tp) for stage in gpus])
        for shardings in choices:
            seconds, num_bytes = _totals(space, setting, shardings, counts, rules, tp_route, dp_route)
            if num_bytes / pp + pricer.cluster.memory_reserve <= memory:
                found.append((seconds / pp, with_shardings(setting, shardings)))
        if not complete:
            left_out = min(left_out, _least_compute_s(space, setting, counts, tp_route) / pp)
    found.sort()
    return found, left_out


def with_shardings(setting: Setting, shardings: tuple[tuple[str, str], ...]) -> Setting:
    """Return the setting with its choice of sharding filled in."""
    fields = {name: getattr(setting, name) for name in Setting.__slots__}
    return Setting(**fields | {"shardings": shardings})


def _totals(
    space: Space,
    setting: Setting,
    shardings: tuple[tuple[str, str], ...],
    counts: dict[str, int],
    rules: StateRules,
    tp_route: Route,
    dp_route: Route,
) -> tuple[float, int]:
    """Return the numerator of (6), with the fastest routes that any stage has, and the bytes of all stages' states."""
    pricer, chosen = space.pricer, dict(shardings)
    gpu = pricer.cluster.gpu_at(0)
    seconds, trainable, frozen, partial = 0.0, 0, 0, 0
    for name, count in counts.items():
        numbers = pricer.numbers(
            name, setting.microbatch_size, setting.tp_degree, chosen.get(name, "replicated"), tp_route
        )
        seconds += count * (
            numbers.forward_s + numbers.forward_comm_s + numbers.backward_s + numbers.backward_comm_s
        )  # fmt: skip
        trainable += count * numbers.trainable
        frozen += count * numbers.frozen
        partial += count * numbers.partial
    for readers, is_trainable, elements in pricer.repeats(setting.tp_degree, chosen):
        if is_trainable:
            trainable -= (len(readers) - 1) * elements
        else:
            frozen -= (len(readers) - 1) * elements
    trainable, frozen = max(trainable, 0), max(frozen, 0)
    sharded = rules.num_shards > 1
    grads = trainable * rules.grad_bytes_per_element
    finish = collective_s("reduce_scatter" if sharded else "all_reduce", grads, rules.dp_degree, dp_route)
    finish += collective_s("all_reduce", partial * rules.grad_bytes_per_element, setting.tp_degree, tp_route)
    finish += optimizer_s(trainable, rules, gpu)
    prepare = cast_s(trainable + frozen, rules, gpu)
    if sharded:
        working = (trainable + frozen) * WORKING_BYTES[rules.precision]
        prepare += collective_s("all_gather", working, rules.dp_degree, dp_route)
    states = rules.param_bytes(trainable + frozen) + rules.grad_bytes(trainable) + rules.optimizer_bytes(trainable)
    return prepare + setting.num_microbatches * seconds + finish, states - 3 * setting.pp_degree  # rounded up per stage


def _least_compute_s(space: Space, setting: Setting, counts: dict[str, int], route: Route) -> float:
    """Return m times the least seconds of every layer over all its shardings."""
    total = 0.0
    for layer_class in space.pricer.profile.layer_classes:
        tp, rows = setting.tp_degree, setting.microbatch_size
        names = ["replicated", *(s.name for s in layer_class.shardings if s.tp_degree == tp)]
        priced = [
            space.pricer.numbers(layer_class.name, rows, tp, name, route)
            for name in names
            if name == "replicated" or space.has_cost(layer_class.name, name, tp)
        ]
        total += counts.get(layer_class.name, 0) * min(
            n.forward_s + n.forward_comm_s + n.backward_s + n.backward_comm_s for n in priced
        )
    return setting.num_microbatches * total


class Problems:
    """Makes the problem of a setting; keeps the tables that settings share."""

    def __init__(self, space: Space, origin: Origin) -> None:
        self.space, self.origin = space, origin
        self._crossings: dict[int, Crossing] = {}
        self._tables: dict[tuple[int, int, tuple[tuple[str, str], ...], Route], LayerTable] = {}
        self._spines: dict[tuple[int, int, tuple[tuple[str, str], ...], Route], tuple[tuple[int, ...], ...]] = {}
        self._masks: dict[int, list[Bools]] = {}

    @property
    def recompute_choices(self) -> list[tuple[bool, ...]]:
        """Whether each layer may be kept, recomputed, or either, by pins and exclusions."""
        pins, exclusions = self.space.pins, self.space.exclusions
        choices: list[tuple[bool, ...]] = []
        for index in range(len(self.space.pricer.profile.layers)):
            allowed = {False, True}
            if pins.recompute == "none" or exclusions.recompute == "all" or index in exclusions.recomputed:
                allowed &= {False}
            if pins.recompute == "all" or exclusions.recompute == "none":
                allowed &= {True}
            if pins.recompute == "named":
                allowed &= {index in pins.recomputed}
            choices.append(tuple(sorted(allowed)))
        return choices

    def of(self, setting: Setting, *, memory_bytes: int | None = None) -> Problem:
        """Return the problem of a setting; `memory_bytes` replaces the GPUs' own memory."""
        pricer, space = self.space.pricer, self.space
        pp, tp, dp, rows = setting.pp_degree, setting.tp_degree, setting.dp_degree, setting.microbatch_size
        gpus = space.stage_gpus(pp, tp, dp)
        if rows not in self._crossings:
            self._crossings[rows] = Crossing.of(pricer, rows)
        rules = StateRules(space.request.optimizer, space.request.precision, setting.data_parallel, dp)
        shardings = dict(setting.shardings)
        states: dict[tuple[Route, Route], StateTable] = {}
        positions = []
        masks = self._allowed(pp)
        for s, route in enumerate(tensor_routes(pricer, gpus, tp)):
            key = (rows, tp, setting.shardings, route)
            if key not in self._tables:
                table = LayerTable(
                    pricer, self._crossings[rows], rows, tp, shardings, route, self.recompute_choices
                )  # fmt: skip
                self._tables[key] = table
                profile = pricer.profile
                self._spines[key] = (
                    spine(profile, table.forward.tolist(), gradients=False),
                    spine(profile, table.backward.tolist(), gradients=True),
                )
            table = self._tables[key]
            dp_route = pricer.data_route(gpus[s], tp)
            if (route, dp_route) not in states:
                states[route, dp_route] = StateTable.of(
                    table, rules, pricer.cluster.gpu_at(0), tp, dp_route, pricer.cluster.memory_reserve
                )
            positions.append(
                Position(
                    layers=table,
                    states=states[route, dp_route],
                    budget_bytes=memory_bytes or min(pricer.cluster.gpu_at(rank).memory for rank in gpus[s]),
                    in_flight=setting.num_microbatches if setting.schedule == "gpipe" else pp - s,
                    allowed=masks[s],
                )
            )
        first_key = (rows, tp, setting.shardings, positions[0].layers.route)
        spines = self._spines[first_key]
        cluster = pricer.cluster
        return Problem(
            setting,
            positions,
            {(s, s + 1): pricer.message_route(gpus[s], gpus[s + 1]) for s in range(pp - 1)},
            (spines[0], spines[1]),
            [(shared, repeat[2]) for shared, repeat in zip(pricer.shared, pricer.repeats(tp, shardings), strict=True)],
            rules,
            max(cluster.intra_node.bandwidth, cluster.inter_node.bandwidth),
        )

    def _allowed(self, pp: int) -> list[Bools]:
        """Return for every position which [a, b) may stand there, by order, pinned cuts and pinned stages."""
        if pp not in self._masks:
            count = len(self.space.pricer.profile.layers)
            a, b = np.indices((count + 1, count + 1))
            cut_ok = np.ones(count + 1, dtype=bool)
            pins, exclusions = self.space.pins, self.space.exclusions
            if pins.cuts is not None:
                cut_ok[1:count] = False
                cut_ok[list(pins.cuts)] = True
            cut_ok[list(exclusions.cuts or ())] = False
            masks = []
            for s in range(pp):
                mask = (a < b) & (a >= s) & (count - b >= pp - 1 - s) & cut_ok[a] & cut_ok[b]
                mask &= (a == 0) if s == 0 else (a > 0)
                mask &= (b == count) if s == pp - 1 else (b < count)
                for layer, stage in pins.stages:
                    inside = (a <= layer) & (layer < b)
                    mask &= inside if stage == s else ~inside
                for layer, stage in exclusions.stages:
                    if stage == s:
                        mask &= ~((a <= layer) & (layer < b))
                masks.append(mask)
            self._masks[pp] = masks
        return self._masks[pp]

    def plan(self, setting: Setting, spans: Sequence[Span], choices: Sequence[Choice]) -> Plan:
        """Return the plan, without a prediction."""
        profile, request = self.space.pricer.profile, self.space.request
        gpus = self.space.stage_gpus(setting.pp_degree, setting.tp_degree, setting.dp_degree)
        chosen = dict(setting.shardings)
        stages = []
        for (first, stop), choice, ranks in zip(spans, choices, gpus, strict=True):
            layers = profile.layers[first:stop]
            classes = dict.fromkeys(layer.layer_class for layer in layers)
            stages.append(
                Stage(
                    layers=tuple(layer.name for layer in layers),
                    tp_degree=setting.tp_degree,
                    dp_degree=setting.dp_degree,
                    microbatch_size=setting.microbatch_size,
                    recompute=tuple(profile.layers[index].name for index in choice.layers),
                    shardings={name: chosen[name] for name in classes if name in chosen},
                    gpus=ranks,
                )
            )
        return Plan(
            global_batch_size=request.global_batch_size,
            num_microbatches=setting.num_microbatches,
            schedule=setting.schedule,
            data_parallel=setting.data_parallel,
            optimizer=request.optimizer,
            precision=request.precision,
            stages=tuple(stages),
            origin=self.origin,
        )


@dataclass(slots=True)
class Incumbent:
    """The best plan so far, and the best one of every setting that was priced."""

    problems: Problems
    best: Plan | None = None
    by_setting: dict[Setting, Plan] = field(default_factory=dict)
    num_priced: int = 0

    @property
    def step_time_s(self) -> float:
        """The best step time; inf where there is no plan."""
        return step_time_s(self.best) if self.best is not None else float("inf")

    def offer(self, problem: Problem, spans: Sequence[Span], choices: Sequence[Choice]) -> float:
        """Price a plan by `cost.evaluate`, keep it if it is better, and return the best step time."""
        plan = self.problems.plan(problem.setting, spans, choices)
        prediction = self.problems.space.pricer.evaluate(plan)
        self.num_priced += 1
        plan = plan.model_copy(update={"prediction": prediction})
        known = self.by_setting.get(problem.setting)
        if known is None or prediction.step_time_s < step_time_s(known):
            self.by_setting[problem.setting] = plan
        if prediction.step_time_s < self.step_time_s * (1 - TOLERANCE):
            self.best = plan
        return self.step_time_s


def step_time_s(plan: Plan) -> float:
    """Return the predicted step time of a priced plan."""
    assert plan.prediction is not None
    return plan.prediction.step_time_s


@dataclass(slots=True)
class Outcome:
    """What a search found, and what it proved."""

    incumbent: Incumbent
    lower_bound_s: float
    num_settings: int
    num_nodes: int
    waiting: list[tuple[float, Setting]]
    """Settings that were dropped by their bound before they were priced, in the order of the bounds."""


def search(space: Space, origin: Origin, progress: Progress, time_limit_s: float | None) -> Outcome:
    """Return the best plan over all settings, and a lower bound proven for `cost.evaluate` of every plan."""
    problems = Problems(space, origin)
    incumbent = Incumbent(problems)
    budget = Budget(None if time_limit_s is None else time.monotonic() + time_limit_s)
    settings, left_out = settings_with_bounds(space)
    queue: list[tuple[float, int, Setting, Branch | None]] = [
        (bound, index, setting, None) for index, (bound, setting) in enumerate(settings)
    ]
    heapq.heapify(queue)
    bound = float("inf")
    branch: Branch | None = None
    last_report = time.monotonic()
    try:
        while queue and queue[0][0] < incumbent.step_time_s * (1 - TOLERANCE):
            bound, index, setting, branch = heapq.heappop(queue)
            now = time.monotonic()
            if now - last_report > 0.1:
                last_report = now
                progress(f"{setting.pp_degree} stages", len(settings) - len(queue), len(settings))
            if branch is None:
                budget.spend()
                branch = Branch(problems.of(setting))
                first_bound = max(bound, branch.root_bound)
                if first_bound < incumbent.step_time_s * (1 - TOLERANCE):
                    offer_first_plans(branch, incumbent)
                    heapq.heappush(queue, (first_bound, index, setting, branch))
                branch = None
                continue
            branch.search(incumbent.step_time_s, incumbent.offer, budget)
            branch = None
    except (OutOfTimeError, KeyboardInterrupt):
        remaining = [bound if branch is None else max(bound, branch.bound), *(item[0] for item in queue)]
        lower = min(left_out, incumbent.step_time_s, *remaining)
    else:
        lower = min(left_out, incumbent.step_time_s)
    waiting = sorted((item[0], item[2]) for item in queue)
    progress("done", len(settings), len(settings))
    return Outcome(incumbent, lower, len(settings), budget.num_nodes, waiting)


def offer_first_plans(branch: Branch, incumbent: Incumbent) -> None:
    """Price an even plan and the one that attains the bound: where they tie, the even one stays."""
    for spans in (branch.even_spans(), branch.relaxed_spans()):
        choices = branch.choose(spans)
        if choices is not None:
            incumbent.offer(branch.problem, spans, choices)

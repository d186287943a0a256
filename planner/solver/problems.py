"""From settings to problems, whose tables many settings share, and from choices to plans."""

from collections.abc import Sequence

import numpy as np

from planner.cost.communication import Route
from planner.cost.places import DataRoutes
from planner.cost.states import StateRules, memory_bytes_per_s
from planner.graph import is_chained, layer_graph, shared_updates, spine
from planner.plan import Origin, Plan, Stage, group_of_stage
from planner.schedule import num_in_flight
from planner.solver.problem import Position, Problem, Setting, Span
from planner.solver.space import Shardings, Space
from planner.solver.tables import Bools, Crossing, LayerTable, StateTable

# microbatch size, tensor-parallel degree, ways to divide, route, GPU types
_Key = tuple[int, int, tuple[Shardings, ...], Route, tuple[str, ...]]

MAX_RECENT = 6  # problems of hundreds of layers and stages have tables of some hundred MB


def cuts_left(space: Space) -> Bools:
    """Return before which layers, and behind the last one, pins, exclusions and buffers leave a cut."""
    count = len(space.pricer.profile.layers)
    left = np.ones(count + 1, dtype=bool)
    if space.pins.cuts is not None:
        left[1:count] = False
        left[list(space.pins.cuts)] = True
    left[[cut for cut in space.exclusions.cuts or () if cut]] = False
    for first, last in space.pins.together:
        left[first + 1 : last + 1] = False
    left[list(shared_updates(space.pricer.profile))] = False
    return left


def state_rules(space: Space, setting: Setting) -> StateRules:
    """Return how a setting holds parameters."""
    request = space.request
    return StateRules(
        request.optimizer, request.precision, setting.data_parallel, setting.dp_degree, setting.num_shards
    )


class Problems:
    """Makes the problem of a setting; keeps the tables that settings share."""

    def __init__(self, space: Space, origin: Origin) -> None:
        self.space, self.origin = space, origin
        self._graph = layer_graph(space.pricer.profile)
        self.chained = is_chained(space.pricer.profile)
        self._crossings: dict[int, Crossing] = {}
        self._tables: dict[_Key, LayerTable] = {}
        self._spines: dict[_Key, tuple[tuple[int, ...], ...]] = {}
        self._masks: dict[int, list[Bools]] = {}
        self._recent: dict[Setting, Problem] = {}

    def of(self, setting: Setting) -> Problem:
        """Return the problem of a setting; the last few are kept, with what they have come to know."""
        problem = self._recent.pop(setting, None) or self._make(setting)
        self._recent[setting] = problem
        if len(self._recent) > MAX_RECENT:
            del self._recent[next(iter(self._recent))]
        return problem

    def least(self, settings: Sequence[Setting]) -> Problem:
        """Return a problem whose bounds hold for all of `settings`, which differ in sharding and data parallelism."""
        return self._make(settings[0], settings)

    def _make(self, setting: Setting, alike: Sequence[Setting] = ()) -> Problem:
        space, pricer = self.space, self.space.pricer
        alike = alike or (setting,)
        pp, tp, rows = setting.pp_degree, setting.tp_degree, setting.microbatch_size
        over = space.stage_routes(*setting.degrees)
        every = dict.fromkeys(other.shardings for other in alike)
        modes = {(other.data_parallel, other.num_shards): other for other in alike}
        rules = {mode: state_rules(space, other) for mode, other in modes.items()}
        data = [space.data_routes(*other.degrees, other.num_shards) for other in modes.values()]
        states: dict[tuple[tuple[str, ...], Route, tuple[DataRoutes, ...]], StateTable] = {}
        types = self.gpu_types(setting)
        positions = []
        masks = self.allowed(pp)
        for s, (route, *data_routes) in enumerate(zip(over.tensor, *data, strict=True)):
            table = self.table(rows, tp, tuple(every), route, types[s])
            at = [pricer.cluster.gpus[name] for name in types[s]]
            key = (types[s], route, tuple(data_routes))
            if key not in states:
                gpu = min(at, key=memory_bytes_per_s)
                found = [
                    StateTable.of(table, rule, gpu, tp, routes, pricer.cluster.memory_reserve)
                    for rule, routes in zip(rules.values(), data_routes, strict=True)
                ]
                states[key] = found[0] if len(found) == 1 else StateTable.least(found)
            positions.append(
                Position(
                    layers=table,
                    states=states[key],
                    budget_bytes=min(gpu.memory for gpu in at),
                    in_flight=num_in_flight(setting.schedule, pp, setting.num_microbatches, s),
                    allowed=masks[s],
                )
            )
        spines = self._spines[rows, tp, tuple(every), positions[0].layers.route, types[0]]
        cluster = pricer.cluster
        repeats = [pricer.repeats(tp, dict(shardings)) for shardings in every]
        return Problem(
            setting,
            positions,
            {(s, s + 1): route for s, route in enumerate(over.messages)},
            (spines[0], spines[1]),
            [(shared, min(of[index][2] for of in repeats)) for index, shared in enumerate(pricer.shared)],
            max(rules.values(), key=lambda rule: rule.num_shards),
            cluster.fastest_bytes_per_s,
            self.space.limits.recompute_fraction,
            chained=self.chained,
        )

    def table(
        self, rows: int, tp: int, every: tuple[Shardings, ...], route: Route, types: tuple[str, ...]
    ) -> LayerTable:
        """Return the table of a choice of sharding, or the least of several, on GPUs of these types."""
        key = (rows, tp, every, route, types)
        if key not in self._tables:
            pricer = self.space.pricer
            if len(every) > 1:
                table = LayerTable.least([self.table(rows, tp, (one,), route, types) for one in every])
            else:
                table = LayerTable.of(
                    pricer, self.crossing(rows), rows, tp, dict(every[0]), route, self.space.recompute_choices, types
                )  # fmt: skip
            self._tables[key] = table
            self._spines[key] = (
                spine(self._graph, table.forward.tolist(), gradients=False),
                spine(self._graph, table.backward.tolist(), gradients=True),
            )
        return self._tables[key]

    def gpu_types(self, setting: Setting) -> list[tuple[str, ...]]:
        """Return the names of the types of every device group's GPUs."""
        places = self.space.pricer.places
        return [tuple(places.count_types(gpus)) for gpus in self.space.stage_gpus(*setting.degrees)]

    def rules(self, setting: Setting) -> StateRules:
        """Return how a setting holds parameters."""
        return state_rules(self.space, setting)

    def crossing(self, rows: int) -> Crossing:
        """Return what crosses cuts for a microbatch of `rows`."""
        if rows not in self._crossings:
            self._crossings[rows] = Crossing.of(self.space.pricer, rows)
        return self._crossings[rows]

    def allowed(self, pp: int) -> list[Bools]:
        """Return for every position which [a, b) may stand there, by order, pinned cuts and pinned stages."""
        if pp not in self._masks:
            count = len(self.space.pricer.profile.layers)
            a, b = np.indices((count + 1, count + 1))
            cut_ok, pins, exclusions = cuts_left(self.space), self.space.pins, self.space.exclusions
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
                for first, last in exclusions.together:
                    mask &= (first < a) | (b <= last)
                masks.append(mask)
            self._masks[pp] = masks
        return self._masks[pp]

    def plan(self, setting: Setting, spans: Sequence[Span], remade: Sequence[Sequence[int]]) -> Plan:
        """Return the plan of stages that recompute these layers, without a prediction."""
        profile, request = self.space.pricer.profile, self.space.request
        of_groups = self.space.stage_gpus(*setting.degrees)
        gpus = [of_groups[group_of_stage(setting.schedule, setting.pp_degree, s)] for s in range(len(spans))]
        whole = setting.num_shards == (setting.dp_degree if setting.data_parallel == "sharded" else 1)
        chosen = dict(setting.shardings)
        stages = []
        for (first, stop), layers_remade, ranks in zip(spans, remade, gpus, strict=True):
            layers = profile.layers[first:stop]
            classes = dict.fromkeys(layer.layer_class for layer in layers)
            stages.append(
                Stage(
                    layers=tuple(layer.name for layer in layers),
                    tp_degree=setting.tp_degree,
                    dp_degree=setting.dp_degree,
                    microbatch_size=setting.microbatch_size,
                    recompute=tuple(profile.layers[index].name for index in layers_remade),
                    shard_degree=None if whole else setting.num_shards,
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

"""From settings to problems, whose tables many settings share, and from choices to plans."""

from collections.abc import Sequence

import numpy as np

from planner.cost.communication import Route
from planner.cost.states import StateRules
from planner.graph import layer_graph, shared_updates, spine
from planner.plan import Origin, Plan, Stage
from planner.schedule import num_in_flight
from planner.solver.branch import Span
from planner.solver.problem import Position, Problem, Setting
from planner.solver.recompute import Choice
from planner.solver.space import Shardings, Space
from planner.solver.tables import Bools, Crossing, LayerTable, StateTable


class Problems:
    """Makes the problem of a setting; keeps the tables that settings share."""

    def __init__(self, space: Space, origin: Origin) -> None:
        self.space, self.origin = space, origin
        self._graph = layer_graph(space.pricer.profile)
        self._crossings: dict[int, Crossing] = {}
        self._tables: dict[tuple[int, int, Shardings, Route], LayerTable] = {}
        self._spines: dict[tuple[int, int, Shardings, Route], tuple[tuple[int, ...], ...]] = {}
        self._masks: dict[int, list[Bools]] = {}

    def of(self, setting: Setting, *, memory_bytes: int | None = None) -> Problem:
        """Return the problem of a setting; `memory_bytes` replaces the GPUs' own memory."""
        pricer, space = self.space.pricer, self.space
        pp, tp, dp, rows = setting.pp_degree, setting.tp_degree, setting.dp_degree, setting.microbatch_size
        over = space.stage_routes(pp, tp, dp)
        if rows not in self._crossings:
            self._crossings[rows] = Crossing.of(pricer, rows)
        rules = StateRules(space.request.optimizer, space.request.precision, setting.data_parallel, dp)
        shardings = dict(setting.shardings)
        states: dict[tuple[Route, Route], StateTable] = {}
        positions = []
        masks = self._allowed(pp)
        for s, route in enumerate(over.tensor):
            key = (rows, tp, setting.shardings, route)
            if key not in self._tables:
                table = LayerTable(
                    pricer, self._crossings[rows], rows, tp, shardings, route, space.recompute_choices
                )  # fmt: skip
                self._tables[key] = table
                self._spines[key] = (
                    spine(self._graph, table.forward.tolist(), gradients=False),
                    spine(self._graph, table.backward.tolist(), gradients=True),
                )
            table = self._tables[key]
            dp_route = over.data[s]
            if (route, dp_route) not in states:
                states[route, dp_route] = StateTable.of(
                    table, rules, pricer.cluster.gpu_at(0), tp, dp_route, pricer.cluster.memory_reserve
                )
            positions.append(
                Position(
                    layers=table,
                    states=states[route, dp_route],
                    budget_bytes=memory_bytes or pricer.cluster.gpu_at(0).memory,
                    in_flight=num_in_flight(setting.schedule, pp, setting.num_microbatches, s),
                    allowed=masks[s],
                )
            )
        first_key = (rows, tp, setting.shardings, positions[0].layers.route)
        spines = self._spines[first_key]
        cluster = pricer.cluster
        return Problem(
            setting,
            positions,
            {(s, s + 1): route for s, route in enumerate(over.messages)},
            (spines[0], spines[1]),
            [(shared, repeat[2]) for shared, repeat in zip(pricer.shared, pricer.repeats(tp, shardings), strict=True)],
            rules,
            cluster.fastest_bytes_per_s,
            self.space.limits.recompute_fraction,
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
            cut_ok[[cut for cut in exclusions.cuts or () if cut]] = False
            for first, last in pins.together:
                cut_ok[first + 1 : last + 1] = False
            cut_ok[list(shared_updates(self.space.pricer.profile))] = False
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

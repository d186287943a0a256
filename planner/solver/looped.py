"""Plans of a setting whose device groups have several stages, or whose backwards are split.

They are even cuts and balanced ones, improved from neighbour to neighbour. Few cuts are all tried. Layers are
recomputed where a group holds more than it can, as little as a few tries find.
"""

from functools import cached_property
from itertools import combinations, pairwise
from math import comb

import numpy as np

from planner.cost.batch import Order
from planner.cost.communication import Route
from planner.cost.states import memory_bytes_per_s
from planner.plan import Plan, Schedule, group_of_stage
from planner.schedule import KINDS, group_actions
from planner.solver.differences import step_time_s
from planner.solver.incumbent import Incumbent
from planner.solver.problem import Setting, Span
from planner.solver.tables import Floats, Ints, LayerTable, StateTable

MOST_TRIED, MOST_PRICED = 512, 128  # cuts that are all tried: where they are priced together, or one by one
MOST_TURNS = 2048  # of all stages: more take too long to try many cuts
MOST_BATCH = 64
MOST_ROUNDS = 12
MOST_FACTOR_GROUPS = 64  # above, the factor of (9) takes seconds
MIN_GAIN = 1e-3
PRECISION = 1e-4
LEAN_STEPS = 7


class Looped:
    """The tables of one setting, and its plans."""

    def __init__(self, incumbent: Incumbent, setting: Setting) -> None:
        self.incumbent, self.setting, self.problems = incumbent, setting, incumbent.problems
        space, pp, tp = self.problems.space, setting.pp_degree, setting.tp_degree
        over = space.stage_routes(*setting.degrees)
        data = space.data_routes(*setting.degrees, setting.num_shards)
        self.num_stages = pp * setting.num_chunks
        self.groups = [group_of_stage(setting.schedule, pp, stage) for stage in range(self.num_stages)]
        self.routes = over.messages, over.around
        cluster, rules = space.pricer.cluster, self.problems.rules(setting)
        self.tables: list[LayerTable] = []
        self.states: list[StateTable] = []
        self.capacity: list[int] = []
        known: dict[object, StateTable] = {}
        for group, types in enumerate(self.problems.gpu_types(setting)):
            route, at = over.tensor[group], [cluster.gpus[name] for name in types]
            table = self.problems.table(setting.microbatch_size, tp, (setting.shardings,), route, types)
            key = (types, route, data[group])
            if key not in known:
                slowest = min(at, key=memory_bytes_per_s)
                known[key] = StateTable.of(table, rules, slowest, tp, data[group], cluster.memory_reserve)
            self.tables.append(table)
            self.states.append(known[key])
            self.capacity.append(min(gpu.memory for gpu in at))
        self.num_layers = len(self.tables[0].forward)
        self.allowed = self.problems.allowed(self.num_stages)
        self.least_s = 0.0

    @property
    def _args(self) -> tuple[Schedule, int, int, int]:
        return self.setting.schedule, self.setting.pp_degree, self.setting.num_microbatches, self.setting.num_chunks

    def search(self, tolerance: float) -> bool:
        """Offer plans; return whether no other is of interest: all cuts were tried, and fit or are slower."""
        count, stages = self.num_layers, self.num_stages
        most = MOST_TRIED if self._is_exact else MOST_PRICED
        if comb(count - 1, stages - 1) <= most and stages * self.setting.num_microbatches <= MOST_TURNS:
            every = [(0, *cuts, count) for cuts in combinations(range(1, count), stages - 1)]
            every = [cuts for cuts in every if self._stands(cuts)]
            return self._try_all(np.array(every, dtype=np.int64).reshape(-1, stages + 1), tolerance)
        starts = np.array([cuts for cuts in (self._even(), self._balanced()) if self._stands(cuts)], dtype=np.int64)
        if len(starts):
            self._improve(starts)
        return False

    def _try_all(self, cuts: Ints, tolerance: float) -> bool:
        """Try all cuts, those first that would be fastest if nothing had to be recomputed."""
        if self._is_exact:
            parts = np.array_split(cuts, max(1, len(cuts) // MOST_BATCH))
            step_s = np.concatenate([self._price(part) for part in parts])
        else:
            step_s = np.array([self._plain_s(list(pairwise(row))) for row in cuts.tolist()])
        undecided = []
        for index in np.argsort(step_s, kind="stable"):
            if step_s[index] * (1 - 1e-9) >= self.incumbent.limit_s(tolerance):
                break
            self.incumbent.budget.check()
            plan, is_settled = self._fitting(list(pairwise(cuts[index].tolist())))
            if not is_settled and (plan is None or step_time_s(plan) > step_s[index] * (1 + 1e-9)):
                undecided.append(float(step_s[index]))
        self.least_s = min(undecided, default=float("inf"))
        return self.least_s * (1 - 1e-9) >= self.incumbent.limit_s(tolerance)

    def _plain_s(self, spans: list[Span]) -> float:
        self.incumbent.budget.check()
        return step_time_s(self.incumbent.price(self.setting, spans, [() for _ in spans]))

    @property
    def _can_recompute(self) -> bool:
        """Whether people leave it open if layers are recomputed."""
        return any(len(choices) > 1 for choices in self.problems.space.recompute_choices)

    @property
    def _is_exact(self) -> bool:
        """Whether `_price` is what `cost.evaluate` says of plans without recomputation."""
        neighbours = all(consumers == (producer + 1,) for producer, consumers, _, _ in self.tables[0].crossing.edges)
        return neighbours and not self.problems.space.pricer.shared

    def _improve(self, moved: Ints) -> None:
        cuts, best_s = moved[0], float("inf")
        for _ in range(MOST_ROUNDS):
            self.incumbent.budget.check()
            found = self._price(moved)
            index = int(found.argmin())
            if not found[index] < best_s * (1 - MIN_GAIN):
                break
            cuts, best_s = moved[index], float(found[index])
            moved = self._moved(cuts)
            if not len(moved):
                break
        if best_s < self.incumbent.limit_s(0.0):
            self._fitting(list(pairwise(cuts.tolist())))

    def _moved(self, cuts: Ints) -> Ints:
        """Return neighbours: one cut moved by a layer, those next to the longest stages first."""
        found = []
        for cut in range(1, len(cuts) - 1):
            for step in (-1, 1):
                moved = cuts.copy()
                moved[cut] += step
                if moved[cut - 1] < moved[cut] < moved[cut + 1] and self._stands(moved.tolist()):
                    found.append(moved)
        if len(found) > MOST_BATCH:
            length = self.tables[0].forward_sum + self.tables[0].backward_sum
            found.sort(key=lambda moved: float(np.diff(length[moved]).max()))
        return np.array(found[:MOST_BATCH], dtype=np.int64).reshape(-1, len(cuts))

    def _stands(self, cuts: "tuple[int, ...] | list[int]") -> bool:
        return all(self.allowed[s][first, stop] for s, (first, stop) in enumerate(pairwise(cuts)))

    def _even(self) -> tuple[int, ...]:
        size, longer = divmod(self.num_layers, self.num_stages)
        return tuple(s * size + min(s, longer) for s in range(self.num_stages + 1))

    def _balanced(self) -> tuple[int, ...]:
        """Return cuts whose slowest stage is as fast as any."""
        work = self.tables[0].forward_sum + self.tables[0].backward_sum
        count = self.num_layers
        best = np.full(count + 1, np.inf)
        best[0] = 0.0
        choices = []
        for s in range(self.num_stages):
            through = np.maximum(best[:, None], np.where(self.allowed[s], work[None, :] - work[:, None], np.inf))
            choices.append(through.argmin(axis=0))
            best = through.min(axis=0)
        cuts = [count]
        for choice in reversed(choices):
            cuts.append(int(choice[cuts[-1]]))
        return tuple(reversed(cuts)) if np.isfinite(best[count]) else self._even()

    @cached_property
    def _order(self) -> Order:
        pairs = [(s, s + 1, True) for s in range(self.num_stages - 1) if self.groups[s] != self.groups[s + 1]]
        return Order(group_actions(*self._args), pairs, self.groups)

    def _price(self, cuts: Ints) -> Floats:
        """Return the step time of every row of cuts, without recomputation and as if all fitted."""
        if not len(cuts):
            return np.zeros(0)
        stages, plans = self.num_stages, len(cuts)
        seconds = np.zeros((stages, len(KINDS), plans))
        ready, tail = np.zeros((2, self.setting.pp_degree, plans))
        busy, latency = [], []
        for s, group in enumerate(self.groups):
            first, stop = cuts[:, s], cuts[:, s + 1]
            table, state = self.tables[group], self.states[group]
            seconds[s, 0] = table.forward_sum[stop] - table.forward_sum[first]
            seconds[s, 1] = table.backward_sum[stop] - table.backward_sum[first]
            seconds[s, 3] = table.weight_sum[stop] - table.weight_sum[first]
            seconds[s, 2] = np.maximum(0.0, seconds[s, 1] - seconds[s, 3])
            ready[group] += state.ready_s[first, stop]
            tail[group] += state.tail_s[first, stop]
            if s + 1 < stages and self.groups[s + 1] != group:
                route = self._route(group, self.groups[s + 1])
                busy += list(table.crossing.crossing_bytes[:, stop] / route.bandwidth_bytes_per_s)
                latency += [np.full(plans, route.latency_s)] * 2
        empty = np.zeros((0, plans))
        ends = self._order.play(
            seconds, np.array(busy) if busy else empty, np.array(latency) if latency else empty, ready
        )
        return np.asarray((ends + tail).max(axis=0))

    def _route(self, source: int, target: int) -> Route:
        messages, around = self.routes
        return messages[min(source, target)] if abs(source - target) == 1 else around

    def _fitting(self, spans: list[Span]) -> tuple[Plan | None, bool]:
        """Return a plan of these stages that fits, if one is found, and whether no other choice could be better.

        Layers are recomputed as far as each group needs it, the same share of what its stages hold.
        """
        forced = any(choices == (True,) for choices in self.problems.space.recompute_choices)
        before: list[tuple[int, ...]] | None = None
        plain: list[tuple[int, ...]] = [() for _ in spans]
        shares = [1.0] * self.setting.pp_degree
        for attempt in range(LEAN_STEPS):
            remade = plain if attempt == 0 and not forced else self._lean(spans, shares)
            if remade == before:  # nothing is left to recompute
                return None, False
            before = remade
            plan = self.incumbent.price(self.setting, spans, remade)
            assert plan.prediction is not None
            over = {
                self.groups[s]: stage.memory.peak_bytes - self.capacity[self.groups[s]]
                for s, stage in enumerate(plan.prediction.stages)
                if stage.memory.peak_bytes > self.capacity[self.groups[s]]
            }
            if not over:
                return self.incumbent.consider(self.setting, plan), remade is plain
            if not self._can_recompute or any(
                stage.memory.peak_bytes - stage.memory.activation_bytes - stage.memory.transient_bytes
                > self.capacity[self.groups[s]]
                for s, stage in enumerate(plan.prediction.stages)
            ):
                return None, True
            if step_time_s(plan) >= self.incumbent.limit_s(0.0):
                return None, False
            for group, num_bytes in over.items():
                stages = [s for s, of in enumerate(self.groups) if of == group]
                held = max(plan.prediction.stages[s].memory.activation_bytes for s in stages)
                shares[group] *= max(0.0, 1.0 - 1.02 * num_bytes / max(held, 1))
        return None, False

    def _lean(self, spans: list[Span], shares: list[float]) -> list[tuple[int, ...]]:
        """Return layers to recompute so that each stage keeps at most its group's share of what it would keep.

        Those come first that save most in a second.
        """
        remade = []
        for (first, stop), group in zip(spans, self.groups, strict=True):
            table, choices = self.tables[group], self.problems.space.recompute_choices
            wanted = (1.0 - shares[group]) * float(table.kept_all[first, stop])
            chosen = [layer for layer in range(first, stop) if choices[layer] == (True,)]
            free = [layer for layer in range(first, stop) if len(choices[layer]) == 2]
            rate = table.activations / np.maximum(table.forward, 1e-30)
            free.sort(key=lambda layer, rate=rate: (-float(rate[layer]), layer))  # type: ignore[misc]
            saved = float(sum(table.activations[layer] for layer in chosen))
            for layer in free:
                if saved >= wanted:
                    break
                chosen.append(layer)
                saved += float(table.activations[layer])
            remade.append(tuple(sorted(chosen)))
        return remade

"""The ways to run one stage at a number of microbatches: tensor- and data-parallel degree, sharding, shards of states.

Of every option the tables of all stages [a, b), over the fastest links that any place in the cluster gives it: bounds.
The rows of a microbatch of all replicas together are the same in every stage, so dp_degree divides them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner.cost.communication import Route
from planner.cost.layers import REPLICATED
from planner.cost.places import DataRoutes
from planner.cost.states import StateRules
from planner.plan import DataParallel
from planner.solver.core.pipeline import Option
from planner.solver.problems import cuts_left
from planner.solver.recompute import Choice
from planner.solver.routes import least_route, regular_node_size
from planner.solver.space import Shardings, Space
from planner.solver.tables import Bools, Crossing, Floats, Ints, LayerTable, StateTable, prefix_sums

MAX_KEPT = 10_000_000  # stages of tables that are kept for other numbers of microbatches
NUM_PRICES = 16  # at which a bound of recomputation is looked for
SAME = 1e-9  # relative: a share that differs by less is the same


@dataclass(frozen=True, slots=True, order=True)
class Way:
    """One way to run a stage; ordered from regular to irregular."""

    tp_degree: int
    dp_degree: int
    num_shards: int
    shardings: Shardings

    @property
    def gpus(self) -> int:
        """GPUs of the stage."""
        return self.tp_degree * self.dp_degree


class Ways:
    """All ways of a space, by the rows of all replicas together; and what layers cost in each, before any table."""

    def __init__(self, space: Space) -> None:
        self.space, self.pricer = space, space.pricer
        self._routes: dict[tuple[int, int, int], tuple[Route, DataRoutes, tuple[Route, ...]]] = {}
        self._seconds: dict[tuple[int, int], Floats] = {}
        self._tables: dict[tuple[int, int, Shardings], LayerTable] = {}

    def degrees(self, rows: int) -> Iterator[tuple[int, int]]:
        """Yield (tp_degree, dp_degree) of stages that take `rows` of a microbatch, all replicas together."""
        space, num_gpus = self.space, self.space.most_gpus
        largest = num_gpus if space.request.theoretical else space.pricer.cluster.gpus_per_node
        for tp in space.tp_degrees:
            if tp > min(largest, num_gpus) or not space.admits("tp_degree", tp) or space.forbidden(tp):
                continue
            for dp in range(1, num_gpus // tp + 1):
                each = rows // dp
                if rows % dp or each < space.pricer.profile.least_rows or not space.admits("microbatch_size", each):
                    continue
                if space.admits("dp_degree", dp) and (dp == 1 or space.carried is None):
                    yield tp, dp

    def of(self, rows: int) -> list[Way]:
        """Return the ways to run a stage."""
        found = []
        for tp, dp in self.degrees(rows):
            shards = [n for mode, n in (("replicated", 1), ("sharded", dp)) if self.space.admits("data_parallel", mode)]
            for shardings in self.shardings(tp, dp, rows):
                found += [Way(tp, dp, n, shardings) for n in dict.fromkeys(shards if dp > 1 else [1])]
        return sorted(found)

    def shardings(self, tp: int, dp: int, rows: int) -> list[Shardings]:
        """Return the choices of sharding at these degrees; `complete` says whether these are all."""
        return self.space.combinations(tp, rows // dp, self.routes(tp, dp, 1)[2])[0]

    def complete(self, rows: int) -> bool:
        """Return whether no choice of sharding was left out."""
        return all(
            self.space.combinations(tp, rows // dp, self.routes(tp, dp, 1)[2])[1] for tp, dp in self.degrees(rows)
        )

    def routes(self, tp: int, dp: int, shards: int) -> tuple[Route, DataRoutes, tuple[Route, ...]]:
        """Return the fastest routes that a stage has anywhere, and all that its tensor-parallel groups may have."""
        key = (tp, dp, shards)
        if key not in self._routes:
            pricer, size = self.pricer, tp * dp
            per_node = regular_node_size(pricer.cluster)
            room = self.space.most_gpus - size
            places = range(min(room, per_node - 1 if per_node else room) + 1)
            at = [tuple(range(first, first + size)) for first in places]
            tensor = tuple(dict.fromkeys(pricer.tensor_route(gpus, tp) for gpus in at))
            data = [pricer.data_routes(gpus, tp, shards) for gpus in at]
            within, across = (least_route([getattr(found, name) for found in data]) for name in ("within", "across"))
            self._routes[key] = (least_route(tensor), DataRoutes(within, across), tensor)
        return self._routes[key]

    def table(self, key: tuple[int, int, Shardings], crossing: Crossing, route: Route) -> LayerTable:
        """Return the table of (rows of a replica, tp_degree, shardings); the last ones are kept."""
        if key not in self._tables:
            rows, tp, shardings = key
            if len(self._tables) * len(self.pricer.profile.layers) ** 2 > MAX_KEPT:
                del self._tables[next(iter(self._tables))]
            allowed = self.space.recompute_choices
            self._tables[key] = LayerTable.of(self.pricer, crossing, rows, tp, dict(shardings), route, allowed)
        return self._tables[key]

    def layer_seconds(self, tp: int, rows: int, dp: int) -> Floats:
        """Return forward and backward together of every layer, the least over its shardings; `rows` of one replica."""
        key = (tp, rows)
        if key not in self._seconds:
            by_class: dict[str, float] = {}
            names = [layer_class.name for layer_class in self.pricer.profile.layer_classes]
            route = self.routes(tp, dp, 1)[0]
            for shardings in self.shardings(tp, dp, rows * dp):
                chosen = dict(shardings)
                for name in names:
                    numbers = self.pricer.numbers(name, rows, tp, chosen.get(name, REPLICATED), route)
                    seconds = numbers.forward_s + numbers.forward_comm_s + numbers.backward_s + numbers.backward_comm_s
                    by_class[name] = min(seconds, by_class.get(name, float("inf")))
            layers = self.pricer.profile.layers
            self._seconds[key] = np.array([by_class.get(layer.layer_class, np.inf) for layer in layers])
        return self._seconds[key]

    def gpu_seconds(self, rows: int) -> float:
        """Return the GPU-seconds that all layers take at least for a microbatch of `rows`, all replicas together."""
        every = [tp * dp * self.layer_seconds(tp, rows // dp, dp) for tp, dp in self.degrees(rows)]
        return float(np.min(every, axis=0).sum()) if every else float("inf")


class StageOptions:
    """The tables of ways at one number of rows; says what recomputation they need (`core.pipeline.Remaking`)."""

    def __init__(self, ways: Ways, rows: int) -> None:
        self.space, self.ways, self.rows = ways.space, ways.of(rows), rows
        pricer = self.space.pricer
        self._choices: dict[tuple[int, int, int, int], Choice | None] = {}
        self._prices: dict[tuple[int, int, Shardings], list[tuple[float, Floats]]] = {}
        self.tables: list[LayerTable] = []
        self.states: list[StateTable] = []
        crossings: dict[int, Crossing] = {}
        gpu = pricer.cluster.gpu_at(0)
        self.budget_bytes = gpu.memory
        request = self.space.request
        for way in self.ways:
            each = rows // way.dp_degree
            tensor, data, _ = ways.routes(way.tp_degree, way.dp_degree, way.num_shards)
            if each not in crossings:
                crossings[each] = Crossing.of(pricer, each)
            key = (each, way.tp_degree, way.shardings)
            table = ways.table(key, crossings[each], tensor)
            mode: DataParallel = "sharded" if way.num_shards > 1 else "replicated"
            rules = StateRules(request.optimizer, request.precision, mode, way.dp_degree, way.num_shards)
            self.tables.append(table)
            self.states.append(
                StateTable.of(table, rules, gpu, way.tp_degree, data, pricer.cluster.memory_reserve)
            )  # fmt: skip

    @cached_property
    def cuttable(self) -> Bools:
        """The stages [a, b) that pinned and excluded cuts leave."""
        count = len(self.space.pricer.profile.layers)
        cut_ok, pins, exclusions = cuts_left(self.space), self.space.pins, self.space.exclusions
        index = np.arange(count + 1)
        allowed = (index[:, None] < index[None, :]) & cut_ok[:, None] & cut_ok[None, :]
        for first, last in exclusions.together:
            allowed &= (first < index[:, None]) | (index[None, :] <= last)
        if pins.cuts is not None:
            pinned = np.array(sorted({0, *pins.cuts, count}))
            allowed &= np.searchsorted(pinned, index)[None, :] - np.searchsorted(pinned, index)[:, None] == 1
        return np.asarray(allowed)

    @property
    def forces_any(self) -> bool:
        """Whether some layers must be recomputed."""
        return any(table.any_forced for table in self.tables)

    def options(self) -> list[Option]:
        """Return what each way costs for every stage that fits with one microbatch in flight."""
        found = []
        cluster = self.space.pricer.cluster
        fastest = cluster.fastest_bytes_per_s
        for way, table, states in zip(self.ways, self.tables, self.states, strict=True):
            room = self.budget_bytes - states.fixed_bytes
            fits = self.cuttable & (table.kept_least + table.transient <= room)
            forward = table.forward_sum[None, :] - table.forward_sum[:, None]
            backward = table.backward_sum[None, :] - table.backward_sum[:, None]
            there, back = self._next_bytes(self.rows // way.dp_degree)
            found.append(
                Option(
                    gpus=way.gpus,
                    forward=np.where(fits, forward, np.inf),
                    backward=np.where(fits, backward, np.inf),
                    ready=states.ready_s,
                    tail=states.tail_s,
                    layer_forward=table.forward,
                    layer_backward=table.backward,
                    arrive=there / fastest,
                    back=back / fastest,
                )
            )
        return found

    def _next_bytes(self, rows: int) -> tuple[Floats, Floats]:
        """Return by cut the bytes that one layer hands to the next, and those of gradients back, of one replica."""
        profile = self.space.pricer.profile
        there, back = np.zeros(len(profile.layers) + 1), np.zeros(len(profile.layers) + 1)
        for edge in profile.edges:
            if edge.producer + 1 in edge.consumers:
                there[edge.producer + 1] += edge.num_bytes(rows)
                back[edge.producer + 1] += edge.num_bytes(rows) if edge.needs_grad else 0
        return there, back

    def seconds(self, option: int, in_flight: int, firsts: Ints, stops: Ints) -> Floats:
        """Return a bound of the seconds of recomputation of stages; 0 only where none is needed."""
        table, states, w = self.tables[option], self.states[option], in_flight
        room = self.budget_bytes - states.fixed_bytes[firsts, stops]
        transient = table.transient[firsts, stops]
        need = (w * table.kept_all[firsts, stops] + transient - room) / w
        fits = w * table.kept_least[firsts, stops] + transient <= room
        short = np.flatnonzero(fits & (need > 0))
        extra = np.zeros(len(firsts))
        if table.any_forced:
            extra = table.forced_sum[stops] - table.forced_sum[firsts]
        elif len(short):
            extra[short] = self._relaxed(option, need[short], firsts[short], stops[short])
        fits &= extra <= self._most_extra(table, firsts, stops)
        return np.where(fits, extra, np.inf)

    def _relaxed(self, option: int, need: Floats, firsts: Ints, stops: Ints) -> Floats:
        """Return what saving `need` bytes takes at least: max over prices u of u * need - sum max(0, u * s - t).

        A recomputed layer takes t seconds and saves at most s bytes; layers may be recomputed in part.
        """
        way = self.ways[option]
        key = (self.rows // way.dp_degree, way.tp_degree, way.shardings)
        if key not in self._prices:
            self._prices[key] = self._find_prices(option)
        found = np.full(len(need), np.finfo(float).tiny)  # something must be recomputed
        for price, surplus in self._prices[key]:
            np.maximum(found, price * need - (surplus[stops] - surplus[firsts]), out=found)
        return found

    def _find_prices(self, option: int) -> list[tuple[float, Floats]]:
        """Return prices in seconds per byte, and the sums over the first layers of what saving is worth beyond t."""
        way, pricer = self.ways[option], self.space.pricer
        rows = self.rows // way.dp_degree
        layers = pricer.layer_table(rows, way.tp_degree, dict(way.shardings), self.tables[option].route)
        saved = np.array(
            [
                layer.activation_bytes
                + layer.saved_output_bytes
                + max(0, layer.saved_input_bytes - min(layer.saved_input_bytes, given))
                if True in allowed
                else 0
                for layer, given, allowed in zip(layers, pricer.inputs(rows), self.space.recompute_choices, strict=True)
            ],
            dtype=np.float64,
        )
        seconds = np.array([layer.recompute_s for layer in layers])
        able = saved > 0
        if not able.any():
            return []
        prices = np.quantile(seconds[able] / saved[able], np.linspace(0, 1, NUM_PRICES))
        return [
            (float(price), prefix_sums(np.maximum(0.0, price * saved - seconds).tolist()))
            for price in np.unique(prices)
        ]

    def _most_extra(self, table: LayerTable, firsts: Ints, stops: Ints) -> Floats:
        share = self.space.limits.recompute_fraction * (1 + SAME)
        forward = table.forward_sum[stops] - table.forward_sum[firsts]
        return np.full(len(forward), np.inf) if share == float("inf") else np.asarray(share * forward)

    def choose(self, option: int, in_flight: int, first: int, stop: int) -> Choice | None:
        """Return the recomputed layers of a stage; None where no choice fits."""
        key = (option, in_flight, first, stop)
        if key not in self._choices:
            self._choices[key] = self._choose(*key)
        return self._choices[key]

    def _choose(self, option: int, in_flight: int, first: int, stop: int) -> Choice | None:
        table, states = self.tables[option], self.states[option]
        room = int(self.budget_bytes - states.fixed_bytes[first, stop])
        need = in_flight * int(table.kept_all[first, stop]) + int(table.transient[first, stop])
        if not table.any_forced and need <= room:
            return Choice((), 0.0, need)
        if in_flight * int(table.kept_least[first, stop]) + int(table.transient[first, stop]) > room:
            return None
        assert table.choices is not None, "a table of one choice of sharding"
        choice = table.choices.fastest(first, stop, int(table.crossing.received[first, stop]), in_flight, room)
        if choice is None:
            return None
        most = self._most_extra(table, np.array([first]), np.array([stop]))[0]
        return choice if choice.seconds <= most else None


def gpus_of(ways: Sequence[Way]) -> list[tuple[int, ...]]:
    """Return the GPUs of stages one after another: consecutive ranks, the tensor-parallel index fastest."""
    found, first = [], 0
    for way in ways:
        found.append(tuple(range(first, first + way.gpus)))
        first += way.gpus
    return found

"""One setting of the outer search (degrees, microbatches, schedule, sharding): what is left are cuts and recomputation.

Lower bounds of the step time of any plan with the stage [a, b) at position s, p microbatches in flight there:

    (1)  head(a) + start + (m - p) * (tf + tb) + end + after
    (2)  start = max(p * tf, tf + D)        its first backward waits for its forwards, and for a round trip
    (3)  end   = max(p * tb, tb + D)        the last forward makes a round trip, or the last p backwards follow
    (4)  D     = forwards and backwards of all layers from b on, and the messages between

Where a round trip takes longer than what is done meanwhile, the p - 1 forwards and backwards of others between the
forward of a microbatch and its backward, the stage waits for the rest of it, D - (p - 1) * (tf + tb), once for every p
microbatches between start and end: for microbatch p, 2 p, ..., one fewer where the last round trip is counted in (3).

head(a) is the forward path to layer a, `after` the backward path from a to the start and what follows there, or what
follows in the stage itself. Where p = m, the last forward comes before the first backward, and only one of (2) and (3)
has a round trip; for GPipe it is always the last forward's, p * tf + D + p * tb. `sum + (m - 1) * max` is no lower
bound of 1F1B: early stages hide what comes after them behind their warm-up. Paths follow a spine (`graph.spine`):
layers each of which waits for the one before; where a stage is not on it, the terms that need it are left out.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from planner.cost.communication import Route, collective_s
from planner.cost.states import StateRules
from planner.graph import SharedStorage
from planner.plan import DataParallel, Schedule
from planner.solver.recompute import Choice
from planner.solver.tables import Bools, Floats, Ints, LayerTable, StateTable
from planner.solver.waves import Suffixes

SAME = 1e-9  # relative: a share that differs by less is the same

Span = tuple[int, int]
"""The layers [first, stop) of a stage."""

Placement = Literal["stages", "replicas"]
PLACEMENTS: tuple[Placement, ...] = ("stages", "replicas")
"""Which GPUs are neighbours, beside those of a tensor-parallel group: a stage's replicas, or a replica's stages."""


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class Setting:
    """A point of the outer search; ordered from regular to irregular, which breaks ties."""

    num_idle: int
    pp_degree: int
    num_chunks: int
    tp_degree: int
    num_microbatches: int
    schedule_rank: int
    data_parallel_rank: int
    placement_rank: int
    shardings: tuple[tuple[str, str], ...]
    dp_degree: int
    num_shards: int
    microbatch_size: int
    schedule: Schedule
    data_parallel: DataParallel
    placement: Placement

    @property
    def degrees(self) -> tuple[int, int, int, Placement]:
        """What the GPUs of the stages follow from: pp, tp and dp degree, and placement."""
        return self.pp_degree, self.tp_degree, self.dp_degree, self.placement


@dataclass(frozen=True, slots=True)
class Position:
    """What holds at one position of the pipeline: tables for its routes, memory, and which [a, b) may stand there."""

    layers: LayerTable
    states: StateTable
    budget_bytes: int
    in_flight: int
    allowed: Bools


@dataclass(frozen=True, slots=True)
class Spine:
    """A path of layers: the sum of seconds before each cut, the layers beside its crossing, and layers off it."""

    before: Floats
    last_before: Ints
    first_after: Ints
    off_before: Ints
    reaches_end: bool

    @classmethod
    def of(cls, path: Sequence[int], seconds: Floats) -> "Spine":
        """Return the spine along `path`; `seconds` per layer."""
        count = len(seconds)
        on = np.zeros(count, dtype=bool)
        on[list(path)] = True
        before = np.concatenate(([0.0], np.cumsum(np.where(on, seconds, 0.0))))
        last = np.full(count + 1, -1, dtype=np.int64)
        after = np.full(count + 1, count, dtype=np.int64)
        for cut in range(1, count + 1):
            last[cut] = cut - 1 if on[cut - 1] else last[cut - 1]
        for cut in reversed(range(count)):
            after[cut] = cut if on[cut] else after[cut + 1]
        off = np.concatenate(([0], np.cumsum(~on)))
        return cls(before, last, after, off.astype(np.int64), bool(on[-1]))


class Problem:
    """A setting with its tables; see the module's docstring for the bounds."""

    def __init__(
        self,
        setting: Setting,
        positions: Sequence[Position],
        routes: Mapping[tuple[int, int], Route],
        spines: tuple[Sequence[int], Sequence[int]],
        shared: Sequence[tuple[SharedStorage, int]],
        rules: StateRules,
        fastest_bytes_per_s: float,
        recompute_fraction: float = float("inf"),
        *,
        chained: bool,
    ) -> None:
        self._recompute_fraction = recompute_fraction
        self.setting, self.positions, self.routes, self.chained = setting, positions, routes, chained
        self.num_layers = len(positions[0].layers.forward)
        stages, count = setting.pp_degree, self.num_layers
        self.forward_spine = Spine.of(spines[0], np.min([p.layers.forward for p in positions], axis=0))
        self.backward_spine = Spine.of(spines[1], np.min([p.layers.backward for p in positions], axis=0))
        on_spine = np.isin(np.arange(count), list(spines[0]))
        slowest = np.where(on_spine, np.min([p.layers.forward for p in positions], axis=0), 0.0)
        self._slowest_before = np.concatenate(([0.0], np.maximum.accumulate(slowest)))
        crossing = positions[0].layers.crossing
        neighbours = [routes[s, s + 1] for s in range(stages - 1)]
        fastest = max((r.bandwidth_bytes_per_s for r in neighbours), default=float("inf"))
        latency = min((r.latency_s for r in neighbours), default=0.0)
        sizes = [(size, grad) for _, _, size, grad in crossing.edges]
        self.least_sent_s = latency + min((size for size, _ in sizes), default=0) / fastest
        self.least_back_s = latency + min((size for size, grad in sizes if grad), default=0) / fastest
        self.least_tied_s = self._least_tied(shared, rules, Route(fastest_bytes_per_s, 0.0))
        start = min((float(positions[0].states.tail_s[0, b]) for b in range(1, count + 1)), default=0.0)
        self.start_tail_s = start + self.least_tied_s
        self._messages: dict[tuple[int, int, int], tuple[Floats, Floats, Bools, Bools]] = {}
        self._extra: list[Floats] = []
        self._settled: list[Bools] = []

    def _least_tied(self, shared: Sequence[tuple[SharedStorage, int]], rules: StateRules, route: Route) -> float:
        """Return seconds of gradient sums that stage 0 takes part in whatever the cuts: layer 0's with a late layer."""
        stages, seconds = self.setting.pp_degree, 0.0
        for storage, elements in shared:
            late = storage.layers[-1] > self.num_layers - stages
            if storage.trainable and storage.layers[0] == 0 and late and stages > 1:
                num_bytes = elements * rules.grad_bytes_per_element / rules.num_shards
                seconds += collective_s("all_reduce", num_bytes, 2, route)
        return seconds

    @property
    def fits(self) -> bool:
        """Whether any stages hold all layers, each recomputed as far as it can be."""
        reached: Bools = np.zeros(self.num_layers + 1, dtype=bool)
        reached[0] = True
        for position in self.positions:
            first, last = int(reached.argmax()), len(reached) - int(reached[::-1].argmax())
            rows = slice(first, last)
            table = position.layers
            need = (
                position.in_flight * table.kept_least[rows] + table.transient[rows] + position.states.fixed_bytes[rows]
            )
            possible = (need <= position.budget_bytes) & position.allowed[rows] & reached[rows, None]
            reached = np.asarray(possible.any(axis=0))
            if not reached.any():
                return False
        return bool(reached[-1])

    @property
    def extra(self) -> list[Floats]:
        """Seconds of recomputation that [a, b) needs, by position: at least, until `settle` says it exactly."""
        if not self._extra:
            self._extra = [self._least_extra(position) for position in self.positions]
            self._settled = [(extra == 0) | np.isinf(extra) for extra in self._extra]
        return self._extra

    def settle(self, s: int, wanted: Bools, check: Callable[[], None]) -> bool:
        """Make `extra` exact for the wanted [a, b) at position s; return whether any was not. `check` may raise."""
        extra = self.extra[s]
        unknown = wanted & ~self._settled[s]
        for a, b in zip(*np.nonzero(unknown), strict=True):
            check()
            choice = self.recompute(s, int(a), int(b))
            extra[a, b] = np.inf if choice is None else choice.seconds
            self._settled[s][a, b] = True
        return bool(unknown.any())

    def _least_extra(self, position: Position) -> Floats:
        """Return seconds of recomputation that [a, b) needs at least; inf where it fits in no way or is not allowed."""
        table, w = position.layers, position.in_flight
        room = position.budget_bytes - position.states.fixed_bytes
        need = w * table.kept_all + table.transient - room
        with np.errstate(divide="ignore", invalid="ignore"):
            extra = np.where(need > 0, need / (w * table.best_ratio), 0.0)
        forced = table.forced_sum[None, :] - table.forced_sum[:, None]
        extra = forced if table.any_forced else np.nan_to_num(extra, nan=np.inf, posinf=np.inf)
        fits = (w * table.kept_least + table.transient <= room) & (extra <= self.most_extra(table))
        return np.where(fits & position.allowed, extra, np.inf)

    def most_extra(self, table: LayerTable) -> Floats:
        """Return seconds of recomputation that every [a, b) may have at most: a share of its forward."""
        forward = table.forward_sum[None, :] - table.forward_sum[:, None]
        share = self._recompute_fraction * (1 + SAME)
        return np.full_like(forward, np.inf) if share == float("inf") else np.asarray(share * forward)

    def recompute(self, s: int, a: int, b: int) -> Choice | None:
        """Return the recomputed layers of stage [a, b) at position s; None where no choice fits."""
        position = self.positions[s]
        table, room = position.layers, int(position.budget_bytes - position.states.fixed_bytes[a, b])
        kept, transient = int(table.kept_all[a, b]), int(table.transient[a, b])
        if not table.any_forced and position.in_flight * kept + transient <= room:
            return Choice((), 0.0, position.in_flight * kept + transient)
        received = int(table.crossing.received[a, b])
        assert table.choices is not None, "the least of several shardings has no choices of its own"
        choice = table.choices.fastest(a, b, received, position.in_flight, room)
        return None if choice is None or choice.seconds > self.most_extra(table)[a, b] else choice

    def choose(self, spans: Sequence[Span]) -> list[Choice] | None:
        """Return the recomputed layers of every stage; None where a stage can't be."""
        choices = []
        for s, (first, stop) in enumerate(spans):
            choice = self.recompute(s, first, stop) if self.positions[s].allowed[first, stop] else None
            if choice is None:
                return None
            choices.append(choice)
        return choices

    def even_spans(self) -> list[Span]:
        """Return stages of equal layer counts, the first ones longer where they don't divide."""
        stages, count = self.setting.pp_degree, self.num_layers
        sizes = [count // stages + (s < count % stages) for s in range(stages)]
        stops = np.cumsum(sizes).tolist()
        return [(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]

    def times(self, s: int) -> tuple[Floats, Floats]:
        """Return seconds of forward and of backward, recomputation included, of [a, b) at position s."""
        table = self.positions[s].layers
        forward = table.forward_sum[None, :] - table.forward_sum[:, None]
        return forward, table.backward_sum[None, :] - table.backward_sum[:, None] + self.extra[s]

    def within(self, s: int, forward: Floats, backward: Floats, trip: Floats) -> Floats:
        """Return start + (m - p) * (tf + tb) + waits + end of (1) at position s, for these times and round trips."""
        w, m = self.positions[s].in_flight, self.setting.num_microbatches
        if self.setting.schedule == "gpipe":  # the first backward waits for the last forward's round trip
            return m * forward + trip + m * backward
        if w == m:  # the last forward comes before the first backward: one round trip on any path
            return np.maximum(np.maximum(w * forward, forward + trip) + w * backward, w * forward + trip + backward)
        longer = trip - (w - 1) * np.where(np.isfinite(backward), forward + backward, 0.0)
        waits = np.where(np.isfinite(longer), np.maximum(0.0, longer), 0.0)  # inf is in the other terms
        start = np.maximum(w * forward, forward + trip)
        end = np.maximum(w * backward + (m - w) // w * waits, backward + trip + (m - w - 1) // w * waits)
        total: Floats = start + (m - w) * (forward + backward) + end
        return total

    def station(self, s: int) -> Floats:
        """Return bound (1) for every stage [a, b) at position s; inf where it can't stand there."""
        states, fits = self.positions[s].states, np.isfinite(self.extra[s])
        forward, backward = self.times(s)
        head, after = self.paths(s)
        within = self.within(s, forward, np.where(fits, backward, 0.0), self._round_trip(s))
        bound = np.maximum(head, states.ready_s) + within
        return np.where(fits, bound + np.maximum(after, states.tail_s), np.inf)

    def paths(self, s: int) -> tuple[Floats, Floats]:
        """Return head and the path back to the start, tail of stage 0 included, for [a, b) at position s."""
        size = self.num_layers + 1
        if s == 0:
            return np.zeros((size, size)), np.full((size, size), self.start_tail_s)
        stops = np.arange(size)[None, :]
        results = []
        for spine, message_s in ((self.forward_spine, self.least_sent_s), (self.backward_spine, self.least_back_s)):
            messages = 1 + np.maximum(0, s - 1 - spine.off_before)
            path = np.where(spine.last_before >= 0, spine.before + messages * message_s, 0.0)
            results.append(np.where(spine.first_after[:, None] < stops, path[:, None], 0.0))
        # The path back ends in stage 0 only if the spine begins there; it begins at layer 0 or counts for nothing.
        starts = self.backward_spine.last_before[1] == 0
        return results[0], results[1] + np.where(results[1] > 0, self.start_tail_s if starts else 0.0, 0.0)

    def pace(self, s: int, firsts: Ints, b: int) -> Floats:
        """Return the least seconds between microbatches that reach stage [a, b): the slowest layer on the path to a."""
        enters = (self.forward_spine.last_before[firsts] >= 0) & (self.forward_spine.first_after[firsts] < b)
        return np.where(enters & (s > 0), self._slowest_before[firsts], 0.0)

    def _round_trip(self, s: int) -> Floats:
        """Return (4) for [a, b) at position s: 0 where it can't be told."""
        size, later = self.num_layers + 1, self.setting.pp_degree - 1 - s
        if later == 0 or not (self.forward_spine.reaches_end and self.backward_spine.reaches_end):
            return np.zeros((size, size))
        total = np.zeros((size, size))
        sure = np.ones((size, size), dtype=bool)
        for spine, message_s in ((self.forward_spine, self.least_sent_s), (self.backward_spine, self.least_back_s)):
            off_after = spine.off_before[-1] - spine.off_before
            messages = 1 + np.maximum(0, later - 1 - off_after)
            total += (spine.before[-1] - spine.before + messages * message_s)[None, :]
            sure &= spine.last_before[None, :] >= np.arange(size)[:, None]
        return np.where(sure, total, 0.0)

    def hop(self, s: int) -> tuple[Floats, Floats]:
        """Return the seconds in which what layer b - 1 hands to layer b crosses, by b, from position s; and back."""
        route = self.routes[s, s + 1]
        sent, back = self.positions[s].layers.crossing.next_bytes / route.bandwidth_bytes_per_s + route.latency_s
        return sent, back

    def messages(self, s: int, b: int, c: int) -> tuple[Floats, Floats, Bools, Bools]:
        """Return, for every a, busy seconds forward and back from [a, b) at s to [b, c), and whether any are sent."""
        key = (s, b, c)
        if key not in self._messages:
            sent, back = np.zeros(b), np.zeros(b)
            some, grads = np.zeros(b, dtype=bool), np.zeros(b, dtype=bool)
            for producer, consumers, num_bytes, needs_grad in self.positions[s].layers.crossing.edges:
                if producer < b and any(b <= consumer < c for consumer in consumers):
                    sent[: producer + 1] += num_bytes
                    some[: producer + 1] = True
                    if needs_grad:
                        back[: producer + 1] += num_bytes
                        grads[: producer + 1] = True
            bandwidth = self.routes[s, s + 1].bandwidth_bytes_per_s
            self._messages[key] = (sent / bandwidth, back / bandwidth, some, grads)
        return self._messages[key]

    def fronts(self, s: int, b: int, c: int, firsts: Ints, extra: Floats) -> tuple[Suffixes, Bools]:
        """Return the stages [a, b) at position s before [b, c), for each a, and whether each sends to that one."""
        table, states, n = self.positions[s].layers, self.positions[s].states, len(firsts)
        forward = table.forward_sum[b] - table.forward_sum[firsts]
        backward = table.backward_sum[b] - table.backward_sum[firsts] + extra
        if c < 0:
            none = np.zeros((n, 0))
            empty = Suffixes(
                forward[:, None], backward[:, None], none, none, none, none, none.astype(bool),
                states.ready_s[firsts, b][:, None],
            )  # fmt: skip
            return empty, np.ones(n, dtype=bool)
        sent, back, some, grads = self.messages(s, b, c)
        sent, back, some, grads = sent[firsts], back[firsts], some[firsts], grads[firsts]
        latency = np.full((n, 1), self.routes[s, s + 1].latency_s)
        front = Suffixes(
            forward[:, None], backward[:, None], sent[:, None], latency, back[:, None], latency, grads[:, None],
            states.ready_s[firsts, b][:, None],
        )  # fmt: skip
        return front, some

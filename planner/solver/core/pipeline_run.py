"""One dynamic program over suffixes of pipelines: within a limit, and with the sum T in an interval. See `pipeline`."""

from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from planner.solver.core.lattice import Bools, Floats
from planner.solver.core.pipeline import EPSILON, Ints, Pairs, Piece, most_behind_s, most_between_s

if TYPE_CHECKING:
    from planner.solver.core.pipelines import Pipelines

_BLOCK = 1 << 20  # numbers of a block of the dynamic program
_KEPT = 30_000_000  # seconds of recomputation that are kept
_REFINED_STAGES = 48  # positions from the end that have their own GPU-seconds in front


class Limited:
    """The candidate stages within a limit, what recomputation they need, and GPU-seconds in front and behind.

    `suffix(p)[i]` are what p stages over the layers from i on take at least, `front(p)[i]` what any stages over the
    layers before i take at least with p stages behind. Recomputation does not fall with the microbatches in flight.
    """

    def __init__(self, pipelines: "Pipelines", limit_s: float) -> None:
        self.pipelines, self.chain, self.limit_s = pipelines, pipelines.chain, limit_s
        pairs, work = pipelines.pairs(), pipelines.work
        most = limit_s * (1 + EPSILON) / self.chain.num_microbatches
        outside = work[0] - work[pairs.first] + work[pairs.stop]
        keep = (pairs.forward + pairs.backward) <= most
        keep &= outside <= most * (self.chain.num_gpus - pairs.gpus) * (1 + EPSILON)
        self.pairs = pairs[keep]
        self._by_option = [np.flatnonzero(self.pairs.option == k) for k in range(len(self.chain.options))]
        self._remade: dict[int, Floats] = {}
        self._suffix: list[Floats] = []
        self._front: list[Floats] = []

    def remade(self, position: int) -> Floats:
        """Return the seconds of recomputation of every candidate at a position."""
        w = self.chain.in_flight(position)
        if w in self._remade:
            return self._remade[w]
        pairs, found = self.pairs, np.zeros(len(self.pairs.first))
        for k, index in enumerate(self._by_option):
            found[index] = self.chain.remaking.seconds(k, w, pairs.first[index], pairs.stop[index])
        if len(self._remade) * len(found) > _KEPT:
            self._remade.pop(next(iter(self._remade)))
        self._remade[w] = found
        return found

    def stages(self, position: int, chosen: Ints) -> "Stages":
        """Return candidates at a position."""
        pairs, remade = self.pairs[chosen], self.remade(position)[chosen]
        return Stages(pairs, remade)

    @cached_property
    def merged(self) -> "Merged":
        """The same, with the least that options of equal GPUs have of each: what these don't allow, nothing does."""
        return Merged(self)

    def suffix(self, position: int) -> Floats:
        """Return the least GPU-seconds of suffixes with so many stages."""
        return self._suffix[position] if position < len(self._suffix) else self.pipelines.work

    def front(self, position: int) -> Floats:
        """Return the least GPU-seconds in front of so many stages."""
        last = min(position, len(self._front) - 1)
        return self._front[last] if self._front else self.pipelines.work[0] - self.pipelines.work

    def refine(self) -> None:
        """Find GPU-seconds with the memory and recomputation of whole stages in mind."""
        if self._front:
            return
        pairs, count = self.pairs, self.chain.num_layers
        positions = min(self.pipelines.most_stages, _REFINED_STAGES)
        suffix = np.full(count + 1, inf)
        suffix[count] = 0.0
        self._suffix = [suffix]
        by_stop = np.argsort(pairs.stop, kind="stable")
        starts, rows = np.unique(pairs.first, return_index=True)
        stops, columns = np.unique(pairs.stop[by_stop], return_index=True)
        taken: list[Floats] = []
        for position in range(1, positions + 1):
            self.pipelines.check()
            taken.append(pairs.gpus * (pairs.forward + pairs.backward + self.remade(position)))
            suffix = np.full(count + 1, inf)
            if len(starts):
                suffix[starts] = np.minimum.reduceat(taken[-1] + self._suffix[-1][pairs.stop], rows)
            self._suffix.append(suffix)
        front = np.full(count + 1, inf)
        front[0] = 0.0
        bounds = [*columns, len(by_stop)]
        for index, stop in enumerate(stops):
            of = by_stop[bounds[index] : bounds[index + 1]]
            front[stop] = np.min(taken[-1][of] + front[pairs.first[of]])
        self._front = [front]
        for position in range(positions - 1, -1, -1):
            front = np.full(count + 1, inf)
            if len(stops):
                values = (taken[position] + self._front[0][pairs.first])[by_stop]
                front[stops] = np.minimum.reduceat(values, columns)
            front[0] = 0.0
            self._front.insert(0, front)


@dataclass(frozen=True, slots=True)
class Stages:
    """Candidates at a position, and the seconds of recomputation that they need there."""

    pairs: Pairs
    remade: Floats


class Merged:
    """The candidates of a limit, those of the same layers and as many GPUs as one."""

    def __init__(self, limited: Limited) -> None:
        self.limited, pairs = limited, limited.pairs
        key = (pairs.first * (limited.chain.num_layers + 1) + pairs.stop) * (limited.chain.num_gpus + 1) + pairs.gpus
        self._order = np.argsort(key, kind="stable")
        _, self._starts = np.unique(key[self._order], return_index=True)
        one = self._order[self._starts]
        least = {name: self._least(getattr(pairs, name)) for name in ("ready", "tail", "arrive", "back")}
        self.pairs = Pairs(
            pairs.first[one], pairs.stop[one], np.full(len(one), -1), pairs.gpus[one],
            self._least(pairs.forward), self._least(pairs.backward), *least.values(),
        )  # fmt: skip
        self._by_flight: dict[int, tuple[Floats, Floats]] = {}

    def _least(self, values: Floats) -> Floats:
        return np.minimum.reduceat(values[self._order], self._starts) if len(self._starts) else values

    def stages(self, position: int, chosen: Ints) -> Stages:
        """Return candidates at a position; their backward includes their recomputation."""
        w = self.limited.chain.in_flight(position)
        if w not in self._by_flight:
            remade, of = self.limited.remade(position), self.limited.pairs
            forward = self._least(np.where(np.isfinite(remade), of.forward, inf))
            if len(self._by_flight) * len(forward) > _KEPT:
                self._by_flight.pop(next(iter(self._by_flight)))
            self._by_flight[w] = (forward, self._least(of.backward + remade))
        forward, backward = (values[chosen] for values in self._by_flight[w])
        fits = np.isfinite(forward)
        found = replace(
            self.pairs[chosen], forward=np.where(fits, forward, 0.0), backward=np.where(fits, backward, 0.0)
        )  # fmt: skip
        return Stages(found, np.where(fits, 0.0, inf))


class Run:
    """One dynamic program: a limit, and an interval of T."""

    def __init__(self, limited: Limited, limit_s: float, low_s: float, high_s: float) -> None:
        self.limited, self.pipelines, self.chain = limited, limited.pipelines, limited.chain
        self.limit, self.low, self.high = limit_s, low_s, high_s
        self.slack = max(0.0, limit_s - low_s)
        self.caps: list[float] = []
        self._bound_positions()
        self.tables: list[Floats] = []

    def _bound_positions(self) -> None:
        """Bound c and D of every position: X = limit - low; (m - 1) c <= X + D and (m - w) c <= X - D."""
        chain, slack, behind = self.chain, self.slack, 0.0
        m = chain.num_microbatches
        for position in range(1, self.pipelines.most_stages + 1):
            w = chain.in_flight(position)
            if position > 1:
                behind = min(behind + self.pipelines.most_message_s, slack if w < m else self.high)
            by_all = self.limit / m
            if chain.schedule == "gpipe":
                most = step = slack / (m - 1) if m > 1 else inf
            elif w == m:
                most = min((slack + behind) / (m - 1), 2 * slack / (m - 1)) if m > 1 else inf
                step = most
            else:  # c is largest where both are equal, D + c where D is
                crossing = slack * (w - 1) / (2 * m - w - 1)
                at = min(behind, crossing)
                most = (slack + at) / (m - 1)
                step = min((slack + behind) / (m - 1), (slack - behind) / (m - w))
            self.caps.append(min(most, by_all))
            behind = min(behind + min(max(step, 0.0), by_all), self.high)

    def possible(self) -> bool:
        """Return False where merged candidates show already that there are none."""
        return self._reach(self.limited.merged) is not None

    def find(self) -> list[Piece] | None:
        """Return stages, or None."""
        position = self._reach(self.limited)
        return None if position is None else self._trace(position, int(np.argmin(self.tables[position][0])))

    def _reach(self, source: "Limited | Merged") -> int | None:
        """Return the number of stages with which layer 0 is reached first; None where it never is."""
        chain, count = self.chain, self.chain.num_layers
        if not self.caps or self.low > self.high or (max(self.caps) <= 0 and self.pipelines.work[0] > 0):
            return None
        self._bound_gpus()
        if self.width <= 0:
            return None
        base = source.pairs
        able = np.flatnonzero(base.forward + base.backward <= max(self.caps) * (1 + EPSILON))
        table = np.full((count + 1, self.width), inf)
        table[count, 0] = 0.0
        self.tables = [table]
        for position in range(1, len(self.caps) + 1):
            self.pipelines.check()
            chosen = able[self._viable(position, base, able, table)]
            table = self._extend(position, source.stages(position, chosen), table)
            self.tables.append(table)
            if position in chain.stage_counts and np.isfinite(table[0]).any():
                return position
            if not np.isfinite(table).any():
                return None
        return None

    def _bound_gpus(self) -> None:
        """Find the corridor (4) of every position."""
        gpus, count, most = self.chain.num_gpus, self.chain.num_layers, max(self.caps)
        self.lows: list[Ints] = [np.zeros(count + 1, dtype=np.int64)]
        self.highs: list[Ints] = [np.full(count + 1, -1)]
        self.highs[0][count] = 0
        reached = 0.0
        for position, cap in enumerate(self.caps, start=1):
            reached = max(reached, cap)
            low = np.clip(_gpus_of(self.limited.suffix(position), reached), 1, gpus + 1)
            high = gpus - np.clip(_gpus_of(self.limited.front(position), most), 0, gpus + 1)
            high[1:] = np.minimum(high[1:], gpus - 1)
            low[count], high[count] = 0, -1
            self.lows.append(low)
            self.highs.append(high)
        self.width = max(int((high - low).max()) for low, high in zip(self.lows, self.highs, strict=True)) + 1

    def _viable(self, position: int, pairs: Pairs, able: Ints, table: Floats) -> Ints:
        """Return which candidates join the corridors of two positions, from a suffix that is reached."""
        before = position - 1
        first, stop, size = pairs.first[able], pairs.stop[able], pairs.gpus[able]
        keep: Bools = (table.min(axis=1) < inf)[stop]
        keep &= self.lows[before][stop] + size <= self.highs[position][first]
        keep &= self.highs[before][stop] + size >= self.lows[position][first]
        return np.flatnonzero(keep)

    def _budget(self, position: int) -> Floats:
        """Return (5): the largest sum of a suffix from i with the GPUs of each column."""
        low, high = self.lows[position], self.highs[position]
        used = low[:, None] + np.arange(self.width)[None, :]
        left = self.chain.num_gpus - used
        pipelines, work = self.pipelines, self.limited.front(position)
        front = np.full(used.shape, inf)
        np.divide(work[:, None], left, out=front, where=left > 0)
        front = np.maximum(front, (pipelines.head + pipelines.after)[:, None])
        front[1:] += pipelines.least_back[1:, None] + (pipelines.start_s + pipelines.finish_s)
        front[0] = 0.0
        budget = np.full(used.shape, -1.0)
        np.subtract(self.high, front, out=budget, where=front < inf)
        budget[used > high[:, None]] = -1.0
        return budget

    def _most_behind(self, position: int, stages: Stages) -> Floats:
        """Return the largest D that the limit leaves each stage at a position; negative where it can't stand there."""
        chain, pipelines, pairs, remade = self.chain, self.pipelines, stages.pairs, stages.remade
        f, b = pairs.forward, pairs.backward + np.where(np.isfinite(remade), remade, 0.0)
        most = most_behind_s(chain, position, f, b, self.limit - pipelines.ends_of(pairs))
        if chain.linked:
            most = np.minimum(most, most_between_s(chain, position, f, b, self.slack))
        else:
            most = np.where(most >= 0, inf, -1.0)
        return np.where(np.isfinite(remade), most, -1.0)

    def _least_behind(self, stages: Stages) -> Floats:
        """Return the least D of every stage: limit >= H + m c >= low - D + (m - 1) c."""
        if self.chain.schedule == "gpipe" or not self.chain.linked:
            return np.full(len(stages.remade), -inf)
        remade = np.where(np.isfinite(stages.remade), stages.remade, 0.0)
        c = stages.pairs.forward + stages.pairs.backward + remade
        return np.asarray((self.chain.num_microbatches - 1) * c - self.slack, dtype=np.float64)

    def _extend(self, position: int, stages: Stages, table: Floats) -> Floats:
        """Return the least sums with one stage more in front."""
        width, pairs = self.width, stages.pairs
        new = np.full_like(table, inf)
        reached = table.min(axis=1)
        most = self._most_behind(position, stages)
        alive = np.flatnonzero(reached[pairs.stop] + pairs.back <= most)
        if not len(alive):
            return new
        first, stop = pairs.first[alive], pairs.stop[alive]
        own = pairs.own(stages.remade)[alive]
        back, most = pairs.back[alive], most[alive]
        least = self._least_behind(stages)[alive] - back
        padded = np.full((len(table), 3 * width), inf)
        padded[:, width : 2 * width] = table
        flat = padded.ravel()
        shift = np.clip(self.lows[position][first] - pairs.gpus[alive] - self.lows[position - 1][stop], -width, width)
        base = stop * (3 * width) + width + shift
        columns = np.arange(width)
        block = max(1, _BLOCK // width)
        starts = 0
        while starts < len(first):
            ends = min(starts + block, len(first))
            part = slice(starts, ends)
            values = flat[base[part, None] + columns[None, :]]
            np.maximum(values, least[part, None], out=values)
            values[values > (most - back)[part, None]] = inf
            values += own[part, None]
            rows, where = np.unique(first[part], return_index=True)
            reduced = np.minimum.reduceat(values, where, axis=0)
            new[rows] = np.minimum(new[rows], reduced)
            starts = ends
        new[new > self._budget(position)] = inf
        return new

    def _trace(self, position: int, column: int) -> list[Piece]:
        """Return the stages that attain a sum."""
        pieces: list[Piece] = []
        first, used = 0, int(self.lows[position][0]) + column
        while position > 0:
            index = np.flatnonzero(self.limited.pairs.first == first)
            stages = self.limited.stages(position, index)
            pairs, most = stages.pairs, self._most_behind(position, stages)
            at = used - pairs.gpus - self.lows[position - 1][pairs.stop]
            inside = (at >= 0) & (at < self.width)
            behind = np.where(inside, self.tables[position - 1][pairs.stop, np.clip(at, 0, self.width - 1)], inf)
            behind = np.maximum(behind, self._least_behind(stages) - pairs.back)
            total = np.where(behind <= most - pairs.back, behind + pairs.own(stages.remade), inf)
            best = int(np.argmin(total))
            pieces.append(Piece(int(pairs.first[best]), int(pairs.stop[best]), int(pairs.option[best])))
            used -= int(pairs.gpus[best])
            first, position = pieces[-1].stop, position - 1
        return pieces


def _gpus_of(seconds: Floats, cap: float) -> Ints:
    """Return how many GPUs take so many GPU-seconds at least, each at work for at most `cap`; many where it's inf."""
    if cap <= 0:
        return np.where(seconds > 0, 1 << 30, 0)
    return np.asarray(np.ceil(np.minimum(seconds / cap, 1 << 30) * (1 - EPSILON) - 1e-9), dtype=np.int64)

"""Chains of at most k stages none of whose loads is above a threshold, over the down-sets of a graph.

With r(D) the fewest stages in which all of down-set D is done and none is above T, r(J) = 1 + min r(I) over the I
inside J with load(I, J) <= T. It is found breadth by breadth, each down-set being a row once and a column until it is
reached. A down-set can only be on a chain if

    (1)  time(D) + crossing(D) <= r(D) * T
    (2)  rest(D) + crossing(D) <= (k - r(D)) * T

The same from the end tells which of those that are reached are on any chain, and among these the best chain is found by
dynamic programming over stages and loads.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from planner.solver.core.lattice import Bools, Floats
from planner.solver.core.loads import Ints, StateLoads

_SINGLE = 1e-5  # of a threshold: more than single precision loses
_DOUBLE = 1e-12
_COLUMNS, _ROWS = 512, 2048  # of a block
Cuts = tuple[int, ...]  # down-sets between stages, the empty one first and the whole graph last


class DeadlineError(Exception):
    """The time for a search is over."""


@dataclass(slots=True)
class Deadline:
    """When to stop, by a clock."""

    at_s: float
    clock: Callable[[], float] = time.monotonic

    @classmethod
    def after(cls, seconds: float, clock: Callable[[], float] = time.monotonic) -> "Deadline":
        """Return the deadline so many seconds from now."""
        return cls(clock() + seconds, clock)

    @property
    def left_s(self) -> float:
        """The seconds left."""
        return self.at_s - self.clock()

    def check(self) -> None:
        """Raise DeadlineError when it has passed."""
        if self.left_s <= 0:
            raise DeadlineError


class Chains:
    """Chains of at most `num_stages` stages over given down-sets, the first the empty one and the last all nodes.

    These may be some of a graph's: what is found then holds for chains of these.
    """

    def __init__(self, loads: StateLoads, num_stages: int, deadline: Deadline) -> None:
        self._loads, self._deadline, self._most = loads, deadline, num_stages
        self._before = loads.times + loads.crossing
        self._after = loads.times[-1] - loads.times + loads.crossing
        self._count = len(loads.times)
        self._order = np.argsort(loads.times, kind="stable")

    def reached(self, limit: float, *, exact: bool) -> Ints:
        """Return for each down-set the fewest stages to it, -1 where no chain within the limit can be by it.

        With `exact` the limit holds as it is, else where it is exceeded by a little more than single precision loses.
        """
        fewest = np.full(self._count, -1, dtype=np.int64)
        fewest[0] = 0
        everything = np.ones(self._count, dtype=bool)
        for depth in self._depths(limit, self._before, self._after, fewest, everything, exact=exact):
            if fewest[-1] == depth:
                break
        return fewest

    def remaining(self, limit: float, reached: Ints, *, exact: bool) -> Ints:
        """Return for each down-set that `reached` has the fewest stages from it to the end; -1 where too many."""
        fewest = np.full(self._count, -1, dtype=np.int64)
        fewest[-1] = 0
        for _ in self._depths(limit, self._after, self._before, fewest, reached >= 0, exact=exact, reached=reached):
            pass
        return fewest

    def _depths(
        self,
        limit: float,
        behind: Floats,
        ahead: Floats,
        fewest: Ints,
        usable: Bools,
        *,
        exact: bool,
        reached: Ints | None = None,
    ) -> Iterator[int]:
        """Grow `fewest` by a stage at a time, and yield the number; from the end to the start if `reached` is given."""
        margin = _DOUBLE if exact else _SINGLE
        limit *= 1 + margin
        earliest = np.ceil(behind / (limit * (1 + margin))).astype(np.int64)
        latest = self._most - np.ceil(ahead / (limit * (1 + margin))).astype(np.int64)
        if reached is not None:
            latest = np.minimum(latest, self._most - reached)
        times = self._loads.times
        new = np.flatnonzero(fewest == 0)
        for depth in range(1, self._most + 1):
            waiting = (usable & (fewest < 0) & (earliest <= depth) & (latest >= depth))[self._order]
            columns = self._order[waiting]
            new = new[np.argsort(times[new], kind="stable")]
            found = [np.zeros(0, dtype=np.int64)]
            for first in range(0, len(columns), _COLUMNS):
                part = columns[first : first + _COLUMNS]
                low, high = float(times[part[0]]), float(times[part[-1]])
                ends = (low, high + limit) if reached is not None else (low - limit, high)
                slack = 1e-9 * float(times[-1])
                window = np.searchsorted(times[new], (ends[0] - slack, ends[1] + slack))
                found.append(part[self._hits(new[window[0] : window[1]], part, limit, exact, reached is not None)])
            new = np.concatenate(found)
            fewest[new] = depth
            yield depth
            if not len(new):
                return

    def _hits(self, rows: Ints, columns: Ints, limit: float, exact: bool, backward: bool) -> Bools:
        """Return which columns a stage within the limit leads to from a row, or from which one leads to a row."""
        hit = np.zeros(len(columns), dtype=bool)
        for first in range(0, len(rows), _ROWS):
            self._deadline.check()
            part, left = rows[first : first + _ROWS], np.flatnonzero(~hit)
            if not len(left):
                break
            if backward:
                hit[left] = (self._loads.block(columns[left], part, exact=exact, limit=limit) <= limit).any(axis=1)
            else:
                hit[left] = (self._loads.block(part, columns[left], exact=exact, limit=limit) <= limit).any(axis=0)
        return hit

    def followed(self, reached: Ints) -> Cuts:
        """Return a chain by which the end was reached, each stage of it the lightest that leads on."""
        cuts = [self._count - 1]
        while cuts[-1]:
            rows = np.flatnonzero(reached == reached[cuts[-1]] - 1)
            loads = self._loads.block(rows, np.array([cuts[-1]]), exact=True)[:, 0]
            cuts.append(int(rows[int(loads.argmin())]))
        return tuple(reversed(cuts))

    def loads_of(self, cuts: Cuts) -> Floats:
        """Return the load of every stage of a chain."""
        return np.array(
            [float(self._loads.block(np.array([a]), np.array([b]), exact=True)[0, 0]) for a, b in pairwise(cuts)]
        )

    def best_among(
        self, states: Ints, reached: Ints, remaining: Ints, limit: float, most_pairs: int, *, power: float = np.inf
    ) -> Cuts | None:
        """Return the best chain over some down-sets within the limit; None where it has more than so many stages.

        F[q][J] = min over I of max(F[q - 1][I], load(I, J)), or for a finite power the sum of F[q - 1][I] and
        (load(I, J) / limit) ** power, which is small where all loads are, the largest above all.
        """
        states = states[np.argsort(self._loads.times[states], kind="stable")]
        pairs = self._pairs(states, reached, remaining, limit, most_pairs)
        if pairs is None:
            return None
        starts, stops, loads = pairs
        order = np.argsort(stops, kind="stable")
        starts, stops, costs = starts[order], stops[order], loads[order]
        together: np.ufunc = np.maximum
        if np.isfinite(power):
            costs, together = (costs / limit) ** power, np.add
        firsts = np.flatnonzero(np.diff(stops, prepend=-1))
        best = np.full((self._most + 1, self._count), np.inf)
        best[0, 0] = 0.0
        for depth in range(1, self._most + 1):
            best[depth, stops[firsts]] = np.minimum.reduceat(together(best[depth - 1, starts], costs), firsts)
        depth = int(best[:, -1].argmin())
        cuts = [self._count - 1]
        while depth:
            into = slice(*np.searchsorted(stops, (cuts[-1], cuts[-1] + 1)))
            ways = together(best[depth - 1, starts[into]], costs[into])
            cuts.append(int(starts[into][int(ways.argmin())]))
            depth -= 1
        return tuple(reversed(cuts))

    def _pairs(
        self, states: Ints, reached: Ints, remaining: Ints, limit: float, most_pairs: int
    ) -> tuple[Ints, Ints, Floats] | None:
        """Return (start, stop, load) of every stage within the limit that a chain can have."""
        limit *= 1 + _DOUBLE
        times, found, count = self._loads.times[states], [], 0
        for first in range(0, len(states), _COLUMNS):
            self._deadline.check()
            columns = states[first : first + _COLUMNS]
            low = float(times[first]) - limit - 1e-9 * float(times[-1])
            rows = states[int(np.searchsorted(times, low)) : first + len(columns)]
            loads = self._loads.block(rows, columns, exact=True, limit=limit)
            fits = (loads <= limit) & (reached[rows][:, None] + 1 + remaining[columns][None, :] <= self._most)
            fits &= rows[:, None] != columns[None, :]
            i, j = np.nonzero(fits)
            found.append((rows[i], columns[j], loads[i, j]))
            count += len(i)
            if count > most_pairs:
                return None
        return (
            np.concatenate([part[0] for part in found]),
            np.concatenate([part[1] for part in found]),
            np.concatenate([part[2] for part in found]),
        )

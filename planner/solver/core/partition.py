"""The best chain of at most k stages of a graph, or the best found with how far it can be from the best.

While a graph has few down-sets, thresholds between a lower bound and the best chain are tried until none is left, which
is the proof (`thresholds`). A graph of many is searched in parts, each small enough to be searched whole: the down-sets
on several topological orders first, then those near the cuts of a chain, again and again in other random directions.
In turn the largest load is made least, and a sum of powers of all loads: that moves on where many chains have one
largest load. The bound then is the larger of an even share and the slowest node.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from planner.solver.core.lattice import Bools, TooManyStatesError, down_sets
from planner.solver.core.loads import LoadOracle, StateLoads
from planner.solver.core.thresholds import Chains, Cuts, Deadline, DeadlineError

MOST_STATES = 1_000_000  # about 1 GB for 200 nodes
ROUNDS = 400  # of searches near a chain
SAME = 1e-9  # relatively: loads nearer than this are one
_SMALL = 60_000  # down-sets that are searched whole at once
_ROUNDS_BEFORE = 24  # near a chain, before more are
_NUM_ORDERS = 24
_KINDS = ((4.0, 700), (16.0, 700), (64.0, 700), (np.inf, 1500))  # of rounds: power, and down-sets near each cut
_FEW = 3000  # down-sets that are on chains, for the last step
_MOST_PAIRS = 6_000_000


@dataclass(frozen=True)
class Partition:
    """The nodes of each stage in order, the largest load, and what no partition's can be less than."""

    stages: tuple[frozenset[int], ...]
    bottleneck: float
    lower_bound: float
    num_states: int
    """All down-sets of the graph; 0 where they are too many, or were not needed."""

    @property
    def gap_fraction(self) -> float:
        """How far from the best it can be, 0 where it is proved to be the best."""
        gap = self.bottleneck / self.lower_bound - 1 if self.lower_bound else 0.0
        return gap if gap > 2 * SAME else 0.0


def best_partition(
    graph: LoadOracle,
    num_stages: int,
    *,
    time_limit_s: float = float("inf"),
    most_states: int = MOST_STATES,
    rounds: int = ROUNDS,
    seed: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> Partition:
    """Return the partition of a graph into at most so many stages, each waiting for earlier ones only, of least load.

    The same for the same arguments, unless the time limit, by a `clock`, or Ctrl-C ends it: then the best so far.
    """
    search = _Search(graph, num_stages, Deadline.after(time_limit_s, clock), random.Random(seed))
    try:
        search.run(most_states, rounds)
    except (DeadlineError, KeyboardInterrupt):
        search.ended = True
    return search.partition()


class _Search:
    """The best chain so far and the one that is searched around, as bit sets of nodes, and what is proved."""

    def __init__(self, graph: LoadOracle, num_stages: int, deadline: Deadline, chance: random.Random) -> None:
        self.graph, self.num_stages, self.deadline, self.chance = graph, num_stages, deadline, chance
        self.count = len(graph.successors)
        self.needs = [0] * self.count
        for node, after in enumerate(graph.successors):
            for other in after:
                self.needs[other] |= 1 << node
        self.lower = max(float(np.sum(graph.node_times)) / num_stages, *graph.node_times)
        self.num_states, self.ended = 0, False
        self.best = self.here = [0, (1 << self.count) - 1]
        self.upper = self.height = float(self._chains(self.best).loads_of((0, 1)).max())

    def partition(self) -> Partition:
        """Return what was found."""
        stages = tuple(frozenset(_nodes(after & ~before)) for before, after in pairwise(self.best))
        return Partition(stages, self.upper, min(self.lower, self.upper), self.num_states)

    def run(self, most_states: int, rounds: int) -> None:
        """Search until it is proved, or for so many rounds."""
        self._reduce(self._prefixes([self._order([range(self.count)]) for _ in range(_NUM_ORDERS)]))
        if self._proved():
            return
        try:
            lattice = down_sets(self.graph.successors, limit=most_states)
        except TooManyStatesError:
            self._rounds(rounds)
            return
        self.num_states = lattice.num_states
        if lattice.num_states > _SMALL:
            self._rounds(min(rounds, _ROUNDS_BEFORE))
        loads = self.graph.of_states(lattice.members)
        for cuts, lower in best_chains(loads, self.num_stages, self.deadline, self.lower, self.upper):
            self.lower = lower
            if cuts is not None:
                self._go([_as_bits(lattice.members[cut]) for cut in cuts])
        self.lower = max(self.lower, self.upper * (1 - SAME))

    def _rounds(self, rounds: int) -> None:
        """Search near a chain, in other directions each time."""
        for number in range(rounds):
            if self._proved():
                return
            power, most = _KINDS[number % len(_KINDS)]
            states = self._near(most)
            if np.isfinite(power):
                self._smooth(states, power)
            else:
                self._reduce(states)

    def _proved(self) -> bool:
        return self.upper <= self.lower * (1 + SAME)

    def _chains(self, states: Sequence[int]) -> Chains:
        """Return the chains over some down-sets, the smallest first."""
        return Chains(self.graph.of_states(_as_members(states, self.count)), self.num_stages, self.deadline)

    def _go(self, chain: list[int]) -> None:
        """Go to a chain, and keep it if it is the best."""
        self.here, self.height = chain, float(self._chains(chain).loads_of(tuple(range(len(chain)))).max())
        if self.height < self.upper:
            self.best, self.upper = self.here, self.height

    def _listed(self, states: set[int]) -> list[int]:
        """Return some down-sets and those of this chain, which is so never lost."""
        return sorted(states | set(self.here), key=lambda state: (state.bit_count(), state))

    def _reduce(self, states: set[int]) -> None:
        """Go to the chain of some down-sets whose largest load is the least."""
        listed = self._listed(states)
        loads = self.graph.of_states(_as_members(listed, self.count))
        for cuts, _ in best_chains(loads, self.num_stages, self.deadline, self.lower, self.height):
            if cuts is not None:
                self._go([listed[cut] for cut in cuts])

    def _smooth(self, states: set[int], power: float) -> None:
        """Go to the chain of some down-sets, none of whose loads is above this one's, with the least sum of powers."""
        listed = self._listed(states)
        chains, limit = self._chains(listed), self.height * (1 + SAME)
        reached = chains.reached(limit, exact=False)
        remaining = chains.remaining(limit, reached, exact=False)
        on = np.flatnonzero((reached >= 0) & (remaining >= 0))
        cuts = chains.best_among(on, reached, remaining, limit, _MOST_PAIRS, power=power)
        if cuts is not None:
            self._go([listed[cut] for cut in cuts])

    def _order(self, parts: Sequence[Sequence[int]]) -> list[int]:
        """Return a random topological order of the nodes, one part after the other."""
        order: list[int] = []
        done = 0
        for part in parts:
            inside = set(part)
            deep = self.chance.random() < 0.5  # to stay in a branch, or to take branches in turn
            ready = [node for node in part if self.needs[node] & ~done == 0]
            self.chance.shuffle(ready)
            while ready:
                node = ready.pop(-1 if deep else self.chance.randrange(len(ready)))
                order.append(node)
                done |= 1 << node
                after = [n for n in self.graph.successors[node] if n in inside and self.needs[n] & ~done == 0]
                self.chance.shuffle(after)
                ready += after
        return order

    def _prefixes(self, orders: Sequence[Sequence[int]]) -> set[int]:
        """Return the down-sets along some orders."""
        states = {0}
        for order in orders:
            state = 0
            for node in order:
                state |= 1 << node
                states.add(state)
        return states

    def _near(self, most: int) -> set[int]:
        """Return down-sets near the cuts of this chain, at most so many for each, in random directions."""
        stages = [_nodes(after & ~before) for before, after in pairwise(self.here)]
        order = self._order(stages)
        states = self._prefixes([order])
        at = 0
        for stage in stages[:-1]:
            at += len(stage)
            states |= self._around(order, at, most)
        return states

    def _around(self, order: Sequence[int], at: int, most: int) -> set[int]:
        """Return the down-sets that differ from the first `at` of an order by the nodes nearest to that place."""
        back = front = at
        found: set[int] = set()
        while back > 0 or front < self.count:
            back, front = max(0, back - 1), min(self.count, front + 1)
            larger = self._between(order[:back], order[back:front], most)
            if larger is None:
                break
            found = larger
        return found

    def _between(self, before: Sequence[int], free: Sequence[int], most: int) -> set[int] | None:
        """Return the down-sets of all of `before` and some of `free`; None where they are too many."""
        start = sum(1 << node for node in before)
        found, level = {start}, {start}
        while level:
            level = {
                state | 1 << node
                for state in level
                for node in free
                if not state >> node & 1 and self.needs[node] & ~state == 0
            }
            found |= level
            if len(found) > most:
                return None
        return found


def best_chains(
    loads: StateLoads, num_stages: int, deadline: Deadline, lower: float, upper: float
) -> Iterator[tuple[Cuts | None, float]]:
    """Yield better and better chains than `upper`, or None, with a lower bound for all of them; at last the best.

    `lower` is a lower bound to start from.
    """
    chains = Chains(loads, num_stages, deadline)
    exact = False
    while lower < upper * (1 - SAME):
        exact = exact or upper - lower < 1e-4 * upper
        limit = upper * (1 - SAME) if exact else (lower + upper) / 2
        reached = chains.reached(limit, exact=exact)
        if reached[-1] < 0:
            lower = limit
            yield None, lower
            continue
        cuts = chains.followed(reached)
        value = float(chains.loads_of(cuts).max())
        if value >= upper:  # within it in single precision alone
            exact = True
            continue
        upper = value
        yield cuts, lower
        remaining = chains.remaining(min(limit, upper), reached, exact=exact)
        on = np.flatnonzero((reached >= 0) & (remaining >= 0))
        best = chains.best_among(on, reached, remaining, upper, _MOST_PAIRS) if len(on) <= _FEW else None
        if best is not None:
            yield best, float(chains.loads_of(best).max())
            return


def _nodes(state: int) -> list[int]:
    return [node for node in range(state.bit_length()) if state >> node & 1]


def _as_bits(members: Bools) -> int:
    return int.from_bytes(np.packbits(members, bitorder="little").tobytes(), "little")


def _as_members(states: Sequence[int], count: int) -> Bools:
    num_bytes = (count + 7) // 8
    packed = np.frombuffer(b"".join(state.to_bytes(num_bytes, "little") for state in states), dtype=np.uint8)
    bits = np.unpackbits(packed.reshape(len(states), num_bytes), axis=1, bitorder="little")
    return np.asarray(bits[:, :count].astype(np.bool_))

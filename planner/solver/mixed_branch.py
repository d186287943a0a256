"""The search to the end over pipelines whose stages differ, by branch and bound from the last stage to the first.

In a node the suffix is played with the least messages (`waves.stage_ends`); what comes before it is bounded by

    (10)  G[p][b][g] = min over stages [a, b) and ways of max(G[p + 1][a][g + GPUs], station of it as stage p + 1)

the least step time that stages in front of p stages on g GPUs allow, over bound (1) of `core.pipeline`. A complete
pipeline is priced by `cost.evaluate`, which knows all messages and links.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from planner.solver.core.pipeline import Chain, Pairs, Piece
from planner.solver.core.pipelines import Pipelines
from planner.solver.incumbent import Incumbent
from planner.solver.tables import Floats, Ints
from planner.solver.waves import Suffixes, stage_ends

if TYPE_CHECKING:
    from planner.solver.mixed import MixedProblem

MAX_EXACT = 3000  # stages whose recomputation is asked for exactly


def size_of_search(chain: Chain) -> int:
    """Return how large the tables of a search to the end are."""
    pairs = sum(int(np.isfinite(option.forward + option.backward).sum()) for option in chain.options)
    return pairs * max(chain.stage_counts, default=0) * (chain.num_gpus + 1)


@dataclass(slots=True)
class _Node:
    bound: float
    position: int
    first: int
    gpus: int
    behind: float
    pieces: tuple[Piece, ...] = ()
    suffix: Suffixes | None = None
    tails: Floats | None = None


def search_exactly(problem: "MixedProblem", pipelines: Pipelines, incumbent: Incumbent, tolerance: float) -> bool:
    """Price complete pipelines until none can beat the best plan by more than `tolerance`.

    Return False, having searched nothing, where the recomputation of too many stages would have to be known.
    """
    search = _Search(problem, pipelines, incumbent, tolerance)
    if not search.refine():
        return False
    search.run()
    return True


class _Search:
    def __init__(self, problem: "MixedProblem", pipelines: Pipelines, incumbent: Incumbent, tolerance: float) -> None:
        self.problem, self.pipelines, self.incumbent, self.tolerance = problem, pipelines, incumbent, tolerance
        self.chain, self.pairs = problem.chain, pipelines.pairs()
        self.most = max(self.chain.stage_counts, default=0)
        self.remade: list[Floats] = []
        for position in range(1, self.most + 1):
            found, w = np.empty(len(self.pairs.first)), self.chain.in_flight(position)
            for k in range(len(self.chain.options)):
                of = np.flatnonzero(self.pairs.option == k)
                found[of] = problem.options.seconds(k, w, self.pairs.first[of], self.pairs.stop[of])
            self.remade.append(found)
        self._least_behind()
        self._front()

    def refine(self) -> bool:
        """Make recomputation exact where a plan better than the best may have the stage; False where that is much."""
        limit = self.incumbent.limit_s(self.tolerance)
        todo: list[tuple[int, Ints]] = []
        for position in range(1, self.most + 1):
            pairs, remade = self.pairs, self.remade[position - 1]
            behind = self.least[position - 1][pairs.stop] + pairs.back
            bounds = self.pipelines.station_of(position, pairs, remade, behind)
            bounds = np.maximum(bounds, self.front[position].min(axis=1)[pairs.first])
            unsure = self.problem.options.forces_any | (remade > 0)
            todo.append((position, np.flatnonzero((bounds < limit) & unsure)))
        if sum(len(index) for _, index in todo) > MAX_EXACT:
            return False
        for position, index in todo:
            w = self.chain.in_flight(position)
            for i in index:
                self.incumbent.budget.check()
                option, first, stop = int(self.pairs.option[i]), int(self.pairs.first[i]), int(self.pairs.stop[i])
                choice = self.problem.options.choose(option, w, first, stop)
                self.remade[position - 1][i] = np.inf if choice is None else choice.seconds
        self._least_behind()
        self._front()
        return True

    def _least_behind(self) -> None:
        """Find the least sum of a suffix from each layer on, by its stages."""
        pairs = self.pairs
        self.least = [np.full(self.chain.num_layers + 1, np.inf)]
        self.least[0][-1] = 0.0
        for position in range(1, self.most + 1):
            values = self.least[-1][pairs.stop] + pairs.own(self.remade[position - 1])
            found = np.full(self.chain.num_layers + 1, np.inf)
            np.minimum.at(found, pairs.first, values)
            self.least.append(found)

    def _front(self) -> None:
        """Fill (10)."""
        pairs, chain = self.pairs, self.chain
        shape = (chain.num_layers + 1, chain.num_gpus + 1)
        self.front: list[Floats] = []
        beyond = np.full(shape, np.inf)
        for position in range(self.most, -1, -1):
            table = np.full(shape, np.inf)
            if position < self.most:
                behind = self.least[position][pairs.stop] + pairs.back
                station = self.pipelines.station_of(position + 1, pairs, self.remade[position], behind)
                for gpus in range(chain.num_gpus + 1):
                    fits = pairs.gpus + gpus <= chain.num_gpus
                    used = np.minimum(pairs.gpus + gpus, chain.num_gpus)
                    values = np.where(fits, np.maximum(station, beyond[pairs.first, used]), np.inf)
                    np.minimum.at(table[:, gpus], pairs.stop, values)
            if position in chain.stage_counts:
                table[0, :] = 0.0
            self.front.insert(0, table)
            beyond = table

    def run(self) -> None:
        """Search; plans go to the incumbent."""
        stack = [_Node(0.0, 0, self.chain.num_layers, 0, 0.0)]
        while stack:
            node = stack.pop()
            if node.bound >= self.incumbent.limit_s(self.tolerance):
                continue
            self.incumbent.budget.spend()
            for child in sorted(self._children(node), key=lambda child: -child.bound):
                if child.first:
                    stack.append(child)
                elif child.bound < self.incumbent.limit_s(self.tolerance):
                    self.problem.offer(child.pieces, self.incumbent)

    def _children(self, node: _Node) -> list[_Node]:
        """Return the ways to put one more stage in front."""
        position, chain = node.position + 1, self.chain
        if position > self.most:
            return []
        limit = self.incumbent.limit_s(self.tolerance)
        at = np.flatnonzero((self.pairs.stop == node.first) & (self.pairs.gpus + node.gpus <= chain.num_gpus))
        pairs, remade = self.pairs[at], self.remade[position - 1][at]
        behind = node.behind + pairs.back
        used = pairs.gpus + node.gpus
        bounds = np.maximum(self.pipelines.station_of(position, pairs, remade, behind), node.bound)
        bounds = np.maximum(bounds, self.front[position][pairs.first, used])
        keep = bounds < limit
        pairs, remade, behind, used, bounds = pairs[keep], remade[keep], behind[keep], used[keep], bounds[keep]
        if not len(bounds):
            return []
        suffix, tails = self._put_in_front(node, pairs, remade)
        if chain.linked:
            later = pairs.first > 0
            arrive = np.where(later, self.pipelines.head[pairs.first] + self.pipelines.start_s, 0.0)
            after = np.where(later, self.pipelines.after[pairs.first] + self.pipelines.finish_s, 0.0)
            ends = stage_ends(chain.schedule, chain.num_microbatches, suffix, arrive, np.zeros(len(arrive)))
            bounds = np.maximum(bounds, np.maximum((ends + tails).max(axis=1), ends[:, 0] + after))
        own = pairs.own(remade)
        return [
            _Node(
                bound=float(bounds[i]),
                position=position,
                first=int(pairs.first[i]),
                gpus=int(used[i]),
                behind=float(node.behind + own[i]),
                pieces=(Piece(int(pairs.first[i]), int(pairs.stop[i]), int(pairs.option[i])), *node.pieces),
                suffix=suffix.rows(slice(i, i + 1)),
                tails=tails[i : i + 1],
            )
            for i in np.flatnonzero(bounds < limit)
        ]

    def _put_in_front(self, node: _Node, pairs: Pairs, remade: Floats) -> tuple[Suffixes, Floats]:
        """Return each suffix with a stage more, and the tails of its stages."""
        count, latency = len(pairs.first), self.chain.latency_s
        forward, backward, ready = pairs.forward[:, None], (pairs.backward + remade)[:, None], pairs.ready[:, None]
        if node.suffix is None or node.tails is None:
            none = np.zeros((count, 0))
            empty = Suffixes(forward, backward, none, none, none, none, none.astype(bool), ready)
            return empty, pairs.tail[:, None]
        there = self.chain.options[node.pieces[0].option].arrive[node.first]
        delay = np.full((count, 1), latency)
        front = Suffixes(
            forward, backward, np.full((count, 1), there), delay, (pairs.back - latency)[:, None], delay,
            np.ones((count, 1), dtype=bool), ready,
        )  # fmt: skip
        tails = np.concatenate((pairs.tail[:, None], np.broadcast_to(node.tails, (count, node.tails.shape[1]))), axis=1)
        return node.suffix.with_front(front), tails

"""The inner search: the best cuts and recomputed layers of one setting, exactly, by branch and bound.

Stages are fixed from the last to the first. In a node the suffix is played exactly (`waves.stage_ends`), and what
comes before it is bounded by a dynamic program over bound (1) of `problem`:

    (5)  G[s][b] = min over a of max(G[s - 1][a], station of [a, b) at position s - 1)

the least step time that s stages covering layers [0, b) allow. A node is dropped where the larger of both is no better
than the best plan known. A complete plan is priced by `cost.evaluate`, through `Incumbent.offer`.
"""

from dataclasses import dataclass, field

import numpy as np

from planner.solver.incumbent import TOLERANCE, Budget, Incumbent
from planner.solver.problem import Problem, Span
from planner.solver.recompute import Choice
from planner.solver.tables import Floats
from planner.solver.waves import Suffixes, stage_ends


@dataclass(slots=True)
class Node:
    """A suffix of stages; `bound` is proven for every plan that ends so."""

    bound: float
    position: int
    start: int
    stop: int
    suffix: Suffixes | None = None
    tails: Floats | None = None
    spans: tuple[Span, ...] = ()
    choices: tuple[Choice, ...] = ()
    chained: bool = True
    """every stage of the suffix sends to the next: it can be played"""


@dataclass(slots=True)
class Branch:
    """The state of the search in one setting: what is open, and the bound of all that is."""

    problem: Problem
    prefix: list[Floats] = field(default_factory=list)
    stations: list[Floats] = field(default_factory=list)
    open: list[Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stations = [self.problem.station(s) for s in range(self.problem.setting.pp_degree)]
        self._relax()
        self.restart()

    def _relax(self) -> None:
        """Do the dynamic program (5) over the stations."""
        best = np.full(self.problem.num_layers + 1, np.inf)
        best[0] = 0.0
        self.prefix = [best]
        for station in self.stations:
            self.prefix.append(np.min(np.maximum(self.prefix[-1][:, None], station), axis=0))

    def refine(self, limit_s: float, budget: Budget) -> None:
        """Put the recomputation that stages really need in place of its bound, where a better plan might use it."""
        changed = False
        for s, station in enumerate(self.stations):
            below = np.maximum(station, self.prefix[s][:, None]) < limit_s
            if self.problem.settle(s, below, budget.check):
                self.stations[s] = self.problem.station(s)
                changed = True
        if changed:
            self._relax()
            for node in self.open:
                node.bound = max(node.bound, self.root_bound)

    @property
    def root_bound(self) -> float:
        """The least step time by (5); inf where nothing fits."""
        return float(self.prefix[-1][-1])

    @property
    def bound(self) -> float:
        """The least bound of what is open; inf where nothing is."""
        return min((node.bound for node in self.open), default=float("inf"))

    def relaxed_spans(self) -> list[Span]:
        """Return the stages that attain (5): a good first plan."""
        spans, stop = [], self.problem.num_layers
        for s in reversed(range(self.problem.setting.pp_degree)):
            values = np.maximum(self.prefix[s], self.stations[s][:, stop])
            least = values.min()
            # Among equal ones the stage nearest to an even share: what regular plans look like.
            share = stop - stop / (s + 1)
            first = int(min(np.flatnonzero(values <= least * (1 + TOLERANCE)), key=lambda a: (abs(a - share), a)))
            spans.append((first, stop))
            stop = first
        return spans[::-1]

    def search(self, incumbent: Incumbent, tolerance: float, max_nodes: int) -> bool:
        """Price complete plans until nothing open is of interest (`Incumbent.limit_s`): return whether that is so.

        Gives up after `max_nodes`; then, and where OutOfTimeError is raised, what is left is in `open`.
        """
        end = incumbent.budget.num_nodes + max_nodes
        while self.open:
            node = self.open[-1]
            if node.bound >= incumbent.limit_s(tolerance):
                self.open.pop()
                continue
            if incumbent.budget.num_nodes >= end:
                return False
            incumbent.budget.spend()
            children = self._children(node, incumbent.limit_s(tolerance))
            if node.position > 0:  # in one step: an interrupt never loses what is open
                self.open[-1:] = sorted(children, key=lambda child: -child.bound)
                continue
            for leaf in children:
                if leaf.bound < incumbent.limit_s(tolerance):
                    incumbent.offer(self.problem, leaf.spans, leaf.choices)
            self.open.pop()
        return True

    def restart(self) -> None:
        """Open everything again: a search to a smaller tolerance follows."""
        stages, count = self.problem.setting.pp_degree, self.problem.num_layers
        self.open = [Node(self.root_bound, stages - 1, count, -1)]

    def _children(self, node: Node, limit: float) -> list[Node]:
        """Return the ways to put one more stage in front of a node whose bound is below the limit."""
        problem, s, b = self.problem, node.position, node.start
        bounds = np.maximum(np.maximum(self.prefix[s], self.stations[s][:, b]), node.bound)
        firsts = np.flatnonzero(bounds < limit)
        found = [(int(a), choice) for a in firsts if (choice := problem.recompute(s, int(a), b)) is not None]
        if not found:
            return []
        firsts = np.array([a for a, _ in found], dtype=np.int64)
        extra = np.array([choice.seconds for _, choice in found])
        front, linked = problem.fronts(s, b, node.stop, firsts, extra)
        suffix = front if node.suffix is None else node.suffix.with_front(front)
        tails = problem.positions[s].states.tail_s[firsts, b][:, None]
        if node.tails is not None:
            tails = np.concatenate((tails, np.broadcast_to(node.tails, (len(firsts), node.tails.shape[1]))), axis=1)
        bounds = bounds[firsts]
        chained = linked & node.chained
        if chained.any():
            head, after = problem.paths(s)
            arrive = head[firsts, b] if s else np.zeros(len(firsts))
            ends = stage_ends(
                problem.setting.schedule, problem.setting.num_microbatches, suffix, arrive, problem.pace(s, firsts, b)
            )
            last = ends[:, 0] + (after[firsts, b] if s else tails[:, 0] + problem.least_tied_s)
            bounds = np.where(chained, np.maximum(bounds, np.maximum((ends + tails).max(axis=1), last)), bounds)
        return [
            Node(
                bound=float(bounds[index]),
                position=s - 1,
                start=a,
                stop=b,
                suffix=suffix.rows(slice(index, index + 1)),
                tails=tails[index : index + 1],
                spans=((a, b), *node.spans),
                choices=(choice, *node.choices),
                chained=bool(chained[index]),
            )
            for index, (a, choice) in enumerate(found)
            if bounds[index] < limit
        ]

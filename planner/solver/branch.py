"""The inner search: the best cuts and recomputed layers of one setting, exactly, by branch and bound.

Stages are fixed from the last to the first. In a node the suffix is played exactly (`waves.stage_ends`), and what
comes before it is bounded by a dynamic program over bound (1) of `problem`:

    (5)  G[s][b] = min over a of max(G[s - 1][a], station of [a, b) at position s - 1)

the least step time that s stages covering layers [0, b) allow. A node is dropped where the larger of both is no better
than the best plan known. A complete plan is priced by `cost.evaluate`, through `Incumbent.offer`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.solver.problem import Problem
from planner.solver.recompute import Choice
from planner.solver.tables import Floats
from planner.solver.waves import Suffixes, stage_ends

TOLERANCE = 1e-10  # a plan better by less, relatively, is not searched for

Span = tuple[int, int]


class OutOfTimeError(Exception):
    """The search was stopped; what is known so far is the answer."""


@dataclass(slots=True)
class Budget:
    """Ends the search: after `deadline` (time.monotonic), after `max_nodes`, or never."""

    deadline: float | None = None
    max_nodes: int | None = None
    num_nodes: int = 0

    def spend(self) -> None:
        """Count a node; OutOfTimeError where the time is up."""
        self.num_nodes += 1
        self.check()

    def check(self) -> None:
        """OutOfTimeError where the time is up."""
        if self.max_nodes is not None and self.num_nodes > self.max_nodes:
            raise OutOfTimeError
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise OutOfTimeError


Offer = Callable[[Problem, Sequence[Span], Sequence[Choice]], float]


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
    refined: bool = False

    def __post_init__(self) -> None:
        stages, count = self.problem.setting.pp_degree, self.problem.num_layers
        self.stations = [self.problem.station(s) for s in range(stages)]
        self._relax()
        self.open = [Node(self.root_bound, stages - 1, count, -1)]

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
            extra = self.problem.extra[s]
            below = (extra > 0) & (np.maximum(station, self.prefix[s][:, None]) < limit_s)
            for a, b in zip(*np.nonzero(below), strict=True):
                budget.check()
                choice = self.problem.recompute(s, int(a), int(b))
                extra[a, b] = np.inf if choice is None else choice.seconds
            if below.any():
                self.stations[s] = self.problem.station(s)
                changed = True
        if changed:
            self._relax()
            for node in self.open:
                node.bound = max(node.bound, self.root_bound)
        self.refined = True

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

    def even_spans(self) -> list[Span]:
        """Return stages of equal layer counts, the first ones longer where they don't divide."""
        stages, count = self.problem.setting.pp_degree, self.problem.num_layers
        sizes = [count // stages + (s < count % stages) for s in range(stages)]
        stops = np.cumsum(sizes).tolist()
        return [(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]

    def choose(self, spans: Sequence[Span]) -> list[Choice] | None:
        """Return the recomputed layers of every stage; None where a stage can't be."""
        choices = []
        for s, (first, stop) in enumerate(spans):
            choice = self.problem.recompute(s, first, stop) if self.problem.positions[s].allowed[first, stop] else None
            if choice is None:
                return None
            choices.append(choice)
        return choices

    def search(self, incumbent_s: float, offer: Offer, budget: Budget) -> None:
        """Price complete plans until nothing open can beat the best one; OutOfTimeError leaves the rest in `open`.

        `offer` prices a plan and returns the best step time known then.
        """
        while self.open:
            node = self.open[-1]
            if node.bound >= incumbent_s * (1 - TOLERANCE):
                self.open.pop()
                continue
            budget.spend()
            children = self._children(node, incumbent_s)
            if node.position > 0:  # in one step: an interrupt never loses what is open
                self.open[-1:] = sorted(children, key=lambda child: -child.bound)
                continue
            for leaf in children:
                if leaf.bound < incumbent_s * (1 - TOLERANCE):
                    incumbent_s = min(incumbent_s, offer(self.problem, leaf.spans, leaf.choices))
            self.open.pop()

    def _children(self, node: Node, incumbent_s: float) -> list[Node]:
        """Return the ways to put one more stage in front of a node that may still beat the incumbent."""
        problem, s, b = self.problem, node.position, node.start
        limit = incumbent_s * (1 - TOLERANCE)
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

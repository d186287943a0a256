"""One setting of the outer search, decided step by step: each step is taken only while the setting may still win."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.solver.branch import Branch
from planner.solver.candidates import Candidates
from planner.solver.corridor import Corridor
from planner.solver.incumbent import Incumbent
from planner.solver.neighbours import improve
from planner.solver.problem import Problem, Setting

FIRST_NODES = 200  # of the branch and bound, before others have their turn; doubled every time
PRECISION = 2e-3  # of a bound that only decides about the order


@dataclass(slots=True)
class OpenAlike:
    """Settings that differ in sharding and data parallelism alone: bounded together before each is looked at."""

    bound: float
    parts: "list[OpenSetting]"

    @property
    def label(self) -> str:
        """What progress shows."""
        return self.parts[0].label

    def advance(self, incumbent: Incumbent, tolerance: float) -> "Sequence[OpenAlike | OpenSetting]":
        """Raise the bound by (8) over the least of all; return this where that is enough, else the settings."""
        incumbent.budget.spend()
        limit = incumbent.limit_s(tolerance)
        if limit == float("inf"):
            return self.parts
        problem = incumbent.problems.least([part.setting for part in self.parts])
        corridor = Corridor(Candidates(problem, limit))
        if problem.fits:
            self.bound, _ = corridor.tighten(self.bound, limit, PRECISION)
            if self.bound < limit:
                return [replace(part, bound=max(part.bound, self.bound)) for part in self.parts]
        else:
            self.bound = float("inf")
        return [self] if self.bound < float("inf") else []


@dataclass(slots=True)
class OpenSetting:
    """A setting that waits for its next step, with what is proven of it so far."""

    bound: float
    setting: Setting
    begun: bool = False
    refined_to_s: float = float("inf")
    """the step time below which the recomputation of all stages is known exactly"""
    searched_to: float = float("inf")
    """the tolerance of the branch and bound that is under way"""
    max_nodes: int = FIRST_NODES
    visits: int = 0
    """how often it was searched without an end"""
    branch: Branch | None = None

    @property
    def label(self) -> str:
        """What progress shows."""
        return f"{self.setting.pp_degree} stages"

    def advance(self, incumbent: Incumbent, tolerance: float) -> "list[OpenSetting]":
        """Take one step; return what is still open: this, with a larger bound, or nothing.

        The steps: tables, a bound over them and first plans; the same with the recomputation that stages really need,
        and the plans near the best of these; branch and bound.
        """
        incumbent.budget.spend()
        problem = incumbent.problems.of(self.setting)
        if not self.begun:
            self.begun = True
            if not problem.fits:
                return []
            if problem.chained:
                self._bound_chain(incumbent, problem, tolerance)
            else:
                self._bound_graph(incumbent, problem, tolerance)
        elif problem.chained and self.refined_to_s > (limit := incumbent.limit_s(tolerance)):
            self.refined_to_s = limit
            self._bound_chain(incumbent, problem, tolerance, settle=True)
        else:
            self._search(incumbent, problem, tolerance)
        return [self] if self.bound < float("inf") else []

    def _bound_chain(self, incumbent: Incumbent, problem: Problem, tolerance: float, *, settle: bool = False) -> None:
        """Raise the bound by (8), with recomputation known exactly if `settle`; offer plans near what attains it."""
        if incumbent.step_time_s == float("inf") and not self._find_any(incumbent, problem):
            self.bound = float("inf")
            return
        limit = incumbent.limit_s(tolerance)
        corridor = Corridor(Candidates(problem, limit))
        if settle:
            corridor.settle(limit, incumbent.budget.check)
        self.bound, spans = corridor.tighten(self.bound, limit, PRECISION)
        if spans is not None:
            near = improve(corridor.candidates, (problem.even_spans(), spans), incumbent)
            if near is not None:
                incumbent.offer(problem, near)

    def _find_any(self, incumbent: Incumbent, problem: Problem) -> bool:
        """Offer a first plan; return False where this setting has none."""
        corridor = Corridor(Candidates(problem, float("inf")))
        spans = corridor.stages_within(float("inf"))
        if spans is not None and problem.choose(spans) is None:
            corridor.settle(float("inf"), incumbent.budget.check)
            spans = corridor.stages_within(float("inf"))
        if spans is None:
            return False
        near = improve(corridor.candidates, (problem.even_spans(), spans), incumbent)
        incumbent.offer(problem, near or spans)
        return True

    def _bound_graph(self, incumbent: Incumbent, problem: Problem, tolerance: float) -> None:
        """Raise the bound by (5); offer the plan that attains it, and an even one."""
        branch = Branch(problem)
        self.bound = max(self.bound, branch.root_bound)
        if self.bound < incumbent.limit_s(tolerance):
            for spans in (problem.even_spans(), branch.relaxed_spans()):
                incumbent.offer(problem, spans)

    def _search(self, incumbent: Incumbent, problem: Problem, tolerance: float) -> None:
        if tolerance != self.searched_to:
            self.branch = Branch(problem)
            self.branch.refine(incumbent.limit_s(tolerance), incumbent.budget)
            self.searched_to = tolerance
        assert self.branch is not None
        done = self.branch.search(incumbent, tolerance, self.max_nodes)
        self.max_nodes *= 2
        self.visits += not done
        reached = incumbent.limit_s(tolerance)
        self.bound = max(self.bound, reached if done else min(self.branch.bound, reached))

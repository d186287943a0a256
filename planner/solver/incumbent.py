"""What all parts of the search share: the best plan so far, and the time there is."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from planner.plan import Plan
from planner.solver.differences import step_time_s
from planner.solver.problem import Problem, Setting, Span
from planner.solver.problems import Problems
from planner.solver.recompute import Choice

TOLERANCE = 1e-10  # a plan better by less, relatively, is not searched for


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


@dataclass(slots=True)
class Incumbent:
    """The best plan so far, and the best one of every setting that was priced.

    Only plans that take less than `to_beat_s` count, where the question is whether there is one.
    """

    problems: Problems
    budget: Budget
    to_beat_s: float = float("inf")
    best: Plan | None = None
    best_setting: Setting | None = None
    by_setting: dict[Setting, Plan] = field(default_factory=dict)
    num_priced: int = 0
    left_out_s: float = float("inf")
    """a bound of what is not searched; inf where everything is"""

    @property
    def step_time_s(self) -> float:
        """The best step time, or the one to beat; inf where there is neither."""
        return step_time_s(self.best) if self.best is not None else self.to_beat_s

    def limit_s(self, tolerance: float) -> float:
        """Return the step time below which a plan is still of interest: better by more than `tolerance`, relatively."""
        return self.step_time_s * (1 - max(tolerance, TOLERANCE))

    def offer(self, problem: Problem, spans: Sequence[Span], choices: Sequence[Choice] | None = None) -> None:
        """Price a plan by `cost.evaluate`, and keep it if it is better; without `choices`, with those of least time.

        Of two plans that are equally fast, the one of the more regular setting is kept.
        """
        choices = choices or problem.choose(spans)
        if choices is not None:
            plan = self.price(problem.setting, spans, [choice.layers for choice in choices])
            self.consider(problem.setting, plan)

    def price(self, setting: Setting, spans: Sequence[Span], remade: Sequence[Sequence[int]]) -> Plan:
        """Return a plan, priced."""
        plan = self.problems.plan(setting, spans, remade)
        self.num_priced += 1
        return plan.model_copy(update={"prediction": self.problems.space.pricer.evaluate(plan)})

    def consider(self, setting: Setting, plan: Plan) -> Plan:
        """Keep a priced plan that fits, if it is better."""
        found_s, best_s = step_time_s(plan), self.step_time_s
        known = self.by_setting.get(setting)
        if known is None or found_s < step_time_s(known):
            self.by_setting[setting] = plan
        regular = self.best is not None and (self.best_setting is None or setting < self.best_setting)
        tie = regular and found_s <= best_s * (1 + TOLERANCE)
        if found_s < best_s * (1 - TOLERANCE) or tie:
            self.best, self.best_setting = plan, setting
        return plan

    def offer_plan(self, plan: Plan) -> None:
        """Price a plan of no setting, whose stages may differ, and keep it if it is faster than any other."""
        prediction = self.problems.space.pricer.evaluate(plan)
        self.num_priced += 1
        if prediction.step_time_s < self.step_time_s * (1 - TOLERANCE):
            self.best, self.best_setting = plan.model_copy(update={"prediction": prediction}), None

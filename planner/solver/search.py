"""The outer search: settings in the order of their bounds, one incumbent for all, until none can beat it.

A setting waits with bound (6) of `settings`, then with (5) of `branch` over its tables, then with (5) where the
recomputation that stages really need is known; then the inner search decides it. It is dropped as soon as one of these
reaches the best plan's step time: never axis by axis.
"""

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from planner.plan import Origin, Plan
from planner.solver.branch import TOLERANCE, Branch, Budget, OutOfTimeError, Span
from planner.solver.problem import Problem, Setting
from planner.solver.problems import Problems
from planner.solver.recompute import Choice
from planner.solver.settings import settings_with_bounds
from planner.solver.space import Space

Progress = Callable[[str, int, int], None]


@dataclass(slots=True)
class Incumbent:
    """The best plan so far, and the best one of every setting that was priced.

    Only plans that take less than `to_beat_s` count, where the question is whether there is one.
    """

    problems: Problems
    to_beat_s: float = float("inf")
    best: Plan | None = None
    by_setting: dict[Setting, Plan] = field(default_factory=dict)
    num_priced: int = 0

    @property
    def step_time_s(self) -> float:
        """The best step time, or the one to beat; inf where there is neither."""
        return step_time_s(self.best) if self.best is not None else self.to_beat_s

    def offer(self, problem: Problem, spans: Sequence[Span], choices: Sequence[Choice]) -> float:
        """Price a plan by `cost.evaluate`, keep it if it is better, and return the best step time."""
        plan = self.problems.plan(problem.setting, spans, choices)
        prediction = self.problems.space.pricer.evaluate(plan)
        self.num_priced += 1
        plan = plan.model_copy(update={"prediction": prediction})
        known = self.by_setting.get(problem.setting)
        if known is None or prediction.step_time_s < step_time_s(known):
            self.by_setting[problem.setting] = plan
        if prediction.step_time_s < self.step_time_s * (1 - TOLERANCE):
            self.best = plan
        return self.step_time_s


def step_time_s(plan: Plan) -> float:
    """Return the predicted step time of a priced plan."""
    assert plan.prediction is not None
    return plan.prediction.step_time_s


@dataclass(slots=True)
class Outcome:
    """What a search found, and what it proved."""

    incumbent: Incumbent
    lower_bound_s: float
    num_settings: int
    num_nodes: int
    was_ended: bool
    """by the time limit, Ctrl-C or `max_nodes`, before it was through"""
    waiting: list[tuple[float, Setting]]
    """Settings that were dropped by their bound before they were priced, in the order of the bounds."""


def search(
    space: Space,
    origin: Origin,
    progress: Progress,
    time_limit_s: float | None,
    *,
    any_plan: bool = False,
    to_beat_s: float = float("inf"),
    max_nodes: int | None = None,
) -> Outcome:
    """Return the best plan over all settings, and a lower bound proven for `cost.evaluate` of every plan.

    `any_plan` ends the search as soon as there is a plan: the question then is whether one exists. With `to_beat_s`
    only faster plans are looked for: without one, the bound is that time. `max_nodes` ends the search as the time limit
    does, but the same on every machine.
    """
    problems = Problems(space, origin)
    incumbent = Incumbent(problems, to_beat_s)
    budget = Budget(None if time_limit_s is None else time.monotonic() + time_limit_s, max_nodes)
    settings, left_out = settings_with_bounds(space)
    queue: list[tuple[float, int, Setting, Branch | None]] = [
        (bound, index, setting, None) for index, (bound, setting) in enumerate(settings)
    ]
    heapq.heapify(queue)
    bound = float("inf")
    branch: Branch | None = None
    last_report, was_ended = time.monotonic(), False
    try:
        while queue and queue[0][0] < incumbent.step_time_s * (1 - TOLERANCE):
            if any_plan and incumbent.best is not None:
                raise OutOfTimeError
            bound, index, setting, branch = heapq.heappop(queue)
            now = time.monotonic()
            if now - last_report > 0.1:
                last_report = now
                progress(f"{setting.pp_degree} stages", len(settings) - len(queue), len(settings))
            if branch is not None and branch.refined:
                branch.search(incumbent.step_time_s, incumbent.offer, budget)
            else:  # sharpen its bound, and let it wait for its turn again
                budget.spend()
                problem = problems.of(setting) if branch is None else branch.problem
                if not problem.fits:
                    branch = None
                    continue
                waiting_branch = branch or Branch(problem)
                if branch is not None:
                    branch.refine(incumbent.step_time_s, budget)
                sharper = max(bound, waiting_branch.root_bound)
                if sharper < incumbent.step_time_s * (1 - TOLERANCE):
                    offer_first_plans(waiting_branch, incumbent)
                    heapq.heappush(queue, (sharper, index, setting, waiting_branch))
            branch = None
    except (OutOfTimeError, KeyboardInterrupt):
        was_ended = True
        remaining = [bound if branch is None else max(bound, branch.bound), *(item[0] for item in queue)]
        lower = min(left_out, incumbent.step_time_s, *remaining)
    else:
        lower = min(left_out, incumbent.step_time_s)
    waiting = sorted((item[0], item[2]) for item in queue)
    progress("done", len(settings), len(settings))
    return Outcome(incumbent, lower, len(settings), budget.num_nodes, was_ended, waiting)


def offer_first_plans(branch: Branch, incumbent: Incumbent) -> None:
    """Price an even plan and the one that attains the bound: where they tie, the even one stays."""
    for spans in (branch.even_spans(), branch.relaxed_spans()):
        choices = branch.choose(spans)
        if choices is not None:
            incumbent.offer(branch.problem, spans, choices)

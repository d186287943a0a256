"""The plans that lost, and why."""

from planner.plan import Plan, RunnerUp
from planner.solver.branch import Branch
from planner.solver.differences import SAME, reason, slower_fraction, step_time_s, summary
from planner.solver.search import Outcome, offer_first_plans

MAX_PRICED = 40  # settings that the search dropped, priced only to be shown


def runners_up(outcome: Outcome, top: int) -> tuple[RunnerUp, ...]:
    """Return the best plans of other degrees than the winner's, then of other settings; best first.

    Where the search priced too few, the best-bounded of those it dropped are priced now. A runner-up is the best plan
    that was priced for its degrees; only the winner is proven best.
    """
    best = outcome.incumbent.best
    if best is None or top < 1:
        return ()
    for _, setting in outcome.waiting[:MAX_PRICED]:
        if len(_by_degrees(outcome)) > top:
            break
        if setting not in outcome.incumbent.by_setting:
            branch = Branch(outcome.incumbent.problems.of(setting))
            if branch.root_bound < float("inf"):
                offer_first_plans(branch, outcome.incumbent)
    others = [plan for key, plan in _by_degrees(outcome).items() if key != _degrees(best)]
    others.sort(key=step_time_s)
    shown = {_decisions(plan) for plan in (best, *others)}
    for plan in sorted(outcome.incumbent.by_setting.values(), key=step_time_s):
        if _decisions(plan) not in shown:
            shown.add(_decisions(plan))
            others.append(plan)
    return tuple(_runner_up(plan, best) for plan in others[:top])


def _degrees(plan: Plan) -> tuple[int, int, int]:
    return plan.pp_degree, plan.tp_degree, plan.dp_degree


def _decisions(plan: Plan) -> tuple[object, ...]:
    return *_degrees(plan), plan.num_microbatches, plan.schedule, plan.data_parallel


def _by_degrees(outcome: Outcome) -> dict[tuple[int, int, int], Plan]:
    found: dict[tuple[int, int, int], Plan] = {}
    for _, plan in sorted(outcome.incumbent.by_setting.items(), key=lambda item: (step_time_s(item[1]), item[0])):
        found.setdefault(_degrees(plan), plan)
    return found


def _runner_up(plan: Plan, best: Plan) -> RunnerUp:
    assert plan.prediction is not None
    return RunnerUp(
        summary=summary(plan),
        pp_degree=plan.pp_degree,
        tp_degree=plan.tp_degree,
        dp_degree=plan.dp_degree,
        microbatch_size=plan.microbatch_size,
        num_microbatches=plan.num_microbatches,
        schedule=plan.schedule,
        data_parallel=plan.data_parallel,
        step_time_s=plan.prediction.step_time_s,
        peak_bytes=plan.prediction.peak_bytes,
        reason="as fast; less regular" if slower_fraction(plan, best) < SAME else reason(plan, best),
    )

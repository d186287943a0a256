"""The plans that lost, and why."""

from planner.plan import Plan, RunnerUp
from planner.solver.branch import Branch
from planner.solver.search import Outcome, offer_first_plans, step_time_s
from planner.units import counted, format_seconds

MAX_PRICED = 40  # settings that the search dropped, priced only to be shown


def summary(plan: Plan) -> str:
    """Return a plan's decisions in one line."""
    degrees = f"pp {plan.pp_degree} x tp {plan.tp_degree} x dp {plan.dp_degree}"
    mode = f", {plan.data_parallel}" if plan.dp_degree > 1 else ""
    schedule = f", {plan.schedule}" if plan.pp_degree > 1 else ""
    remade = sum(len(stage.recompute) for stage in plan.stages)
    recompute = f", {counted(remade, 'layer')} recomputed" if remade else ""
    microbatches = counted(plan.num_microbatches, "microbatch", "microbatches")
    return f"{degrees}{schedule}{mode}, {microbatches} of {plan.microbatch_size}{recompute}"


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
        reason=reason(plan, best),
    )


def parts(plan: Plan) -> dict[str, float]:
    """Return where a step's time goes, in seconds of the stage that has most of each."""
    assert plan.prediction is not None
    stages, m = plan.prediction.stages, plan.num_microbatches
    return {
        "computing": max(m * (s.time_s - s.tensor_parallel_time_s - s.recompute_time_s) for s in stages),
        "recomputing activations": max(m * s.recompute_time_s for s in stages),
        "tensor-parallel communication": max(m * s.tensor_parallel_time_s for s in stages),
        "data-parallel communication": max(s.data_parallel_time_s for s in stages),
        "waiting in the pipeline": plan.prediction.bubble_fraction * plan.prediction.step_time_s,
        "the optimizer": max(s.optimizer_time_s for s in stages),
    }


def reason(plan: Plan, best: Plan) -> str:
    """Return by how much a plan is slower than the best, and what it spends most of that on."""
    slower = step_time_s(plan) - step_time_s(best)
    share = slower / step_time_s(best) if step_time_s(best) else 0.0
    if share < 1e-6:
        return "as fast; less regular"
    theirs, ours = parts(plan), parts(best)
    name, more = max(((name, theirs[name] - ours[name]) for name in theirs), key=lambda item: item[1])
    cause = f": {format_seconds(more)} more {name}" if more > 0 else ""
    return f"{100 * share:.3g} % slower{cause}"

"""`--top k`: really different plans, each the best of its kind, as brute force finds them."""

import pytest
from oracle import all_plans
from strategies import ORIGIN, equal_profile, make_cluster, random_cluster, random_profile

from planner import cost
from planner.errors import UsageError
from planner.plan import Plan
from planner.solver import SolveRequest, incumbent, solve

TOP = 3


def degrees(plan: Plan) -> tuple[int, int, int]:
    return plan.pp_degree, plan.tp_degree, plan.dp_degree


@pytest.mark.parametrize("seed", range(12))
def test_runners_up_are_the_best_plans_of_other_degrees(seed: int) -> None:
    profile = random_profile(seed, num_layers=3, num_classes=2, tp_degrees=(2,), skips=seed % 3 == 0)
    cluster = random_cluster(seed, 4)
    pricer, best = cost.Pricer(profile, cluster), dict[tuple[int, int, int], float]()
    for plan in all_plans(profile, 4, 4):
        try:
            step_s = pricer.evaluate(plan).step_time_s
        except UsageError:  # a shared parameter that is divided in two ways
            continue
        best[degrees(plan)] = min(step_s, best.get(degrees(plan), step_s))
    request = SolveRequest(num_gpus=4, global_batch_size=4, top=TOP, pins=(("num_gpus", "4"),))
    solution = solve(profile, cluster, request, origin=ORIGIN)
    assert solution.plan is not None
    ranked = sorted(best.values())
    found = [(r.pp_degree, r.tp_degree, r.dp_degree) for r in solution.runners_up]
    different = len({degrees(solution.plan), *found}) - 1
    assert different == min(TOP, len(best) - 1)
    shown = [runner_up.step_time_s for runner_up in solution.runners_up]
    assert shown[:different] == pytest.approx(ranked[1 : 1 + different], rel=1e-9)
    assert shown[different:] == sorted(shown[different:])
    assert all(runner_up.gap_fraction == 0 for runner_up in solution.runners_up)


def test_where_degrees_run_out_schedules_and_modes_are_told_apart() -> None:
    profile, cluster = equal_profile(4, activation=10, params=1000), make_cluster(4, intra=(1e4, 0.01))
    pins = (("pp_degree", "2"), ("tp_degree", "1"), ("dp_degree", "2"))
    solution = solve(profile, cluster, SolveRequest(num_gpus=4, global_batch_size=8, pins=pins), origin=ORIGIN)
    assert solution.plan is not None
    kinds = [(r.schedule, r.data_parallel) for r in solution.runners_up]
    assert (solution.plan.schedule, solution.plan.data_parallel) not in kinds
    assert len(kinds) == len(set(kinds)) == TOP
    times = [r.step_time_s for r in solution.runners_up]
    assert times == sorted(times)
    for (schedule, mode), step_s in zip(kinds, times, strict=True):
        pinned = (*pins, ("schedule", schedule), ("data_parallel", mode))
        alone = solve(profile, cluster, SolveRequest(num_gpus=4, global_batch_size=8, pins=pinned), origin=ORIGIN)
        assert alone.lower_bound_s == pytest.approx(step_s, rel=1e-9)


def test_after_an_ended_search_no_other_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = []
    spend = incumbent.Budget.spend

    def spend_few(budget: incumbent.Budget) -> None:
        if budget not in searches:
            searches.append(budget)
        spend(budget)
        if budget.num_nodes > 12:
            raise KeyboardInterrupt

    monkeypatch.setattr(incumbent.Budget, "spend", spend_few)
    profile = random_profile(7, num_layers=8, num_classes=8)
    request = SolveRequest(num_gpus=8, global_batch_size=16)
    solution = solve(profile, random_cluster(7, 8), request, origin=ORIGIN)
    assert solution.status == "feasible"
    assert len(searches) == 1

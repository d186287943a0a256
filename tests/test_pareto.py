"""The Pareto front: points that brute force can't beat, and what is known where it is ended."""

import json
from pathlib import Path

import pytest
from commands import Run
from oracle import all_plans
from strategies import ORIGIN, equal_profile, make_cluster, random_cluster, random_profile

from planner import cost
from planner.cluster import Cluster
from planner.model_profile import ModelProfile, write_profile
from planner.plan import Plan
from planner.solver import SolveRequest, solve
from planner.solver.pareto import Point, pareto, undominated

Costs = tuple[int, float, int]


def solved(profile: ModelProfile, cluster: Cluster, request: SolveRequest) -> Plan:
    plan = solve(profile, cluster, request, origin=ORIGIN).plan
    assert plan is not None
    return plan


def beats(one: Costs, other: Costs) -> bool:
    return one[0] <= other[0] and one[1] < other[1] * (1 - 1e-9) and one[2] <= other[2]


@pytest.mark.parametrize("seed", range(8))
def test_no_plan_beats_a_point_in_everything(seed: int) -> None:
    profile = random_profile(seed, num_layers=3, num_classes=2, skips=seed % 3 == 0)
    cluster, num_gpus = random_cluster(seed, 4), 4
    request = SolveRequest(num_gpus=num_gpus, global_batch_size=4, top=0, limits=(("num_gpus", "4..4"),))
    best = solved(profile, cluster, request)
    free = SolveRequest(num_gpus=num_gpus, global_batch_size=4, top=0)
    front = pareto(best, profile, cluster, free)
    assert front.is_complete
    pricer = cost.Pricer(profile, cluster)
    everything: list[Costs] = []
    for count in range(1, num_gpus + 1):
        for plan in all_plans(profile, count, 4):
            priced = pricer.evaluate(plan)
            everything.append((count, priced.step_time_s, priced.peak_bytes))
    points = [point.costs for point in front.points]
    assert front.points[0].plan == best
    for point in points:
        same = [one for one in everything if one[0] == point[0]]
        assert not any(beats(one, point) for one in same), "the best plan within its memory, of its GPUs"
        assert not any(beats(one, point) for one in points)
    assert min(point[2] for point in points) == min(one[2] for one in everything)
    assert len({point[0] for point in points}) > 1


def test_points_that_are_beaten_or_equal_are_left_out() -> None:
    profile, cluster = equal_profile(4, activation=1000), make_cluster(4)
    plan = solved(profile, cluster, SolveRequest(num_gpus=4, global_batch_size=8))
    assert plan.prediction is not None
    slower = plan.model_copy(
        update={"prediction": plan.prediction.model_copy(update={"step_time_s": 2 * plan.prediction.step_time_s})}
    )
    points = [Point(plan, 0.0), Point(slower, 0.0), Point(plan, 0.5)]
    assert undominated(points) == [points[0]]
    assert undominated([Point(slower, 0.0), Point(plan, 0.0)]) == [Point(plan, 0.0)]


@pytest.mark.parametrize("error", [KeyboardInterrupt, None])
def test_the_points_that_are_found_are_kept_where_it_is_ended(error: type[BaseException] | None) -> None:
    profile, cluster = equal_profile(6, activation=1000, params=100), make_cluster(4, intra=(1e5, 0.01))
    request = SolveRequest(num_gpus=4, global_batch_size=8)
    best = solved(profile, cluster, request)
    full = pareto(best, profile, cluster, request)
    asked = 0

    def left_s() -> float | None:
        nonlocal asked
        asked += 1
        if asked > 3:
            if error is not None:
                raise error
            return 0.0
        return None

    ended = pareto(best, profile, cluster, request, left_s=left_s)
    assert full.is_complete
    assert not ended.is_complete
    assert 1 < len(ended.points) < len(full.points)
    assert all(point in full.points for point in ended.points)


def test_solve_shows_the_front(run: Run, folder: Path) -> None:
    profile = equal_profile(6, activation=1000, params=100)
    write_profile(profile.model_copy(update={"provenance": profile.provenance}), Path("profiles/test.json"))
    line = ("solve", "--gpus", "4", "--global-batch-size", "8", "--pareto", "--limit", "memory=1GiB")
    done = run(*line)
    assert done.code == 0, done.err
    assert done.err.splitlines()[-1] == "wrote plan.py"
    table = done.out[done.out.index("step time against memory and GPUs") :].splitlines()
    told = json.loads(run(*line, "--json").out)
    points = told["pareto"]["points"]
    assert told["pareto"]["is_complete"]
    assert points[0]["step_time_s"] == told["step_time_s"]
    assert points[0]["peak_bytes"] <= told["peak_bytes"]  # as fast with less is better
    assert sum(one["num_gpus"] == 4 for one in points) > 1
    assert {one["num_gpus"] for one in points} >= {1, 2, 4}
    assert sum(line.strip()[:1].isdigit() for line in table) == len(points)
    for one in points:
        assert one["gap_fraction"] == 0
        assert one["headroom_bytes"] > 0
    done = run(*line, "--time-limit", "1ns")
    assert done.code == 1
    assert "--time-limit" in done.err

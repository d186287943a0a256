"""Where a plan stays the best: ends that brute force agrees with, and what is known where the search is ended."""

import io
import json
from pathlib import Path

import pytest
from commands import Run
from oracle import all_plans
from rich.console import Console
from strategies import ORIGIN, equal_profile, make_cluster, random_cluster, random_profile
from test_compare import CLUSTER

from planner import cost
from planner.cluster import Cluster, read_cluster
from planner.model_profile import ModelProfile, write_profile
from planner.plan import Plan
from planner.report import sensitivity_json, sensitivity_table
from planner.solver import SolveRequest, sensitivity, solve
from planner.solver.infeasible import with_memory

PINS = (("num_gpus", "4"),)
STEP = SolveRequest(num_gpus=4, global_batch_size=4, pins=PINS, top=0)


def solved(profile: ModelProfile, cluster: Cluster) -> Plan:
    plan = solve(profile, cluster, STEP, origin=ORIGIN).plan
    assert plan is not None
    return plan


def priced(profile: ModelProfile, cluster: Cluster, plans: list[Plan]) -> list[tuple[float, int]]:
    pricer = cost.Pricer(profile, cluster)
    found = [pricer.evaluate(plan) for plan in plans]
    memory = cluster.gpu_at(0).memory
    return [(one.step_time_s, one.peak_bytes) for one in found if one.peak_bytes <= memory]


@pytest.mark.parametrize("seed", range(6))
def test_the_ends_of_ranges_are_those_of_brute_force(seed: int) -> None:
    profile = random_profile(seed, num_layers=3, num_classes=2)
    plans = list(all_plans(profile, 4, 4))
    roomy = random_cluster(seed, 4)
    peaks = sorted(peak for _, peak in priced(profile, roomy, plans))
    cluster = with_memory(roomy, peaks[len(peaks) // 4])
    plan = solved(profile, cluster)
    found = sensitivity.sensitivity(plan, profile, cluster, STEP)
    assert (found.better, found.is_complete) == (None, True)
    assert plan.prediction is not None
    own_s, own_peak = plan.prediction.step_time_s, plan.prediction.peak_bytes
    memory, *bandwidths = found.ranges
    assert memory.least == own_peak
    faster = [peak for step_s, peak in priced(profile, roomy, plans) if step_s < own_s * (1 - 2e-6)]
    if memory.most is None:
        assert not faster
    else:
        assert memory.most < min(faster) <= memory.tried[1] <= memory.most + 0.01 * memory.now + 1
        assert memory.above is not None
        assert memory.above.step_time_s is not None
        assert memory.above.step_time_s < own_s
    assert len(bandwidths) == (2 if cluster.node_at(3) else 1)
    for one in bandwidths:
        link = "inter_node" if one.quantity == "bandwidth between nodes" else "intra_node"
        for value, is_best in ((one.least, True), (one.most, True), *((v, None) for v in one.tried)):
            if value is None:
                continue
            changed = getattr(cluster, link).model_copy(update={"bandwidth": value})
            there = cluster.model_copy(update={link: changed})
            own = cost.evaluate(plan, profile, there).step_time_s
            best = min(step_s for step_s, _ in priced(profile, there, plans))
            ends = [one.tried[0]] * (one.least is not None) + [one.tried[1]] * (one.most is not None)
            assert (best >= own * (1 - 1.1e-6)) == (is_best is True or value not in ends)


def test_links_of_node_groups_change_with_the_others() -> None:
    profile = random_profile(3, num_layers=3, num_classes=2)
    slow = make_cluster(4, gpus_per_node=2, intra=(300.0, 0.01), inter=(100.0, 0.01))
    own = [group.model_copy(update={"inter_node": slow.inter_node}) for group in slow.node_groups]
    fast = slow.inter_node.model_copy(update={"bandwidth": 1e9})
    grouped = slow.model_copy(update={"node_groups": tuple(own), "inter_node": fast})
    plan = solved(profile, slow)
    one, other = (sensitivity.sensitivity(plan, profile, cluster, STEP).ranges[1] for cluster in (slow, grouped))
    for value, scaled in ((one.least, other.least), (one.most, other.most)):
        assert scaled == (None if value is None else pytest.approx(value * 1e7))


def test_what_is_not_proven_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    profile, cluster = equal_profile(6, activation=100), make_cluster(4, intra=(1e4, 0.01))
    request = SolveRequest(num_gpus=4, global_batch_size=8, top=0)
    plan = solve(profile, cluster, request, origin=ORIGIN).plan
    assert plan is not None
    monkeypatch.setattr(sensitivity, "MAX_NODES", 0)
    found = sensitivity.sensitivity(plan, profile, cluster, request)
    assert found.is_complete
    assert 0 < found.num_unproven <= found.num_searches
    text = io.StringIO()
    Console(file=text, width=200).print(sensitivity_table(plan, found))
    assert f"not proven in {found.num_unproven} of {found.num_searches} searches" in text.getvalue()


def test_constraints_cost_what_the_best_plan_without_them_saves() -> None:
    profile, cluster = equal_profile(6, activation=100), make_cluster(4, intra=(1e4, 0.01))
    pins = (("pp_degree", "4"), ("schedule", "gpipe"))
    request = SolveRequest(num_gpus=4, global_batch_size=8, top=0, pins=pins, limits=(("memory", "1GiB"),))
    plan = solve(profile, cluster, request, origin=ORIGIN).plan
    assert plan is not None
    found = sensitivity.sensitivity(plan, profile, cluster, request)
    prices = {price.constraint: price.plan for price in found.prices}
    assert list(prices) == ["--pin pp_degree=4", "--pin schedule=gpipe", "--limit memory=1GiB"]
    assert prices["--limit memory=1GiB"] is None
    free = prices["--pin pp_degree=4"]
    assert free is not None
    alone = solve(profile, cluster, request.without(("--pin", "pp_degree", "4")), origin=ORIGIN).plan
    assert alone is not None
    assert free.prediction == alone.prediction
    told = sensitivity_json(found)["constraints"]
    assert [one["constraint"] for one in told] == list(prices)
    text = io.StringIO()
    Console(file=text, width=200).print(sensitivity_table(plan, found))
    assert "--limit memory=1GiB costs nothing: no plan without it is faster" in text.getvalue()
    assert "--pin pp_degree=4 costs " in text.getvalue()


def test_a_plan_that_is_near_enough_counts_as_the_best() -> None:
    profile = random_profile(3, num_layers=3, num_classes=2)
    cluster = random_cluster(3, 4)
    plan = solved(profile, cluster)
    strict = sensitivity.sensitivity(plan, profile, cluster, STEP)
    loose = sensitivity.sensitivity(plan, profile, cluster, STEP, within_fraction=0.05)
    for one, other in zip(strict.ranges, loose.ranges, strict=True):
        assert other.least is None or (one.least is not None and other.least <= one.least)
        assert other.most is None or (one.most is not None and other.most >= one.most)


def test_a_plan_that_is_not_the_best_is_told_with_the_better_one() -> None:
    profile, cluster = equal_profile(4), make_cluster(4)
    request = SolveRequest(num_gpus=4, global_batch_size=8, top=0, pins=(("pp_degree", "4"),))
    plan = solve(profile, cluster, request, origin=ORIGIN).plan
    assert plan is not None
    found = sensitivity.sensitivity(plan, profile, cluster, SolveRequest(num_gpus=4, global_batch_size=8))
    assert found.better is not None
    assert found.better.pp_degree == 1
    assert found.ranges == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, None])
def test_what_is_known_is_told_where_the_search_is_ended(error: type[BaseException] | None) -> None:
    profile, cluster = equal_profile(4, activation=10), make_cluster(4, gpus_per_node=2, intra=(1000.0, 0.01))
    plan = solved(profile, cluster)
    full = sensitivity.sensitivity(plan, profile, cluster, STEP)
    searches = 0

    def left_s() -> float | None:
        nonlocal searches
        searches += 1
        if searches > full.num_searches - 2:
            if error is not None:
                raise error
            return 0.0
        return None

    ended = sensitivity.sensitivity(plan, profile, cluster, STEP, left_s=left_s)
    assert full.is_complete
    assert not ended.is_complete
    assert ended.ranges == full.ranges[: len(ended.ranges)]
    assert 0 < len(ended.ranges) < len(full.ranges)


def test_explain_shows_where_a_plan_stays_the_best(run: Run, folder: Path) -> None:
    profile = equal_profile(6, activation=300, params=100, forward_flops=2.0)
    write_profile(profile, Path("profiles/test.json"))
    Path("tiny.toml").write_text(CLUSTER)
    origin = ORIGIN.replace(profile_path="profiles/test.json", cluster="tiny", cluster_path="tiny.toml")
    request = SolveRequest(num_gpus=4, global_batch_size=8)
    plan = solve(profile, read_cluster("tiny.toml"), request, origin=origin).plan
    assert plan is not None
    Path("plan.py").write_text(f"PLAN = {plan.model_dump(mode='json')!r}\n")
    done = run("explain", "plan.py", "--sensitivity")
    assert done.code == 0, done.err
    assert "cluster: tiny" in done.err
    told = done.out[done.out.index("sensitivity: where the plan stays the best") :]
    for words in ("memory per GPU", "bandwidth between nodes", "bandwidth inside a node", "10 KiB", "100 B/s"):
        assert words in told
    found = json.loads(run("explain", "plan.py", "--sensitivity", "--within", "2%", "--json").out)["sensitivity"]
    assert (found["is_best_now"], found["is_complete"], found["within_fraction"]) == (True, True, 0.02)
    assert plan.prediction is not None
    memory = found["ranges"][0]
    assert (memory["quantity"], memory["least"]) == ("memory per GPU", plan.prediction.peak_bytes)
    run("explain", "plan.py", "--within", "2%").assert_one_error(2, "--within is for --sensitivity")
    run("explain", "plan.py", "--sensitivity", "--within", "2").assert_one_error(2, "--within '2' is no share")
    done = run("explain", "plan.py", "--sensitivity", "--time-limit", "1ns")
    assert (done.code, "ended before all ranges were found" in done.out) == (0, True)

"""What people and scripts are shown of plans, profiles and solutions."""

import json

import pytest
from rich.console import Console
from strategies import ORIGIN, equal_profile, make_cluster, make_plan, random_profile, timed_profile

from planner import cost
from planner.cluster import Cluster
from planner.model_profile import ModelProfile
from planner.plan import Plan
from planner.prediction import WholePart
from planner.report import explain, plan_json, plan_table, profile_table, solution_json, timeline
from planner.report.text import layer_ranges, rank_ranges
from planner.solver import Solution, SolveRequest, solve

HELD = (("q", "view"), ("k", "view_2"))


def shown(*renderables: object, width: int = 200) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        for renderable in renderables:
            console.print(renderable)
    return capture.get()


def solved(profile: ModelProfile, cluster: Cluster, batch: int, *pins: tuple[str, str]) -> Solution:
    request = SolveRequest(num_gpus=cluster.num_gpus, global_batch_size=batch, pins=pins)
    return solve(profile, cluster, request, origin=ORIGIN)


def priced(plan: Plan, profile: ModelProfile) -> Plan:
    return plan.replace(prediction=cost.evaluate(plan, profile, make_cluster(plan.num_gpus)))


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["wte", "h.0", "h.1", "h.2", "ln_f"], "wte, h.0-2, ln_f"),
        (["h.9", "h.10", "h.12"], "h.9-10, h.12"),
        (["enc.0.mlp", "enc.1.mlp", "dec.2.mlp"], "enc.0-1.mlp, dec.2.mlp"),
        (["0", "1"], "0-1"),
        (["head"], "head"),
    ],
)
def test_layers_are_shown_as_ranges(names: list[str], text: str) -> None:
    assert layer_ranges(names) == text


def test_ranks_are_shown_as_ranges() -> None:
    assert rank_ranges([0, 1, 2, 5, 8, 9]) == "0-2, 5, 8-9"


def test_what_stays_whole_is_told_by_reason() -> None:
    profile = timed_profile([1.0, 1.0], [2.0, 2.0])
    plan = priced(make_plan(profile, [1], m=3), profile)
    assert plan.prediction is not None
    layers = ("h.0", "h.1")
    parts = [WholePart(layers=layers, module=name, param_count=64, reason=f"3 heads ({op})") for name, op in HELD]
    parts.append(WholePart(layers=("h.2",), param_count=8, reason="3 heads"))
    parts.append(WholePart(layers=("h.2",), module="o", param_count=8, reason="a sum (add)"))
    plan = plan.replace(prediction=plan.prediction.replace(whole=tuple(parts)))
    assert [line for line in shown(plan_table(plan)).splitlines() if line.startswith("whole")] == [
        "whole on every tensor-parallel rank: q, k of h.0-1 (64 parameters each); h.2 (8 parameters): 3 heads",
        "whole on every tensor-parallel rank: o of h.2 (8 parameters): a sum",
    ]


def test_the_schedule_is_drawn_to_scale() -> None:
    profile = timed_profile([1.0, 1.0], [2.0, 2.0])
    assert timeline(priced(make_plan(profile, [1], m=3), profile), width=48).splitlines()[:2] == [
        "stage 0  |F0..F1..        B0::::::F2..B1::::::    B2::::::|",
        "stage 1  |    F0..B0::::::F1..B1::::::F2..B2::::::        |",
    ]


def test_groups_of_several_stages_are_drawn_with_theirs() -> None:
    profile = timed_profile([1.0] * 4, [2.0] * 4)
    plan = priced(make_plan(profile, [1, 2, 3], m=2, schedule="zbv", groups=2), profile)
    *drawn, legend = timeline(plan, width=52).splitlines()
    assert drawn == [
        "stages 0, 3 |0F0.0F1.    3F0.3I0:3W0-3F1.3I1:3W1-0I0:0W0-0I1:0W1-|",
        "stages 1-2  |    1F0.2F0.1F1.2F1.2I0:2W0-1I0:2I1:1I1:1W0-2W1-1W1-|",
    ]
    assert legend.startswith("F: forward '.', I: gradients of inputs ':', W: of weights '-', each with its stage")
    text = shown(*explain(plan))
    assert "2 groups of 2 stages x tp 1 x dp 1 on 2 GPUs, schedule zbv" in text
    assert "Memory: stages 0, 3 together are fullest" in text
    assert "of which weights" in text
    lines = text.splitlines()
    start = next(index for index, line in enumerate(lines) if "peak memory of one GPU" in line)
    assert [line.split()[:2] for line in lines[start + 4 : start + 6]] == [["0,", "3"], ["1-2", "0"]]
    assert json.loads(json.dumps(plan_json(plan)))["num_chunks"] == 2


def test_a_plan_is_told_with_its_proof() -> None:
    profile = equal_profile(8, activation=1000, params=100, forward_flops=1e9)
    solution = solved(profile, make_cluster(4, intra=(1e5, 0.01)), 16, ("pp_degree", "2"), ("tp_degree", "1"))
    assert solution.plan is not None
    text = shown(*explain(solution.plan))
    for part in (
        "proven optimal", "2 stages x tp 1 x dp 2 on 4 GPUs", "layers.0-3", "Bottleneck: stage", "Bubble: the GPUs",
        "Exposed communication", "Memory: stage 0 is fullest", "activation", "runners-up", "% slower", "MFU",
    ):  # fmt: skip
        assert part in text
    assert "layers.4-7" in shown(plan_table(solution.plan))


def test_one_of_a_thing_is_told_in_the_singular() -> None:
    profile = equal_profile(1, activation=1000, params=100)
    solution = solved(profile, make_cluster(1), 1)
    assert solution.plan is not None
    text = shown(*explain(solution.plan), profile_table(profile))
    for part in ("1 stage x tp 1 x dp 1 on 1 GPU,", "1 microbatch of 1", "1 sample per step", "1 layer of 1 class,"):
        assert part in text


def test_a_plan_without_a_price_is_shown_as_such() -> None:
    text = shown(*explain(make_plan(equal_profile(2))))
    assert "not priced" in text
    assert "solve again" in text


def test_the_json_has_the_keys_that_scripts_rely_on() -> None:
    profile = equal_profile(4, activation=1000, params=100)
    solution = solved(profile, make_cluster(2), 8, ("pp_degree", "2"))
    found = json.loads(json.dumps(solution_json(solution), allow_nan=False))
    keys = {"status", "step_time_s", "lower_bound_s", "gap_fraction", "pp_degree", "num_microbatches", "schedule"}
    assert keys | {"data_parallel", "stages", "runners_up"} <= set(found)
    stage = {"layers", "tp_degree", "dp_degree", "microbatch_size", "recompute", "gpus", "time_s", "peak_bytes"}
    assert all(stage <= set(one) for one in found["stages"])
    assert found["status"] == "optimal"
    assert found["lower_bound_s"] == found["step_time_s"]
    assert [one["layers"] for one in found["stages"]] == [["layers.0", "layers.1"], ["layers.2", "layers.3"]]
    assert solution.plan is not None
    assert plan_json(solution.plan) == solution_json(solution)


def test_the_json_of_no_plan_has_conflict_and_repairs() -> None:
    solution = solved(equal_profile(2, params=1000), make_cluster(1, memory=100), 4)
    found = json.loads(json.dumps(solution_json(solution)))
    assert found["status"] == "infeasible"
    assert found["conflict"]["constraint"] == "memory"
    assert found["conflict"]["available_bytes"] == 100
    assert found["conflict"]["least_peak_bytes"] == 2000 * (4 + 4 + 8)
    assert "bytes" not in found["conflict"]["message"] + found["repairs"][0]["description"]  # once, with a unit
    assert "needs 31.2 KiB per GPU" in found["conflict"]["message"]
    assert "the GPUs have 100 B, 31.2 KiB less" in found["conflict"]["message"]
    assert found["repairs"][0].keys() == {"description", "step_time_s", "gap_fraction", "summary", "instead"}


def test_a_profile_is_shown_by_runs_of_equal_layers() -> None:
    text = shown(profile_table(equal_profile(12, params=1000, activation=2048)))
    assert "layers.0-11" in text
    assert "12 x 1 k" in text
    assert "2 KiB" in text
    tied = random_profile(1, num_layers=6, num_classes=1)
    assert ("tied: " in shown(profile_table(tied))) == bool(tied.tied)


def test_one_stage_is_not_compared_with_itself() -> None:
    solution = solved(equal_profile(2, activation=1000, params=100), make_cluster(1), 1)
    assert solution.plan is not None
    text = shown(*explain(solution.plan))
    assert "takes 6 s per microbatch." in text
    assert "average stage" not in text


def test_without_flops_there_is_no_mfu() -> None:
    plan = solved(equal_profile(2, forward_flops=0.0), make_cluster(1), 1).plan
    assert plan is not None
    assert plan.prediction is not None
    assert plan.prediction.mfu_fraction is None
    assert "MFU -," in shown(plan_table(plan))

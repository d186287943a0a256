"""How plans are told whose stages differ: degrees by stage, shard groups, GPU types, and many stages in few rows."""

from typing import Any

from rich.console import Console
from strategies import equal_profile, make_cluster
from test_cost_degrees import mixed_plan

from planner.cost import evaluate
from planner.plan import Plan
from planner.report.json_objects import plan_json
from planner.report.plan_tables import explain, plan_table
from planner.report.stage_rows import stage_runs
from planner.solver.differences import data_parallel, summary


def priced(stages: list[dict[str, Any]], num_layers: int, *, m: int = 1, batch: int = 8, **plan: Any) -> Plan:
    profile = equal_profile(num_layers, params=1000, activation=100)
    made = mixed_plan(profile, stages, m=m, batch=batch, **plan)
    return made.model_copy(update={"prediction": evaluate(made, profile, make_cluster(made.num_gpus))})


def printed(*parts: Any) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(*parts)
    return capture.get()


def row(text: str, stage: str) -> list[str]:
    """Return the cells of the first row of a table that begins with this stage."""
    line = next(line for line in text.splitlines() if line.split()[:1] == [stage])
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_stages_of_different_degrees_are_told_one_by_one() -> None:
    plan = priced(
        [
            {"layers": 1, "tp_degree": 2},
            {"layers": 2, "dp_degree": 4, "shard_degree": 2},
            {"layers": 1, "dp_degree": 8},
        ],
        4,
    )
    text = printed(plan_table(plan))
    assert "3 stages x tp 1-2 x dp 1-8 on 14 GPUs" in text
    assert "1 microbatch of 1-8 per replica" in text
    assert "data parallel sharded over 2 of 4 and 1 of 8" in text
    assert row(text, "0")[:5] == ["0", "layers.0", "2 x 1", "0-1", "8"]
    assert row(text, "1")[:5] == ["1", "layers.1-2", "1 x 4, sharded over 2", "2-5", "2"]
    assert row(text, "2")[:5] == ["2", "layers.3", "1 x 8", "6-13", "1"]


def test_many_stages_are_told_in_few_rows() -> None:
    wide, deep = {"layers": 2, "tp_degree": 8, "dp_degree": 4}, {"layers": 2, "tp_degree": 4, "dp_degree": 8}
    plan = priced([wide] * 4 + [deep] * 60, 128, m=64, batch=512)
    assert stage_runs(plan) == [range(4), range(4, 64)]
    text = printed(plan_table(plan))
    assert len(text.splitlines()) < 15
    assert row(text, "0-3")[:5] == ["0-3", "layers.0-7 (2 each)", "8 x 4", "0-127 (32 each)", "2"]
    assert row(text, "4-63")[:5] == ["4-63", "layers.8-127 (2 each)", "4 x 8", "128-2047 (32 each)", "1"]
    assert plan.prediction is not None
    assert "KiB - " in row(text, "4-63")[-1]  # fewer microbatches are in flight from stage to stage
    few = priced([wide | {"layers": 1}] * 4, 4)
    assert stage_runs(few) == [range(index, index + 1) for index in range(4)]
    assert len(printed(*explain(plan)).splitlines()) < 64 + 60  # the picture of the schedule has a line for each stage


def test_equal_stages_are_told_as_ever() -> None:
    plan = priced([{"layers": 1, "dp_degree": 2}] * 2, 2, data_parallel="sharded")
    text = printed(plan_table(plan))
    assert "2 stages x tp 1 x dp 2 on 4 GPUs" in text
    assert "data parallel sharded," in text
    assert "rows" not in text
    assert "GPU type" not in text


def test_how_far_states_are_sharded_is_told() -> None:
    hybrid = {"layers": 1, "dp_degree": 8, "shard_degree": 4}
    assert data_parallel(priced([hybrid] * 2, 2)) == "sharded over 4 of 8"
    assert "sharded over 4 of 8" in summary(priced([hybrid] * 2, 2))
    assert data_parallel(priced([hybrid | {"shard_degree": 8}] * 2, 2)) == "sharded"
    assert data_parallel(priced([hybrid | {"shard_degree": 1}] * 2, 2, data_parallel="sharded")) == "replicated"
    found = plan_json(priced([hybrid, {"layers": 1, "dp_degree": 8}], 2))["stages"]
    assert [stage["shard_degree"] for stage in found] == [4, 1]


def test_gpu_types_and_scaled_times_are_told() -> None:
    plan = priced([{"layers": 1}] * 2, 2)
    assert plan.prediction is not None
    stages = [stage.model_copy(update={"gpu": gpu}) for stage, gpu in zip(plan.prediction.stages, "ab", strict=True)]
    prediction = plan.prediction.model_copy(update={"stages": tuple(stages)})
    origin = plan.origin.model_copy(update={"scaled_gpus": ("b",)})
    plan = plan.model_copy(update={"prediction": prediction, "origin": origin})
    text = printed(plan_table(plan))
    assert row(text, "1")[3:5] == ["1", "b"]
    assert "times on b are scaled by roofline from those of another GPU type" in text
    assert [stage["gpu"] for stage in plan_json(plan)["stages"]] == ["a", "b"]
    stages = [stage.model_copy(update={"gpu": "a"}) for stage in stages]
    prediction = prediction.model_copy(update={"stages": tuple(stages)})
    assert "roofline" not in printed(plan_table(plan.model_copy(update={"prediction": prediction})))


def test_gpus_are_idle_by_their_number() -> None:
    plan = priced([{"layers": 1, "dp_degree": 4}, {"layers": 1}], 2, batch=4)
    assert plan.prediction is not None
    # Of 15 s: four GPUs compute for 3, one for 12.
    assert round(plan.prediction.bubble_fraction, 9) == round(1 - (4 * 3 + 12) / (5 * 15), 9)

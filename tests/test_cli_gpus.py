"""Profiles of several GPU types on the command line, and plans that can't be written as code."""

import json
from pathlib import Path

import pytest
from commands import Run
from strategies import layer_cost
from test_cli import small_profile

from planner.emitter import emit
from planner.model_profile import ModelProfile, write_profile
from planner.plan import read_plan

BATCH = ("--global-batch-size", "8", "--precision", "bf16")


def on(gpu: str, forward_s: float, path: str) -> ModelProfile:
    """Write a profile of one layer computed for a GPU type."""
    profile = small_profile(device_type="cuda", gpu=gpu, dtype="bfloat16")
    costs = (layer_cost(forward_s=forward_s, backward_s=0.0, forward_flops=0.0),)
    classes = (profile.layer_classes[0].model_copy(update={"costs": costs}),)
    profile = profile.model_copy(update={"layer_classes": classes})
    write_profile(profile, Path(path))
    return profile


def test_times_on_the_cluster_s_type_are_those_of_its_profile(run: Run, folder: Path) -> None:
    on("h100-sxm", 1.0, "a.json")
    on("l40s", 5.0, "b.json")
    done = run(
        *("solve", "--gpus", "1", "--profile", "a.json", "--profile", "b.json", "--cluster", "l40s", "--json"),
        *BATCH,
        *("--pin", "recompute=none", "--pin", "microbatch_size=8"),
    )
    assert done.code == 0, done.err
    assert json.loads(done.out)["stages"][0]["time_s"] == pytest.approx(8 * 5.0)
    assert "a.json (computed for h100-sxm, bfloat16), b.json (computed for l40s, bfloat16)" in done.err
    assert "warning" not in done.err
    origin = read_plan(Path("plan.py")).origin
    assert origin.profile_path == "a.json + b.json"
    assert origin.profile_hash.count("+") == 1
    # the plan's two profiles are found again
    done = run("compare", "plan.py", "--degrees", "pp=1,tp=1,dp=1")
    assert done.code == 0, done.err
    assert "b.json (computed for l40s, bfloat16)" in done.err
    Path("b.json").unlink()
    run("compare", "plan.py", "--degrees", "pp=1").assert_one_error(2, "'b.json', which is not there")


def test_times_without_a_profile_are_scaled_and_that_is_told(run: Run, folder: Path) -> None:
    on("h100-sxm", 1.0, "a.json")
    done = run("solve", "--gpus", "1", "--profile", "a.json", "--cluster", "l40s", *BATCH)
    assert done.code == 0, done.err
    assert "warning: times on l40s are scaled by roofline from those of h100-sxm: profile with --gpu l40s" in done.err
    assert "times on l40s are scaled by roofline" in done.out
    assert read_plan(Path("plan.py")).origin.scaled_gpus == ("l40s",)


def test_profiles_of_two_models_are_refused(run: Run, folder: Path) -> None:
    on("h100-sxm", 1.0, "a.json")
    other = on("l40s", 5.0, "b.json")
    write_profile(other.replace(provenance=other.provenance.replace(model_hash="another")), Path("b.json"))
    done = run("solve", "--gpus", "1", "--profile", "a.json", "--profile", "b.json")
    done.assert_one_error(2, "differ in model_hash", "another", "--gpu")


def test_edited_plans_that_no_runtime_runs_are_refused_by_verify(run: Run, folder: Path) -> None:
    profile = on("h100-sxm", 1.0, "a.json")
    assert run("solve", "--gpus", "4", "--profile", "a.json", "--top", "0", "--pin", "dp_degree=4", *BATCH).code == 0
    plan = read_plan(Path("plan.py"))
    text = emit(plan, profile)
    edited = text.replace("'dp_degree': 4,", "'dp_degree': 4, 'shard_degree': 2,")
    assert edited != text
    Path("plan.py").write_text(edited)
    done = run("verify", "plan.py", "--model", "model.py")
    done.assert_one_error(1, "plan.py can't be run yet", "shards stage 0 over 2 of 4 replicas")


MIXED = """
memory_reserve = "1GiB"
source = "a test"

[[node_groups]]
count = 1
gpus_per_node = 2
gpu = "h100-sxm"

[[node_groups]]
count = 1
gpus_per_node = 2
gpu = "l40s"
intra_node = { bandwidth = "32GB/s", latency = "10us" }

[intra_node]
bandwidth = "450GB/s"
latency = "5us"

[inter_node]
bandwidth = "50GB/s"
latency = "10us"
"""


def test_hand_written_plans_are_compared_on_a_mixed_cluster(run: Run, folder: Path) -> None:
    on("h100-sxm", 1.0, "a.json")
    Path("mixed.toml").write_text(MIXED)
    words = '"num_microbatches": 1, "schedule": "1f1b", "data_parallel": "replicated", "global_batch_size": 2'
    step = f'{words}, "optimizer": "adamw", "precision": "bf16"'
    for name, gpus in (("fast", (0, 1)), ("both", (0, 2))):
        stage = {"layers": ("linear",), "dp_degree": 2, "gpus": gpus}
        Path(f"{name}.py").write_text(f"PLAN = {{{step}, 'stages': [{stage}]}}\n")
    done = run("compare", "fast.py", "both.py", "--profile", "a.json", "--cluster", "mixed.toml")
    assert done.code == 0, done.err
    assert "32 GB/s and 10 us inside nodes of l40s" in done.err
    assert "warning: times on l40s are scaled by roofline from those of h100-sxm" in done.err
    assert "h100-sxm + l40s" in done.out
    assert "both.py against fast.py: " in done.out
    assert "slower" in done.out

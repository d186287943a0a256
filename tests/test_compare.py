"""`planner compare`: plans and hand-written degrees, priced side by side by the one cost function."""

import json
from pathlib import Path

import pytest
from commands import Done, Run
from hypothesis import given
from hypothesis import strategies as st
from strategies import ORIGIN, equal_profile, make_cluster, make_plan, random_cluster, random_profile

from planner import cost
from planner.cluster import Cluster, read_cluster
from planner.errors import UsageError
from planner.model_profile import ModelProfile, write_profile
from planner.plan import Plan
from planner.solver import SolveRequest, solve
from planner.solver.differences import headroom, parts, reason, step_time_s
from planner.solver.written import complete, read_degrees

CLUSTER = """
memory_reserve = "0B"
node_groups = [{count = 2, gpus_per_node = 2, gpu = "tiny"}]
intra_node = {bandwidth = "1kB/s", latency = "1ms"}
inter_node = {bandwidth = "100B/s", latency = "10ms"}
[gpus.tiny]
name = "tiny"
memory = "10KiB"
memory_bandwidth = "1MB/s"
peak_flops = {float32 = "10FLOP/s"}
source = "a test"
"""
NAME = "profiles/test.json"


def priced(plan: Plan, profile: ModelProfile, cluster: Cluster) -> Plan:
    return plan.replace(prediction=cost.evaluate(plan, profile, cluster))


@given(
    st.integers(0, 10_000),
    st.integers(2, 6),
    st.sampled_from(["1f1b", "gpipe"]),
    st.sampled_from(["replicated", "sharded"]),
)
def test_the_parts_of_a_step_sum_to_it(seed: int, num_layers: int, schedule: str, mode: str) -> None:
    profile = random_profile(seed, num_layers=num_layers)
    cut, remade = 1 + seed % (num_layers - 1), [f"layers.{seed % num_layers}"] if seed % 3 else []
    plan = make_plan(
        profile,
        [cut],
        m=4,
        dp=2,
        schedule=schedule,  # type: ignore[arg-type]
        data_parallel=mode,  # type: ignore[arg-type]
        recompute=remade,
    )
    found = priced(plan, profile, random_cluster(seed, 4))
    assert sum(parts(found).values()) == pytest.approx(step_time_s(found), rel=1e-9)
    assert all(seconds >= 0 for seconds in parts(found).values())
    assert found.prediction is not None
    idle = parts(found)["waiting in the pipeline"] / step_time_s(found)
    assert idle == pytest.approx(found.prediction.bubble_fraction, abs=1e-9)


def test_reasons_name_what_makes_the_difference() -> None:
    profile, cluster = equal_profile(4, activation=100), make_cluster(4)
    even = priced(make_plan(profile, [2], m=8, dp=2), profile, cluster)
    bent = priced(make_plan(profile, [1], m=8, dp=2), profile, cluster)
    remade = priced(make_plan(profile, [2], m=8, dp=2, recompute=["layers.0"]), profile, cluster)
    assert reason(even, even) == "as fast"
    assert reason(bent, even) == "38.9 % slower: 21 s more waiting in the pipeline"
    assert reason(even, bent) == "28 % faster: 21 s less waiting in the pipeline"
    assert reason(remade, even, most=3) == (
        "13 % slower: 4 s more recomputing activations, 3 s more waiting in the pipeline"
    )
    assert headroom(even, cluster) == (0, 80 * 2**30 - 400)


def test_degrees_are_completed_regularly() -> None:
    profile, cluster = equal_profile(7, activation=100), make_cluster(8)
    step = SolveRequest(num_gpus=8, global_batch_size=16, optimizer="sgd")

    def plan_of(text: str) -> Plan:
        plan = complete(read_degrees(text), profile, cluster, step, origin=ORIGIN)
        assert plan.prediction == cost.evaluate(plan, profile, cluster)
        return plan

    plan = plan_of("pp=4,m=8")
    assert [len(stage.layers) for stage in plan.stages] == [2, 2, 2, 1]
    assert (plan.dp_degree, plan.microbatch_size, plan.schedule, plan.optimizer) == (2, 1, "1f1b", "sgd")
    plan = plan_of("pp=2,dp=1,rows=4,schedule=gpipe,cuts=layers.3,recompute=layers.0,layers.5")
    assert [stage.recompute for stage in plan.stages] == [("layers.0",), ("layers.5",)]
    assert (plan.num_microbatches, plan.num_gpus, len(plan.stages[0].layers)) == (4, 2, 3)
    assert len(plan_of("cuts=layers.1,layers.2,dp=1").stages) == 3
    assert all(len(stage.recompute) == len(stage.layers) for stage in plan_of("pp=2,recompute=all").stages)


@pytest.mark.parametrize(
    ("text", "sizes", "firsts"),
    [
        ("pp=2,m=8,schedule=interleaved-1f1b", [2, 2, 2, 2], [0, 4, 0, 4]),
        ("pp=2,m=8,schedule=interleaved-1f1b,chunks=4,dp=4", [1] * 8, [0, 4] * 4),
        ("pp=2,m=8,schedule=zbv", [2, 2, 2, 2], [0, 4, 4, 0]),
        ("pp=4,m=8,schedule=zero-bubble,cuts=layers.1,layers.2,layers.3", [1, 1, 1, 5], [0, 2, 4, 6]),
    ],
)
def test_schedules_that_are_not_solved_for_are_priced(text: str, sizes: list[int], firsts: list[int]) -> None:
    profile, cluster = equal_profile(8, activation=100), make_cluster(8)
    step = SolveRequest(num_gpus=8, global_batch_size=32, optimizer="sgd")
    plan = complete(read_degrees(f"{text},recompute=all"), profile, cluster, step, origin=ORIGIN)
    assert [len(stage.layers) for stage in plan.stages] == sizes
    assert [stage.gpus[0] for stage in plan.stages] == firsts
    assert all(stage.recompute == stage.layers for stage in plan.stages)
    found = priced(plan, profile, cluster)
    assert sum(parts(found).values()) == pytest.approx(step_time_s(found), rel=1e-9)


def test_what_does_not_fit_is_priced_all_the_same() -> None:
    profile, cluster = equal_profile(4, activation=1000), make_cluster(2, memory=3500)
    step = SolveRequest(num_gpus=2, global_batch_size=8, optimizer="sgd")
    none = complete(read_degrees("pp=2,m=8"), profile, cluster, step, origin=ORIGIN)
    fits = complete(read_degrees("pp=2,m=8,recompute=fit"), profile, cluster, step, origin=ORIGIN)
    assert headroom(none, cluster) == (0, 3500 - 4000)
    assert headroom(fits, cluster)[1] >= 0
    assert (len(none.stages[0].recompute), len(fits.stages[0].recompute)) == (0, 1)
    small = make_cluster(2, memory=900)
    still = complete(read_degrees("pp=2,m=8,recompute=fit"), profile, small, step, origin=ORIGIN)
    assert len(still.stages[0].recompute) == 2
    assert headroom(still, small)[1] < 0


@pytest.mark.parametrize(
    ("text", "words", "hint"),
    [
        ("pp", "'pp' is not KEY=VALUE", "pp=4,tp=2"),
        ("pp=2,layers.1", "'layers.1' is not KEY=VALUE", "pp=4,tp=2"),
        ("qq=2", "unknown key 'qq'", "pp, tp, dp, m, rows"),
        ("pp=2,schedule=1b1f", "schedule '1b1f' is not known", "zero-bubble"),
        ("pp=2,m=8,chunks=2", "schedule '1f1b' runs one stage on each GPU", "other chunks"),
        ("pp=2,chunks=3,schedule=interleaved-1f1b", "2 x 3 chunks = 6 stages, more than the 4 layers", "fewer chunks"),
        ("pp=2,schedule=zbv,recompute=fit", "recompute=fit are for schedule 1f1b and gpipe", "leave them out"),
        ("schedule=interleaved-1f1b", "in 2 chunks need pp", "pp="),
        ("pp=2,pp=4", "'pp' is given twice", "pp=4,tp=2"),
        ("pp=", "'pp' has no value", "pp=4,tp=2"),
        ("pp=0", "pp_degree is '0', no count", "pp=4,tp=2"),
        ("pp=3", "pp 3 x tp 1 = 3 does not divide 4 GPUs", "dp="),
        ("pp=4,m=3", "global_batch_size 16 is not divisible by num_microbatches 3", "pp=4,tp=2"),
        ("pp=2,cuts=layer.2", "'pp=2,cuts=layer.2': cuts names layer 'layer.2'", "layers.2"),
        ("pp=2,tp=2", "no layer of 'test' can be divided over tp_degree 2", "pp=4,tp=2"),
    ],
)
def test_degrees_that_are_none_are_usage_errors(text: str, words: str, hint: str) -> None:
    step = SolveRequest(num_gpus=4, global_batch_size=16)
    with pytest.raises(UsageError) as caught:
        complete(read_degrees(text), equal_profile(4), make_cluster(4), step, origin=ORIGIN)
    assert words in caught.value.message
    assert hint in caught.value.hint


@pytest.fixture
def planned(folder: Path) -> Plan:
    """A working directory with a profile, a cluster, and plan.py of the best plan for them."""
    profile = equal_profile(6, activation=300, params=100, forward_flops=2.0)
    write_profile(profile, Path(NAME))
    Path("tiny.toml").write_text(CLUSTER)
    origin = ORIGIN.replace(profile_path=NAME, cluster="tiny", cluster_path="tiny.toml")
    request = SolveRequest(num_gpus=4, global_batch_size=8)
    plan = solve(profile, read_cluster("tiny.toml"), request, origin=origin).plan
    assert plan is not None
    write_plan(plan, "plan.py")
    return plan


def write_plan(plan: Plan, name: str) -> None:
    Path(name).write_text(f"raise SystemExit('it was run')\nPLAN = {plan.model_dump(mode='json')!r}\n")


def test_plans_are_compared_for_people_and_scripts(run: Run, planned: Plan) -> None:
    line = ("compare", "plan.py", "--degrees", "pp=4,m=8", "--degrees", "dp=4,m=1")
    done = run(*line)
    assert done.code == 0, done.err
    assert done.err.splitlines()[-1] == "step: 8 samples, adamw, fp32"
    assert "warning: cluster tiny has changed since plan.py was made" in done.err
    rows = {line[:32].strip(): line[32:].split() for line in done.out.splitlines() if line.strip()}
    fits = [text.strip() for text in " ".join(rows["fits"]).split("free")]
    assert fits == ["yes, 1.41 KiB", "yes, 4.53 KiB", "no, 960 B over"], done.out
    assert "dp=4,m=1 does not fit: stage 0 needs 10.9 KiB per GPU, the GPUs have 10 KiB" in done.out
    told = json.loads(run(*line, "--json").out)["plans"]
    assert [one["name"] for one in told] == ["plan.py", "pp=4,m=8", "dp=4,m=1"]
    assert [one["fits"] for one in told] == [True, True, False]
    assert told[0]["step_time_s"] == step_time_s(planned)
    assert (told[0]["reason"], told[0]["slower_fraction"]) == (None, 0.0)
    for one in told:
        assert sum(one["parts_s"].values()) == pytest.approx(one["step_time_s"])
        assert one["slower_fraction"] == pytest.approx(one["step_time_s"] / told[0]["step_time_s"] - 1)
        assert f"{one['name']} against plan.py: {one['reason']}".partition(":")[2] in done.out or one is told[0]


def test_a_plan_of_few_words_is_completed(run: Run, planned: Plan) -> None:
    layers = list(planned.layers)
    text = {"num_microbatches": 4, "stages": [{"layers": layers[:4], "dp_degree": 2}, {"layers": layers[4:]}]}
    Path("mine.py").write_text(f"PLAN = {text!r}\n")
    text["stages"][1]["dp_degree"] = 2  # type: ignore[index]
    Path("mine.py").write_text(f"PLAN = {text!r}\n")
    done = run("compare", "plan.py", "mine.py", "--json")
    assert done.code == 0, done.err
    mine = json.loads(done.out)["plans"][1]
    assert [stage["gpus"] for stage in mine["stages"]] == [[0, 1], [2, 3]]
    assert [stage["microbatch_size"] for stage in mine["stages"]] == [1, 1]
    assert mine["schedule"] == planned.schedule
    assert mine["status"] is None
    Path("mine.py").write_text("PLAN = {'stages': []}\n")
    run("compare", "plan.py", "mine.py").assert_one_error(1, "mine.py", "at least one stage")
    Path("mine.py").write_text("PLAN = {'stages': [{'layers': ['layers.0'], 'dp_degree': 4}]}\n")
    run("compare", "plan.py", "mine.py").assert_one_error(1, "mine.py", "x dp_degree 4 = 16, not global_batch_size 8")
    Path("mine.py").write_text("PLAN = {'num_microbatches': 2, 'stages': [{'layers': ['layers.0'], 'dp_degree': 4}]}\n")
    run("compare", "plan.py", "mine.py").assert_one_error(2, "mine.py: the plan is not for the profile", "leave out")


def test_degrees_alone_are_compared(run: Run, planned: Plan) -> None:
    line = ("compare", "--degrees", "pp=2", "--degrees", "pp=4", "--cluster", "tiny.toml", "--global-batch-size", "8")
    run(*line).assert_one_error(2, "without dp=", "--gpus")
    done = run(*line, "--gpus", "4", "--json")
    assert done.code == 0, done.err
    assert [one["pp_degree"] for one in json.loads(done.out)["plans"]] == [2, 4]


def test_what_does_not_compare_is_refused(run: Run, planned: Plan) -> None:
    def beside(name: str, **changes: object) -> Done:
        write_plan(planned.model_copy(update=changes), "other.py")
        return run("compare", "plan.py", "other.py")

    run("compare", "plan.py").assert_one_error(2, "nothing to compare with", "--degrees pp=4")
    run("compare", "plan.py", "none.py").assert_one_error(2, "none.py", "does not exist")
    m = {"global_batch_size": 16, "num_microbatches": 2 * planned.num_microbatches}
    beside("batch", **m).assert_one_error(2, "plan.py has global_batch_size 8, other.py 16")
    beside("states", optimizer="sgd").assert_one_error(2, "plan.py has optimizer adamw, other.py sgd")
    origin = planned.origin.replace(profile_hash="1" * 16)
    beside("profile", origin=origin).assert_one_error(2, "their times don't compare", "--profile FILE")
    origin = planned.origin.replace(cluster_hash="1" * 16)
    beside("cluster", origin=origin).assert_one_error(2, "'tiny', which differ: their times", "--cluster NAME")
    assert run("compare", "plan.py", "other.py", "--cluster", "tiny.toml").code == 0
    Path("tiny.toml").rename("gone.toml")
    run("compare", "plan.py", "--degrees", "pp=4").assert_one_error(2, "'tiny.toml', which is not there")
    Path(NAME).rename("gone.json")
    run("compare", "plan.py", "--degrees", "pp=4").assert_one_error(2, NAME, "which is not there", "--profile")
    line = ("--profile", "gone.json", "--cluster", "gone.toml")
    assert run("compare", "plan.py", "--degrees", "pp=4", *line).code == 0

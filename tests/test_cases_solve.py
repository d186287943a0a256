"""Cases of `planner solve`: cuts, degrees, memory, batches, and plans edited by hand."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from planner.cli.main import main
from planner.cost import evaluate
from planner.emitter import emit, write_plan
from planner.errors import EmitError, FileFormatError, UsageError
from planner.model_profile import LayerClass, ModelProfile, write_profile
from planner.plan import Plan, read_plan
from planner.runner.exactness import import_plan
from planner.schedule import num_in_flight
from tests.case_files import MB, MS, bottleneck_ms, bounds, case_profile, read_case, sizes, solve_case
from tests.strategies import chain_profile, layer_cost, make_cluster, make_plan


def names_of(profile: ModelProfile) -> list[str]:
    return [layer.name for layer in profile.layers]


def cover(plan: Plan | None, profile: ModelProfile) -> bool:
    assert plan is not None
    return [name for stage in plan.stages for name in stage.layers] == names_of(profile) and all(
        stage.layers for stage in plan.stages
    )


@pytest.mark.parametrize(
    ("number", "bottleneck", "allowed"),
    [(1, 2.0, [1, 1, 1, 2]), (3, 8.0, [7, 7, 8, 8])],
    ids=["01 five equal layers", "03 thirty layers"],
)
def test_layers_that_do_not_divide_leave_no_stage_empty(number: int, bottleneck: float, allowed: list[int]) -> None:
    case = read_case(number)
    profile = case_profile(case["layers"])
    solution = solve_case(profile, case["gpus"], {"pp_degree": case["stages"]})
    assert solution.status == "optimal"
    assert sorted(sizes(solution)) == allowed
    assert bottleneck_ms(solution) == pytest.approx(bottleneck)
    assert cover(solution.plan, profile)


@pytest.fixture
def edited(folder: Path) -> Path:
    """Case 03: a plan.py whose PLAN lost layers 28 and 29 to an edit by hand."""
    case = read_case(3)
    profile = case_profile(case["layers"])
    solution = solve_case(profile, case["gpus"], {"pp_degree": case["stages"]})
    assert solution.plan is not None
    path = folder / "plan.py"
    write_plan(emit(solution.plan, profile), path)
    text = path.read_text()
    assert read_plan(path).layers == tuple(names_of(profile))
    last = re.search(r"'layer27',\s*'layer28',\s*'layer29'\]", text)
    assert last is not None
    path.write_text(text[: last.start()] + "'layer27']" + text[last.end() :])
    return path


def test_03_a_plan_that_lost_layers_is_refused_by_their_names(edited: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FileFormatError) as caught:
        read_plan(edited)
    assert "its stages leave out 'layer28', 'layer29' (2 of 30 layers)" in caught.value.message
    for command in ("explain", "verify"):
        assert main([command, str(edited)]) == 1
        assert "leave out 'layer28', 'layer29' (2 of 30 layers)" in capsys.readouterr().err
    plan = import_plan(edited)
    with pytest.raises(plan.PlanError, match="leave out layer28, layer29: every layer must be in one stage"):
        plan.setup(lambda: None)  # as a training script would


def test_03_a_plan_that_lost_layers_is_not_priced_or_emitted() -> None:
    case = read_case(3)
    profile, fewer = case_profile(case["layers"]), case_profile(case["layers"][:28])
    plan = make_plan(fewer, [8, 16, 22])
    for refusal, do in (
        (UsageError, lambda: evaluate(plan, profile, make_cluster(4))),
        (EmitError, lambda: emit(plan, profile)),
    ):
        with pytest.raises(refusal, match=r"leave out 'layer28', 'layer29' \(2 of 30 layers\)"):
            do()
    with pytest.raises(ValueError, match=r"leave out 'layer28', 'layer29' \(2 of 30 layers\)"):
        plan.replace(layers=tuple(names_of(profile)))


def test_05_unequal_blocks_are_balanced_by_time() -> None:
    case = read_case(5)
    profile = case_profile(case["layers"])
    solution = solve_case(profile, case["gpus"], {"pp_degree": case["stages"]})
    assert bottleneck_ms(solution) == pytest.approx(24.0, abs=1e-6)
    assert bounds(solution) == [0, 16, 31, 46, 61]
    times = [layer["fwd_ms"] for layer in case["layers"]]
    by_count = [15, 30, 45]
    assert max(sum(times[a:b]) for a, b in pairwise([0, *by_count, 61])) == pytest.approx(25.6)
    priced = evaluate(make_plan(profile, by_count, m=8), profile, make_cluster(4))
    assert max(stage.time_s for stage in priced.stages) / MS == pytest.approx(25.6)
    assert cover(solution.plan, profile)


CAP_TIMES = {(1, 16): 160, (2, 8): 180, (4, 4): 190, (8, 2): 195}


def test_06_the_degrees_are_chosen_within_memory() -> None:
    case = read_case(6)
    batch, most = case["global_microbatches"], case["max_layers_per_gpu"]
    elements = 1000
    layers = [layer | {"params": elements} for layer in case["layers"]]
    profile = case_profile(layers, frozen=True)
    # A replica of fp32 parameters computes on a copy: 8 bytes per element and GPU, where there are several replicas.
    capped = make_cluster(case["gpus"], memory=most * 8 * elements)
    pins = {"microbatch_size": 1, "data_parallel": "replicated", "tp_degree": case["tp"], "num_gpus": case["gpus"]}
    solution = solve_case(profile, capped, pins, batch=batch)
    assert solution.status == "optimal"
    assert solution.plan is not None
    assert (solution.plan.pp_degree, solution.plan.dp_degree, solution.plan.tp_degree) == (8, 2, 1)
    assert sizes(solution) == [5] * 8
    assert solution.plan.prediction is not None
    assert solution.plan.prediction.step_time_s == pytest.approx(0.195)
    for pp, dp in CAP_TIMES:
        fits = solve_case(profile, capped, pins | {"pp_degree": pp}, batch=batch).plan is not None
        assert fits == (pp == 8), pp
        free = solve_case(profile, case["gpus"], pins | {"pp_degree": pp}, batch=batch)
        assert free.plan is not None
        assert free.plan.prediction is not None
        assert free.plan.dp_degree == dp
        assert free.plan.prediction.step_time_s == pytest.approx(CAP_TIMES[pp, dp] * MS)
    deep = solve_case(profile, capped, pins | {"pp_degree": 16}, batch=batch)
    assert deep.plan is not None
    assert deep.plan.prediction is not None
    assert max(sizes(deep)) == 3
    # (64 + 16 - 1) x 3 ms = 237 ms bounds it; stages of 2 layers fill and drain faster: all 40 layers once, 63 x 3 ms.
    assert deep.plan.prediction.step_time_s == pytest.approx((40 + 63 * 3) * MS)
    assert 0.195 < deep.plan.prediction.step_time_s <= 0.237
    best = solve_case(profile, case["gpus"], pins, batch=batch)
    assert best.plan is not None
    assert (best.plan.pp_degree, best.plan.dp_degree) == (1, 16)
    assert best.plan.prediction is not None
    assert best.plan.prediction.step_time_s == pytest.approx(0.160)


def test_07_cuts_follow_time_where_memory_is_ample() -> None:
    case = read_case(7)
    profile = case_profile(case["layers"])
    solution = solve_case(profile, case["gpus"], {"pp_degree": case["stages"], "tp_degree": 1})
    assert bounds(solution) == [0, 3, 6, 9, 10]
    assert bottleneck_ms(solution) == pytest.approx(3.0)
    by_parameters = evaluate(make_plan(profile, [1, 5, 9], m=32), profile, make_cluster(4))
    assert max(stage.time_s for stage in by_parameters.stages) / MS == pytest.approx(4.0)
    assert solution.plan is not None
    assert solution.plan.prediction is not None
    assert by_parameters.step_time_s > solution.plan.prediction.step_time_s


def test_09_the_last_stage_may_be_the_head_alone() -> None:
    case = read_case(9)
    profile = case_profile(case["layers"])
    solution = solve_case(profile, case["gpus"], {"pp_degree": case["stages"]})
    assert bottleneck_ms(solution) == pytest.approx(10.0)
    assert solution.plan is not None
    assert solution.plan.stages[-1].layers == ("layer29",)
    assert cover(solution.plan, profile)
    # The code of such a stage is run in test_cases_emit.


def test_11_parameters_are_told_per_stage_and_the_heaviest_is_no_average(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = read_case(11)
    params, counts = case["params"], case["stage_block_counts"]
    layers = [{"name": "embed", "fwd_ms": 1, "params": params["embed"]}]
    layers += [{"name": f"block{i}", "fwd_ms": 1, "params": params["block"]} for i in range(case["blocks"])]
    layers += [{"name": name, "fwd_ms": 1, "params": params[name]} for name in ("norm", "head")]
    profile = case_profile(layers)
    write_profile(profile, folder / "profile.json")
    starts = [f"block{sum(counts[:stage])}" for stage in range(1, len(counts))]
    pins = ["--pin", f"cuts={','.join(starts)}", "--pin", "dp_degree=1"]
    cluster = folder / "cluster.toml"
    cluster.write_text(
        'name = "test"\nmemory_reserve = "0B"\n'
        '[[node_groups]]\ncount = 1\ngpus_per_node = 4\ngpu = "h100-sxm"\n'
        '[intra_node]\nbandwidth = "450GB/s"\nlatency = "5us"\n[inter_node]\nbandwidth = "50GB/s"\nlatency = "5us"\n'
    )
    command = ["solve", "--gpus", "4", "--profile", "profile.json", "--cluster", "cluster.toml", *pins]
    assert main([*command, "--json", "--optimizer", "sgd"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [stage["param_count"] for stage in found["stages"]] == [113984, 99968, 99968, 214080]
    assert found["max_param_count"] == 214080
    assert found["heaviest_stage"] == 3
    held = [stage["memory"]["param_bytes"] for stage in found["stages"]]
    assert held == [4 * stage["param_count"] for stage in found["stages"]]
    assert max(stage["peak_bytes"] for stage in found["stages"]) == found["peak_bytes"]
    assert found["peak_bytes"] >= 4 * 214080
    assert 132000 not in (found["max_param_count"], *(stage["param_count"] for stage in found["stages"]))
    assert main(["explain", "plan.py"]) == 0
    assert "214 k" in capsys.readouterr().out


def in_flight_profile() -> ModelProfile:
    """Case 12: four stages of one layer, 10 MB saved per microbatch and 5 MB of states each."""
    case = read_case(12)
    [activation], [state] = set(case["act_mb_per_microbatch"]), set(case["state_mb"])
    cost = layer_cost(forward_s=MS, backward_s=2 * MS, activation=activation * MB, frozen=state * MB // 4)
    return chain_profile([LayerClass(name="block", module_class="Block", costs=(cost,))], ["block"] * case["stages"])


@pytest.mark.parametrize(
    ("schedule", "microbatches", "held", "fits_40_mb"),
    [
        ("1f1b", 8, [4, 3, 2, 1], [False, True, True, True]),
        ("1f1b", 2, [2, 2, 2, 1], [True, True, True, True]),
        ("gpipe", 8, [8, 8, 8, 8], [False, False, False, False]),
    ],
)
def test_12_microbatches_in_flight_are_counted_per_stage(
    schedule: str, microbatches: int, held: list[int], fits_40_mb: list[bool]
) -> None:
    profile = in_flight_profile()
    plan = make_plan(profile, [1, 2, 3], m=microbatches, schedule=schedule)  # type: ignore[arg-type]
    assert [num_in_flight(plan.schedule, 4, microbatches, stage) for stage in range(4)] == held
    memory = [stage.memory.peak_bytes for stage in evaluate(plan, profile, make_cluster(4)).stages]
    assert memory == [(10 * count + 5) * MB for count in held]
    assert [peak <= 40 * MB for peak in memory] == fits_40_mb
    pins = {"pp_degree": 4, "schedule": schedule, "num_microbatches": microbatches, "recompute": "none"}
    solution = solve_case(profile, make_cluster(4, memory=40 * MB), pins, batch=microbatches)
    assert (solution.plan is not None) == all(fits_40_mb)
    if solution.plan is not None:
        assert solution.plan.prediction is not None
        found = [stage.memory.peak_bytes for stage in solution.plan.prediction.stages]
        assert found == memory
    else:
        assert solution.conflict is not None
        assert solution.conflict.constraint == "memory"
        over = [str(stage) for stage, fits in enumerate(fits_40_mb) if not fits]
        assert f"{len(over)} stage{'s' if len(over) > 1 else ''} of 4 would not fit: {', '.join(over)}" in str(
            solution.conflict
        )


def test_14_gpus_that_would_stand_idle_are_left_and_told() -> None:
    case = read_case(14)
    profile = case_profile(case["layers"])
    solution = solve_case(profile, case["gpus"], batch=case["global_microbatches"])
    assert solution.plan is not None
    assert solution.plan.num_gpus == 1
    everything = solve_case(profile, case["gpus"], {"num_gpus": case["gpus"]}, batch=case["global_microbatches"])
    assert everything.status == "infeasible"
    assert "1 is not divisible by any dp_degree that makes 8 GPUs: 8" in str(everything.conflict)
    assert any(repair.description == f"leave out --pin num_gpus={case['gpus']}" for repair in everything.repairs)


def test_34_microbatches_must_divide_the_batch() -> None:
    case = read_case(34)
    profile = case_profile(case["layers"])
    pins = {"pp_degree": case["stages"]}
    solution = solve_case(profile, case["gpus"], pins | {"num_microbatches": case["microbatches"]}, batch=case["batch"])
    assert solution.plan is None
    message = str(solution.conflict)
    assert "8 is not divisible by num_microbatches 3" in message
    assert "valid are 1, 2, 4, 8" in message
    assert "4, 8 fill 3 stages under 1f1b" in message
    free = solve_case(profile, case["gpus"], pins, batch=case["batch"])
    assert free.plan is not None
    assert free.plan.num_microbatches in (4, 8)
    assert sizes(free) == [2, 2, 2]


def test_44_more_cuts_than_gpus_are_told_with_both_numbers() -> None:
    case = read_case(44)
    solution = solve_case(case_profile(case["layers"]), 2, {"cuts": "layers.0,layers.2,out"})
    assert solution.status == "infeasible"
    assert str(solution.conflict) == "pins: 3 cuts make 4 stages, more than the 2 GPUs"
    assert solution.repairs


def test_44_a_cut_names_the_first_layer_of_a_stage() -> None:
    case = read_case(44)
    profile = case_profile(case["layers"])
    with pytest.raises(UsageError, match=r"duplicate cut 'layers\.2'"):
        solve_case(profile, case["gpus"], {"cuts": ",".join(case["cuts"])})
    solution = solve_case(profile, case["gpus"], {"cuts": ",".join(case["cuts_ok"])})
    assert solution.plan is not None
    assert [list(stage.layers) for stage in solution.plan.stages] == [
        ["tok", "layers.0"],
        ["layers.1", "layers.2"],
        ["layers.3", "out"],
    ]
    assert cover(solution.plan, profile)
    with pytest.raises(UsageError, match="'tok', the first layer: stage 0 would be empty"):
        solve_case(profile, case["gpus"], {"cuts": "tok,layers.1"})
    with pytest.raises(UsageError, match=r"layer 'layers\.9', which 'test' does not have"):
        solve_case(profile, case["gpus"], {"cuts": "layers.9"})

"""Several GPU types in one cluster: times profiled on each or scaled, the slowest one's pace, the least memory."""

from pathlib import Path
from typing import Any

import pytest
from strategies import ORIGIN, chain_profile, equal_profile, layer_cost
from test_cost_degrees import mixed_plan

from planner import cost
from planner.cluster import Cluster, Gpu, Link, NodeGroup, read_gpu
from planner.cost import Pricer
from planner.cost.gpu_types import profiled_type, scaled_types
from planner.emitter import emit
from planner.errors import EmitError, ProfileError, UsageError
from planner.merged_profile import merge_profiles
from planner.model_profile import LayerClass, ModelProfile, read_profile, write_profile
from planner.plan import Stage
from planner.solver import SolveRequest, solve

H100, L40S = read_gpu("h100-sxm"), read_gpu("l40s")


def mixed_cluster(*groups: tuple[str, int]) -> Cluster:
    """Return nodes of one GPU type each, of the given sizes; links cost nothing."""
    free = Link(bandwidth="1e20B/s", latency="0s")  # type: ignore[arg-type]
    return Cluster(
        name="mixed",
        node_groups=tuple(NodeGroup(count=1, gpus_per_node=count, gpu=name) for name, count in groups),
        intra_node=free,
        inter_node=free,
        memory_reserve="0B",  # type: ignore[arg-type]
        gpus={name: read_gpu(name) for name, _ in groups},
    )


def one_class(*, gpu: str | None = "h100-sxm", dtype: str = "bfloat16", **numbers: Any) -> ModelProfile:
    """Return a profile of two layers of one class."""
    block = LayerClass(name="block", module_class="Block", costs=(layer_cost(**numbers),))
    return chain_profile([block], ["block"] * 2, gpu=gpu, dtype=dtype)


def forward_s(profile: ModelProfile, gpu: str) -> float:
    """Return the predicted forward of one layer on one GPU of a type."""
    plan = mixed_plan(profile, [{"layers": 2}], batch=1, precision="bf16")
    return cost.evaluate(plan, profile, mixed_cluster((gpu, 1))).stages[0].forward_time_s / 2


def rate(gpu: Gpu) -> float:
    return gpu.peak_flops["bfloat16"] * gpu.matmul_efficiency


def width(gpu: Gpu) -> float:
    return gpu.memory_bandwidth * gpu.memory_efficiency


def test_times_are_scaled_at_the_layer_s_own_intensity() -> None:
    computing = one_class(forward_s=1.0, forward_flops=rate(H100))
    assert forward_s(computing, "h100-sxm") == 1.0
    assert forward_s(computing, "l40s") == pytest.approx(rate(H100) / rate(L40S))
    moving = one_class(forward_s=1.0, forward_flops=0.0)
    assert forward_s(moving, "l40s") == pytest.approx(width(H100) / width(L40S))
    half = one_class(forward_s=1.0, forward_flops=rate(H100) / 2)
    assert forward_s(half, "l40s") == pytest.approx(rate(H100) / rate(L40S) / 2 + width(H100) / width(L40S) / 2)
    faster_than_roofline = one_class(forward_s=0.5, forward_flops=rate(H100))
    assert forward_s(faster_than_roofline, "l40s") == pytest.approx(rate(H100) / rate(L40S) / 2)


def test_launches_take_what_they_take_on_the_other_type() -> None:
    cost_of = layer_cost(forward_s=2e-5, forward_flops=0.0).replace(launches=(3, 0, 0))
    block = LayerClass(name="block", module_class="Block", costs=(cost_of,))
    profile = chain_profile([block], ["block"] * 2, gpu="h100-sxm", dtype="bfloat16")
    expected = 3 * L40S.launch_overhead + (2e-5 - 3 * H100.launch_overhead) * width(H100) / width(L40S)
    assert forward_s(profile, "l40s") == pytest.approx(expected)


def test_a_stage_of_several_types_goes_at_the_slowest_pace_with_the_least_memory() -> None:
    profile = one_class(forward_s=1.0, forward_flops=rate(H100), params=1000)
    cluster = mixed_cluster(("h100-sxm", 2), ("l40s", 2))
    pricer = Pricer(profile, cluster)
    stages = [{"layers": 1, "dp_degree": 2, "gpus": (0, 2)}, {"layers": 1, "dp_degree": 2, "gpus": (1, 3)}]
    plan = mixed_plan(profile, stages, precision="bf16", batch=2)
    prediction = pricer.evaluate(plan)
    slow = rate(H100) / rate(L40S)
    assert [stage.forward_time_s for stage in prediction.stages] == pytest.approx([slow, slow])
    assert [stage.gpu for stage in prediction.stages] == ["h100-sxm + l40s"] * 2
    assert pricer.capacity(plan.stages[0]) == L40S.memory
    slow_only = cost.evaluate(plan, profile, mixed_cluster(("l40s", 4))).stages[0]
    assert prediction.stages[0].optimizer_time_s == slow_only.optimizer_time_s > 0
    apart = [{"layers": 1, "dp_degree": 2, "gpus": (0, 1)}, {"layers": 1, "dp_degree": 2, "gpus": (2, 3)}]
    plan = mixed_plan(profile, apart, precision="bf16", batch=2)
    prediction = pricer.evaluate(plan)
    assert [stage.forward_time_s for stage in prediction.stages] == pytest.approx([1.0, slow])
    assert [stage.gpu for stage in prediction.stages] == ["h100-sxm", "l40s"]
    assert [pricer.capacity(stage) for stage in plan.stages] == [H100.memory, L40S.memory]
    with pytest.raises(EmitError, match=r"it runs on GPUs of several types \(h100-sxm, l40s\)"):
        emit(plan.model_copy(update={"prediction": prediction}), profile)


def test_one_type_is_not_told() -> None:
    profile = one_class()
    plan = mixed_plan(profile, [{"layers": 2}], batch=1, precision="bf16")
    prediction = cost.evaluate(plan, profile, mixed_cluster(("h100-sxm", 1)))
    assert "gpu" not in prediction.model_dump()["stages"][0]


def test_profiles_of_several_types_are_one() -> None:
    on_h100 = one_class(forward_s=1.0, activation=10)
    on_l40s = one_class(gpu="l40s", forward_s=7.0, activation=30)
    merged = merge_profiles([on_h100, on_l40s])
    assert (forward_s(merged, "h100-sxm"), forward_s(merged, "l40s")) == (1.0, 7.0)
    cluster = mixed_cluster(("h100-sxm", 1), ("l40s", 1), ("b200", 1))
    assert scaled_types(merged, cluster) == ("b200",)
    assert scaled_types(on_h100, cluster) == ("l40s", "b200")
    plan = mixed_plan(merged, [{"layers": 1}, {"layers": 1}], batch=1, precision="bf16")
    kept = [stage.memory.activation_bytes for stage in cost.evaluate(plan, merged, cluster).stages]
    assert kept == [10, 30]


def test_merged_profiles_are_read_back(tmp_path: Path) -> None:
    merged = merge_profiles([one_class(), one_class(gpu="l40s", forward_s=7.0)])
    write_profile(merged, tmp_path / "merged.json")
    assert read_profile(tmp_path / "merged.json") == merged


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (one_class(), "two profiles have times of h100-sxm"),
        (one_class(gpu=None), "has times of 'cpu', which is no known GPU type"),
        (one_class(gpu="l40s", dtype="float32"), r"differ in dtype \(bfloat16 and float32\)"),
        (one_class(gpu="l40s", params=10), "differ in param_count"),
    ],
)
def test_profiles_that_do_not_belong_together_are_refused(other: ModelProfile, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        merge_profiles([one_class(), other])


def test_times_of_an_unknown_type_are_not_scaled() -> None:
    profile = one_class(gpu=None)
    assert profiled_type(profile) is None
    assert forward_s(profile, "l40s") == 1.0  # as they are, which commands warn of
    plan = mixed_plan(profile, [{"layers": 1}, {"layers": 1}], batch=1, precision="bf16")
    with pytest.raises(ProfileError, match="mixes h100-sxm and l40s; the profile 'test' has times of 'cpu'"):
        cost.evaluate(plan, profile, mixed_cluster(("h100-sxm", 1), ("l40s", 1)))


def test_a_type_without_the_dtype_is_refused() -> None:
    profile = one_class(gpu="a100-sxm-80gb")
    with pytest.raises(ProfileError, match="v100-sxm-32gb has no peak_flops for bfloat16"):
        forward_s(profile, "v100-sxm-32gb")


def test_solving_for_another_type_scales_times() -> None:
    profile = one_class(forward_s=1.0, backward_s=0.0, forward_flops=rate(H100))
    request = SolveRequest(num_gpus=1, global_batch_size=1, precision="bf16", pins=(("recompute", "none"),))
    solution = solve(profile, mixed_cluster(("l40s", 1)), request, origin=ORIGIN)
    assert solution.plan is not None
    assert solution.plan.prediction is not None
    assert solution.plan.prediction.stages[0].forward_time_s == pytest.approx(2 * rate(H100) / rate(L40S))


def test_memory_over_capacity_is_told_not_refused() -> None:
    profile = equal_profile(1, params=10**11)
    stage = Stage(layers=("layers.0",), microbatch_size=1, gpus=(0,))
    pricer = Pricer(profile, mixed_cluster(("l40s", 1)))
    plan = mixed_plan(profile, [{"layers": 1}], batch=1)
    assert pricer.evaluate(plan).peak_bytes > pricer.capacity(stage)

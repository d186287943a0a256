"""The solver on clusters of several GPU types, against brute force."""

import random

import pytest
from oracle import all_plans, fastest, priced_plans
from strategies import ORIGIN, random_cluster, random_profile
from test_cost_gpus import mixed_cluster, one_class
from test_cost_repriced import with_second_type

from planner.errors import UsageError
from planner.plan import EMITTED_SCHEDULES, SCHEDULES
from planner.solver import SolveRequest, solve

CASES_PER_TEST = 15
STRAIGHT = tuple(("schedule", schedule) for schedule in SCHEDULES if schedule not in EMITTED_SCHEDULES)


@pytest.mark.parametrize("block", range(3))
def test_equal_to_brute_force_on_two_gpu_types(block: int) -> None:
    """Ranks are in the order of the cluster: stages may be of one type or the other, or of both."""
    compared, seed, several = 0, 5000 * block, 0
    while compared < CASES_PER_TEST:
        seed += 1
        draw = random.Random(f"types {seed}")
        num_layers, num_gpus = draw.randint(2, 4), draw.choice([2, 4])
        profile = random_profile(seed, num_layers=num_layers, tp_degrees=(2,), skips=draw.random() < 0.3)
        roomy = random_cluster(seed, 2 * num_gpus)
        nodes = roomy.node_groups[0].replace(gpus_per_node=num_gpus // 2, count=2)
        roomy = roomy.model_copy(update={"node_groups": (nodes,)})
        profile, roomy = with_second_type(draw, profile, roomy)
        batch = draw.choice([2, 4])
        every = all_plans(profile, num_gpus, batch, recompute=num_layers < 4, fewer=True, theoretical=True)
        plans = [plan for plan in every if plan.schedule in EMITTED_SCHEDULES]
        if len(plans) > 800:
            continue
        priced = priced_plans(profile, roomy, iter(plans))
        least, most = min(peak for _, peak in priced), max(peak for _, peak in priced)
        memory = draw.choice([most, least + int((most - least) * draw.random())])
        small = {name: gpu.model_copy(update={"memory": memory}) for name, gpu in roomy.gpus.items()}
        cluster = roomy.model_copy(update={"gpus": small})
        pins = () if num_layers < 4 else (("recompute", "none"),)
        request = SolveRequest(
            num_gpus=num_gpus, global_batch_size=batch, pins=pins, exclusions=STRAIGHT, top=0, theoretical=True
        )
        solution = solve(profile, cluster, request, origin=ORIGIN)
        assert solution.plan is not None
        assert solution.plan.prediction is not None
        assert solution.plan.prediction.step_time_s == pytest.approx(fastest(priced, memory), rel=1e-9), seed
        assert solution.status == "optimal"
        several += len({stage.gpu for stage in solution.plan.prediction.stages}) > 1
        compared += 1
    assert several > 0
    assert set(EMITTED_SCHEDULES) == {"1f1b", "gpipe"}


def test_each_stage_fits_its_own_gpus() -> None:
    profile = one_class(params=4 * 10**9, forward_s=1.0)
    cluster = mixed_cluster(("h100-sxm", 1), ("l40s", 1))
    request = SolveRequest(
        num_gpus=2, global_batch_size=2, optimizer="sgd", precision="bf16", pins=(("pp_degree", "2"),), theoretical=True
    )
    solution = solve(profile, cluster, request, origin=ORIGIN)
    assert solution.plan is not None
    assert solution.plan.prediction is not None
    for stage, gpu in zip(solution.plan.prediction.stages, ("h100-sxm", "l40s"), strict=True):
        assert stage.gpu == gpu
        assert stage.memory.peak_bytes <= cluster.gpus[gpu].memory
    larger = one_class(params=10**10, forward_s=1.0)
    found = solve(larger, cluster, request, origin=ORIGIN)
    assert found.conflict is not None
    assert found.conflict.constraint == "memory"
    assert found.conflict.available_bytes == cluster.gpus["l40s"].memory  # 60 GB on either, of which the other has 80
    assert "in stage 1 with layer layers.1; the GPUs have 44.7 GiB" in found.conflict.message


def test_several_types_are_planned_for_only_when_asked() -> None:
    cluster = mixed_cluster(("h100-sxm", 1), ("l40s", 1))
    request = SolveRequest(num_gpus=2, global_batch_size=2, precision="bf16")
    with pytest.raises(UsageError, match="'mixed' mixes h100-sxm and l40s: no plan runs on GPUs of several") as caught:
        solve(one_class(), cluster, request, origin=ORIGIN)
    assert "--theoretical" in caught.value.hint
    alone = SolveRequest(num_gpus=1, global_batch_size=2, precision="bf16")
    assert solve(one_class(), cluster, alone, origin=ORIGIN).status == "optimal"

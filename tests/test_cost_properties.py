"""What must hold of the price of any plan, whatever its degrees and placement."""

import random
from collections.abc import Iterator

import pytest
from strategies import equal_profile, make_cluster, random_cluster, random_profile
from test_cost_degrees import mixed_plan
from test_cost_repriced import draw_plan

from planner import cost
from planner.cluster import Cluster, Link
from planner.errors import UsageError
from planner.model_profile import ModelProfile
from planner.plan import Plan

NUM_CASES = 60


def drawn() -> Iterator[tuple[random.Random, Plan, ModelProfile, Cluster]]:
    """Yield drawn plans that can be priced, each with its own source of random numbers."""
    found, seed = 0, 0
    while found < NUM_CASES:
        seed += 1
        draw = random.Random(f"properties {seed}")
        profile = random_profile(seed, num_layers=draw.randint(2, 5), tp_degrees=(2, 4), skips=draw.random() < 0.3)
        cluster = random_cluster(seed, 32)
        plan = draw_plan(draw, profile, cluster.num_gpus)
        if plan is None:
            continue
        try:
            cost.evaluate(plan, profile, cluster)
        except UsageError:  # ties that are divided differently
            continue
        found += 1
        yield draw, plan, profile, cluster


def with_links(cluster: Cluster, intra: float, inter: float) -> Cluster:
    """Return the cluster with bandwidths multiplied."""
    links = {
        name: Link(bandwidth=f"{link.bandwidth * times!r}B/s", latency=f"{link.latency!r}s")  # type: ignore[arg-type]
        for name, link, times in (("intra_node", cluster.intra_node, intra), ("inter_node", cluster.inter_node, inter))
    }
    return cluster.model_copy(update=links)


def test_equal_gpus_of_a_node_stand_for_one_another() -> None:
    for draw, plan, profile, cluster in drawn():
        per_node = cluster.gpus_per_node
        swapped = {}
        for node in range(cluster.num_gpus // per_node):
            ranks = list(range(node * per_node, (node + 1) * per_node))
            swapped |= dict(zip(ranks, draw.sample(ranks, k=per_node), strict=True))
        stages = tuple(stage.replace(gpus=tuple(swapped[rank] for rank in stage.gpus)) for stage in plan.stages)
        other = plan.replace(stages=stages)
        assert cost.evaluate(other, profile, cluster) == cost.evaluate(plan, profile, cluster)


def test_nodes_stand_for_one_another() -> None:
    for draw, plan, profile, cluster in drawn():
        per_node = cluster.gpus_per_node
        count = cluster.num_gpus // per_node
        nodes = draw.sample(range(count), k=count)
        stages = tuple(
            stage.replace(gpus=tuple(nodes[rank // per_node] * per_node + rank % per_node for rank in stage.gpus))
            for stage in plan.stages
        )
        assert cost.evaluate(plan.replace(stages=stages), profile, cluster) == cost.evaluate(plan, profile, cluster)


def test_more_bandwidth_is_never_slower() -> None:
    for draw, plan, profile, cluster in drawn():
        before = cost.evaluate(plan, profile, cluster)
        faster = with_links(cluster, draw.choice([1, 2, 10]), draw.choice([1, 2, 10]))
        after = cost.evaluate(plan, profile, faster)
        assert after.step_time_s <= before.step_time_s * (1 + 1e-12)
        assert [stage.memory for stage in after.stages] == [stage.memory for stage in before.stages]


def test_links_that_cost_nothing_leave_what_is_computed() -> None:
    for _, plan, profile, cluster in drawn():
        free = make_cluster(cluster.num_gpus, memory_bandwidth=cluster.gpus["test"].memory_bandwidth, intra=(1e24, 0.0))
        prediction = cost.evaluate(plan, profile, free)
        assert prediction.exposed_comm_time_s == pytest.approx(0.0, abs=1e-9)
        before = cost.evaluate(plan, profile, cluster)
        assert prediction.step_time_s == pytest.approx(before.step_time_s - before.exposed_comm_time_s)


@pytest.mark.parametrize("shard_degree", [1, 2, 4, 8])
@pytest.mark.parametrize("tp_degree", [1, 2])
def test_replicas_spread_over_nodes_are_never_faster(shard_degree: int, tp_degree: int) -> None:
    profile = equal_profile(2, params=5000, activation=10)
    cluster = make_cluster(64, gpus_per_node=16, intra=(300.0, 0.1), inter=(50.0, 0.2))

    def step_s(gpus: list[int]) -> float:
        stage = {"layers": 2, "dp_degree": 8, "tp_degree": tp_degree, "shard_degree": shard_degree, "gpus": gpus}
        return cost.evaluate(mixed_plan(profile, [stage], batch=8), profile, cluster).step_time_s

    count = 8 * tp_degree
    together = step_s(list(range(count)))
    draw = random.Random(f"{shard_degree} {tp_degree}")
    for _ in range(20):
        assert step_s(draw.sample(range(64), k=count)) >= together
    nodes = [16 * (i // (count // 4)) + i % (count // 4) for i in range(count)]  # a quarter on each of four
    assert step_s(nodes) > together


def test_a_shard_group_inside_a_node_keeps_the_network_free() -> None:
    profile = equal_profile(1, params=100_000)
    cluster = make_cluster(16, gpus_per_node=8, intra=(1000.0, 0.0), inter=(10.0, 0.0))

    def data_s(shard_degree: int) -> float:
        plan = mixed_plan(profile, [{"layers": 1, "dp_degree": 16, "shard_degree": shard_degree}], batch=16)
        return cost.evaluate(plan, profile, cluster).stages[0].data_parallel_time_s

    # Over 80 bytes/s per node: 15/16 of 400 kB twice, or 1/8 of it once there and back over 10 bytes/s per GPU.
    assert data_s(16) == pytest.approx(2 * 15 / 16 * 400_000 / 80)
    assert data_s(8) == pytest.approx(2 * 7 / 8 * 400_000 / 1000 + 2 * 1 / 2 * 50_000 / 10)
    assert data_s(8) < data_s(16)

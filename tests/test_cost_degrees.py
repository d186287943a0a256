"""Plans whose stages differ in degrees, against numbers worked out by hand and general properties."""

from collections.abc import Sequence
from typing import Any

import pytest
from strategies import ORIGIN, chain_profile, equal_profile, layer_cost, make_cluster, timed_profile

from planner import cost
from planner.cluster import Cluster
from planner.emitter import emit
from planner.errors import EmitError, UsageError
from planner.model_profile import Edge, LayerClass, ModelProfile
from planner.plan import Plan, Stage
from planner.prediction import Prediction
from planner.records import validate
from planner.runnable import unrunnable
from planner.sharding import ShardedParameter, Sharding


def mixed_plan(
    profile: ModelProfile, stages: Sequence[dict[str, Any]], *, m: int = 1, batch: int = 4, **plan: Any
) -> Plan:
    """Return a plan with a stage for each of `stages`: fields of `Stage`, with `layers` as their number.

    GPUs are numbered in the order of the stages unless told.
    """
    names, made, rank = [layer.name for layer in profile.layers], [], 0
    for fields in stages:
        count, names = names[: fields["layers"]], names[fields["layers"] :]
        tp, dp = fields.get("tp_degree", 1), fields.get("dp_degree", 1)
        ranks = fields.get("gpus") or tuple(range(rank, rank + tp * dp))
        rank += tp * dp
        made.append(
            Stage(**fields | {"layers": tuple(count), "microbatch_size": batch // m // dp, "gpus": tuple(ranks)})
        )
    settings = {"schedule": "1f1b", "data_parallel": "replicated", "optimizer": "sgd", "precision": "fp32"} | plan
    return Plan(global_batch_size=batch, num_microbatches=m, stages=tuple(made), origin=ORIGIN, **settings)


def price(plan: Plan, profile: ModelProfile, cluster: Cluster | None = None) -> Prediction:
    return cost.evaluate(plan, profile, cluster or make_cluster(plan.num_gpus))


@pytest.mark.parametrize(
    ("first", "second", "sent_s", "back_s"),
    [  # 400 bytes of 4 rows over 100 bytes/s: what the busiest link carries
        ({}, {}, 4.0, 4.0),
        ({"tp_degree": 2}, {}, 4.0, 8.0),  # the one GPU sends gradients to two
        ({}, {"tp_degree": 2}, 8.0, 4.0),
        ({"dp_degree": 2}, {}, 4.0, 4.0),
        ({}, {"dp_degree": 2}, 4.0, 4.0),
        ({}, {"dp_degree": 4}, 4.0, 4.0),
        ({"dp_degree": 2}, {"dp_degree": 2}, 2.0, 2.0),
        (
            {"dp_degree": 2},
            {"tp_degree": 2},
            4.0,
            2.0,
        ),  # each of two that have all gradients sends half
        ({"tp_degree": 2}, {"dp_degree": 2}, 2.0, 4.0),  # each of the two sends half of the rows to one replica
    ],
)
def test_the_busiest_link_counts(first: dict[str, int], second: dict[str, int], sent_s: float, back_s: float) -> None:
    profile = timed_profile([1.0, 1.0], [1.0, 1.0])
    profile = profile.model_copy(update={"edges": (profile.edges[0].replace(bytes_per_row=100.0),)})
    plan = mixed_plan(profile, [{"layers": 1} | first, {"layers": 1} | second])
    stages = price(plan, profile, make_cluster(plan.num_gpus, intra=(100.0, 0.25))).stages
    assert stages[0].send_time_s == pytest.approx(sent_s + 0.25)
    assert stages[1].send_time_s == pytest.approx(back_s + 0.25)


def test_replicas_that_do_not_divide_one_another_share_rows() -> None:
    # Six rows, 2 -> 3 replicas: each of the two sends its three rows, each of the three gets two.
    profile = timed_profile([1.0, 1.0], [1.0, 1.0])
    profile = profile.model_copy(update={"edges": (profile.edges[0].replace(bytes_per_row=100.0),)})
    plan = mixed_plan(profile, [{"layers": 1, "dp_degree": 2}, {"layers": 1, "dp_degree": 3}], batch=6)
    prediction = price(plan, profile, make_cluster(5, intra=(100.0, 0.0)))
    assert [stage.send_time_s for stage in prediction.stages] == pytest.approx([3.0, 3.0])
    assert prediction.step_time_s == pytest.approx(3 + 3 + 2 + 2 + 3 + 3)


def test_what_has_no_rows_goes_to_every_replica_once() -> None:
    profile = timed_profile([1.0, 1.0], [1.0, 1.0])
    edge = Edge(value="v0", producer=0, consumers=(1,), bytes_per_row=100.0, fixed_bytes=1000, needs_grad=True)
    profile = profile.model_copy(update={"edges": (edge,)})
    cluster = make_cluster(5, intra=(100.0, 0.0))
    spread = mixed_plan(profile, [{"layers": 1}, {"layers": 1, "dp_degree": 2}])
    assert [s.send_time_s for s in price(spread, profile, cluster).stages] == pytest.approx([4 + 20, 4 + 20])
    joined = mixed_plan(profile, [{"layers": 1, "dp_degree": 2}, {"layers": 1}])
    assert [s.send_time_s for s in price(joined, profile, cluster).stages] == pytest.approx([4 + 10, 4 + 10])


def test_the_slowest_route_of_a_message_counts() -> None:
    profile = timed_profile([1.0, 1.0], [1.0, 1.0])
    profile = profile.model_copy(update={"edges": (profile.edges[0].replace(bytes_per_row=100.0),)})
    cluster = make_cluster(4, gpus_per_node=2, intra=(100.0, 0.0), inter=(50.0, 0.5))
    inside = mixed_plan(profile, [{"layers": 1, "gpus": (0,)}, {"layers": 1, "gpus": (1,)}])
    assert price(inside, profile, cluster).stages[0].send_time_s == pytest.approx(4.0)
    across = mixed_plan(profile, [{"layers": 1, "gpus": (0,)}, {"layers": 1, "dp_degree": 2, "gpus": (1, 2)}])
    assert price(across, profile, cluster).stages[0].send_time_s == pytest.approx(8.5)


def test_shard_groups_are_neighbours_and_sum_between_them() -> None:
    profile = equal_profile(1, params=1000)
    cluster = make_cluster(4, gpus_per_node=2, intra=(1000.0, 0.25), inter=(500.0, 0.5))
    hybrid = price(mixed_plan(profile, [{"layers": 1, "dp_degree": 4, "shard_degree": 2}]), profile, cluster).stages[0]
    # Gather 4000 bytes and scatter them over two GPUs of a node, all-reduce halves of it over the network.
    assert hybrid.data_parallel_time_s == pytest.approx(2 * (0.25 + 2.0) + 2 * (0.5 + 1000 / 500))
    assert (hybrid.memory.param_bytes, hybrid.memory.grad_bytes) == (2000 + 4000, 4000 + 2000)


@pytest.mark.parametrize(("degree", "mode"), [(1, "replicated"), (4, "sharded")])
def test_shard_degrees_one_and_all_are_the_two_modes(degree: int, mode: str) -> None:
    profile = equal_profile(2, params=1000, activation=10)
    cluster = make_cluster(4, gpus_per_node=2, intra=(1000.0, 0.25), inter=(500.0, 0.5), memory_bandwidth=1e4)
    plain = mixed_plan(profile, [{"layers": 2, "dp_degree": 4}], data_parallel=mode, optimizer="adamw")
    for other in ("replicated", "sharded"):
        told = mixed_plan(
            profile,
            [{"layers": 2, "dp_degree": 4, "shard_degree": degree}],
            data_parallel=other,
            optimizer="adamw",
        )
        assert price(told, profile, cluster) == price(plain, profile, cluster)


def tied_profile() -> ModelProfile:
    halves = Sharding(name="halves", tp_degree=2, parameters={"weight": ShardedParameter(dim=0)})
    other = Sharding(name="other", tp_degree=4, parameters={"weight": ShardedParameter(dim=1)})
    quarters = Sharding(name="quarters", tp_degree=4, parameters={"weight": ShardedParameter(dim=0)})
    ways = (halves, other, quarters)
    divided = [layer_cost(tp_degree=w.tp_degree, sharding=w.name, params=1000 // w.tp_degree) for w in ways]
    block = LayerClass(name="block", module_class="Block", shardings=ways, costs=(layer_cost(params=1000), *divided))
    return chain_profile([block], ["block"] * 2, tied=[(0, 1)])


def tied_seconds(first: dict[str, Any], second: dict[str, Any], **plan: Any) -> float:
    """Return the seconds of summing 4000 bytes between two stages over links of 1000 bytes/s and 0.25 s."""
    profile = tied_profile()
    told = mixed_plan(profile, [{"layers": 1} | first, {"layers": 1} | second], **plan)
    cluster = make_cluster(told.num_gpus, intra=(1000.0, 0.25))
    events = cost.timeline(told, profile, cluster)
    seconds = {event.stage: event.end_s - event.start_s for event in events if event.kind == "tied"}
    assert len(set(seconds.values())) == 1
    return seconds[0]


def test_shared_gradients_are_summed_between_stages_of_different_degrees() -> None:
    halved = {"tp_degree": 2, "shardings": {"block": "halves"}}
    quartered = {"tp_degree": 4, "shardings": {"block": "quarters"}}
    assert tied_seconds({}, {}) == pytest.approx(2 * (0.25 + 2.0))  # an all-reduce, as ever
    assert tied_seconds(halved, halved) == pytest.approx(2 * (0.25 + 1.0))
    # One GPU has the whole: it sends a half to each of two, and gets both.
    assert tied_seconds({}, halved) == pytest.approx(0.25 + 4.0)
    assert tied_seconds(halved, quartered) == pytest.approx(0.25 + 2.0)
    # Two replicas, each of which needs the whole, of the one: 8000 bytes leave it.
    assert tied_seconds({}, {"dp_degree": 2}) == pytest.approx(0.25 + 8.0)
    assert tied_seconds({}, {"dp_degree": 2, "shard_degree": 2}) == pytest.approx(0.25 + 4.0)
    # Whole at tp_degree 2 on both: two GPUs with a copy each, of a stage with one.
    assert tied_seconds({}, {"tp_degree": 2}) == pytest.approx(0.25 + 8.0)


def test_shared_parameters_that_no_slices_fit_are_refused() -> None:
    with pytest.raises(UsageError, match=r"share parameter 'layers\.0\.weight', which the plan divides differently"):
        tied_seconds(
            {"tp_degree": 2, "shardings": {"block": "halves"}}, {"tp_degree": 4, "shardings": {"block": "other"}}
        )
    with pytest.raises(UsageError, match="divides differently"):
        tied_seconds({"tp_degree": 2, "shardings": {"block": "halves"}}, {"tp_degree": 2})


def test_degrees_that_have_no_price_or_do_not_divide_are_refused() -> None:
    profile = equal_profile(1)
    for key, gpus in (("expert_degree", (0, 1)), ("context_degree", (0, 1, 2, 3))):
        plan = mixed_plan(profile, [{"layers": 1, "dp_degree": 2, key: 2, "gpus": gpus}])
        with pytest.raises(UsageError, match=f"stage 0 has {key} 2, which has no price yet"):
            price(plan, profile, make_cluster(4))
    with pytest.raises(ValueError, match="shard_degree 3 does not divide dp_degree 4"):
        mixed_plan(profile, [{"layers": 1, "dp_degree": 4, "shard_degree": 3}])
    with pytest.raises(ValueError, match="expert_degree 3 does not divide its 4 GPUs"):
        mixed_plan(profile, [{"layers": 1, "dp_degree": 4, "expert_degree": 3}])
    with pytest.raises(ValueError, match="tp_degree 1 x dp_degree 2 x context_degree 2 = 4 GPUs, but 2 are listed"):
        mixed_plan(profile, [{"layers": 1, "dp_degree": 2, "context_degree": 2}])


def test_new_degrees_are_written_only_where_they_are_told() -> None:
    profile = equal_profile(1)
    plain = mixed_plan(profile, [{"layers": 1, "dp_degree": 4}])
    assert not {"shard_degree", "expert_degree", "context_degree"} & set(plain.model_dump()["stages"][0])
    told = mixed_plan(profile, [{"layers": 1, "dp_degree": 4, "shard_degree": 2, "expert_degree": 2}])
    assert validate(Plan, told.model_dump(mode="json"), source="test") == told


@pytest.mark.parametrize(
    ("stages", "told"),
    [
        ([{"tp_degree": 2}, {}], "has stages of different degrees: tp_degree 2 on stage 0, 1 on stage 1"),
        ([{}, {"dp_degree": 2}], "has stages of different degrees: dp_degree 1 on stage 0, 2 on stage 1"),
        (
            [{"dp_degree": 4, "shard_degree": 2}] * 2,
            "shards stage 0 over 2 of 4 replicas, data_parallel replicated",
        ),
        ([{"dp_degree": 2, "expert_degree": 2}] * 2, "has expert_degree 2 on stage 0"),
    ],
)
def test_no_code_is_written_for_what_the_runtime_can_not_run(stages: list[dict[str, Any]], told: str) -> None:
    profile = equal_profile(2)
    plan = mixed_plan(profile, [{"layers": 1} | fields for fields in stages])
    assert unrunnable(plan) == told
    with pytest.raises(EmitError, match="no code can be written yet for this plan: it") as caught:
        emit(plan, profile)
    assert told in caught.value.message


def test_what_the_runtime_runs_is_told_by_nothing() -> None:
    profile = equal_profile(2)
    assert unrunnable(mixed_plan(profile, [{"layers": 1, "dp_degree": 2}] * 2)) is None
    assert unrunnable(mixed_plan(profile, [{"layers": 2, "dp_degree": 2, "shard_degree": 1}])) is None


def test_hand_written_mistakes_are_named() -> None:
    profile = equal_profile(2)
    wrong = mixed_plan(profile, [{"layers": 1}, {"layers": 1, "tp_degree": 2, "shardings": {"blok": "halves"}}])
    with pytest.raises(UsageError, match="stage 1 divides layer class 'blok', which the profile 'test'") as caught:
        price(wrong, profile)
    assert caught.value.hint == "did you mean 'block'?"
    far = mixed_plan(profile, [{"layers": 1}, {"layers": 1, "gpus": (9,)}])
    with pytest.raises(UsageError, match="stage 1 is on GPU 9; the cluster 'test' has GPUs 0 to 3"):
        price(far, profile, make_cluster(4))
    few = profile.model_copy(update={"least_rows": 2})
    with pytest.raises(UsageError, match="stage 1 has microbatch_size 1; 'test' trains on at least 2 rows at a time"):
        price(mixed_plan(few, [{"layers": 1}, {"layers": 1, "dp_degree": 4}]), few)

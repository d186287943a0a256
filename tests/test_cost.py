"""The price of plans against numbers worked out by hand."""

import pytest
from strategies import chain_profile, equal_profile, layer_cost, make_cluster, make_plan, timed_profile

from planner import cost
from planner.cluster import Cluster, Link
from planner.cost.communication import Route, collective_s
from planner.cost.layers import interpolate
from planner.cost.places import Places
from planner.errors import ProfileError, UsageError
from planner.model_profile import Edge, LayerClass, ModelProfile
from planner.plan import DataParallel, Optimizer, Plan, Precision, Schedule
from planner.prediction import Prediction
from planner.records import validate
from planner.sharding import CollectiveCall, ShardedParameter, Sharding


def price(plan: Plan, profile: ModelProfile, cluster: Cluster | None = None) -> Prediction:
    return cost.evaluate(plan, profile, cluster or make_cluster(plan.num_gpus))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_equal_stages_take_m_plus_stages_minus_one_turns(schedule: Schedule) -> None:
    profile = timed_profile([1.0] * 8, [2.0] * 8)
    prediction = price(make_plan(profile, [2, 4, 6], m=8, schedule=schedule), profile)
    assert prediction.step_time_s == pytest.approx((8 + 3) * 6)
    assert prediction.bubble_fraction == pytest.approx(3 / 11)


def test_gpipe_takes_sum_and_slowest_of_each_direction() -> None:
    profile = timed_profile([1, 4, 2], [3, 2, 5])
    prediction = price(make_plan(profile, [1, 2], m=5, schedule="gpipe"), profile)
    assert prediction.step_time_s == pytest.approx((7 + 4 * 4) + (10 + 4 * 5))
    assert prediction.bottleneck_stage == 2


def test_a_slow_first_stage_hides_what_follows_under_1f1b() -> None:
    # Stage 0 is busy from start to end: sum + (m - 1) * max = 12 + 2 * 10 would be too much.
    profile = timed_profile([5.0, 0.5], [5.0, 1.5])
    prediction = price(make_plan(profile, [1], m=3), profile)
    assert prediction.step_time_s == pytest.approx(30.0)


def test_messages_take_their_link_and_then_their_latency() -> None:
    profile = timed_profile([1.0, 1.0], [1.0, 1.0])
    profile = profile.model_copy(update={"edges": (profile.edges[0].replace(bytes_per_row=300.0),)})
    cluster = make_cluster(2, intra=(100.0, 0.5))
    # Forwards leave at 1, 2; the link is busy for 3 s each: they arrive at 4.5 and 7.5. B0 is back at 5.5 + 1 + 3.5.
    prediction = price(make_plan(profile, [1], m=2), profile, cluster)
    assert prediction.stages[0].send_time_s == pytest.approx(3.5)
    events = {(e.stage, e.kind, e.microbatch): e for e in cost.timeline(make_plan(profile, [1], m=2), profile, cluster)}
    assert events[1, "F", 0].start_s == pytest.approx(4.5)
    assert events[1, "F", 1].start_s == pytest.approx(7.5)
    assert events[0, "B", 0].start_s == pytest.approx(10.0)
    assert events[0, "B", 1].start_s == pytest.approx(13.0)
    assert prediction.step_time_s == pytest.approx(14.0)
    assert prediction.exposed_comm_time_s == pytest.approx(14.0 - 6.0)


def test_values_jump_over_stages_directly_and_frozen_stages_wait_for_no_gradient() -> None:
    profile = timed_profile([1.0] * 3, [1.0] * 3)
    skip = Edge(value="v0", producer=0, consumers=(2,), bytes_per_row=1000.0, needs_grad=False)
    profile = profile.model_copy(update={"edges": (*profile.edges, skip)})
    cluster = make_cluster(3, intra=(100.0, 0.0))
    events = {
        (e.stage, e.kind): e for e in cost.timeline(make_plan(profile, [1, 2]), profile, cluster) if e.kind in "FB"
    }
    assert events[1, "F"].start_s == pytest.approx(1.0)
    assert events[2, "F"].start_s == pytest.approx(11.0)
    frozen = profile.model_copy(
        update={"edges": tuple(edge.replace(needs_grad=False, bytes_per_row=0.0) for edge in profile.edges)}
    )
    events = {(e.stage, e.kind): e for e in cost.timeline(make_plan(frozen, [1, 2]), frozen, cluster) if e.kind in "FB"}
    assert [events[s, "B"].start_s for s in range(3)] == pytest.approx([1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("schedule", "m", "megabytes"),
    [("1f1b", 8, [45, 35, 25, 15]), ("1f1b", 2, [25, 25, 25, 15]), ("gpipe", 8, [85, 85, 85, 85])],
)
def test_memory_follows_the_microbatches_in_flight(schedule: Schedule, m: int, megabytes: list[int]) -> None:
    # Saved activations of 10 MB per microbatch and stage, 5 MB of states: parameters and gradients of 625,000 elements.
    profile = equal_profile(4, activation=10_000_000, params=625_000)
    prediction = price(make_plan(profile, [1, 2, 3], m=m, schedule=schedule), profile)
    assert [stage.memory.peak_bytes for stage in prediction.stages] == [value * 10**6 for value in megabytes]


def test_parameters_are_counted_per_stage_never_averaged() -> None:
    sizes = {"embed": 64000, "block": 49984, "head": 64128}
    classes = [
        LayerClass(name=name, module_class=name, costs=(layer_cost(params=count),)) for name, count in sizes.items()
    ]
    profile = chain_profile(classes, ["embed", *["block"] * 8, "head"])
    prediction = price(make_plan(profile, [2, 4, 6]), profile)
    counts = [stage.memory.param_bytes // 4 for stage in prediction.stages]
    assert counts == [113984, 99968, 99968, 214080]


@pytest.mark.parametrize(
    ("precision", "optimizer", "mode", "owners"),
    [
        ("fp32", "adamw", "replicated", (8, 4, 8)),
        ("fp32", "sgd-momentum", "sharded", (1 + 4, 1 + 4, 1)),
        ("bf16-mixed", "adamw", "replicated", (4 + 2, 4, 8)),
        ("bf16-mixed", "adamw", "sharded", (1 + 2, 1 + 4, 2)),
        ("bf16", "sgd", "sharded", (0.5 + 2, 0.5 + 2, 0)),
    ],
)
def test_states_by_precision_optimizer_and_sharding(
    precision: Precision, optimizer: Optimizer, mode: DataParallel, owners: tuple[float, float, float]
) -> None:
    profile = equal_profile(1, params=1000)
    plan = make_plan(profile, dp=4, data_parallel=mode, precision=precision, optimizer=optimizer)
    memory = price(plan, profile).stages[0].memory
    assert (memory.param_bytes, memory.grad_bytes, memory.optimizer_bytes) == tuple(1000 * width for width in owners)


def test_frozen_parameters_have_no_gradient_and_no_state() -> None:
    profile = equal_profile(1, frozen=1000)
    memory = price(make_plan(profile, optimizer="adamw"), profile).stages[0].memory
    assert (memory.param_bytes, memory.grad_bytes, memory.optimizer_bytes) == (4000, 0, 0)


def test_one_replica_holds_no_working_copy_in_fp32() -> None:
    profile = equal_profile(1, params=1000)
    assert price(make_plan(profile), profile).stages[0].memory.param_bytes == 4000


def test_a_recomputed_layer_keeps_its_inputs_and_runs_again() -> None:
    block = LayerClass(
        name="block",
        module_class="Block",
        costs=(layer_cost(activation=100, saved_input=10, saved_output=20, transient=7),),
    )
    profile = chain_profile([block], ["block"] * 3, edge_bytes=16.0)
    kept = price(make_plan(profile), profile).stages[0]
    # input 10, three activations, two boundaries of max(20, 10), output 20; transient 7
    assert (kept.memory.activation_bytes, kept.memory.transient_bytes) == (10 + 300 + 40 + 20, 7)
    remade = price(make_plan(profile, recompute=["layers.1"]), profile).stages[0]
    # the middle one: its input is max(20 saved before it, 16 of its edge), its output saved by the next as input
    assert (remade.memory.activation_bytes, remade.memory.transient_bytes) == (10 + 200 + 20 + 10 + 20, 107)
    assert remade.backward_time_s == pytest.approx(kept.backward_time_s + 1.0)
    assert remade.recompute_time_s == pytest.approx(1.0)


def test_ring_formulas() -> None:
    route = Route(100.0, 0.5)
    assert collective_s("all_reduce", 800.0, 4, route) == pytest.approx(6 * 0.5 + 2 * 3 / 4 * 8)
    assert collective_s("all_gather", 800.0, 4, route) == pytest.approx(3 * 0.5 + 3 / 4 * 8)
    assert collective_s("reduce_scatter", 800.0, 1, route) == 0.0


def test_rings_between_nodes_use_every_rank_s_share_of_the_network() -> None:
    cluster = make_cluster(8, gpus_per_node=4, intra=(300.0, 0.1), inter=(50.0, 0.2))
    places = Places(cluster)
    assert places.ring((0, 1)) == Route(300.0, 0.1)
    assert places.ring((0, 4)) == Route(50.0, 0.2)
    assert places.ring((0, 1, 4, 5)) == Route(100.0, 0.2)
    assert places.ring(tuple(range(8))) == Route(200.0, 0.2)


def test_nodes_with_links_of_their_own_slow_down_whom_they_talk_to() -> None:
    cluster = make_cluster(12, gpus_per_node=4, intra=(300.0, 0.1), inter=(50.0, 0.2))
    slow = Link(bandwidth="20B/s", latency="0.5s")  # type: ignore[arg-type]
    slower = Link(bandwidth="8B/s", latency="0.4s")  # type: ignore[arg-type]
    nodes = cluster.node_groups[0]
    groups = (nodes.replace(count=2), nodes.replace(count=1, intra_node=slow, inter_node=slower))
    places = Places(cluster.model_copy(update={"node_groups": groups}))
    assert places.ring((0, 1)) == Route(300.0, 0.1)
    assert places.ring((0, 1, 4, 5)) == Route(100.0, 0.2)
    assert places.ring((8, 9)) == Route(20.0, 0.5)
    assert places.ring((0, 8)) == Route(8.0, 0.4)
    assert places.ring((0, 1, 8, 9)) == Route(16.0, 0.4)
    assert places.ring((0, 1, 2, 3, 8, 9, 10, 11)) == Route(20.0, 0.4)  # no more than inside the slow node
    assert places.message_route([0], [1]) == Route(300.0, 0.1)
    assert places.message_route([0, 1], [4, 5]) == Route(50.0, 0.2)
    assert places.message_route([0, 8], [4, 1]) == Route(8.0, 0.4)
    assert places.message_route([8], [9]) == Route(20.0, 0.5)


def test_links_of_a_node_group_are_read_and_change_no_hash_where_they_are_none() -> None:
    cluster = make_cluster(8, gpus_per_node=4)
    assert "intra_node" not in cluster.model_dump()["node_groups"][0]
    told = cluster.model_dump(mode="json") | {"node_groups": [{"count": 2, "gpus_per_node": 4, "gpu": "test"}]}
    told["node_groups"][0]["intra_node"] = {"bandwidth": "32GB/s", "latency": "10us"}
    for key in ("intra_node", "inter_node"):
        told[key] = {"bandwidth": "50GB/s", "latency": "10us"}
    told["memory_reserve"] = "0B"
    told.pop("gpus")
    found = validate(Cluster, told, source="test")
    assert found.links_of(found.node_groups[0])[0].bandwidth == 32e9
    assert found.fastest_bytes_per_s == 50e9


def test_gradients_are_reduced_after_the_last_backward() -> None:
    profile = equal_profile(1, params=1000)
    cluster = make_cluster(4, intra=(1000.0, 0.0))
    replicated = price(make_plan(profile, m=2, dp=4), profile, cluster)
    assert replicated.step_time_s == pytest.approx(2 * 3 + 2 * 3 / 4 * 4)
    sharded = price(make_plan(profile, m=2, dp=4, data_parallel="sharded"), profile, cluster)
    assert sharded.step_time_s == pytest.approx(3.0 + 2 * 3 + 3.0)  # gather, two microbatches, scatter
    assert sharded.exposed_comm_time_s == pytest.approx(6.0)
    assert sharded.stages[0].data_parallel_time_s == pytest.approx(6.0)


def test_tied_parameters_are_held_once_in_a_stage_and_summed_between_stages() -> None:
    block = LayerClass(name="block", module_class="Block", costs=(layer_cost(params=1000),))
    profile = chain_profile([block], ["block"] * 3, tied=[(0, 2)])
    one = price(make_plan(profile), profile)
    assert one.stages[0].memory.param_bytes == 2 * 4000
    cluster = make_cluster(2, intra=(1000.0, 0.25))
    split = price(make_plan(profile, [2]), profile, cluster)
    assert [stage.memory.param_bytes for stage in split.stages] == [8000, 4000]
    # forwards 2 + 1, message .25, backwards 2, .25, 4; then an all-reduce of 4000 bytes over two
    assert split.step_time_s == pytest.approx(9.0 + 2 * 0.25 + 2 * (0.25 + 2.0))


def test_tensor_parallel_collectives_run_inside_layers() -> None:
    halves = Sharding(
        name="halves",
        tp_degree=2,
        parameters={"weight": ShardedParameter(dim=0)},
        collectives=(
            CollectiveCall(kind="all_reduce", bytes_per_row=100.0, phase="forward"),
            CollectiveCall(kind="all_reduce", bytes_per_row=200.0, fixed_bytes=100, phase="backward"),
        ),
    )
    costs = (layer_cost(params=1000), layer_cost(tp_degree=2, sharding="halves", forward_s=0.5, params=500))
    profile = chain_profile([LayerClass(name="a", module_class="A", shardings=(halves,), costs=costs)], ["a"])
    cluster = make_cluster(2, intra=(100.0, 0.0))
    plan = make_plan(profile, tp=2, shardings={"a": "halves"}, recompute=["layers.0"])
    stage = price(plan, profile, cluster).stages[0]
    assert stage.forward_time_s == pytest.approx(0.5 + 1.0)
    assert stage.backward_time_s == pytest.approx(2.0 + 3.0 + 0.5 + 1.0)
    assert stage.tensor_parallel_time_s == pytest.approx(1.0 + 3.0 + 1.0)
    assert stage.memory.param_bytes == 2000


def test_a_missing_number_is_an_error_that_names_the_layer() -> None:
    profile = equal_profile(2)
    with pytest.raises(ProfileError) as caught:
        price(make_plan(profile, tp=2, shardings={"block": "halves"}), profile)
    assert "'layers.0'" in caught.value.message
    assert "tp_degree 2" in caught.value.message
    assert caught.value.hint == "profile the model with --tp 2"


def test_plans_of_other_layers_or_more_gpus_are_refused() -> None:
    profile, other = equal_profile(3), timed_profile([1.0, 1.0])
    with pytest.raises(UsageError, match=r"leave out 'layers\.2'"):
        price(make_plan(other), profile)
    with pytest.raises(UsageError, match="uses 3 GPUs, the cluster 'test' has 2"):
        price(make_plan(profile, [1, 2]), profile, make_cluster(2))


def test_between_points_linear_beyond_by_slope_never_falling() -> None:
    points = [(2, 10.0), (4, 14.0), (8, 30.0)]
    assert [interpolate(rows, points) for rows in (2, 3, 6, 8, 14)] == [10.0, 12.0, 22.0, 30.0, 50.0]
    assert interpolate(1, points) == 8.0  # the slope, more than the proportion
    assert interpolate(1, [(2, 10.0), (4, 30.0)]) == 5.0  # the proportion, more than the slope
    assert interpolate(8, [(2, 10.0), (4, 9.0)]) == 9.0
    assert interpolate(6, [(2, 10.0)]) == 30.0


def test_mfu_counts_useful_flops_only() -> None:
    profile = equal_profile(2, forward_flops=1e12)
    cluster = make_cluster(1, peak_flops=1e12)
    whole = price(make_plan(profile, m=2), profile, cluster)
    assert whole.mfu_fraction == pytest.approx(3 * 2 * 2 / 12)
    remade = price(make_plan(profile, m=2, recompute=["layers.0", "layers.1"]), profile, cluster)
    assert remade.mfu_fraction == pytest.approx(3 * 2 * 2 / 16)


def test_the_optimizer_is_a_pass_over_memory() -> None:
    profile = equal_profile(1, params=1000)
    cluster = make_cluster(1, memory_bandwidth=1000.0)
    prediction = price(make_plan(profile, optimizer="adamw"), profile, cluster)
    assert prediction.stages[0].optimizer_time_s == pytest.approx(7 * 4)
    assert prediction.step_time_s == pytest.approx(3 + 28)

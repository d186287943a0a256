"""What the solver promises beside the optimum: constraints kept, conflicts named, repairs verified, one answer."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import (
    ORIGIN,
    chain_profile,
    equal_profile,
    layer_cost,
    make_cluster,
    make_plan,
    random_cluster,
    random_profile,
    timed_profile,
)

from planner import cost
from planner.cluster import Cluster
from planner.cost.simulation import Message, play
from planner.errors import PlannerError, UsageError
from planner.model_profile import Edge, LayerClass, ModelProfile
from planner.plan import EMITTED_SCHEDULES, Plan, Schedule
from planner.schedule import group_actions
from planner.solver import Solution, SolveRequest, incumbent, recompute, solve
from planner.solver.recompute import RecomputeChoices
from planner.solver.routes import representatives
from planner.solver.settings import pipeline_factor
from planner.units import format_bytes


def ask(
    profile: ModelProfile, cluster: Cluster, batch: int, *pins: tuple[str, str], **options: object
) -> Solution:  # fmt: skip
    request = SolveRequest(num_gpus=cluster.num_gpus, global_batch_size=batch, pins=pins)
    return solve(profile, cluster, replace(request, **options), origin=ORIGIN)  # type: ignore[arg-type]


def planned(solution: Solution) -> Plan:
    assert solution.plan is not None, solution.conflict
    return solution.plan


def boundaries(plan: Plan) -> list[int]:
    stops = [0]
    for stage in plan.stages:
        stops.append(stops[-1] + len(stage.layers))
    return stops


# Reported problems of other tools; times in the profiles are forward alone, so that gpipe takes sum + (m - 1) * max.


def test_five_layers_on_four_stages_leave_none_empty() -> None:
    plan = planned(ask(timed_profile([1.0] * 5), make_cluster(4), 8, ("pp_degree", "4"), ("microbatch_size", "1")))
    assert sorted(len(stage.layers) for stage in plan.stages) == [1, 1, 1, 2]


def test_cheap_first_layers_shift_the_cuts() -> None:
    profile = timed_profile([1.0] * 3 + [1.6] * 58)
    plan = planned(
        ask(profile, make_cluster(4), 64, ("pp_degree", "4"), ("microbatch_size", "1"), ("schedule", "gpipe"))
    )
    assert boundaries(plan) == [0, 16, 31, 46, 61]
    assert plan.prediction is not None
    assert max(stage.forward_time_s for stage in plan.prediction.stages) == pytest.approx(24.0)


def test_a_memory_cap_decides_degrees() -> None:
    # 40 layers, 64 microbatches in all, 16 GPUs; iteration = (microbatches / dp + pp - 1) * slowest stage.
    fixed = (("schedule", "gpipe"), ("microbatch_size", "1"), ("tp_degree", "1"), ("data_parallel", "replicated"))
    block = LayerClass(name="block", module_class="Block", costs=(layer_cost(backward_s=0.0, frozen=1000),))
    profile = chain_profile([block], ["block"] * 40)
    cluster = make_cluster(16, memory=6 * 8000)  # with data parallelism a parameter has a working copy: 8 bytes
    plan = planned(ask(profile, cluster, 64, *fixed))
    assert (plan.pp_degree, plan.dp_degree) == (8, 2)
    assert [len(stage.layers) for stage in plan.stages] == [5] * 8
    assert plan.prediction is not None
    assert plan.prediction.step_time_s == pytest.approx(195.0)
    free = planned(ask(profile, make_cluster(16), 64, *fixed))
    assert (free.pp_degree, free.dp_degree) == (1, 16)
    assert free.prediction is not None
    assert free.prediction.step_time_s == pytest.approx(160.0)


def test_a_light_embedding_is_not_left_alone() -> None:
    profile = timed_profile([0.1, *[1.0] * 8, 2.2])
    pins = (("pp_degree", "4"), ("microbatch_size", "1"), ("schedule", "gpipe"))
    assert boundaries(planned(ask(profile, make_cluster(4), 32, *pins))) == [0, 3, 6, 9, 10]


def test_the_last_stage_may_hold_the_loss_alone() -> None:
    profile = timed_profile([1.0] * 29 + [10.0])
    pins = (("pp_degree", "4"), ("microbatch_size", "1"), ("schedule", "gpipe"))
    plan = planned(ask(profile, make_cluster(4), 16, *pins))
    assert plan.stages[-1].layers == ("layers.29",)


def test_gpus_that_can_do_nothing_are_left_idle() -> None:
    assert planned(ask(timed_profile([10.0]), make_cluster(8), 1)).num_gpus == 1
    solution = ask(timed_profile([10.0]), make_cluster(8), 1, ("num_gpus", "8"))
    assert solution.conflict is not None
    assert solution.conflict.constraint == "batch"
    assert "global_batch_size 1 is not divisible by any dp_degree that makes 8 GPUs: 8" in solution.conflict.message
    assert "leave out --pin num_gpus=8" in [repair.description for repair in solution.repairs]


def test_fewer_gpus_are_used_only_where_that_is_faster() -> None:
    profile = equal_profile(4, params=10_000)
    slow, fast = (make_cluster(4, gpus_per_node=2, intra=(1e9, 0.0), inter=(speed, 0.0)) for speed in (10.0, 1e9))
    pins = (("tp_degree", "1"), ("pp_degree", "1"))
    assert planned(ask(profile, slow, 4, *pins)).num_gpus == 2, "replicas on another node would wait for gradients"
    assert planned(ask(profile, fast, 4, *pins)).num_gpus == 4
    assert planned(ask(timed_profile([1.0]), make_cluster(4), 4)).num_gpus == 4


def test_microbatches_that_do_not_divide_the_batch_are_refused() -> None:
    profile, cluster = timed_profile([1.0] * 6, [2.0] * 6), make_cluster(3)
    solution = ask(profile, cluster, 8, ("pp_degree", "3"), ("num_microbatches", "3"))
    assert solution.conflict is not None
    assert (solution.status, solution.conflict.constraint) == ("infeasible", "batch")
    assert "8 is not divisible by num_microbatches 3; valid are 1, 2, 4, 8" in solution.conflict.message
    assert planned(ask(profile, cluster, 8, ("pp_degree", "3"), ("schedule", "1f1b"))).num_microbatches in (4, 8)


def test_a_cut_names_the_first_layer_of_a_stage() -> None:
    profile, cluster = timed_profile([1.0] * 6), make_cluster(3)
    plan = planned(ask(profile, cluster, 6, ("cuts", "layers.2,layers.4")))
    assert [stage.layers for stage in plan.stages] == [
        ("layers.0", "layers.1"), ("layers.2", "layers.3"), ("layers.4", "layers.5")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("pin", "message", "hint"),
    [
        (("cuts", "layers.3,layers.3"), "duplicate cut 'layers.3'", "once"),
        (("cuts", "layers.0"), "'layers.0', the first layer", "first layer of a later stage"),
        (("cuts", "layer.3"), "names layer 'layer.3'", "'layers.3'"),
        (("cuts", "layers"), "'layers', which is no layer of 'test' but holds 6: 'layers.0' to 'layers.5'", "one of"),
        (("cuts", "2"), "names layer '2'", "'layers.2'"),
        (("stage:layrs.1", "0"), "names layer 'layrs.1'", "'layers.1'"),
        (("recompute", "layers.9"), "names layer 'layers.9'", "layers."),
        (("tp_degre", "2"), "unknown key 'tp_degre'", "'tp_degree'"),
        (("schedule", "1f1"), "is not known", "'1f1b'"),
        (("data_parallel", "shard"), "is not known", "'sharded'"),
        (("pp_degree", "0"), "is no count of at least 1", "pp_degree=2"),
        (("pp_degree", "two"), "is no count of at least 1", "pp_degree=2"),
    ],
)
def test_wrong_names_are_usage_errors_with_the_nearest_right_one(pin: tuple[str, str], message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        ask(timed_profile([1.0] * 6), make_cluster(2), 4, pin)
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_two_pins_of_one_decision_are_refused() -> None:
    with pytest.raises(UsageError, match="--pin pp_degree is given twice, as 2 and 4"):
        ask(timed_profile([1.0] * 6), make_cluster(4), 4, ("pp_degree", "2"), ("pp_degree", "4"))


def test_the_request_must_fit_cluster_and_profile() -> None:
    profile = timed_profile([1.0] * 2)
    with pytest.raises(UsageError, match="0, less than 1"):
        SolveRequest(num_gpus=0, global_batch_size=8)
    with pytest.raises(UsageError, match="4 GPUs are asked for, the cluster 'test' has 2"):
        ask(profile, make_cluster(2), 8, num_gpus=4)
    with pytest.raises(UsageError) as caught:
        ask(profile, make_cluster(2), 8, precision="bf16-mixed")
    assert "--dtype bfloat16" in caught.value.hint


@pytest.mark.parametrize(
    "pin",
    [
        ("pp_degree", "2"), ("tp_degree", "2"), ("dp_degree", "2"), ("microbatch_size", "2"), ("num_microbatches", "2"),
        ("schedule", "gpipe"), ("data_parallel", "sharded"), ("recompute", "all"), ("recompute", "none"),
        ("recompute", "layers.1"), ("cuts", "layers.2"), ("stage:layers.1", "1"),
    ],
)  # fmt: skip
def test_pins_are_kept(pin: tuple[str, str]) -> None:
    profile = random_profile(11, num_layers=4, tp_degrees=(2,))
    plan = planned(ask(profile, make_cluster(4, intra=(1000.0, 0.01)), 8, pin))
    key, value = pin
    names = [layer.name for layer in profile.layers]
    remade = [name for stage in plan.stages for name in stage.recompute]
    if key == "recompute":
        assert remade == {"all": names, "none": []}.get(value, [value])
    elif key == "cuts":
        assert [stage.layers[0] for stage in plan.stages[1:]] == [value]
    elif key.startswith("stage:"):
        assert "layers.1" in plan.stages[1].layers
    else:
        assert str(getattr(plan, key)) == value


@pytest.mark.parametrize(
    "exclusion",
    [("pp_degree", "1"), ("dp_degree", "4"), ("schedule", "1f1b"), ("cuts", "layers.2"), ("stage:layers.1", "0")],
)
def test_exclusions_are_kept(exclusion: tuple[str, str]) -> None:
    profile = random_profile(5, num_layers=5)
    pins = (("pp_degree", "2"),) if exclusion[0] in ("cuts", "schedule", "stage:layers.1") else ()
    plan = planned(ask(profile, make_cluster(4), 8, *pins, exclusions=(exclusion,)))
    key, value = exclusion
    if key == "cuts":
        assert plan.stages[1].layers[0] != value
    elif key.startswith("stage:"):
        assert "layers.1" not in plan.stages[0].layers
    else:
        assert str(getattr(plan, key)) != value


def test_an_excluded_layer_is_not_recomputed() -> None:
    profile = equal_profile(4, activation=1000)
    cluster = make_cluster(1, memory=3500)  # two kept, and one that is remade while its backward runs
    assert planned(ask(profile, cluster, 1)).stages[0].recompute == ("layers.0", "layers.1")
    plan = planned(ask(profile, cluster, 1, exclusions=(("recompute", "layers.0,layers.1"),)))
    assert plan.stages[0].recompute == ("layers.2", "layers.3")


@pytest.mark.parametrize(
    ("pins", "constraint", "numbers"),
    [
        ((("tp_degree", "4"),), "sharding", ["tp_degree 4", "1, 2"]),
        ((("pp_degree", "8"),), "layers", ["pp_degree 8", "4 layers"]),
        ((("pp_degree", "2"), ("dp_degree", "8")), "gpus", ["pinned to 16", "8 GPUs"]),
        ((("pp_degree", "3"), ("num_gpus", "8")), "gpus", ["pinned to 3", "8 GPUs"]),
        ((("dp_degree", "1"), ("pp_degree", "4"), ("cuts", "layers.1")), "pins", ["1 cuts", "2 stages"]),
        ((("pp_degree", "4"), ("microbatch_size", "8"), ("schedule", "1f1b")), "warm-up", ["pp_degree 4", "most 2"]),
        ((("microbatch_size", "2"), ("num_microbatches", "2"), ("pp_degree", "4")), "batch", ["global_batch_size 16"]),
        ((("stage:layers.0", "1"), ("pp_degree", "4")), "pins", ["stage:layers.0=1"]),
    ],
)
def test_conflicts_are_named_and_repairs_solve_again(
    pins: tuple[tuple[str, str], ...], constraint: str, numbers: list[str]
) -> None:
    profile = random_profile(3, num_layers=4, num_classes=1, tp_degrees=(2,))
    cluster = make_cluster(8)
    solution = ask(profile, cluster, 16, *pins)
    assert (solution.status, solution.plan) == ("infeasible", None)
    assert solution.conflict is not None
    assert solution.conflict.constraint == constraint
    for number in numbers:
        assert number in solution.conflict.message
    assert solution.repairs
    for repair in solution.repairs:
        if repair.description.startswith("leave out --pin "):
            key, _, value = repair.description.removeprefix("leave out --pin ").partition("=")
            again = ask(profile, cluster, 16, *(pin for pin in pins if pin != (key, value)))
            prediction = planned(again).prediction
            assert prediction is not None
            assert prediction.step_time_s <= repair.step_time_s


def test_a_degree_over_the_node_needs_theoretical() -> None:
    seed = next(
        s for s in range(99) if any(c.shardings for c in random_profile(s, num_layers=2, tp_degrees=(4,)).layer_classes)
    )
    profile, cluster = random_profile(seed, num_layers=2, tp_degrees=(4,)), make_cluster(4, gpus_per_node=2)
    solution = ask(profile, cluster, 4, ("tp_degree", "4"))
    assert solution.conflict is not None
    assert solution.conflict.constraint == "node"
    assert planned(ask(profile, cluster, 4, ("tp_degree", "4"), theoretical=True)).tp_degree == 4


@pytest.mark.parametrize("seed", range(8))
def test_the_least_memory_is_exact(seed: int) -> None:
    profile = random_profile(seed, num_layers=4, tp_degrees=(2,))
    solution = ask(profile, random_cluster(seed, 4, memory=1), 4)
    assert solution.conflict is not None
    least = solution.conflict.least_peak_bytes
    assert least is not None
    assert f"needs {format_bytes(least)} per GPU" in solution.conflict.message
    assert any("of memory" in repair.description for repair in solution.repairs)
    assert planned(ask(profile, random_cluster(seed, 4, memory=least), 4)).prediction is not None
    assert ask(profile, random_cluster(seed, 4, memory=least - 1), 4).plan is None


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.integers(2, 6), st.sampled_from([2, 4]))
def test_more_memory_or_bandwidth_is_never_slower(seed: int, num_layers: int, num_gpus: int) -> None:
    profile = random_profile(seed, num_layers=num_layers, skips=seed % 3 == 0)
    links = {"intra": (1000.0, 0.01), "inter": (200.0, 0.02), "gpus_per_node": 2}
    best = float("inf")
    for memory in (20_000, 60_000, 10**9):
        found = ask(profile, make_cluster(num_gpus, memory=memory, **links), 4).plan  # type: ignore[arg-type]
        step_s = float("inf") if found is None or found.prediction is None else found.prediction.step_time_s
        assert step_s <= best * (1 + 1e-9)
        best = step_s
    faster = links | {"intra": (2000.0, 0.01), "inter": (400.0, 0.02)}
    prediction = planned(ask(profile, make_cluster(num_gpus, memory=10**9, **faster), 4)).prediction  # type: ignore[arg-type]
    assert prediction is not None
    assert prediction.step_time_s <= best * (1 + 1e-9)


@settings(max_examples=15)
@given(st.integers(0, 10_000), st.integers(2, 7))
def test_the_same_input_gives_the_same_bytes(seed: int, num_layers: int) -> None:
    profile, cluster = random_profile(seed, num_layers=num_layers, tp_degrees=(2,)), random_cluster(seed, 4)
    first, second = (planned(ask(profile, cluster, 8)).model_dump_json() for _ in range(2))
    assert first == second


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.integers(2, 8), st.sampled_from([1, 2, 4, 6]))
def test_a_plan_holds_every_layer_once_within_memory(seed: int, num_layers: int, num_gpus: int) -> None:
    profile = random_profile(seed, num_layers=num_layers, skips=True, frozen=seed % 2 == 0)
    cluster = random_cluster(seed, num_gpus, memory=40_000)
    plan = ask(profile, cluster, 12).plan
    if plan is not None:
        assert [name for stage in plan.stages for name in stage.layers] == [layer.name for layer in profile.layers]
        assert sorted(gpu for stage in plan.stages for gpu in stage.gpus) == list(range(plan.num_gpus))
        assert plan.num_gpus <= num_gpus
        assert plan.prediction is not None
        assert plan.prediction.peak_bytes <= 40_000
        assert plan.prediction == cost.evaluate(plan, profile, cluster)


def test_ties_go_to_regular_plans() -> None:
    plan = planned(ask(timed_profile([1.0] * 8, [2.0] * 8), make_cluster(4), 8, ("pp_degree", "4")))
    assert [len(stage.layers) for stage in plan.stages] == [2, 2, 2, 2]
    assert (plan.schedule, plan.data_parallel) == ("1f1b", "replicated")


def test_a_value_read_by_all_later_layers_is_no_obstacle() -> None:
    profile = timed_profile([1.0] * 7, [2.0] * 7)
    everywhere = Edge(value="v0", producer=0, consumers=(2, 3, 4, 5, 6), bytes_per_row=10.0, needs_grad=True)
    profile = profile.model_copy(update={"edges": (*profile.edges, everywhere)})
    solution = ask(profile, make_cluster(3, intra=(1000.0, 0.1)), 6, ("pp_degree", "3"))
    assert solution.status == "optimal"


def test_runners_up_are_other_degrees_with_a_reason() -> None:
    profile = equal_profile(8, activation=10, params=100)
    solution = ask(profile, make_cluster(4, intra=(1e5, 0.01)), 16)
    best = planned(solution)
    assert len(solution.runners_up) == 3
    degrees = [(r.pp_degree, r.tp_degree, r.dp_degree) for r in solution.runners_up]
    assert (best.pp_degree, best.tp_degree, best.dp_degree) not in degrees[:2]
    for runner_up in solution.runners_up:
        assert best.prediction is not None
        assert runner_up.step_time_s >= best.prediction.step_time_s * (1 - 1e-9)
        assert runner_up.reason


def test_an_ended_search_tells_its_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(1)
    classes = [
        LayerClass(name=f"class{i}", module_class="Layer", costs=(layer_cost(forward_s=draw.uniform(0.5, 2)),))
        for i in range(20)
    ]
    profile = chain_profile(classes, [layer_class.name for layer_class in classes], edge_bytes=1000.0)
    cluster = make_cluster(8, intra=(300.0, 0.3))
    pins = (("pp_degree", "8"), ("microbatch_size", "1"), ("schedule", "1f1b"))
    full = ask(profile, cluster, 16, *pins)
    assert full.status == "optimal"
    spend = incumbent.Budget.spend

    def spend_ten(budget: incumbent.Budget) -> None:
        spend(budget)
        if budget.num_nodes > 10:
            raise incumbent.OutOfTimeError

    monkeypatch.setattr(incumbent.Budget, "spend", spend_ten)
    ended = ask(profile, cluster, 16, *pins)
    assert ended.num_nodes < full.num_nodes
    assert ended.status == "feasible"
    assert planned(ended).prediction is not None
    assert ended.lower_bound_s <= full.lower_bound_s * (1 + 1e-9)
    assert ended.plan is not None
    assert ended.plan.prediction is not None
    step_s = ended.plan.prediction.step_time_s
    assert ended.gap_fraction == pytest.approx((step_s - ended.lower_bound_s) / ended.lower_bound_s)


def test_a_search_ended_before_any_plan_is_no_proof_of_infeasibility(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(budget: incumbent.Budget) -> None:
        raise incumbent.OutOfTimeError

    monkeypatch.setattr(incumbent.Budget, "spend", end)
    with pytest.raises(PlannerError, match="ended before any plan was found") as caught:
        ask(timed_profile([1.0] * 4), make_cluster(2), 4)
    assert "--time-limit" in caught.value.hint


@pytest.mark.parametrize("seed", range(6))
def test_the_integer_program_agrees_with_the_labels(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = random_profile(seed, num_layers=7, num_classes=7)
    pricer = cost.Pricer(profile, make_cluster(1))
    layers = pricer.layer_table(2, 1, {}, pricer.ring((0,)))
    names = [layer.layer_class for layer in profile.layers]
    free = [(False, True)] * len(layers)
    labels = RecomputeChoices(layers, pricer.inputs(2), free, names)
    monkeypatch.setattr(recompute, "MAX_LABELS", 0)
    program = RecomputeChoices(layers, pricer.inputs(2), free, names)
    least = labels.leanest(1, 7, 50, 3)
    assert program.leanest(1, 7, 50, 3) == least
    for budget in (least - 1, least, least + 700, least + 3000, 10**6):
        a, b = labels.fastest(1, 7, 50, 3, budget), program.fastest(1, 7, 50, 3, budget)
        assert (a is None) == (b is None) == (budget < least)
        if a is not None and b is not None:
            assert a.seconds == pytest.approx(b.seconds, rel=1e-12)
            assert max(a.num_bytes, b.num_bytes) <= budget


def test_a_hand_written_plan_is_never_faster() -> None:
    profile = random_profile(8, num_layers=6)
    cluster = make_cluster(3, intra=(500.0, 0.05))
    solution = ask(profile, cluster, 6, ("pp_degree", "3"), ("recompute", "none"))
    plan = make_plan(profile, [2, 4], m=6, optimizer="adamw")
    assert solution.lower_bound_s <= cost.evaluate(plan, profile, cluster).step_time_s


# Contradictions, sizes


@pytest.mark.parametrize(("pin", "exclusion"), [("all", "all"), ("none", "none"), ("layers.1", "layers.1")])
def test_recomputation_that_is_pinned_and_excluded_is_refused(pin: str, exclusion: str) -> None:
    pins, exclusions = (("recompute", pin),), (("recompute", exclusion),)
    with pytest.raises(UsageError, match=f"--pin recompute={pin} and --exclude recompute={exclusion} contradict"):
        ask(equal_profile(4), make_cluster(2), 4, *pins, exclusions=exclusions)


def test_a_stage_beyond_the_last_is_told_with_the_number_of_stages() -> None:
    solution = ask(equal_profile(4), make_cluster(2), 4, ("stage:layers.3", "5"))
    assert solution.conflict is not None
    assert solution.conflict.message.startswith("layer 'layers.3' is pinned to stage 5, of at most 2 stages")


@pytest.mark.parametrize(
    ("num_gpus", "batch", "words"),
    [
        (1_000_001, 8, "num_gpus is 1000001, more than 1000000"),
        (10**3000, 8, "num_gpus is a number of about 29"),
        (8, 10**9 + 1, "global_batch_size is 1000000001, more than 1000000000"),
    ],
)
def test_sizes_that_no_search_ends_for_are_refused(num_gpus: int, batch: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        SolveRequest(num_gpus=num_gpus, global_batch_size=batch)


def test_a_pin_of_thousands_of_digits_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="longer than 18 digits"):
        ask(equal_profile(4), make_cluster(2), 4, ("tp_degree", "9" * 5000))


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 40), st.integers(0, 30))
def test_few_ranks_stand_for_a_stage(node: int, tp: int, dp: int, first: int) -> None:
    total = first + tp * dp
    cluster = make_cluster(total, gpus_per_node=min(node, total), inter=(1e9, 1e-6))
    pricer = cost.Pricer(equal_profile(2), cluster)
    stage = tuple(range(first, total))
    few = representatives(cluster, stage, tp)
    assert set(few) <= set(stage)
    assert len(few) <= 4 * node * tp
    assert pricer.tensor_route(few, tp) == pricer.tensor_route(stage, tp)
    assert pricer.data_route(few, tp) == pricer.data_route(stage, tp)


@given(
    st.sampled_from(EMITTED_SCHEDULES),
    st.integers(1, 9),
    st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.0, 5.0)), min_size=1, max_size=6),
)
def test_no_chain_of_stages_is_faster_than_the_bound_on_their_waiting(
    schedule: Schedule, count: int, times: list[tuple[float, float]]
) -> None:
    stages = len(times)
    messages = [Message(s, s + 1, 0.0, 0.0) for s in range(stages - 1)]

    def step_s(forward: list[float], backward: list[float]) -> float:
        played = play(group_actions(schedule, stages, count), forward, backward, messages, [0.0] * stages)
        return max(played.group_ends_s)

    factor = pipeline_factor(schedule, stages, count, 0.5)
    total = sum(map(sum, times))
    assert factor * total <= step_s([f for f, _ in times], [b for _, b in times]) * (1 + 1e-9)
    if schedule == "gpipe" or count > stages:
        assert factor == pytest.approx((count + stages - 1) / stages)
        assert factor * 3.0 * stages == pytest.approx(step_s([1.0] * stages, [2.0] * stages)), "equal stages reach it"
    backwards = [(f, max(f, b)) for f, b in times]  # a larger share that all layers have
    share = min((b / (f + b) for f, b in backwards if f + b), default=0.5)
    larger = pipeline_factor(schedule, stages, count, share) * sum(map(sum, backwards))
    assert larger <= step_s([f for f, _ in backwards], [b for _, b in backwards]) * (1 + 1e-9)

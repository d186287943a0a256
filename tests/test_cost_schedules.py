"""The price of interleaved and zero-bubble schedules against numbers worked out by hand."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError
from strategies import chain_profile, equal_profile, layer_cost, make_cluster, make_plan, timed_profile

from planner import cost
from planner.emitter import emit, make_twin
from planner.errors import EmitError
from planner.model_profile import LayerClass, ModelProfile
from planner.plan import Plan, Schedule, read_plan
from planner.prediction import Prediction

MB = 10**6


def price(plan: Plan, profile: ModelProfile, **cluster: tuple[float, float]) -> Prediction:
    return cost.evaluate(plan, profile, make_cluster(plan.num_gpus, **cluster))  # type: ignore[arg-type]


def chunked(profile: ModelProfile, schedule: Schedule, groups: int, chunks: int, m: int, **more: object) -> Plan:
    size = len(profile.layers) // (groups * chunks)
    cuts = range(size, len(profile.layers), size)
    return make_plan(profile, cuts, m=m, schedule=schedule, groups=groups, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("schedule", "chunks", "step_s", "bubble_s"),
    [
        # 8 layers of 1 s forward, 1 s input gradient and 1 s weight gradient; 4 groups, 8 microbatches: 48 s of work.
        ("1f1b", 1, 48 + 3 * 6, 3 * 6),
        ("interleaved-1f1b", 2, 48 + 3 * 3, 3 * 3),
        ("zero-bubble", 1, 48 + 3 * 2, 3 * 2),
        ("zero-bubble", 2, 48 + 3 * 1, 3 * 1),
        ("zbv", 2, 48 + 3 * 1, 3 * 1),
    ],
)
def test_steps_and_bubbles_are_as_published(schedule: Schedule, chunks: int, step_s: float, bubble_s: float) -> None:
    profile = timed_profile([1.0] * 8, [2.0] * 8)
    prediction = price(chunked(profile, schedule, 4, chunks, 8), profile)
    assert prediction.step_time_s == pytest.approx(step_s)
    assert prediction.bubble_fraction == pytest.approx(bubble_s / step_s)
    assert len(prediction.stages) == 4 * chunks
    split = schedule in ("zero-bubble", "zbv")
    assert prediction.stages[0].weight_time_s == pytest.approx(8 / (4 * chunks) if split else 0.0)
    assert prediction.stages[0].backward_time_s == pytest.approx(2 * 8 / (4 * chunks))


def test_input_gradients_are_sent_before_weight_gradients_run() -> None:
    # The profile's backward is half input, half weight gradient: 3 s each.
    profile = timed_profile([1.0, 1.0], [6.0, 6.0])
    plan = make_plan(profile, [1], m=1, schedule="zero-bubble")
    events = {(e.stage, e.kind): e for e in cost.timeline(plan, profile, make_cluster(2))}
    assert (events[1, "I"].start_s, events[1, "I"].end_s) == pytest.approx((2.0, 5.0))
    assert events[0, "I"].start_s == pytest.approx(5.0)
    assert (events[1, "W"].start_s, events[0, "W"].end_s) == pytest.approx((5.0, 11.0))


def test_recomputation_and_collectives_come_before_the_input_gradient() -> None:
    profile = timed_profile([1.0, 1.0], [6.0, 6.0])
    plan = make_plan(profile, [1], m=1, schedule="zero-bubble", recompute=["layers.1"])
    events = {(e.stage, e.kind): e for e in cost.timeline(plan, profile, make_cluster(2))}
    assert events[1, "I"].end_s - events[1, "I"].start_s == pytest.approx(1.0 + 3.0)
    assert events[1, "W"].end_s - events[1, "W"].start_s == pytest.approx(3.0)


def test_chunks_of_one_pair_of_groups_share_a_link_and_a_v_turns_round_for_nothing() -> None:
    profile = timed_profile([1.0] * 4, [2.0] * 4)
    profile = profile.model_copy(update={"edges": tuple(edge.replace(bytes_per_row=100.0) for edge in profile.edges)})
    looped = chunked(profile, "interleaved-1f1b", 2, 2, 1)
    # Forwards 4 s and three messages of 2.5 s, backwards 8 s and three messages.
    assert price(looped, profile, intra=(50.0, 0.5)).step_time_s == pytest.approx(4 + 3 * 2.5 + 8 + 3 * 2.5)
    # Weights' gradients of stage 0 come last; the turn, from stage 1 to stage 2, is on one GPU.
    v = price(chunked(profile, "zbv", 2, 2, 1), profile, intra=(50.0, 0.5))
    assert v.step_time_s == pytest.approx(4 + 2 * 2.5 + 4 + 2 * 2.5 + 1)
    assert [stage.send_time_s for stage in v.stages] == pytest.approx([2.5, 2.5, 2.5, 2.5])
    assert v.stages[1].memory.communication_bytes == price(
        chunked(profile, "zbv", 2, 2, 1), profile
    ).stages[2].memory.communication_bytes == (100 + 2 * 0 + 100) + (100 + 2 * 100)  # fmt: skip


def test_messages_on_one_link_wait_for_one_another() -> None:
    # Two chunks on each of two groups, two microbatches: 0F0 0F1 2F0 2F1 send to group 1 over one link, 10 s each.
    profile = timed_profile([1.0] * 4, [2.0] * 4)
    profile = profile.model_copy(
        update={
            "edges": tuple(edge.replace(bytes_per_row=b) for edge, b in zip(profile.edges, (10, 0, 10), strict=True))
        }
    )
    plan = chunked(profile, "interleaved-1f1b", 2, 2, 2)
    events = {
        (e.stage, e.kind, e.microbatch): e for e in cost.timeline(plan, profile, make_cluster(2, intra=(1.0, 0.0)))
    }
    assert events[1, "F", 0].start_s == pytest.approx(11.0)
    assert events[1, "F", 1].start_s == pytest.approx(21.0)  # sent at 2, after the first: 11 to 21
    assert events[2, "F", 0].start_s == pytest.approx(12.0)
    assert events[3, "F", 0].start_s == pytest.approx(31.0)  # sent at 13, the link is free at 21
    assert events[3, "F", 1].start_s == pytest.approx(41.0)


def test_memory_follows_what_a_group_holds_of_all_its_stages() -> None:
    # 10 MB kept of a microbatch in each layer, 5 MB of parameters and gradients; two layers on each of two groups.
    profile = equal_profile(4, activation=10 * MB, params=625_000)
    memory = [stage.memory for stage in price(chunked(profile, "interleaved-1f1b", 2, 2, 4), profile).stages]
    assert [m.activation_bytes // MB for m in memory] == [50, 30, 50, 30]  # 0F0 0F1 2F0 2F1 0F2; 1F0 1F1 3F0
    assert [(m.param_bytes + m.grad_bytes) // MB for m in memory] == [10] * 4
    assert memory[0] == memory[2]
    memory = [stage.memory for stage in price(chunked(profile, "zbv", 2, 2, 4), profile).stages]
    assert [m.activation_bytes // MB for m in memory] == [40] * 4  # 2p half stages
    whole = price(make_plan(profile, [2], m=4), profile).stages
    assert whole[0].memory.activation_bytes == 40 * MB
    memory = [stage.memory for stage in price(make_plan(profile, [2], m=4, schedule="zero-bubble"), profile).stages]
    assert [m.activation_bytes // MB for m in memory] == [40, 40]  # every group holds what 1F1B's first one does


def test_chunks_of_different_sizes_are_held_at_different_times() -> None:
    sizes = [1, 1, 7, 1]
    classes = [
        LayerClass(name=f"c{s}", module_class="C", costs=(layer_cost(activation=s * MB, params=s),)) for s in (1, 7)
    ]
    profile = chain_profile(classes, [f"c{s}" for s in sizes])
    prediction = price(chunked(profile, "interleaved-1f1b", 2, 2, 4), profile)
    # Group 0: 0F0 0F1 2F0 2F1 0F2 | 2B0 0F3 | 2B1 2F2 ...: 3 of stage 0 and 2 of stage 2 at most
    assert prediction.stages[0].memory.activation_bytes == (3 + 2 * 7) * MB
    assert prediction.stages[0].param_count == 8


def test_what_is_recomputed_for_the_input_gradient_stays_for_the_weights() -> None:
    block = LayerClass(name="b", module_class="B", costs=(layer_cost(activation=100, saved_input=10, transient=7),))
    profile = chain_profile([block], ["b"] * 2, edge_bytes=0.0)
    names = ["layers.0", "layers.1"]
    whole = price(make_plan(profile, [1], m=2, recompute=names), profile).stages[0].memory
    split = price(make_plan(profile, [1], m=2, schedule="zero-bubble", recompute=names), profile).stages[0].memory
    kept = price(make_plan(profile, [1], m=2, schedule="zero-bubble"), profile).stages[0].memory
    assert (whole.activation_bytes, whole.transient_bytes) == (0, 107)
    # 0F0 0F1 0I0 0W0 0I1 0W1: one microbatch at a time is between I and W, with all it needs
    assert (split.activation_bytes, split.transient_bytes) == (110, 7)
    assert (kept.activation_bytes, kept.transient_bytes) == (220, 7)


def test_parameters_shared_by_chunks_of_one_group_are_held_and_summed_there() -> None:
    block = LayerClass(name="block", module_class="Block", costs=(layer_cost(params=1000),))
    profile = chain_profile([block], ["block"] * 4, tied=[(0, 3)])
    v = price(chunked(profile, "zbv", 2, 2, 2), profile, intra=(1000.0, 0.0))
    assert [stage.memory.param_bytes for stage in v.stages] == [4000, 8000, 8000, 4000]
    assert [stage.param_count for stage in v.stages] == [1000, 2000, 2000, 1000]
    assert v.exposed_comm_time_s == pytest.approx(0.0)
    looped = price(chunked(profile, "interleaved-1f1b", 2, 2, 2), profile, intra=(1000.0, 0.0))
    assert [stage.memory.param_bytes for stage in looped.stages] == [8000] * 4
    assert looped.exposed_comm_time_s == pytest.approx(4.0)  # an all-reduce of 4000 bytes over two


def test_groups_reduce_and_update_all_their_stages_one_after_the_other() -> None:
    profile = equal_profile(4, params=1000)
    plan = chunked(profile, "interleaved-1f1b", 2, 2, 2, dp=2)
    prediction = price(plan, profile, intra=(1000.0, 0.0))
    assert plan.num_gpus == 4
    # interleaved: 2 * 2 * 3 + (p - 1) * 3 s; an all-reduce of 4000 bytes over two replicas takes 4 s, two stages
    assert prediction.step_time_s == pytest.approx(15.0 + 2 * 4.0)
    events = [e for e in cost.timeline(plan, profile, make_cluster(4, intra=(1000.0, 0.0))) if e.kind == "reduce"]
    assert [e.stage for e in events] == [0, 1, 2, 3]
    assert [e.end_s - e.start_s for e in events] == pytest.approx([4.0] * 4)
    ends = {e.stage: e.end_s for e in events}
    assert ends[2] == pytest.approx(ends[0] + 4.0)


@pytest.mark.parametrize(
    ("schedule", "groups", "places", "message"),
    [
        ("1f1b", 2, [0, 1, 0, 1], "GPU 0 is in two stages, and schedule '1f1b' runs one stage on each GPU"),
        ("interleaved-1f1b", 2, [0, 1, 1, 0], "belongs to GPU 0 ..., beside stage 0"),
        ("interleaved-1f1b", 4, [0, 1, 2, 3], "needs 2 or more stages on every device group"),
        ("zbv", 2, [0, 1, 0, 1], "there and back again: this one belongs to GPU 1 ..., beside stage 1"),
        ("zbv", 4, [0, 1, 2, 3], "needs 2 stages on every device group"),
        ("zero-bubble", 3, [0, 1, 2, 0], "equally many on each; 4 stages are on 3 groups"),
    ],
)
def test_stages_are_placed_as_their_schedule_needs_it(
    schedule: Schedule, groups: int, places: list[int], message: str
) -> None:
    profile = equal_profile(4)
    plan = make_plan(profile, [1, 2, 3])
    stages = [stage.replace(gpus=(place,)) for stage, place in zip(plan.stages, places, strict=True)]
    with pytest.raises(ValidationError, match=message.replace(".", r"\.")):
        plan.replace(schedule=schedule, stages=tuple(stages))
    assert len(set(places)) == groups


def test_groups_overlap_in_whole_or_not_at_all() -> None:
    profile = equal_profile(4)
    plan = chunked(profile, "interleaved-1f1b", 2, 2, 2, tp=2)
    assert (plan.pp_degree, plan.num_chunks, plan.num_gpus, plan.groups) == (2, 2, 4, ((0, 2), (1, 3)))
    half = [*plan.stages[:3], plan.stages[3].replace(gpus=(3, 4))]
    with pytest.raises(ValidationError, match="GPU 3 is in two stages"):
        plan.replace(stages=tuple(half))
    other = [*plan.stages[:3], plan.stages[3].replace(tp_degree=1, dp_degree=2, microbatch_size=1)]
    with pytest.raises(ValidationError):
        plan.replace(stages=tuple(other))


def test_plans_with_chunks_read_back_from_their_file(tmp_path: Path) -> None:
    profile = timed_profile([1.0] * 4, [2.0] * 4)
    plan = chunked(profile, "zbv", 2, 2, 4)
    plan = plan.replace(prediction=price(plan, profile))
    path = tmp_path / "plan.py"
    path.write_text(f"PLAN = {json.loads(plan.model_dump_json())!r}\n")
    assert read_plan(path) == plan
    assert "weight_time_s" not in price(make_plan(profile, [2], m=4), profile).model_dump_json()


@pytest.mark.parametrize(("schedule", "chunks"), [("interleaved-1f1b", 2), ("zero-bubble", 1), ("zbv", 2)])
def test_no_code_is_written_for_schedules_that_the_runtime_has_not(schedule: Schedule, chunks: int) -> None:
    profile = equal_profile(4)
    plan = chunked(profile, schedule, 2, chunks, 4)
    for write in (lambda: emit(plan, profile), lambda: make_twin(plan, profile, 2)):
        with pytest.raises(EmitError, match=f"has schedule {schedule}; the runtime has 1f1b and gpipe"):
            write()

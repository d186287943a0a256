"""Interleaved and zero-bubble schedules and groups of shards in the search, against brute force and the lists' own."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import all_plans, fastest, priced_plans
from strategies import ORIGIN, make_cluster, random_cluster, random_profile, timed_profile

from planner.errors import UsageError
from planner.plan import FEWEST_CHUNKS, MOST_CHUNKS, SPLIT_SCHEDULES, Schedule
from planner.schedule import held_at_once
from planner.solver import SolveRequest, solve
from planner.solver.loops import held_of_all

LOOPED: tuple[Schedule, ...] = ("interleaved-1f1b", "zero-bubble", "zbv")
PINS = (("tp_degree", "1"), ("recompute", "none"))


@pytest.mark.parametrize("block", range(5))
def test_equal_to_brute_force(block: int) -> None:
    """What is proven is no more than the best there is; what is called optimal is the best there is."""
    compared = optimal = looped = 0
    seed = 1000 * block
    while compared < 12:
        seed += 1
        draw = random.Random(f"loops {seed}")
        num_layers, num_gpus, batch = draw.randint(3, 6), draw.choice([2, 3, 4]), draw.choice([4, 6, 8])
        profile = random_profile(seed, num_layers=num_layers, num_classes=3, skips=draw.random() < 0.3)
        roomy = random_cluster(seed, num_gpus)
        plans = list(all_plans(profile, num_gpus, batch, recompute=False, fewer=True, theoretical=True))
        if len(plans) > 1500:
            continue
        priced = priced_plans(profile, roomy, iter(plans))
        memory = draw.choice([peak for _, peak in priced])
        cluster = random_cluster(seed, num_gpus, memory=memory)
        request = SolveRequest(num_gpus=num_gpus, global_batch_size=batch, pins=PINS, top=0, theoretical=True)
        solution = solve(profile, cluster, request, origin=ORIGIN)
        best_s = fastest(priced_plans(profile, roomy, (plan for plan in plans if plan.tp_degree == 1)), memory)
        assert solution.plan is not None
        assert solution.plan.prediction is not None
        assert solution.plan.prediction.peak_bytes <= memory
        assert solution.lower_bound_s <= best_s * (1 + 1e-9), seed
        if solution.status == "optimal":
            assert solution.plan.prediction.step_time_s <= best_s * (1 + 1e-9), seed
            degrees = {(stage.tp_degree, stage.dp_degree) for stage in solution.plan.stages}
            if len(degrees) == 1:  # others are not among the plans that are enumerated here
                assert solution.plan.prediction.step_time_s == pytest.approx(best_s, rel=1e-9), seed
        optimal += solution.status == "optimal"
        looped += solution.plan.schedule in LOOPED
        compared += 1
    assert optimal > 8
    assert looped


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(LOOPED), st.integers(2, 6), st.integers(0, 12), st.integers(0, 3))
def test_a_group_holds_at_least_what_the_bound_counts(schedule: Schedule, p: int, more: int, chunk: int) -> None:
    chunks = min(FEWEST_CHUNKS[schedule] + chunk, MOST_CHUNKS.get(schedule, 4))
    for group, rows in enumerate(held_at_once(schedule, p, p + more, chunks)):
        held = rows[:, :chunks] + (rows[:, chunks:] if schedule in SPLIT_SCHEDULES else 0)
        assert held_of_all(schedule, p, p + more, chunks, group) <= held.min(axis=1).max()


def test_schedules_that_no_plan_runs_yet_are_searched_only_if_asked_for() -> None:
    profile, cluster = timed_profile([1.0] * 8, [2.0] * 8), make_cluster(4)
    asked = SolveRequest(num_gpus=4, global_batch_size=4, pins=(("pp_degree", "4"),))
    plain = solve(profile, cluster, asked, origin=ORIGIN).plan
    other = solve(profile, cluster, replace(asked, theoretical=True), origin=ORIGIN).plan
    assert plain is not None
    assert other is not None
    assert plain.schedule in ("1f1b", "gpipe")
    assert other.schedule in LOOPED
    assert plain.prediction is not None
    assert other.prediction is not None
    assert other.prediction.step_time_s < plain.prediction.step_time_s
    with pytest.raises(UsageError, match="--pin schedule=zbv: emitted plans run 1f1b and gpipe so far"):
        solve(profile, cluster, replace(asked, pins=(("schedule", "zbv"),)), origin=ORIGIN)


@pytest.mark.parametrize(
    ("key", "value"),
    [("schedule", "zero-bubble"), ("schedule", "interleaved-1f1b"), ("num_chunks", "2"), ("shard_degree", "2")],
)
def test_pins_of_what_is_theoretical_are_kept(key: str, value: str) -> None:
    profile = random_profile(7, num_layers=6)
    pins = (("pp_degree", "2"), ("dp_degree", "4"), (key, value)) if key == "shard_degree" else ((key, value),)
    request = SolveRequest(num_gpus=8, global_batch_size=8, pins=pins, top=0, theoretical=True)
    plan = solve(profile, random_cluster(7, 8), request, origin=ORIGIN).plan
    assert plan is not None
    if key == "shard_degree":
        assert {stage.num_shards(plan.data_parallel) for stage in plan.stages} == {2}
    else:
        assert str(getattr(plan, key)) == value


def test_a_pinned_group_of_shards_needs_replicas() -> None:
    profile, cluster = random_profile(7, num_layers=4), random_cluster(7, 4)
    asked = SolveRequest(num_gpus=4, global_batch_size=8, pins=(("shard_degree", "2"),), top=0, theoretical=True)
    plan = solve(profile, cluster, asked, origin=ORIGIN).plan
    assert plan is not None
    assert {stage.num_shards(plan.data_parallel) for stage in plan.stages} == {2}
    pins = (("num_chunks", "2"), ("pp_degree", "2"))
    found = solve(profile, cluster, replace(asked, pins=pins, theoretical=False), origin=ORIGIN)
    assert found.conflict is not None
    assert found.conflict.constraint == "runtime"
    assert "--pin num_chunks=2: emitted plans run one stage a device group" in found.conflict.message
    assert "--theoretical" in found.conflict.message

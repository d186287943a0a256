"""Lower bounds under any schedule never exceed the played step, and meet it where that is published."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import chain_messages, schedule_cases

from planner.cost.simulation import Message, play
from planner.plan import SPLIT_SCHEDULES, Schedule
from planner.schedule import group_actions, stages_of_group
from planner.solver.schedule_bounds import mean_seconds, schedule_factor, schedule_paths

Case = tuple[Schedule, int, int, int]
Seconds = tuple[float, float, float]

CASES = schedule_cases(max_groups=5, max_microbatches=12, max_chunks=3)
SECONDS = st.tuples(*[st.floats(0.0, 5.0)] * 3)


def step_s(case: Case, times: list[Seconds], messages: list[Message] | None = None, ready_s: float = 0.0) -> float:
    """Return the step of stages that take (F, I, W) seconds each."""
    schedule, groups, _, chunks = case
    forward, inputs, weights = (list(column) for column in zip(*times, strict=True))
    backward = [i + w for i, w in zip(inputs, weights, strict=True)]
    sent = chain_messages(schedule, groups, chunks) if messages is None else messages
    ready = [ready_s] * groups
    return max(play(group_actions(*case), forward, backward, sent, ready, inputs, weights).group_ends_s)


def station_s(case: Case, group: int, times: list[Seconds], sent_s: float = 0.0, **more: float) -> float:
    """Return the bound of one group that knows all others' times; `sent_s` is what every message takes."""
    schedule, groups, _, chunks = case
    stages = stages_of_group(schedule, groups, chunks, group)
    array = np.array(times)
    back = array[:, 1] if schedule in SPLIT_SCHEDULES else array[:, 1] + array[:, 2]
    edges = list(pairwise([-1, *stages, len(times)]))
    gaps = [slice(a + 1, b) for a, b in edges]
    sent = {message.source for message in chain_messages(schedule, groups, chunks)}
    messages = [len(sent & set(range(max(a, 0), b))) for a, b in edges]
    forward = np.array([[array[gap, 0].sum() + n * sent_s for gap, n in zip(gaps, messages, strict=True)]])
    backward = np.array([[back[gap].sum() + n * sent_s for gap, n in zip(gaps, messages, strict=True)]])
    paths = schedule_paths(*case)[group]
    return float(paths.bound(array[list(stages)][None], forward, backward, **more)[0])


@given(CASES, st.data())
@settings(max_examples=300)
def test_no_group_s_paths_take_longer_than_the_step(case: Case, data: st.DataObject) -> None:
    schedule, groups, _, chunks = case
    stages = groups * chunks
    times = data.draw(st.lists(SECONDS, min_size=stages, max_size=stages))
    latency = data.draw(st.floats(0.0, 2.0))
    ready = data.draw(st.floats(0.0, 20.0))
    messages = [
        Message(m.source, m.target, 0.0, latency, 0.0, latency) for m in chain_messages(schedule, groups, chunks)
    ]
    step = step_s(case, times, messages, ready)
    for group in range(groups):
        assert station_s(case, group, times, latency, ready_s=ready) <= step * (1 + 1e-9)


@given(CASES, st.data())
@settings(max_examples=300)
def test_no_mean_of_paths_takes_longer_than_the_step(case: Case, data: st.DataObject) -> None:
    _, groups, _, chunks = case
    stages = groups * chunks
    times = data.draw(st.lists(SECONDS, min_size=stages, max_size=stages))
    means = mean_seconds(*case, np.eye(3)) @ np.array(times).ravel()
    assert means.max() <= step_s(case, times) * (1 + 1e-9)


@given(CASES, st.data())
def test_no_step_is_faster_than_its_factor(case: Case, data: st.DataObject) -> None:
    _, groups, _, chunks = case
    stages = groups * chunks
    least = data.draw(st.tuples(*[st.floats(0.0, 1.0 / 3)] * 3))
    times = []
    for total, (a, b) in data.draw(
        st.lists(
            st.tuples(st.floats(0.0, 5.0), st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0))),
            min_size=stages,
            max_size=stages,
        )
    ):  # what the least shares leave is divided as drawn
        rest = 1.0 - sum(least)
        low, high = sorted((a, b))
        parts = (low, high - low, 1.0 - high)
        times.append(tuple(total * (share + rest * part) for share, part in zip(least, parts, strict=True)))
    factor = schedule_factor(*case, least)
    assert factor * sum(map(sum, times)) <= step_s(case, times) * (1 + 1e-9)


@given(schedule_cases(max_groups=8, max_microbatches=24, max_chunks=4))
def test_the_bounds_of_equal_stages(case: Case) -> None:
    schedule, groups, m, chunks = case
    times = [(1.0, 1.0, 1.0)] * (groups * chunks)
    step = step_s(case, times)
    best = max(station_s(case, group, times) for group in range(groups))
    factor = schedule_factor(*case, (1 / 3, 1 / 3, 1 / 3))
    assert best <= step * (1 + 1e-9)
    assert m / groups * (1 - 1e-9) <= factor
    assert factor * 3 * groups * chunks <= step * (1 + 1e-9)
    whole_blocks = chunks == 1 or m % groups == 0
    if m >= 2 * groups and whole_blocks:  # no group waits but for the first and the last microbatch
        assert best == pytest.approx(step, rel=1e-9)
    if schedule == "gpipe" or (m > groups and schedule in ("1f1b", "zero-bubble") and chunks == 1):
        assert factor * 3 * groups == pytest.approx(step, rel=1e-9)
    if schedule == "zero-bubble" and chunks == 2 and m >= 2 * groups and whole_blocks and groups <= 4:
        assert factor * 3 * groups * chunks == pytest.approx(step, rel=1e-9)


def test_unequal_cuts_beat_equal_ones_under_interleaving() -> None:
    # Why no factor reaches the bubble of equal stages: less in the last stage, more before it.
    case: Case = ("interleaved-1f1b", 2, 8, 2)
    shares = (1 / 3, 1 / 3, 1 / 3)
    equal = step_s(case, [(1.0, 1.0, 1.0)] * 4)
    lighter = step_s(case, [(s, s, s) for s in (1.024, 1.024, 1.024, 0.928)])
    assert lighter < equal * 0.985
    assert equal * 0.975 < schedule_factor(*case, shares) * 12 <= lighter


@pytest.mark.parametrize("shares", [(-0.1, 0.5, 0.5), (0.5, 0.5, 0.5)])
def test_shares_are_parts_of_one_whole(shares: Seconds) -> None:
    with pytest.raises(ValueError, match="no parts of one whole"):
        schedule_factor("zero-bubble", 2, 4, 1, shares)

"""Plans played together take what each takes alone, to the last bit."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.batch import Order
from planner.cost.simulation import Message, play
from planner.plan import FEWEST_CHUNKS, MOST_CHUNKS, SCHEDULES, Schedule, group_of_stage
from planner.schedule import Action, group_actions

PLANS = 3


@given(st.sampled_from(SCHEDULES), st.integers(1, 4), st.integers(1, 8), st.integers(1, 3), st.integers(0, 10_000))
def test_a_batch_is_played_as_each_alone(schedule: Schedule, groups: int, m: int, more: int, seed: int) -> None:
    draw = random.Random(seed)
    chunks = min(FEWEST_CHUNKS[schedule] + more - 1, MOST_CHUNKS.get(schedule, 4))
    stages = groups * chunks
    actions = group_actions(schedule, groups, m, chunks)
    group_of = [group_of_stage(schedule, groups, stage) for stage in range(stages)]
    pairs = [(s, s + 1) for s in range(stages - 1)]
    pairs += [(s, t) for s in range(stages) for t in range(s + 2, stages) if draw.random() < 0.3]
    pairs = [(s, t) for s, t in pairs if group_of[s] != group_of[t]]
    back = [draw.random() < 0.8 for _ in pairs]
    seconds = np.array([draw.random() for _ in range(stages * 4 * PLANS)]).reshape(stages, 4, PLANS)
    busy, latency = np.array([draw.random() for _ in range(4 * len(pairs) * PLANS)]).reshape(2, 2 * len(pairs), PLANS)
    ready = np.array([draw.random() for _ in range(groups * PLANS)]).reshape(groups, PLANS)
    order = Order(actions, [(s, t, has) for (s, t), has in zip(pairs, back, strict=True)], group_of)
    together = order.play(seconds, busy, latency, ready)
    for plan in range(PLANS):
        messages = [
            Message(
                s, t, busy[2 * i, plan], latency[2 * i, plan], busy[2 * i + 1, plan], latency[2 * i + 1, plan], back[i]
            )
            for i, (s, t) in enumerate(pairs)
        ]
        f, b, i, w = seconds[:, :, plan].T
        alone = play(actions, f, b, messages, ready[:, plan], i, w)
        assert tuple(together[:, plan]) == alone.group_ends_s


def test_lists_that_wait_for_one_another_are_refused() -> None:
    actions = [[Action("B", 0, 0), Action("F", 0, 0)], [Action("F", 1, 0), Action("B", 1, 0)]]
    with pytest.raises(ValueError, match="group 0 waits for ever before 0B0"):
        Order(actions, [(0, 1, True)], [0, 1])

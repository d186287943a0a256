"""The station bound of 1F1B, its waits for round trips included, against the simulation with everything known."""

import random
from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.simulation import Message, play
from planner.schedule import group_actions
from planner.solver.problem import Problem


@given(st.integers(2, 6), st.integers(0, 14), st.integers(0, 100_000))
def test_no_station_is_bounded_above_the_step(stages: int, more: int, seed: int) -> None:
    draw, m = random.Random(seed), stages + more
    forward = [draw.choice([1.0, draw.random() * 2]) for _ in range(stages)]
    backward = [draw.choice([2.0, draw.random() * 4]) for _ in range(stages)]
    busy, latency = ([draw.random() * draw.choice([0.0, 0.1, 1.0]) for _ in range(stages - 1)] for _ in range(2))
    messages = [Message(s, s + 1, b, x, b, x) for s, (b, x) in enumerate(zip(busy, latency, strict=True))]
    step_s = max(play(group_actions("1f1b", stages, m, 1), forward, backward, messages, [0.0] * stages).group_ends_s)
    way = [b + x for b, x in zip(busy, latency, strict=True)]
    tightest = 0.0
    for s in range(stages):
        setting = SimpleNamespace(num_microbatches=m, schedule="1f1b")
        problem = SimpleNamespace(setting=setting, positions=[SimpleNamespace(in_flight=stages - s)] * stages)
        trip = sum(forward[s + 1 :]) + sum(backward[s + 1 :]) + 2 * sum(way[s:])
        own = (np.array(value) for value in (forward[s], backward[s], trip))
        within = float(Problem.within(problem, s, *own))  # type: ignore[arg-type]
        bound = sum(forward[:s]) + sum(backward[:s]) + 2 * sum(way[:s]) + within
        assert bound <= step_s * (1 + 1e-9)
        tightest = max(tightest, bound)
    if len(set(zip(forward, backward, strict=True))) == 1 and not any(way):
        assert abs(tightest - step_s) <= 1e-9 * step_s

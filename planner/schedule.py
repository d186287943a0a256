"""The order in which every device group runs the forwards and backwards of its stages' microbatches.

F is a forward and B a backward; where backwards are split, I is the gradient of a stage's inputs, which the stage
before it waits for, and W that of its weights, for which nobody waits.

    gpipe, 2 groups, 3 microbatches         1f1b, 2 groups, 3 microbatches
    0F0 0F1 0F2         0B0 0B1 0B2         0F0 0F1     0B0 0F2     0B1     0B2
        1F0 1F1 1F2 1B0 1B1 1B2                 1F0 1B0 1F1 1B1 1F2 1B2

    interleaved-1f1b, 2 groups of 2 stages, 2 microbatches
    0F0 0F1 2F0 2F1     2B0     2B1 0B0     0B1
        1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1

    zero-bubble, 2 groups, 3 microbatches
    0F0 0F1     0I0 0W0 0F2 0I1 0W1 0I2 0W2
        1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2

    zbv, 2 groups of 2 stages, 3 microbatches
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
        1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2

Every list is some forwards ahead, then a backward and a forward in turn, then the backwards left; W follow I by a lag
(`_in_turn`). Chunks, the stages of one group, take turns in blocks of as many microbatches as there are groups. Where
the last block has fewer, the list is that of whole blocks without the microbatches that are too many: nothing that
stays waits for one that is left out, so that lists can't hang, and they hold no more.

The same lists are executed by an emitted plan and played by `cost`: Huang et al., "GPipe" (2019); Narayanan et al.,
"Memory-Efficient Pipeline-Parallel DNN Training" (2021), for one forward, one backward; Narayanan et al., "Efficient
Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021), for interleaved stages; Qi et al., "Zero
Bubble Pipeline Parallelism" (2023), for ZB-H1, which holds as much as 1F1B's first group does, in every group; Qi et
al., "Pipeline Parallelism with Controllable Memory" (2024), for zbv (V-ZB), which holds as much too.
"""

import re
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from planner.plan import FEWEST_CHUNKS, MOST_CHUNKS, SPLIT_SCHEDULES, Schedule, group_of_stage

Kind = Literal["F", "B", "I", "W"]
Turn = tuple[int, int]
"""(stage, microbatch)"""
KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")
_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_KEPT_LISTS = 4  # of the largest settings: each has up to a few hundred thousand actions


@dataclass(frozen=True, slots=True)
class Action:
    """One microbatch through one stage, in one of `KINDS`; prints as '2F0' (stage, kind, microbatch)."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Return the action that prints as `text`; ValueError where there is none."""
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is no action; write one like '2F0': stage, one of F, B, I, W, microbatch")
        kind = next(kind for kind in KINDS if kind == match.group(2))
        return cls(kind, int(match.group(1)), int(match.group(3)))


@lru_cache(maxsize=_KEPT_LISTS)
def group_actions(
    schedule: Schedule, num_groups: int, num_microbatches: int, num_chunks: int = 1
) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of every device group, in the order in which it runs them.

    ValueError where the schedule has no such number of chunks.
    """
    if not FEWEST_CHUNKS[schedule] <= num_chunks <= MOST_CHUNKS.get(schedule, num_chunks):
        raise ValueError(f"schedule {schedule!r} with num_chunks {num_chunks}")
    if schedule == "zbv":
        return tuple(tuple(_v_shaped(num_groups, num_microbatches, group)) for group in range(num_groups))
    return tuple(
        tuple(_looped(schedule, num_groups, num_microbatches, num_chunks, group)) for group in range(num_groups)
    )


def stages_of_group(schedule: Schedule, num_groups: int, num_chunks: int, group: int) -> tuple[int, ...]:
    """Return the stages of a device group, in the order of the model: its chunks."""
    return tuple(
        stage for stage in range(num_groups * num_chunks) if group_of_stage(schedule, num_groups, stage) == group
    )


def _looped(schedule: Schedule, p: int, m: int, num_chunks: int, group: int) -> list[Action]:
    """Return a group's actions where the stages are on the groups in turn; `p` groups, `m` microbatches."""
    behind = p - 1 - group
    size = min(p, m) if num_chunks > 1 else m
    ahead = (num_chunks - 1) * size + behind + 1
    if schedule == "gpipe":
        ahead = m
    elif schedule == "interleaved-1f1b":  # as many as fit into a round trip through the groups behind
        ahead += behind
    blocks = [range(first, first + size) for first in range(0, m, size)]
    stages = range(group, num_chunks * p, p)
    forwards = [(stage, j) for block in blocks for stage in stages for j in block]
    backwards = [(stage, j) for block in blocks for stage in reversed(stages) for j in block]
    return _in_turn(forwards, backwards, m, ahead, split=schedule in SPLIT_SCHEDULES, lags=(group, group))


def _v_shaped(p: int, m: int, group: int) -> list[Action]:
    """Return a group's actions of zbv: its first stage is `group`, its second one the same number from the end.

    It goes ahead by 2p forwards: of its first stage alone until the first one is back at the second, then of both in
    turn. W follow at once, but after the last forward those of 2 * `group` I wait, so that these are earlier.
    """
    first, second, behind = group, 2 * p - 1 - group, p - group
    whole = max(m, 2 * p - 1)
    alone = 2 * behind - 1
    forwards = [(first, j) for j in range(alone)]
    forwards += [turn for j in range(group) for turn in ((second, j), (first, alone + j))]
    forwards += [(second, j) for j in range(group, p)]
    forwards += [turn for j in range(p, whole) for turn in ((first, behind - 1 + j), (second, j))]
    backwards = [(second, j) for j in range(behind)]
    backwards += [turn for j in range(behind, whole) for turn in ((first, j - behind), (second, j))]
    backwards += [(first, j) for j in range(whole - behind, whole)]
    return _in_turn(forwards, backwards, m, 2 * p, split=True, lags=(0, 2 * group))


def _in_turn(
    forwards: list[Turn], backwards: list[Turn], m: int, ahead: int, *, split: bool, lags: tuple[int, int]
) -> list[Action]:
    """Return `ahead` forwards, then a backward and a forward in turn, without the microbatches from `m` on.

    Split backwards run their W once more than a lag of them wait: the first one of `lags` while forwards are left,
    then the second.
    """
    f = [Action("F", stage, j) if j < m else None for stage, j in forwards]
    b = [Action("I" if split else "B", stage, j) if j < m else None for stage, j in backwards]
    body: list[Action | None] = [None] * (3 * len(b))
    body[0::3] = b
    later = f[ahead:] + [None] * ahead
    body[2::3] = later[: len(b)]
    waiting: deque[Action] = deque()
    last = max(index for index, action in enumerate(f) if action is not None) - ahead
    for index, action in enumerate(b if split else ()):
        if action is not None:
            waiting.append(Action("W", action.stage, action.microbatch))
            if len(waiting) > lags[index > last + 1]:
                body[3 * index + 1] = waiting.popleft()
    return [action for action in (*f[:ahead], *body, *waiting) if action is not None]


@lru_cache(maxsize=_KEPT_LISTS)
def held_at_once(
    schedule: Schedule, num_groups: int, num_microbatches: int, num_chunks: int = 1
) -> tuple[NDArray[np.int64], ...]:
    """Return for every group what it holds at once: a row for each state of its list, each state once.

    A row counts the microbatches of every chunk between F and B, or F and I; where backwards are split, then those of
    every chunk between I and W, an I that runs included. What a group needs at most is the largest product of a row
    with the bytes of one microbatch in each chunk.
    """
    found = []
    split = schedule in SPLIT_SCHEDULES
    for group in range(num_groups):
        if schedule in ("1f1b", "gpipe"):
            found.append(np.array([[num_in_flight(schedule, num_groups, num_microbatches, group)]]))
            continue
        chunks = {stage: k for k, stage in enumerate(stages_of_group(schedule, num_groups, num_chunks, group))}
        actions = group_actions(schedule, num_groups, num_microbatches, num_chunks)[group]
        changes = np.zeros((len(actions), num_chunks * (1 + split)), dtype=np.int64)
        rows = np.arange(len(actions))
        kinds = np.array([KINDS.index(action.kind) for action in actions])
        columns = np.array([chunks[action.stage] for action in actions])
        for kind, sign, offset in (("F", 1, 0), ("B", -1, 0), ("I", -1, 0), ("I", 1, 1), ("W", -1, 1)):
            chosen = kinds == KINDS.index(kind)
            changes[rows[chosen], columns[chosen] + (offset * num_chunks if chosen.any() else 0)] += sign
        states = np.cumsum(changes, axis=0)
        found.append(np.unique(states, axis=0))
    return tuple(found)


def num_in_flight(
    schedule: Schedule, num_groups: int, num_microbatches: int, group: int, num_chunks: int = 1, chunk: int = 0
) -> int:
    """Return how many microbatches of a chunk a group holds at most, from their forward to the end of their backward.

    A group's chunks are not all at their most at once: see `held_at_once`.
    """
    if schedule == "gpipe":
        return num_microbatches
    if schedule == "1f1b":
        return min(num_microbatches, num_groups - group)
    rows = held_at_once(schedule, num_groups, num_microbatches, num_chunks)[group]
    return int(rows[:, chunk::num_chunks].sum(axis=1).max())

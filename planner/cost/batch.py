"""Many plans of one order of actions played at once: `simulation.play` over arrays.

`Order` sorts the actions of all groups into levels: in a level every group runs at most one action, whose messages were
all sent by actions of earlier levels. Which action belongs to which level depends on the lists alone, not on the times,
so it is worked out once, and each level is then a handful of operations on arrays of (actions of the level) x (plans).
The numbers are those of `simulation.play` to the last bit: the same sums and maxima, in the same order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from planner.schedule import KINDS, Action

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Round:
    """Messages that leave at the end of a level's actions, at most one of each."""

    senders: Ints  # positions in the level
    messages: Ints  # forward ones at 2 i, those back at 2 i + 1
    links: Ints
    receivers: Ints  # actions in the order of levels
    is_unique: bool  # no two go to one receiver


@dataclass(frozen=True, slots=True)
class _Level:
    """Actions that run at once."""

    actions: slice  # of the actions in the order of levels
    groups: Ints
    rounds: tuple[_Round, ...]


class Order:
    """The levels of the action lists of a plan's device groups, and of the messages between its stages.

    `messages` are (source stage, target stage, whether gradients come back), as in `simulation.Message`, and `group_of`
    says which group has a stage. ValueError where the lists wait for one another for ever.
    """

    def __init__(
        self,
        actions: Sequence[Sequence[Action]],
        messages: Sequence[tuple[int, int, bool]],
        group_of: Sequence[int],
    ) -> None:
        self.num_messages, self.num_stages = len(messages), len(group_of)
        flat = [action for todo in actions for action in todo]
        kind = np.array([KINDS.index(action.kind) for action in flat], dtype=np.int64)
        stage = np.array([action.stage for action in flat], dtype=np.int64)
        microbatch = np.array([action.microbatch for action in flat], dtype=np.int64)
        # The one action that runs a stage's forward, or its backward (of inputs), of a microbatch.
        at = np.full((2, self.num_stages, int(microbatch.max()) + 1), -1, dtype=np.int64)
        for way, kinds in enumerate((("F",), ("B", "I"))):
            chosen = np.isin(kind, [KINDS.index(name) for name in kinds])
            at[way, stage[chosen], microbatch[chosen]] = np.flatnonzero(chosen)
        links: dict[tuple[int, int], int] = {}
        sent: list[NDArray[np.int64]] = []
        for index, (source, target, has_gradient) in enumerate(messages):
            for way, (a, b) in enumerate(((source, target), (target, source))[: 1 + has_gradient]):
                link = links.setdefault((group_of[a], group_of[b]), len(links))
                count = at.shape[2]
                sent.append(np.array([at[way, a], at[way, b], np.full(count, 2 * index + way), np.full(count, link)]))
        self._num_links = len(links)
        self._sort(actions, np.concatenate(sent, axis=1) if sent else np.zeros((4, 0), dtype=np.int64))
        self._duration = (stage * len(KINDS) + kind)[self._by_level]

    def _sort(self, actions: Sequence[Sequence[Action]], sent: Ints) -> None:
        """Sort actions into levels; `sent` are columns of (sender, receiver, message, link)."""
        starts = np.array([0, *accumulate(len(todo) for todo in actions)], dtype=np.int64)
        total = int(starts[-1])
        senders, receivers, message_of, link_of = sent[:, np.argsort(sent[0], kind="stable")]
        first = np.searchsorted(senders, np.arange(total + 1))
        turn = np.arange(len(senders)) - first[senders]  # among the messages of one action
        missing = np.bincount(receivers, minlength=total)
        next_action = starts[:-1].copy()
        new_index = np.empty(total, dtype=np.int64)
        levels: list[tuple[Ints, Ints, Ints, Ints]] = []
        done = 0
        while done < total:
            open_groups = np.flatnonzero(next_action < starts[1:])
            ready = open_groups[missing[next_action[open_groups]] == 0]
            if not len(ready):
                stuck = int(open_groups[0])
                action = actions[stuck][int(next_action[stuck] - starts[stuck])]
                raise ValueError(f"group {stuck} waits for ever before {action}")
            chosen = next_action[ready]
            next_action[ready] += 1
            new_index[chosen] = np.arange(done, done + len(chosen))
            counts = first[chosen + 1] - first[chosen]
            leaving = np.repeat(first[chosen] - np.concatenate(([0], np.cumsum(counts)[:-1])), counts)
            leaving = leaving + np.arange(len(leaving))
            np.subtract.at(missing, receivers[leaving], 1)
            levels.append((chosen, ready, np.repeat(np.arange(len(chosen)), counts), leaving))
            done += len(chosen)
        self._by_level = np.concatenate([chosen for chosen, *_ in levels])
        made, done = [], 0
        for chosen, groups, positions, leaving in levels:
            rounds = []
            for number in range(int(turn[leaving].max()) + 1 if len(leaving) else 0):
                of = turn[leaving] == number
                there = new_index[receivers[leaving[of]]]
                unique = len(np.unique(there)) == len(there)
                rounds.append(_Round(positions[of], message_of[leaving[of]], link_of[leaving[of]], there, unique))
            made.append(_Level(slice(done, done + len(chosen)), groups, tuple(rounds)))
            done += len(chosen)
        self.levels = tuple(made)

    def play(self, seconds: Floats, busy: Floats, latency: Floats, ready: Floats) -> Floats:
        """Return when each group has run its last action (groups x plans), in seconds from the start of the step.

        `seconds` (stages x 4 x plans) are of `schedule.KINDS`; `busy` and `latency` (2 messages x plans) those of
        message i forward at 2 i, back at 2 i + 1; `ready` (groups x plans) is when each group may start.
        """
        plans = ready.shape[1]
        duration = seconds.reshape(self.num_stages * len(KINDS), plans)[self._duration]
        arrived = np.zeros((len(self._by_level), plans))
        link_free = np.zeros((self._num_links, plans))
        free = ready.copy()
        for level in self.levels:
            end = np.maximum(free[level.groups], arrived[level.actions])
            end += duration[level.actions]
            free[level.groups] = end
            for batch in level.rounds:
                left = np.maximum(link_free[batch.links], end[batch.senders])
                left += busy[batch.messages]
                link_free[batch.links] = left
                left = left + latency[batch.messages]
                if batch.is_unique:
                    arrived[batch.receivers] = np.maximum(arrived[batch.receivers], left)
                else:
                    np.maximum.at(arrived, batch.receivers, left)
        return free

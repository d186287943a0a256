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

from planner.schedule import Action

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

KINDS = {"F": 0, "B": 1, "I": 2, "W": 3}
_FORWARD, _BACKWARD, _INPUT, _WEIGHT = range(4)


@dataclass(frozen=True, slots=True)
class _Level:
    """Actions that run at once, and the messages that leave when they end, in rounds of one message per receiver."""

    actions: slice  # of the actions in the order of levels
    groups: Ints
    rounds: "tuple[_Round, ...]"


@dataclass(frozen=True, slots=True)
class _Round:
    senders: Ints  # positions in the level
    links: Ints
    receivers: Ints  # actions in the order of levels


class Order:
    """The levels of the action lists of a plan's device groups, and of the messages between its stages.

    `links` are (source stage, target stage, whether gradients come back), as in `simulation.Message`. ValueError where
    the lists wait for one another for ever.
    """

    def __init__(self, actions: Sequence[Sequence[Action]], links: Sequence[tuple[int, int, bool]]) -> None:
        self.num_groups, self.num_links = len(actions), len(links)
        flat = [action for todo in actions for action in todo]
        kind = np.array([KINDS[action.kind] for action in flat], dtype=np.int64)
        stage = np.array([action.stage for action in flat], dtype=np.int64)
        microbatch = np.array([action.microbatch for action in flat], dtype=np.int64)
        self.num_stages, count = int(stage.max()) + 1, int(microbatch.max()) + 1
        # The one action that runs a stage's forward, or its (input) backward, of a microbatch.
        forward_of = np.full((self.num_stages, count), -1, dtype=np.int64)
        backward_of = np.full((self.num_stages, count), -1, dtype=np.int64)
        is_forward, is_backward = kind == _FORWARD, (kind == _BACKWARD) | (kind == _INPUT)
        forward_of[stage[is_forward], microbatch[is_forward]] = np.flatnonzero(is_forward)
        backward_of[stage[is_backward], microbatch[is_backward]] = np.flatnonzero(is_backward)
        sends = self._messages(links, forward_of, backward_of)
        self._levels(actions, sends)
        self._duration = (stage * len(KINDS) + kind)[self._by_level]

    @staticmethod
    def _messages(
        links: Sequence[tuple[int, int, bool]], forward_of: Ints, backward_of: Ints
    ) -> list[tuple[int, Ints, Ints]]:
        """Return (link, senders, receivers) by link and direction; link 2 i goes forward, 2 i + 1 back."""
        sends = []
        for index, (source, target, has_gradient) in enumerate(links):
            sends.append((2 * index, forward_of[source], forward_of[target]))
            if has_gradient:
                sends.append((2 * index + 1, backward_of[target], backward_of[source]))
        return sends

    def _levels(self, actions: Sequence[Sequence[Action]], sends: Sequence[tuple[int, Ints, Ints]]) -> None:
        sizes = np.array([len(todo) for todo in actions], dtype=np.int64)
        starts = np.array([0, *accumulate(sizes.tolist())], dtype=np.int64)
        total = int(starts[-1])
        senders = np.concatenate([s for _, s, _ in sends]) if sends else np.zeros(0, dtype=np.int64)
        receivers = np.concatenate([r for _, _, r in sends]) if sends else np.zeros(0, dtype=np.int64)
        link_of = np.repeat(np.array([link for link, _, _ in sends], dtype=np.int64), [len(s) for _, s, _ in sends])
        by_sender = np.argsort(senders, kind="stable")
        senders, receivers, link_of = senders[by_sender], receivers[by_sender], link_of[by_sender]
        first = np.searchsorted(senders, np.arange(total + 1))
        missing = np.bincount(receivers, minlength=total)
        rank_among = np.zeros(len(receivers), dtype=np.int64)  # of the messages to one receiver
        by_receiver = np.argsort(receivers, kind="stable")
        rank_among[by_receiver] = np.arange(len(receivers)) - np.searchsorted(
            receivers[by_receiver], receivers[by_receiver]
        )
        next_action = starts[:-1].copy()
        new_index = np.empty(total, dtype=np.int64)
        by_level: list[Ints] = []
        raw: list[tuple[slice, Ints, Ints, Ints]] = []
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
            by_level.append(chosen)
            counts = first[chosen + 1] - first[chosen]
            sent = np.repeat(first[chosen] - np.concatenate(([0], np.cumsum(counts)[:-1])), counts)
            sent = sent + np.arange(len(sent))
            np.subtract.at(missing, receivers[sent], 1)
            positions = np.repeat(np.arange(len(chosen)), counts)
            raw.append((slice(done, done + len(chosen)), ready, positions, sent))
            done += len(chosen)
        self._by_level = np.concatenate(by_level)
        levels = []
        for span, groups, positions, sent in raw:
            rounds = []
            ranks = rank_among[sent]
            for rank in range(int(ranks.max()) + 1 if len(ranks) else 0):
                of = ranks == rank
                if of.any():
                    rounds.append(_Round(positions[of], link_of[sent[of]], new_index[receivers[sent[of]]]))
            levels.append(_Level(span, groups, tuple(rounds)))
        self.levels = tuple(levels)

    def play(self, seconds: Floats, busy: Floats, latency: Floats, ready: Floats) -> Floats:
        """Return when each group has run its last action (groups x plans), in seconds from the start of the step.

        `seconds` (stages x 4 x plans) are of F, B, I and W; `busy` and `latency` (2 links x plans) of messages, those
        of link i forward at 2 i, back at 2 i + 1; `ready` (groups x plans) is when each group may start.
        """
        plans = ready.shape[1]
        duration = seconds.reshape(self.num_stages * len(KINDS), plans)[self._duration]
        arrived = np.zeros((len(self._by_level), plans))
        link_free = np.zeros((2 * self.num_links, plans))
        free = ready.copy()
        for level in self.levels:
            end = np.maximum(free[level.groups], arrived[level.actions])
            end += duration[level.actions]
            free[level.groups] = end
            for batch in level.rounds:
                sent = np.maximum(link_free[batch.links], end[batch.senders])
                sent += busy[batch.links]
                link_free[batch.links] = sent
                sent = sent + latency[batch.links]
                arrived[batch.receivers] = np.maximum(arrived[batch.receivers], sent)
        return free

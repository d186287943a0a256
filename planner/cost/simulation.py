"""The event simulation: plays the action list of every group, with messages between stages, and says when what happens.

A device group runs its actions in order, each as soon as the one before it is done and its messages have arrived.
Messages leave when the action that makes them ends: values after a forward, gradients after a backward or, where it is
split, after the gradient of inputs. One link carries those from one group to another in order, each keeping it busy for
bytes / bandwidth and arriving a latency later. Between stages of one group there are none: its list has them in order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.schedule import Action


@dataclass(frozen=True, slots=True)
class Message:
    """What a stage sends to a later one per microbatch, and the gradients that come back (where any do); seconds."""

    source: int
    target: int
    forward_busy_s: float
    forward_latency_s: float
    backward_busy_s: float = 0.0
    backward_latency_s: float = 0.0
    has_gradient: bool = True


@dataclass(frozen=True, slots=True)
class Played:
    """Start and end of every action, per group in the order of its list; seconds from the start of the step."""

    starts_s: tuple[tuple[float, ...], ...]
    ends_s: tuple[tuple[float, ...], ...]

    @property
    def group_ends_s(self) -> tuple[float, ...]:
        """When each group has run its last action."""
        return tuple(ends[-1] for ends in self.ends_s)


# Plain lists and tuples: this loop is most of what a price takes. By microbatch, what a stage still waits for, and when
# the last of what came did; what leaves it, as (link, busy, latency, missing, arrived, group) of the receiver.
_Box = tuple[list[int], list[float]]
_Sent = tuple[int, float, float, list[int], list[float], int]


def play(
    actions: Sequence[Sequence[Action]],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    messages: Sequence[Message],
    ready_s: Sequence[float],
    input_s: Sequence[float] = (),
    weight_s: Sequence[float] = (),
) -> Played:
    """Return when every action starts and ends; `ready_s` is when each group may start at the earliest.

    Seconds are those of every stage: of its forward, its whole backward, and where backwards are split the gradients
    of its inputs and of its weights. `messages` are those between stages of different groups. ValueError where the
    lists wait for one another for ever.
    """
    num_groups, num_stages = len(actions), len(forward_s)
    num_microbatches = 1 + max(action.microbatch for action in actions[0])
    group_of = _groups(actions, num_stages)
    waiting = {"F": [0] * num_stages, "B": [0] * num_stages}
    for message in messages:
        waiting["F"][message.target] += 1
        waiting["B"][message.source] += message.has_gradient
    boxes: dict[str, list[_Box]] = {
        kind: [([counts[stage]] * num_microbatches, [0.0] * num_microbatches) for stage in range(num_stages)]
        for kind, counts in waiting.items()
    }
    links: dict[tuple[int, int], int] = {}
    sent: dict[str, list[list[_Sent]]] = {kind: [[] for _ in range(num_stages)] for kind in "FB"}
    for message in messages:
        source, target = group_of[message.source], group_of[message.target]
        link = links.setdefault((source, target), len(links))
        there = (link, message.forward_busy_s, message.forward_latency_s, *boxes["F"][message.target], target)
        sent["F"][message.source].append(there)
        if message.has_gradient:
            link = links.setdefault((target, source), len(links))
            back = (link, message.backward_busy_s, message.backward_latency_s, *boxes["B"][message.source], source)
            sent["B"][message.target].append(back)
    nothing = ([0] * num_microbatches, [0.0] * num_microbatches)
    does: dict[str, list[tuple[float, list[int], list[float], list[_Sent]]]] = {
        "F": [(s, *box, out) for s, box, out in zip(forward_s, boxes["F"], sent["F"], strict=True)],
        "B": [(s, *box, out) for s, box, out in zip(backward_s, boxes["B"], sent["B"], strict=True)],
        "I": [(s, *box, out) for s, box, out in zip(input_s, boxes["B"], sent["B"], strict=False)],
        "W": [(s, *nothing, []) for s in weight_s],
    }
    link_free = [0.0] * len(links)
    free = list(ready_s)
    position = [0] * num_groups
    starts: list[list[float]] = [[] for _ in range(num_groups)]
    ends: list[list[float]] = [[] for _ in range(num_groups)]
    pending = list(range(num_groups))
    while pending:
        group = pending.pop()
        todo, here, now = actions[group], position[group], free[group]
        starts_here, ends_here = starts[group], ends[group]
        while here < len(todo):
            action = todo[here]
            microbatch = action.microbatch
            seconds, missing, arrived, out = does[action.kind][action.stage]
            if missing[microbatch]:
                break
            came = arrived[microbatch]
            if came > now:
                now = came
            starts_here.append(now)
            now += seconds
            ends_here.append(now)
            here += 1
            for link, busy, latency, missing, arrived, other in out:
                left = link_free[link]
                left = (left if left > now else now) + busy
                link_free[link] = left
                left += latency
                if left > arrived[microbatch]:
                    arrived[microbatch] = left
                missing[microbatch] -= 1
                if not missing[microbatch]:
                    pending.append(other)
        position[group], free[group] = here, now
    if any(position[group] < len(actions[group]) for group in range(num_groups)):
        stuck = next(group for group in range(num_groups) if position[group] < len(actions[group]))
        raise ValueError(f"group {stuck} waits for ever before {actions[stuck][position[stuck]]}")
    return Played(tuple(map(tuple, starts)), tuple(map(tuple, ends)))


def _groups(actions: Sequence[Sequence[Action]], num_stages: int) -> list[int]:
    """Return the group of every stage: the one whose list has it."""
    found = [-1] * num_stages
    for group, todo in enumerate(actions):
        left = num_stages // len(actions)
        for action in todo:
            if found[action.stage] < 0:
                found[action.stage] = group
                left -= 1
                if not left:
                    break
    return found

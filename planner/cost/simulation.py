"""The event simulation: plays the action list of every stage, with messages between them, and says when what happens.

A stage runs its actions in order, each as soon as the one before it is done and its messages have arrived. Messages
leave when the action that makes them ends; one link carries those of a pair of stages and direction in order, each
keeping it busy for bytes / bandwidth and arriving a latency later.
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
    """Start and end of every action, per stage in the order of its list; seconds from the start of the step."""

    starts_s: tuple[tuple[float, ...], ...]
    ends_s: tuple[tuple[float, ...], ...]

    @property
    def stage_ends_s(self) -> tuple[float, ...]:
        """When each stage has run its last action."""
        return tuple(ends[-1] for ends in self.ends_s)


def play(
    actions: Sequence[Sequence[Action]],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    messages: Sequence[Message],
    ready_s: Sequence[float],
) -> Played:
    """Return when every action starts and ends; `ready_s` is when each stage may start at the earliest.

    ValueError where the lists wait for one another for ever.
    """
    num_stages = len(actions)
    num_microbatches = 1 + max(action.microbatch for action in actions[0])
    sends: list[list[int]] = [[] for _ in range(num_stages)]
    returns: list[list[int]] = [[] for _ in range(num_stages)]
    for index, message in enumerate(messages):
        sends[message.source].append(index)
        if message.has_gradient:
            returns[message.target].append(index)
    waiting_forward = [[m.target == stage for m in messages].count(True) for stage in range(num_stages)]
    waiting_backward = [len([i for i in sends[stage] if messages[i].has_gradient]) for stage in range(num_stages)]
    missing = {
        "F": [[waiting_forward[stage]] * num_microbatches for stage in range(num_stages)],
        "B": [[waiting_backward[stage]] * num_microbatches for stage in range(num_stages)],
    }
    arrived = {
        "F": [[0.0] * num_microbatches for _ in range(num_stages)],
        "B": [[0.0] * num_microbatches for _ in range(num_stages)],
    }
    link_free = {"F": [0.0] * len(messages), "B": [0.0] * len(messages)}
    free = list(ready_s)
    position = [0] * num_stages
    starts: list[list[float]] = [[] for _ in range(num_stages)]
    ends: list[list[float]] = [[] for _ in range(num_stages)]
    pending = list(range(num_stages))
    while pending:
        stage = pending.pop()
        todo = actions[stage]
        while position[stage] < len(todo):
            action = todo[position[stage]]
            kind, microbatch = action.kind, action.microbatch
            if missing[kind][stage][microbatch]:
                break
            start = max(free[stage], arrived[kind][stage][microbatch])
            end = start + (forward_s if kind == "F" else backward_s)[stage]
            starts[stage].append(start)
            ends[stage].append(end)
            free[stage] = end
            position[stage] += 1
            for index in (sends if kind == "F" else returns)[stage]:
                message = messages[index]
                if kind == "F":
                    other, busy, latency = message.target, message.forward_busy_s, message.forward_latency_s
                else:
                    other, busy, latency = message.source, message.backward_busy_s, message.backward_latency_s
                sent = max(link_free[kind][index], end) + busy
                link_free[kind][index] = sent
                arrived[kind][other][microbatch] = max(arrived[kind][other][microbatch], sent + latency)
                missing[kind][other][microbatch] -= 1
                pending.append(other)
    if any(position[stage] < len(actions[stage]) for stage in range(num_stages)):
        stuck = next(stage for stage in range(num_stages) if position[stage] < len(actions[stage]))
        raise ValueError(f"stage {stuck} waits for ever before {actions[stuck][position[stuck]]}")
    return Played(tuple(map(tuple, starts)), tuple(map(tuple, ends)))

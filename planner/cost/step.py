"""A step of priced stages: the actions played, then what every device group does after its last backward."""

from dataclasses import dataclass
from typing import Literal

from planner.cost.simulation import Message, Played, play
from planner.cost.stage import StageTimes
from planner.prediction import MemoryUse
from planner.schedule import Action

EventKind = Literal["F", "B", "I", "W", "prepare", "reduce", "tied", "optimizer"]


@dataclass(frozen=True, slots=True)
class Event:
    """Something a stage does, in seconds from the start of the step; `microbatch` is -1 for what is done once."""

    stage: int
    kind: EventKind
    microbatch: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class PricedStages:
    """A plan's stages, priced one by one."""

    times: tuple[StageTimes, ...]
    memory: tuple[MemoryUse, ...]
    param_counts: tuple[int, ...]
    messages: tuple[Message, ...]
    tied: tuple[tuple[tuple[int, ...], float], ...]
    """(stages that hold a shared parameter, seconds of summing its gradients)"""
    actions: tuple[tuple[Action, ...], ...]
    groups: tuple[tuple[int, ...], ...]
    """the stages of every device group"""

    def ready_s(self, group: int, *, comm: bool = True) -> float:
        """Seconds in which a group prepares all its stages."""
        own = [self.times[stage] for stage in self.groups[group]]
        return sum(t.cast_s + (t.gather_s if comm else 0.0) for t in own)


def play_stages(priced: PricedStages, *, comm: bool = True) -> Played:
    """Return when every action runs; without any communication if `comm` is False."""
    messages = priced.messages
    if not comm:
        messages = tuple(Message(m.source, m.target, 0.0, 0.0, has_gradient=m.has_gradient) for m in messages)
    return play(
        priced.actions,
        [t.forward_action_s(comm=comm) for t in priced.times],
        [t.backward_action_s(comm=comm) for t in priced.times],
        messages,
        [priced.ready_s(group, comm=comm) for group in range(len(priced.groups))],
        [t.input_action_s(comm=comm) for t in priced.times],
        [t.weight_s for t in priced.times],
    )


def finish_step(priced: PricedStages, played: Played, *, comm: bool = True) -> tuple[float, list[Event]]:
    """Return the step time, and what every stage does after the last backward of its device group.

    Gradients are reduced within the stage, then those of shared parameters summed between stages, in their order; then
    the optimizer runs. Stages of one group take their turns.
    """
    done = list(played.group_ends_s)
    group_of = {stage: group for group, stages in enumerate(priced.groups) for stage in stages}
    events: list[Event] = []
    for stage, t in enumerate(priced.times):
        group = group_of[stage]
        seconds = t.reduce_s if comm else 0.0
        if seconds:
            events.append(Event(stage, "reduce", -1, done[group], done[group] + seconds))
            done[group] += seconds
    for stages, seconds in priced.tied:
        start = max(done[group_of[stage]] for stage in stages)
        for stage in stages:
            done[group_of[stage]] = start + (seconds if comm else 0.0)
            events.append(Event(stage, "tied", -1, start, done[group_of[stage]]))
    for stage, t in enumerate(priced.times):
        group = group_of[stage]
        events.append(Event(stage, "optimizer", -1, done[group], done[group] + t.optimizer_s))
        done[group] += t.optimizer_s
    return max(event.end_s for event in events), events


def all_events(priced: PricedStages) -> list[Event]:
    """Return what the stages do, at which times."""
    played = play_stages(priced)
    events = finish_step(priced, played)[1]
    for group, actions in enumerate(priced.actions):
        ready = 0.0
        for stage in priced.groups[group]:
            seconds = priced.times[stage].cast_s + priced.times[stage].gather_s
            if seconds:
                events.append(Event(stage, "prepare", -1, ready, ready + seconds))
            ready += seconds
        events.extend(
            Event(action.stage, action.kind, action.microbatch, start, end)
            for action, start, end in zip(actions, played.starts_s[group], played.ends_s[group], strict=True)
        )
    return events

"""The order in which every stage runs the forwards (F) and backwards (B) of its microbatches.

    gpipe, 2 stages, 3 microbatches         1f1b, 2 stages, 3 microbatches
    0F0 0F1 0F2         0B0 0B1 0B2         0F0 0F1     0B0 0F2     0B1     0B2
        1F0 1F1 1F2 1B0 1B1 1B2                 1F0 1B0 1F1 1B1 1F2 1B2

The same lists are executed by an emitted plan and played by `cost`: Huang et al., "GPipe" (2019); Narayanan et al.,
"Memory-Efficient Pipeline-Parallel DNN Training" (2021), for one forward, one backward.
"""

import re
from dataclasses import dataclass
from typing import Literal

from planner.plan import Schedule

Kind = Literal["F", "B"]
_ACTION = re.compile(r"(\d+)([FB])(\d+)")


@dataclass(frozen=True, slots=True)
class Action:
    """One microbatch through one stage, forward or backward; prints as '2F0' (stage, kind, microbatch)."""

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
            raise ValueError(f"{text!r} is no action; write one like '2F0': stage, F or B, microbatch")
        return cls("F" if match.group(2) == "F" else "B", int(match.group(1)), int(match.group(3)))


def num_in_flight(schedule: Schedule, num_stages: int, num_microbatches: int, stage: int) -> int:
    """Return how many microbatches a stage holds at most between their forward and their backward."""
    if schedule == "gpipe":
        return num_microbatches
    return min(num_microbatches, num_stages - stage)


def stage_actions(schedule: Schedule, num_stages: int, num_microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of every stage, in the order in which it runs them.

    1F1B: stage s runs `num_in_flight` forwards, then a backward and a forward in turn, then the backwards left.
    """
    lists = []
    for stage in range(num_stages):
        ahead = num_in_flight(schedule, num_stages, num_microbatches, stage)
        actions = [Action("F", stage, microbatch) for microbatch in range(ahead)]
        for microbatch in range(num_microbatches):
            actions.append(Action("B", stage, microbatch))
            if microbatch + ahead < num_microbatches:
                actions.append(Action("F", stage, microbatch + ahead))
        lists.append(tuple(actions))
    return tuple(lists)

"""The outer search: everything open in the order of its bound, one incumbent for all, until nothing can beat it.

What is open is taken apart step by step: degrees and microbatches into numbers of stages, these into settings, a
setting into its tables, a sharper bound with first plans, and a branch and bound (`settings`, `chains`). It is left
alone as soon as its bound reaches the best plan's step time: never axis by axis. The search goes to a coarse tolerance
first, so that a good plan with a small gap is there early, and then to finer ones.
"""

import heapq
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from planner.plan import Origin
from planner.solver.chains import OpenSetting
from planner.solver.incumbent import Budget, Incumbent, OutOfTimeError
from planner.solver.loops import OpenLoops
from planner.solver.mixed import open_mixed
from planner.solver.problems import Problems
from planner.solver.settings import open_degrees
from planner.solver.space import Space

VISIT = 0.002  # of its bound, a setting that is searched is put off by for each time it was
TOLERANCES = (0.3, 5e-2, 1e-2, 1e-3, 0.0)

Progress = Callable[[str, int, int], None]


class Open(Protocol):
    """A part of the search space; `bound` is proven for every plan in it."""

    bound: float

    @property
    def label(self) -> str:
        """What progress shows."""
        ...

    def advance(self, incumbent: Incumbent, tolerance: float) -> "Sequence[Open]":
        """Take a step: return the open parts that together hold what is left, offer plans to the incumbent."""
        ...


@dataclass(slots=True)
class Outcome:
    """What a search found, and what it proved."""

    incumbent: Incumbent
    lower_bound_s: float
    num_nodes: int
    was_ended: bool
    """by the time limit, Ctrl-C or `max_nodes`, before it was through"""


def search(
    space: Space,
    origin: Origin,
    progress: Progress,
    time_limit_s: float | None,
    *,
    any_plan: bool = False,
    to_beat_s: float = float("inf"),
    max_nodes: int | None = None,
) -> Outcome:
    """Return the best plan over all settings, and a lower bound proven for `cost.evaluate` of every plan.

    `any_plan` ends the search as soon as there is a plan: the question then is whether one exists. With `to_beat_s`
    only faster plans are looked for: without one, the bound is that time. `max_nodes` ends the search as the time limit
    does, but the same on every machine.
    """
    budget = Budget(None if time_limit_s is None else time.monotonic() + time_limit_s, max_nodes)
    incumbent = Incumbent(Problems(space, origin), budget, to_beat_s)
    queue = _Queue()
    current: Open | None = None
    reported, was_ended = time.monotonic(), False
    try:
        for part in open_degrees(space):
            queue.push(part)
        if space.request.theoretical:  # first plans of straight schedules and one kind of stage, then what they leave
            queue.hold_back(open_mixed(space))
        for tolerance in TOLERANCES:
            while (current := queue.take(incumbent.limit_s(tolerance))) is not None:
                if any_plan and incumbent.best is not None:
                    raise OutOfTimeError
                now = time.monotonic()
                if now - reported > 0.1:
                    reported = now
                    progress(current.label, queue.num_closed, queue.num_closed + len(queue))
                parts = current.advance(incumbent, tolerance)
                current = None
                queue.replace(parts)
            queue.release()
    except (OutOfTimeError, KeyboardInterrupt):
        was_ended = True
        bounds = [queue.least] if current is None else [queue.least, current.bound]
        lower = min(incumbent.left_out_s, incumbent.step_time_s, *bounds)
    else:
        lower = min(incumbent.left_out_s, incumbent.step_time_s)
    progress("done", queue.num_closed + len(queue), queue.num_closed + len(queue))
    return Outcome(incumbent, lower, budget.num_nodes, was_ended)


class _Queue:
    """Open parts by bound; of equal ones that which came first. Those that were taken often wait longer.

    Some can be held back until there is a plan to compare with, and loops with them: a straight schedule has one soon.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Open]] = []
        self._aside: list[Open] = []
        self._held: list[Open] = []
        self._holds_back = False
        self._count = 0
        self.num_closed = 0

    def __len__(self) -> int:
        return len(self._heap) + len(self._aside)

    @property
    def least(self) -> float:
        """The least bound of all, what is held back too; inf where nothing is open."""
        return min((part.bound for part in (*self.parts(), *self._held)), default=float("inf"))

    def hold_back(self, parts: Iterable[Open]) -> None:
        """Keep these parts, and loops that are added, until `release`."""
        self._holds_back = True
        self._held.extend(parts)

    def release(self) -> None:
        """Hold nothing back any more, and put nothing aside."""
        self._holds_back = False
        again, self._held, self._aside = [*self._aside, *self._held], [], []
        for part in again:
            self.push(part)

    def push(self, part: Open) -> None:
        """Add a part."""
        if self._holds_back and isinstance(part, OpenLoops):
            self._held.append(part)
            return
        self._count += 1
        visits = part.visits if isinstance(part, OpenSetting) else 0
        heapq.heappush(self._heap, (part.bound * (1 + VISIT * visits), self._count, part))

    def take(self, limit_s: float) -> Open | None:
        """Take out the next part whose bound is below the limit, and put others aside; None where there is none."""
        while self._heap:
            part = heapq.heappop(self._heap)[2]
            if part.bound < limit_s:
                return part
            self._aside.append(part)
        return None

    def replace(self, parts: Sequence[Open]) -> None:
        """Add what is left of the part taken out last."""
        self.num_closed += not parts
        for part in parts:
            self.push(part)

    def parts(self) -> list[Open]:
        """Return everything open that is not held back."""
        return [*(part for _, _, part in self._heap), *self._aside]

"""What the solver answers: a plan with its proof, or the conflict with repairs that were verified."""

from dataclasses import dataclass

from planner.plan import Plan, RunnerUp, Status
from planner.units import format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """Why there is no plan: the constraint by name, and its numbers.

    For memory, `least_peak_bytes` is the least memory per GPU with which some plan fits, `available_bytes` what the
    GPUs have, and `layers` the stage that is fullest in that plan.
    """

    constraint: str
    message: str
    least_peak_bytes: int | None = None
    available_bytes: int | None = None
    layers: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    """a least set of people's own constraints that can't hold together; none where they are not at fault"""

    def __str__(self) -> str:
        together = f" (in conflict with one another: {', '.join(self.between)})" if len(self.between) > 1 else ""
        return f"{self.constraint}: {self.message}{together}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """A change with which a plan exists, shown by solving again: the best plan then, and what it does `instead`."""

    description: str
    step_time_s: float
    gap_fraction: float = 0.0
    summary: str = ""
    instead: str = ""

    def __str__(self) -> str:
        gap = f", at most {100 * self.gap_fraction:.3g} % from the best" if self.gap_fraction else ""
        instead = f", which {self.instead}" if self.instead else ""
        return (
            f"{self.description}: the best plan then takes {format_seconds(self.step_time_s)} per step{gap}"
            f" ({self.summary}){instead}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The answer. `optimal` only where the gap is 0; `lower_bound_s` is proven for every plan of the search space."""

    status: Status
    plan: Plan | None
    lower_bound_s: float = 0.0
    gap_fraction: float = 0.0
    num_priced: int = 0
    num_nodes: int = 0
    runners_up: tuple[RunnerUp, ...] = ()
    conflict: Conflict | None = None
    repairs: tuple[Repair, ...] = ()

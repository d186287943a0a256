"""What the processes of `verify` are told and what they answer; this module imports no torch, so its owner need not."""

from dataclasses import dataclass
from pathlib import Path

from planner.shrink import Shrink

# 'no gradient': none in one process and none in the plan; 'unused': and the plan leaves the parameter out
EQUAL_VERDICTS = ("equal", "no gradient", "unused")
TOLERANCE = 1e-5  # on the loss (absolute) and on each norm(g - g_one) / norm(g_one)


@dataclass(frozen=True, kw_only=True)
class ExactJob:
    """What every process needs to know; `microbatch_size` is the rows that the one process takes at a time."""

    plan_path: Path
    model_spec: str
    inputs_function: str
    shrink: Shrink | None = None
    global_batch_size: int
    microbatch_size: int
    reference_path: Path


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What one process told beside the file that it wrote: notes for people, and what the comparison leaves open.

    `carried` are the buffers that a forward writes and the next one reads.
    """

    notes: tuple[str, ...] = ()
    not_proved: tuple[str, ...] = ()
    coupled: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How far a plan's two steps are from one process; `whole_batch_difference` from one that takes the batch at once.

    That is the largest difference of the loss and of a gradient (relative), None where it was not computed.
    """

    loss_difference: float
    comparisons: "list[Comparison]"
    whole_batch_difference: float | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One parameter's gradients beside those of one process, at the step where they differ most."""

    name: str
    shape: tuple[int, ...]
    difference: float
    norm: float
    step: int
    verdict: str

"""What the processes of `verify` are told and what they answer; this module imports no torch, so its owner need not."""

from dataclasses import dataclass
from pathlib import Path

from planner.shrink import Shrink

# 'no gradient': none in one process and none in the plan; 'unused': and the plan leaves the parameter out
EQUAL_VERDICTS = ("equal", "no gradient", "unused")
# On the loss (relative, absolute below 1), on each norm(g - g_one) / norm(g_one), on the norm that clips, on buffers.
TOLERANCE = 1e-5
BUILD_SEEDS = (1201, 1202, 1203)  # the others are tried where every gradient is zero with those before


@dataclass(frozen=True, kw_only=True)
class ExactJob:
    """What every process needs to know; `microbatch_size` is the rows that the one process takes at a time.

    `same_microbatches`: every stage takes these microbatches, all of them, so that its buffers are one process's.
    """

    plan_path: Path
    model_spec: str
    inputs_function: str
    shrink: Shrink | None = None
    global_batch_size: int
    microbatch_size: int
    same_microbatches: bool = False
    seed: int = BUILD_SEEDS[0]
    reference_path: Path


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What one process told beside the file that it wrote: notes for people, and what the comparison leaves open.

    `carried` are the buffers that a forward writes and the next one reads. `has_gradients`: some are not zero.
    """

    notes: tuple[str, ...] = ()
    not_proved: tuple[str, ...] = ()
    coupled: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()
    has_gradients: bool = True


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How far a plan's two steps are from one process; `whole_batch_difference` from one that takes the batch at once.

    That is the largest difference of the loss and of a gradient (relative), None where it was not computed.
    `clip_difference` is that of the norm by which gradients are clipped, `buffers` those of updated buffers (relative).
    """

    loss_difference: float
    comparisons: "list[Comparison]"
    whole_batch_difference: float | None
    clip_difference: float
    buffers: "dict[str, float]"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One parameter's gradients beside those of one process, at the step where they differ most."""

    name: str
    shape: tuple[int, ...]
    difference: float
    norm: float
    step: int
    verdict: str

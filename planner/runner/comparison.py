"""How far a plan's losses, gradients and parameters are from one process's, and what is told of it."""

import sys
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from planner.runner.exact_job import EQUAL_VERDICTS, TOLERANCE, Comparison

# A gradient this far below the largest is rounding: a key's bias under softmax is zero in exact arithmetic, and about
# 1e-17 of the largest in float64. Differences are measured against no less than this, so zero must be zero to 1e-14.
ZERO_FRACTION = 1e-9
LARGEST = 1e30  # a difference or norm above it is told as this: nothing trains there, in no dtype


def loss_gap(loss: float, one: float) -> float:
    """Return how far a loss is from another, relative where that is above 1; `LARGEST` where it is no number."""
    gap = abs(loss - one) / max(1.0, abs(one))
    return min(gap, LARGEST) if gap == gap else LARGEST


def compare_gradient(gradient: Tensor | None, one: Tensor | None, floor: float) -> tuple[float, float, str]:
    """Return norm(g - g_one) / norm(g_one), norm(g_one), and 'equal' or what is wrong; `floor` stands in for zero."""
    if one is None:
        if gradient is None:
            return 0.0, 0.0, "no gradient"
        if not bool(gradient.any()):  # an optimizer leaves a parameter without gradient alone, and decays this one
            return 0.0, 0.0, "zero, not none"
        excess = float(gradient.double().norm()) / max(floor, sys.float_info.min)
        return min(excess, LARGEST) if excess == excess else LARGEST, 0.0, "unexpected"
    norm = float(one.norm())
    if gradient is None:
        return 1.0, norm, "missing"
    if gradient.shape != one.shape:
        return 1.0, norm, f"shape {tuple(gradient.shape)}"
    difference = float((gradient.double() - one).norm()) / max(norm, floor, sys.float_info.min)
    if difference != difference or difference == float("inf"):
        return LARGEST, norm, "not finite"
    difference = min(difference, LARGEST)
    return difference, norm, "equal" if difference <= TOLERANCE else "differs"


def compare_initial(value: Tensor | None, one: Tensor | None) -> tuple[float, float, str]:
    """Compare a parameter right after setup, bit for bit."""
    if one is None:
        return 1.0, 0.0, "unexpected"
    norm = float(one.double().norm())
    if value is None or value.shape != one.shape:
        return 1.0, norm, "not set up"
    if torch.equal(value, one):
        return 0.0, norm, "equal"
    difference = float((value.double() - one).norm()) / max(norm, sys.float_info.min)
    return min(difference, LARGEST) if difference == difference else LARGEST, norm, "starts otherwise"


def keep_furthest(
    worst: dict[str, Comparison],
    given: Mapping[str, Tensor | None] | None,
    expected: Mapping[str, Tensor | None],
    step: int,
    compare: Callable[[Tensor | None, Tensor | None], tuple[float, float, str]],
    unread: Collection[str] = (),
) -> None:
    """Keep, for each parameter, the comparison that is furthest off; `given` is None on ranks other than 0.

    Parameters `unread`, which get no gradient in one process, may be missing: if the plan did need one, its loss
    would differ.
    """
    if given is None:
        return
    for name in (*expected, *(name for name in given if name not in expected)):
        one = expected.get(name)
        if name in unread and given.get(name) is None:
            difference, norm, verdict = 0.0, 0.0, "unused"
        else:
            difference, norm, verdict = compare(given.get(name), one)
        before = worst.get(name)
        if (
            before is None
            or (verdict not in EQUAL_VERDICTS, difference) > (before.verdict not in EQUAL_VERDICTS, before.difference)
            or (before.step == 0 and before.verdict == "equal")
        ):
            shape = tuple(one.shape) if one is not None else ()
            worst[name] = Comparison(
                name=name, shape=shape, difference=difference, norm=norm, step=step, verdict=verdict
            )

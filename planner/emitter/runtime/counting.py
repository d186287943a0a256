"""Counting: what a loss divides by, over all microbatches and replicas of a step, and the loss that uses it."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from planner.emitter.runtime.checks import PlanError
from planner.emitter.runtime.stage import PlanStage

_LOSS_TOLERANCE = 1e-3  # relative: rounding of a sum in another order, in any dtype


def _count_step(
    stage: PlanStage, microbatches: Iterable[tuple[dict[str, Any], Any]], group: dist.ProcessGroup, dp_degree: int
) -> dict[str, Tensor]:
    """Return a step's counts by name; the data-parallel ranks, which count the same, call it together."""
    if not stage.step_counts:
        return {}
    with torch.no_grad():
        counted = [
            stage.count_microbatch(*(inputs[name] for name in stage.count_inputs), target)
            for inputs, target in microbatches
        ]
        result: dict[str, Tensor] = {}
        for index, (name, over) in enumerate(stage.step_counts.items()):
            total = torch.stack([counts[index].to(stage.device) for counts in counted]).sum(0)
            if dp_degree > 1:
                dist.all_reduce(total, group=group)
            result[name] = total / (len(counted) * dp_degree) if over == "mean" else total
    return result


def _check_loss(stage: PlanStage, loss_fn: Callable[..., Tensor], output: Any, target: Any, own: Any) -> None:
    """Raise PlanError where loss_fn is another function than the one this plan was made for; `own` are counts of one
    microbatch.
    """
    assert stage.microbatch_loss is not None
    with torch.no_grad():
        given = loss_fn(output) if target is None else loss_fn(output, target)
        counts = dict(zip(stage.step_counts, own, strict=True))
        known = stage.microbatch_loss(output, target, *(counts[name] for name in stage.loss_counts))
    difference = abs(float(given) - float(known))
    if difference > _LOSS_TOLERANCE * max(abs(float(given)), abs(float(known))):
        raise PlanError(
            f"loss_fn gives {float(given):.6g} for a microbatch, and the loss that this plan was made for "
            f"{float(known):.6g}\nhint: profile and solve again with the loss_fn that you train with"
        )

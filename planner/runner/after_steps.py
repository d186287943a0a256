"""What a plan leaves beside its gradients: the norm by which it clips them, and the buffers that forward updates."""

import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_CLIP_EPSILON = 1e-6  # of torch.nn.utils.clip_grad_norm_, added to the norm


def clip_difference(runtime: Any, gradients: Iterable[Tensor | None]) -> float:
    """Return how far `runtime.clip_grad_norm_` is from one process's with these gradients; it halves the gradients.

    Relative to the norm: of what the first call returns, and of what it leaves, which a second one returns.
    """
    norm = math.sqrt(sum(float(gradient.double().norm()) ** 2 for gradient in gradients if gradient is not None))
    if norm == 0.0:
        return 0.0
    found = float(runtime.clip_grad_norm_(norm / 2))
    left = float(runtime.clip_grad_norm_(2 * norm))  # scales nothing
    expected = norm * (norm / 2) / (norm + _CLIP_EPSILON)
    difference = max(abs(found - norm), abs(left - expected)) / norm
    return difference if math.isfinite(found) and math.isfinite(left) else sys.float_info.max


def changed_buffers(model: nn.Module, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of the buffers that are others than they were."""
    return {
        name: buffer.detach().clone()
        for name, buffer in model.named_buffers()
        if name not in before or not torch.equal(buffer, before[name])
    }


def buffer_differences(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Return for each buffer that a plan has norm(b - b_one) / norm(b_one); of integers 1 where any is another."""
    differences: dict[str, float] = {}
    for name, one in expected.items():
        buffer = found.get(name)
        if buffer is None:
            continue
        if buffer.shape != one.shape or not one.is_floating_point():
            differences[name] = float(not torch.equal(buffer.to(one.dtype), one))
            continue
        difference = float((buffer.double() - one.double()).norm()) / max(float(one.norm()), sys.float_info.min)
        differences[name] = difference if math.isfinite(difference) else sys.float_info.max
    return differences

"""What the profiler uses of torch that PyTorch does not promise to keep, in one place and for one version.

Fake tensors and the switch that turns function modes off were checked with torch 2.13; another version is refused
before anything is recorded, because what has changed there may not raise.
"""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from planner.errors import UsageError

__all__ = [
    "BATCH_NORM",
    "LOSS_MODULE",
    "FakeTensor",
    "FakeTensorMode",
    "check_torch",
    "has_gradient_hooks",
    "quiet_fake_tensors",
    "unrecorded",
    "unset_fake_temporarily",
]

TESTED_TORCH = "2.13"

LOSS_MODULE = nn.modules.loss._Loss  # what torch's own losses derive from
BATCH_NORM = nn.modules.batchnorm._BatchNorm


def check_torch() -> None:
    """Raise UsageError for a torch other than the one this module was checked with."""
    if torch.__version__.split(".")[:2] != TESTED_TORCH.split("."):
        raise UsageError(
            f"torch {torch.__version__} is installed, and planner records models with torch {TESTED_TORCH}",
            hint=f"install torch {TESTED_TORCH}, or a planner made for {torch.__version__}",
        )


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Return whether hooks were registered on a tensor, which change its gradient or see it."""
    return bool(tensor._backward_hooks) or bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def unrecorded() -> AbstractContextManager[None]:
    """Return a context in which function modes see nothing."""
    return torch._C.DisableTorchFunction()


@contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Keep torch from logging what a fake operator refuses: the error tells it."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _grouped_product(
    mode: FakeTensorMode,
    func: Any,
    left: torch.Tensor,
    right: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """Return the fake result of products of groups (the experts of a mixture) in other dtypes than bfloat16.

    torch's own fake operator takes bfloat16 alone, though its kernels take float32 and float16 too, and the recording
    in float64 has to pass. Groups lie along a dimension of a matrix that has two dimensions, in pieces that end at
    `offs`; a matrix of three dimensions has one matrix for each group.
    """
    if left.dtype != right.dtype or left.dtype == torch.bfloat16 or not left.is_floating_point() or bias is not None:
        return NotImplemented
    shape = [left.shape[-2], right.shape[-1]]
    if left.dim() == right.dim():
        if left.dim() == 2 and offs is None:
            return NotImplemented
        shape.insert(0, left.shape[0] if left.dim() == 3 or offs is None else offs.shape[0])
    return left.new_empty(shape, dtype=out_dtype)


def _ctc_loss(
    mode: FakeTensorMode, func: Any, log_probs: torch.Tensor, targets: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Return the fake losses of sequences, and what backward reads, as large as the longest target makes it at most.

    torch's own fake operator refuses: how much backward reads depends on the values of the targets' lengths.
    """
    length, rows = log_probs.shape[0], log_probs.shape[1] if log_probs.dim() == 3 else 1
    longest = targets.shape[-1]
    return log_probs.new_empty((rows,)), log_probs.new_empty((rows, length, 2 * longest + 1))


def _ctc_loss_backward(
    mode: FakeTensorMode, func: Any, grad: Any, log_probs: torch.Tensor, *args: Any, **kw: Any
) -> Any:
    return torch.empty_like(log_probs)


_detect_is_causal_mask = nn.modules.transformer._detect_is_causal_mask


def _is_causal(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Return the hint that `nn.TransformerEncoder` gives its layers, whose mask they get too.

    torch finds it out from the values of the mask, which a fake tensor does not have; without the hint, attention
    takes the mask as it is, and computes the same.
    """
    if isinstance(mask, FakeTensor):
        return is_causal is True
    return _detect_is_causal_mask(mask, is_causal, size)


if torch.__version__.split(".")[:2] == TESTED_TORCH.split("."):  # another version is refused by `check_torch`
    fake_impls.register_op_impl(torch.ops.aten._grouped_mm.default)(_grouped_product)
    for ctc_loss in (torch.ops.aten._ctc_loss.default, torch.ops.aten._ctc_loss.Tensor):
        fake_impls.register_op_impl(ctc_loss)(_ctc_loss)
    for backward in (torch.ops.aten._ctc_loss_backward.default, torch.ops.aten._ctc_loss_backward.Tensor):
        fake_impls.register_op_impl(backward)(_ctc_loss_backward)
    nn.modules.transformer._detect_is_causal_mask = _is_causal

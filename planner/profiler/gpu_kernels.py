"""Makes fake tensors on the CPU take the kernels that a GPU would run.

A fake model lives on the CPU, because fake CUDA tensors need a torch built for CUDA to run their backward. A few
functions choose other operators on a CPU than on a GPU, with other memory: these are replaced while a forward runs.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten
_FLASH_DTYPES = {torch.float16, torch.bfloat16}
_FLASH_MAX_HEAD = 256
_ATTENTION, _DROPOUT = F.scaled_dot_product_attention, F.dropout  # torch's own, while the names in F are replaced


def _first(results: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return what an operator computes; its other results are what it keeps for its backward."""
    return results[0]


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention by the kernels of torch's CUDA build: flash for half precision without a mask, else memory-efficient.

    None of them keeps the matrix of scores; a mask is kept in the dtype of the query. Float64 and other than four
    dimensions take the matrix products, as they do there.
    """
    if query.dim() != 4 or query.dtype == torch.float64:
        return _ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    same_heads = query.shape[-1] == key.shape[-1] == value.shape[-1] <= _FLASH_MAX_HEAD
    if attn_mask is None and query.dtype in _FLASH_DTYPES and same_heads:
        flash = aten._scaled_dot_product_flash_attention
        return _first(flash(query, key, value, dropout_p, is_causal, False, scale=scale))
    if enable_gqa and key.shape[1] != query.shape[1]:  # the memory-efficient kernel knows no groups
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    bias = attn_mask
    if bias is not None:
        if bias.dtype == torch.bool:
            zero, low = (torch.scalar_tensor(number, dtype=query.dtype) for number in (0.0, -math.inf))
            bias = torch.where(bias, zero, low)
        bias = bias.expand(*query.shape[:3], key.shape[2])
    efficient = aten._scaled_dot_product_efficient_attention
    return _first(efficient(query, key, value, bias, query.requires_grad, dropout_p, is_causal, scale=scale))


def _fused_dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:  # noqa: A002
    """Dropout that keeps a mask of one byte an element, not one of the input's dtype."""
    if not train or not 0 < p < 1:
        return torch.dropout(input, p, train)
    return _first(torch.native_dropout(input, p, True))


def _dropout(
    input: torch.Tensor,  # noqa: A002
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> torch.Tensor:
    return _DROPOUT(input, p, training, True) if inplace else _fused_dropout(input, p, training)


def _rms_norm(
    input: torch.Tensor,  # noqa: A002
    normalized_shape: list[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """RMS normalisation in one kernel, as CUDA has it: priced as layer normalisation without a shift.

    The two read and write the same bytes, but for one number a row (the mean) that layer normalisation keeps too.
    """
    return F.layer_norm(input, list(normalized_shape), weight, None, eps or 1e-5)


_FUNCTIONS: dict[str, Any] = {"scaled_dot_product_attention": _attention, "dropout": _dropout, "rms_norm": _rms_norm}
_REPLACED: dict[Any, Callable[..., torch.Tensor]] = {
    **{getattr(F, name): replacement for name, replacement in _FUNCTIONS.items()},
    torch.dropout: _fused_dropout,
    torch.rms_norm: _rms_norm,
}


@contextmanager
def _functions_replaced() -> Iterator[None]:
    before = {name: getattr(F, name) for name in _FUNCTIONS}
    try:
        for name, replacement in _FUNCTIONS.items():
            setattr(F, name, replacement)
        yield
    finally:
        for name, function in before.items():
            setattr(F, name, function)


class GpuKernels(TorchFunctionMode):
    """While it is entered, functions with kernels of their own on a GPU take these."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:  # written in Python: a mode doesn't see the functions it calls
            with _functions_replaced():
                return func(*args, **kwargs)
        return _REPLACED.get(func, func)(*args, **kwargs)

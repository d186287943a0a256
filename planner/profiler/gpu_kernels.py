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


# Gates and kinds of recurrent layers by cuDNN's number, and what one keeps for its backward beside inputs and outputs,
# in numbers per position, direction and hidden unit: the gates and an LSTM's cell state; a GRU's candidate also needs
# the hidden state's part of it. cuDNN's own reserve is no smaller; it can be asked for on a GPU only.
_RECURRENT_MODES = {torch.rnn_relu: 0, torch.rnn_tanh: 1, torch.lstm: 2, torch.gru: 3}
_KEPT_PER_UNIT = {0: 0, 1: 0, 2: 5, 3: 4}
# The product with the hidden state, then all that is element-wise in one: the next step waits for both. Directions run
# beside each other, products with the inputs beside all steps (Appleyard, Kocisky and Blunsom, arXiv:1604.01946).
_LAUNCHES_PER_STEP = 2


def _recurrent_layers(function: Any) -> Callable[..., Any]:
    """Return a recurrent function of torch (lstm, gru, ...) that runs as cuDNN does: every layer in one operator."""
    mode = _RECURRENT_MODES[function]

    def run(input: Any, *args: Any) -> Any:  # noqa: A002
        state, weights, biases, num_layers, dropout, train, bidirectional = args[:7]
        if not isinstance(weights, list | tuple):  # packed sequences, whose lengths fake tensors don't know
            return function(input, *args)
        batch_first = args[7]
        hidden, cell = state if mode == 2 else (state, None)
        width = cell.shape[-1] if cell is not None else hidden.shape[-1]
        projected = hidden.shape[-1] if hidden.shape[-1] != width else 0
        output, *states = aten._cudnn_rnn(
            input, weights, (4 if biases else 2) + bool(projected), input.new_empty(0), hidden, cell, mode, width,
            projected, num_layers, batch_first, dropout, train, bidirectional, [], None,
        )  # fmt: skip
        return (output, *states[:2]) if cell is not None else (output, states[0])

    return run


def _cudnn_rnn(*args: Any) -> tuple[Any, ...]:
    """Return the results of cuDNN's operator with the bytes it keeps, which torch's own fake leaves out.

    They are in the place of the copied weights, which aren't copied: where a graph is retained autograd clones the
    reserve, as it does on a GPU, but the pass that retains it is one of measuring only.
    """
    output, hidden, cell, reserve, _ = aten._cudnn_rnn.default(*args)
    value, mode, width, projected, num_layers, dropout, bidirectional = args[0], *args[6:10], args[11], args[13]
    positions, directions = math.prod(value.shape[:-1]), 2 if bidirectional else 1
    per_unit = _KEPT_PER_UNIT[mode] + (1 if projected else 0)  # what is projected is kept too
    kept = num_layers * directions * positions * width * per_unit * value.itemsize
    between = (num_layers - 1) * positions * output.shape[-1]
    kept += between * (value.itemsize + (1 if dropout else 0))
    return output, hidden, cell, reserve, value.new_empty(kept, dtype=torch.uint8)


def _cudnn_rnn_backward(*args: Any) -> tuple[Any, ...]:
    """Return gradients of the shapes that cuDNN's operator returns; torch has no fake of it."""
    wanted = args[-1]
    found = [
        torch.empty_like(tensor) if asked and tensor is not None else None
        for tensor, asked in zip((args[0], *args[4:6]), wanted, strict=False)
    ]
    return *found, [torch.empty_like(weight) for weight in args[1]] if wanted[3] else []


_FAKES: dict[Any, Callable[..., Any]] = {
    aten._cudnn_rnn.default: _cudnn_rnn,
    aten._cudnn_rnn_backward.default: _cudnn_rnn_backward,
}


def run_operator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return an operator's results on fake tensors, those of a GPU's operators without a fake included."""
    return _FAKES.get(func, func)(*args, **kwargs)


def dependent_launches(func: Any, args: tuple[Any, ...]) -> int:
    """Return how many kernels an operator launches one after another: those of each step of each recurrent layer."""
    if func not in _FAKES:
        return 1
    num_layers, batch_first = args[9:11] if func is aten._cudnn_rnn.default else args[13:15]
    steps = args[0].shape[1 if batch_first else 0]
    return int(_LAUNCHES_PER_STEP * steps * num_layers)


_FUNCTIONS: dict[str, Any] = {"scaled_dot_product_attention": _attention, "dropout": _dropout, "rms_norm": _rms_norm}
_REPLACED: dict[Any, Callable[..., Any]] = {
    **{function: _recurrent_layers(function) for function in _RECURRENT_MODES},
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

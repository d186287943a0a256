"""Floating-point operations of single operators: matrix products, convolutions, attention and recurrent layers.

2 per multiply-add. Attention counts as its two matrix products over all pairs of positions, causal or not. Everything
else counts as none: what element-wise operators cost is bytes, not FLOPs.

A recurrent layer multiplies the input and the hidden state of every position by the matrices of its gates (Hochreiter
and Schmidhuber, Neural Computation 9(8), 1997, for the LSTM; its products as kernels run them in Appleyard, Kocisky and
Blunsom, arXiv:1604.01946, section 3), so that forward, for T steps of B rows, G gates (LSTM 4, GRU 3, plain 1),

    FLOPs = 2 * T * B * G * hidden * (input + hidden)    per layer and direction

and backward twice: the gradients of input and hidden state, and those of the matrices.
"""

import math
from typing import Any

import torch
from torch.utils import flop_counter

aten = torch.ops.aten


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    batch, heads, length, width = query.shape
    return 2 * batch * heads * length * key.shape[-2] * (width + value.shape[-1])


def _attention_backward(grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    """The scores again, then two products for each of the two of the forward."""
    batch, heads, length, width = query.shape
    return 2 * batch * heads * length * key.shape[-2] * (3 * width + 2 * value.shape[-1])


_FORWARD_ATTENTION = {
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_fused_attention_overrideable,
}
_BACKWARD_ATTENTION = {
    aten._scaled_dot_product_flash_attention_backward,
    aten._scaled_dot_product_efficient_attention_backward,
    aten._scaled_dot_product_cudnn_attention_backward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
    aten._scaled_dot_product_fused_attention_overrideable_backward,
}
ATTENTION = _FORWARD_ATTENTION | _BACKWARD_ATTENTION

# Whole recurrent layers in one operator: all layers and directions at once on a GPU, one of them on a CPU.
_FORWARD_RECURRENT = {aten._cudnn_rnn, aten.miopen_rnn, aten.mkldnn_rnn_layer}
_BACKWARD_RECURRENT = {aten._cudnn_rnn_backward, aten.miopen_rnn_backward, aten.mkldnn_rnn_layer_backward}
_RECURRENT = _FORWARD_RECURRENT | _BACKWARD_RECURRENT


def _recurrent(packet: Any, args: tuple[Any, ...]) -> int:
    """Every position (packed sequences have fewer than T * B) meets every matrix once, a projection's included."""
    positions = math.prod(args[0].shape[:-1])
    # The CPU's operator takes two matrices and two biases, and matrices of zeros where there is no bias.
    weights = args[1] if isinstance(args[1], list | tuple) else args[1:3]
    forward: int = 2 * positions * sum(weight.numel() for weight in weights if weight.dim() == 2)
    if packet in _FORWARD_RECURRENT:
        return forward
    for_weights = packet is aten.mkldnn_rnn_layer_backward or args[-1][3]  # the CPU's always finds all gradients
    return 2 * forward if for_weights else forward


def _convolution_backward(args: tuple[Any, ...]) -> int:
    """The forward's products once for each gradient asked for (torch's registry has the weight's times the groups)."""
    grad, value, weight, transposed, (for_input, for_weight, _) = *args[:3], args[7], args[10]
    places = math.prod((value if transposed else grad).shape[2:])
    return int(2 * value.shape[0] * places * weight.numel() * (for_input + for_weight))


def _shapes(packet: Any, args: tuple[Any, ...]) -> int | None:
    """Return the count of the commonest products without the registry's slower way, or None."""
    if packet is aten.mm:
        return 2 * args[0].shape[0] * args[0].shape[1] * args[1].shape[1]  # type: ignore[no-any-return]
    if packet is aten.bmm:
        return 2 * args[0].shape[0] * args[0].shape[1] * args[0].shape[2] * args[1].shape[2]  # type: ignore[no-any-return]
    if packet is aten.addmm:
        return 2 * args[1].shape[0] * args[1].shape[1] * args[2].shape[1]  # type: ignore[no-any-return]
    if packet in _FORWARD_ATTENTION:
        return _attention(args[0], args[1], args[2])
    if packet in _BACKWARD_ATTENTION:
        return _attention_backward(args[0], args[1], args[2], args[3])
    if packet is aten.convolution_backward:
        return _convolution_backward(args)
    if packet in _RECURRENT:
        return _recurrent(packet, args)
    if packet in (aten.mv, aten.dot):
        return 2 * args[0].numel()  # type: ignore[no-any-return]
    if packet is aten._grouped_mm:  # groups divide one dimension: every row, column or pair of them is in one group
        groups = args[0].shape[0] if args[0].dim() == 3 and args[1].dim() == 3 else 1
        return 2 * groups * args[0].shape[-2] * args[0].shape[-1] * args[1].shape[-1]  # type: ignore[no-any-return]
    return None


_HAS_FLOPS: dict[Any, bool] = {}


def count_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the floating-point operations of one call of an aten operator."""
    packet = getattr(func, "overloadpacket", None)
    if packet not in _HAS_FLOPS:
        own = packet in ATTENTION or packet in _RECURRENT or packet in (aten.mv, aten.dot, aten._grouped_mm)
        _HAS_FLOPS[packet] = own or packet in flop_counter.flop_registry
    if not _HAS_FLOPS[packet]:
        return 0
    known = _shapes(packet, args)
    return int(flop_counter.flop_registry[packet](*args, **kwargs, out_val=result)) if known is None else known

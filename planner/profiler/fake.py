"""Turns a model on the meta device into fake tensors to run a forward on."""

import torch
from torch import nn

from planner.profiler.torch_internals import FakeTensorMode


def make_fake(model: nn.Module, mode: FakeTensorMode, dtype: torch.dtype | None, *, buffers: bool = False) -> nn.Module:
    """Replace the model's parameters and buffers by fake tensors on the CPU, ties kept; returns the model.

    Floating parameters take `dtype` (those of another floating dtype than the model's default keep theirs); floating
    buffers keep their own unless `buffers`.
    """
    made: dict[int, torch.Tensor] = {}
    default = model_dtype(model)

    def convert(tensor: torch.Tensor, follows: bool) -> torch.Tensor:
        if id(tensor) not in made:
            target = dtype if follows and dtype is not None and tensor.dtype == default else tensor.dtype
            with mode:
                made[id(tensor)] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=target, device="cpu")
            if isinstance(tensor, nn.Parameter):
                made[id(tensor)] = nn.Parameter(made[id(tensor)], requires_grad=tensor.requires_grad)
        return made[id(tensor)]

    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                module._parameters[name] = convert(param, True)  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = convert(buffer, buffers)
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                vars(module)[name] = convert(value, False)
    return model


def model_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of most floating parameters (by elements)."""
    counts: dict[torch.dtype, int] = {}
    for param in model.parameters():
        if param.is_floating_point():
            counts[param.dtype] = counts.get(param.dtype, 0) + param.numel()
    return max(counts, key=lambda dtype: counts[dtype]) if counts else torch.get_default_dtype()

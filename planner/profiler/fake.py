"""Builds models without their weights: parameters on the meta device, then fake tensors to run a forward on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from planner.profiler.torch_internals import FakeTensorMode


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move every parameter to the meta device as it is registered; all else stays real, so code may read it."""
    original = nn.Module.register_parameter
    moved: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # one that is registered twice stays one

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(module, name, param)
        if param is not None and param.device.type != "meta":
            if id(param) not in moved:
                meta = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
                meta.__dict__.update(param.__dict__)
                moved[id(param)] = (param, meta)
            module._parameters[name] = moved[id(param)][1]

    nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def build_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """Return the model with its parameters on the meta device; buffers are real.

    Where a model's constructor needs the values of its parameters, it is built for real and moved.
    """
    try:
        with _parameters_on_meta():
            model = build()
    except (RuntimeError, NotImplementedError) as error:
        if "meta" not in str(error):
            raise
        model = build()
    return model


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
    return model


def model_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of most floating parameters (by elements)."""
    counts: dict[torch.dtype, int] = {}
    for param in model.parameters():
        if param.is_floating_point():
            counts[param.dtype] = counts.get(param.dtype, 0) + param.numel()
    return max(counts, key=lambda dtype: counts[dtype]) if counts else torch.get_default_dtype()

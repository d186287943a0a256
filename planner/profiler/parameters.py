"""Refuses a forward that changes the model's own parameters: writes one, replaces it, or makes a new one.

Whoever trains steps the parameters that the model was built with, each on every GPU that has it. What a forward does to
them would be done once for each microbatch, and be lost where a parameter is kept in parts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from planner.errors import CaptureError
from planner.profiler.torch_internals import has_gradient_hooks

_HINT = (
    "keep what forward updates in a buffer (register_buffer) and write that in place; or change parameters in the "
    "training loop, after the optimizer's step"
)


class Parameters:
    """The parameters of a model at the beginning of a forward."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = {id(module): name for name, module in model.named_modules()}
        self._storages = {_storage(tensor): name for name, tensor in model.named_parameters()}
        if not any(module.training for module in model.modules()):  # weights scaled for inference train nothing
            self._modules, self._storages = {}, {}

    def check_write(self, target: torch.Tensor, where: str) -> None:
        """Raise CaptureError where a tensor that is written in place is a parameter or a view of one."""
        if (name := self._storages.get(_storage(target))) is not None:
            raise CaptureError(f"{where}: forward writes parameter {name!r} in place", hint=_HINT)

    @contextmanager
    def kept(self, location: Callable[[], str]) -> Iterator[None]:
        """Raise CaptureError at the statement with which code inside gives a module of the model another parameter."""
        original = nn.Module.register_parameter

        def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
            held = module._parameters.get(name)
            if id(module) in self._modules and param is not held:
                full = ".".join(part for part in (self._modules[id(module)], name) if part)
                does = "makes" if held is None else "replaces"
                raise CaptureError(
                    f"{location()}: forward {does} parameter {full!r}, and the optimizer has those that the model was "
                    "built with",
                    hint="make parameters in __init__" if held is None else _HINT,
                )
            original(module, name, param)

        nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module.register_parameter = original  # type: ignore[method-assign]


def check_initialized(model: nn.Module, built_by: str) -> None:
    """Raise CaptureError for a lazy module whose first forward, which gives its parameters a shape, has not been."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            raise CaptureError(
                f"{name!r} has no shape until the first forward of its lazy module",
                hint=f"run one batch through the model in {built_by}, or give the module its sizes",
            )


def check_trainable(model: nn.Module) -> None:
    """Raise CaptureError for parameters that a plan can't train as one process does, though no statement tells it."""
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag) or not module.weight.requires_grad:
            continue
        if module.max_norm is not None:
            raise CaptureError(
                f"{name!r} has max_norm={module.max_norm:g}: its forward scales the rows that it looks up in place, so "
                "every GPU would scale those of its own rows of the batch",
                hint="leave max_norm out, and scale the weight in the training loop after the optimizer's step",
            )
        if module.sparse:
            raise CaptureError(
                f"{name!r} has sparse=True: its gradient is a sparse tensor, which no plan adds up over GPUs",
                hint="leave sparse out: gradients are then as large as the weight, and as right",
            )
    for name, parameter in model.named_parameters():
        if has_gradient_hooks(parameter):
            raise CaptureError(
                f"parameter {name!r} has a hook on its gradient, which would be given parts of it: of a microbatch, of "
                "a replica, of a divided weight",
                hint="change gradients in the training loop, between runtime.step and the optimizer's step",
            )
        if parameter.is_complex():
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise CaptureError(
                f"parameter {name!r} is {dtype}, and plans train real numbers",
                hint="keep it as real numbers, nn.Parameter(torch.view_as_real(values)), and call "
                "torch.view_as_complex on it in forward",
            )


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)

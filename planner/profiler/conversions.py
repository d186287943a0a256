"""Lets a forward convert modules (`self.head = self.head.to(x.device)`) while it is recorded.

torch can't swap the fake tensors of a parameter that the recording knows. A conversion is no call of the program: the
plan's stages run on one device, and what a module called whole converts, it converts there too.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from planner.profiler.torch_internals import unrecorded

Convert = Callable[[torch.Tensor], torch.Tensor]


@contextmanager
def converted_modules(renamed: Callable[[torch.Tensor, torch.Tensor], None]) -> Iterator[None]:
    """Have `module.to(...)` and the like replace parameters and buffers; `renamed(old, new)` is told of each."""
    original = nn.Module._apply

    def apply(module: nn.Module, convert: Convert, recurse: bool = True) -> nn.Module:
        for inner in module.modules() if recurse else (module,):
            for held in (inner._parameters, inner._buffers):
                _convert(held, convert, renamed)
        return module

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]


def _convert(held: dict[str, Any], convert: Convert, renamed: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
    for key, tensor in held.items():
        if tensor is None:
            continue
        with torch.no_grad(), unrecorded():
            made = convert(tensor)
            if made.dtype == tensor.dtype and made.device == tensor.device:
                continue
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        renamed(tensor, made)
        held[key] = made

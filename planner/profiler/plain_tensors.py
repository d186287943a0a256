"""Tensors that a model has without having registered them, and functions that keep what they computed.

A plain attribute (`self.freqs = precompute(...)`) is constant data of its module like a buffer, so a program reads it
by its name, and a plan makes it a buffer of its stage. Neither the state dict nor the hash of the model has it. A small
tensor that stands elsewhere (a global name, a list) is spelled out in the program.
"""

import functools
import gc
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from planner.profiler.torch_internals import FakeTensor, unrecorded, unset_fake_temporarily

MAX_SPELLED_OUT = 256  # elements that a program holds as numbers
_CACHE = type(functools.lru_cache(lambda: None))
_INSTALLED = (*sysconfig.get_paths().values(), str(Path(__file__).parents[1]))


def plain_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every tensor that is a plain attribute of a module, by its fully qualified name.

    One that needs a gradient is none: it is computed from parameters, or trained behind the optimizer's back.
    """
    return {
        f"{path}.{name}" if path else name: value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor) and not value.requires_grad
    }


def constants(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers and plain tensors of a module by name."""
    return plain_tensors(module) | dict(module.named_buffers(remove_duplicate=False))


def spelled_out(tensor: torch.Tensor) -> Any:
    """Return the values of a small tensor as numbers in lists, None for one whose values nobody has, or too many."""
    if isinstance(tensor, FakeTensor) or tensor.is_meta or tensor.requires_grad or tensor.is_sparse:
        return None
    if not 0 < tensor.numel() <= MAX_SPELLED_OUT:
        return None
    with unset_fake_temporarily(), unrecorded():
        return tensor.detach().cpu().tolist()


def find_tensor(model: nn.Module, name: str) -> torch.Tensor:
    """Return a parameter, a buffer or a plain tensor of the model by its fully qualified name."""
    owner, _, attribute = name.rpartition(".")
    found = getattr(model.get_submodule(owner), attribute)
    assert isinstance(found, torch.Tensor)
    return found


@contextmanager
def emptied_caches(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Empty the caches of the model's functions (`functools.lru_cache`) at the end; yield what does it in between.

    What such a function computed in one module, another one then gets from nowhere, and a later recording gets tensors
    of an earlier one: a cache has to be empty wherever a module's code begins.
    """
    functions = _caching_functions(model)

    def empty() -> None:
        for function in functions:
            function.cache_clear()

    try:
        yield empty
    finally:
        empty()


def _caching_functions(model: nn.Module) -> list[Any]:
    """Return the functions with a cache of the model's own code, and of the Python modules that its classes are in."""
    classes = {type(module).__module__ for module in model.modules()}
    found = []
    for item in gc.get_objects():
        if type(item) is _CACHE:  # not isinstance: it asks objects that answer with warnings
            name = getattr(item, "__module__", None)
            if name in classes or _is_own(getattr(sys.modules.get(name or ""), "__file__", None)):
                found.append(item)
    return found


def _is_own(file: str | None) -> bool:
    """Return whether a file belongs neither to Python, nor to an installed package, nor to planner."""
    return file is not None and not file.startswith(_INSTALLED)

"""Python's and numpy's random numbers: drawn again in a recomputation, and the same on tensor-parallel ranks."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import nn

from planner.emitter.runtime.checks import PlanError


@contextmanager
def _seeded_generators() -> Iterator[None]:
    """Seed the generators of Python and numpy from torch's inside, and leave them as they were."""
    seed = int(torch.randint(2**31, (), device="cpu"))
    numpy: Any = sys.modules.get("numpy")
    before = random.getstate(), numpy and numpy.random.get_state()
    random.seed(seed)
    if numpy is not None:
        numpy.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        if numpy is not None:
            numpy.random.set_state(before[1])


def _seed_calls(module: nn.Module) -> None:
    """Let a module draw from generators that are seeded for each call."""
    forward = module.forward

    def seeded(*args: Any, **kwargs: Any) -> Any:
        with _seeded_generators():
            return forward(*args, **kwargs)

    module.forward = seeded


def _drawing_function(model: nn.Module, name: str) -> Callable[..., Any]:
    """Return the function 'module:function', which stands in the file of that module's class."""
    owner, _, function = name.partition(":")
    for found in type(model.get_submodule(owner)).__mro__:
        own = vars(sys.modules[found.__module__]) if found.__module__ in sys.modules else {}
        drawing = own.get(function)
        if isinstance(drawing, FunctionType) and drawing.__module__ == found.__module__:
            return drawing
    raise PlanError(
        f"the file of {owner or 'the model'}'s class has no function {function!r}, which draws random numbers\n"
        "hint: give the model that the plan was made for"
    )

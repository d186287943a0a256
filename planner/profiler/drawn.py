"""Functions of a model's own code that draw with Python's or numpy's generators, and return an array or a list.

A program can't hold what they drew, but it can call them where the model does: `torch.tensor(sample(...))` becomes a
draw, which makes the numbers anew in every microbatch.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import nn

from planner.own_functions import Function, own_files, own_function, replaced
from planner.profiler.functions import PythonRandom
from planner.profiler.recording import Call
from planner.profiler.values import flatten

MAKERS = {torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy}  # that make a tensor of an array or a list
_OPTIONS = ("dtype", "device")


class Drawn:
    """Stands for what a drawing function returned, until a tensor is made of it; the code can do nothing else with it.

    `call` is the draw, `value` what was returned and `tensor` what was made of it.
    """

    def __init__(self, value: Any, call: Call) -> None:
        self.value, self.call = value, call
        self.tensor: torch.Tensor | None = None


def drawing_functions(frame: FrameType | None, module: nn.Module) -> tuple[str, ...]:
    """Return the functions that the innermost own code of a module names, of those in its file: one of them drew."""
    files = {names["__file__"]: names for names in own_files(module) if "__file__" in names}
    while frame is not None and frame.f_code.co_filename not in files:
        frame = frame.f_back
    if frame is None:
        return ()
    names = files[frame.f_code.co_filename]
    return tuple(name for name in frame.f_code.co_names if isinstance(names.get(name), FunctionType))


@contextmanager
def watched(
    model: nn.Module,
    targets: tuple[str, ...],
    random: PythonRandom,
    begin: Callable[[str, tuple[Any, ...], dict[str, Any]], Call | None],
) -> Iterator[None]:
    """Let the functions `targets` ('module:function') return what they draw as `Drawn`.

    `begin` returns the draw of a call, or None where nothing is recorded.
    """

    def watch(target: str, function: Function) -> Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            given = any(isinstance(item, torch.Tensor) for item in flatten((args, kwargs)))
            draw = None if given else begin(target, args, kwargs)
            value = function(*args, **kwargs)
            if draw is None or not (isinstance(value, list) or type(value).__module__ == "numpy"):
                return value
            return Drawn(value, draw) if random.drew() else value

        return call

    changes = []
    for target in targets:
        owner, _, name = target.partition(":")
        found = own_function(model.get_submodule(owner), name)
        if found is not None:
            changes.append((found[0], name, watch(target, found[1])))
    with replaced(changes):
        yield


def tensor_of(drawn: Drawn) -> torch.Tensor:
    """Return what `torch.as_tensor` makes of drawn numbers."""
    if drawn.tensor is None:
        drawn.tensor = torch.as_tensor(drawn.value)
    return drawn.tensor


def conversion(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of `Tensor.to` that give what a call of a maker gives; None where the call is another."""
    plain = func in MAKERS and len(args) == 1 and set(kwargs) <= set(_OPTIONS)
    return {name: value for name, value in kwargs.items() if value is not None} | {"copy": True} if plain else None

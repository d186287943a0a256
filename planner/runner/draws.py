"""Random numbers for an exact comparison: the same for the same call in every process, whatever was drawn before."""

import functools
import zlib
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from planner.own_functions import Function, own_function, replaced
from planner.random_operators import draws_numbers

_SEED = 4177
# Operators that draw every element alike, from their other arguments: one row of such numbers stands for all rows.
_FILLS = {
    *("uniform_", "normal_", "exponential_", "random_", "log_normal_", "cauchy_", "geometric_", "bernoulli_"),
    *("rand", "randn", "randint", "rand_like", "randn_like", "randint_like"),
}


class CountedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the calls of operators that draw random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += draws_numbers(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class MatchedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes every operator that draws random numbers give the same for the same call, and the same for every row.

    A stage of a plan runs some of a model's calls, on some of its rows: only what depends on neither can be compared.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        with torch.random.fork_rng([]):
            torch.manual_seed(_SEED + zlib.crc32(name.encode()))
            if name not in _FILLS or any(isinstance(item, Tensor) for item in (*args[1:], *kwargs.values())):
                return func(*args, **kwargs)
            return _fill(func, name, args, kwargs)


def _fill(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what an operator of `_FILLS` gives, every row like the first."""
    if args and isinstance(args[0], Tensor):
        first = args[0]
        if not first.dim() or not first.shape[0]:
            return func(*args, **kwargs)
        row = func(torch.empty_like(first[:1]), *args[1:], **kwargs)
        return first.copy_(row.expand_as(first)) if name.endswith("_") else row.expand_as(first).clone()
    position = next(i for i, item in enumerate(func._schema.arguments) if item.name == "size")
    size = list(args[position])
    if not size or not size[0]:
        return func(*args, **kwargs)
    row = func(*args[:position], [1, *size[1:]], *args[position + 1 :], **kwargs)
    return row.expand(size).clone()


def draws_like(plan: ModuleType, model: nn.Module) -> AbstractContextManager[None]:
    """Let the model draw with Python's and numpy's generators as a plan does: seeded anew for each call.

    Modules are changed for good, functions of the model's code inside the context.
    """
    changes = []
    for draw in {name for stage in getattr(plan, "STAGES", ()) for name in getattr(stage, "draws", ())}:
        owner, _, name = draw.partition(":")
        if not name:
            plan._seed_calls(model.get_submodule(draw))
        elif (found := own_function(model.get_submodule(owner), name)) is not None:
            changes.append((found[0], name, _seeded(plan, found[1])))
    return replaced(changes)


def _seeded(plan: ModuleType, function: Function) -> Function:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with plan._seeded_generators():
            return function(*args, **kwargs)

    return call

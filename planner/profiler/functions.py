"""Sees what a function mode does not while a forward is recorded: custom autograd functions, checkpoints, randomness.

What runs inside `Function.apply` has a gradient of its own, and a reentrant checkpoint runs its code without gradients,
which backward then computes again.
"""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from planner.random_operators import draws_numbers

OPAQUE_FUNCTION = "is a custom autograd function, whose gradient only its own code knows"
OPAQUE_HINT = "call it in the forward of a module of its own, which is then kept whole"

Run = Callable[..., Any]
Seen = Callable[[type, Run, tuple[Any, ...], dict[str, Any]], Any]


@contextmanager
def seen_functions(see: Seen) -> Iterator[None]:
    """Call `see(function class, apply, args, kwargs)` for every custom autograd function applied inside.

    What is checkpointed runs as if it were not: recomputing is for a plan to decide.
    """

    def apply_seen(cls: type, apply: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if cls is CheckpointFunction:  # (function, preserve_rng_state, *arguments)
            return args[0](*args[2:])
        return apply(*args, **kwargs) if cls.__module__ == checkpoint.__module__ else see(cls, apply, args, kwargs)

    with _replaced_apply(apply_seen):
        yield


@contextmanager
def checkpoints_not_reentrant() -> Iterator[None]:
    """Let reentrant checkpoints inside be the other kind: it costs the same, and gives gradients of inputs alone."""

    def apply_other(cls: type, apply: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if cls is CheckpointFunction:
            return checkpoint(args[0], *args[2:], use_reentrant=False, preserve_rng_state=args[1])
        return apply(*args, **kwargs)

    with _replaced_apply(apply_other):
        yield


@contextmanager
def _replaced_apply(call: Seen) -> Iterator[None]:
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        return call(cls, original.__get__(None, cls), args, kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators inside that draw random numbers, whatever called them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.count += draws_numbers(func, args, kwargs)
        return func(*args, **kwargs)


class PythonRandom:
    """Tells whether Python's `random`, or numpy, drew numbers since it was asked last: no operator of torch did."""

    def __init__(self) -> None:
        self._state = self._now()

    def drew(self) -> bool:
        """Return whether numbers were drawn, and forget it."""
        before, self._state = self._state, self._now()
        return before != self._state

    def spoil(self) -> None:
        """Let `drew` tell that numbers were drawn."""
        self._state = ()

    @staticmethod
    def _now() -> tuple[Any, ...]:
        numpy = sys.modules.get("numpy")
        if numpy is None:
            return (random.getstate(),)
        _, keys, position, *_ = numpy.random.get_state()
        return random.getstate(), keys.tobytes(), position

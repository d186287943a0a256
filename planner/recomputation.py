"""Lets what a checkpoint computes again in backward run under the function modes that its forward ran under."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any


@contextmanager
def recomputed_under(modes: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Let checkpoints of both kinds that are made inside compute again under `modes()`.

    torch turns a function mode off while it handles a call, and `backward` is one. The function keeps its default in
    itself, and whoever imported it has that function.
    """
    from torch.utils import checkpoint as module
    from torch.utils.checkpoint import CheckpointFunction, checkpoint

    function: Any = inspect.unwrap(checkpoint)
    defaults, noop, original = function.__kwdefaults__, module.noop_context_fn, CheckpointFunction.backward

    def contexts() -> tuple[Any, Any]:
        return nullcontext(), modes()

    def backward(ctx: Any, *gradients: Any) -> Any:
        with modes():
            return original(ctx, *gradients)  # type: ignore[no-untyped-call]

    function.__kwdefaults__ = {**defaults, "context_fn": contexts}
    module.noop_context_fn = contexts  # a reentrant one takes no other than the default
    CheckpointFunction.backward = staticmethod(backward)  # type: ignore[method-assign]
    try:
        yield
    finally:
        function.__kwdefaults__, module.noop_context_fn = defaults, noop
        CheckpointFunction.backward = staticmethod(original)  # type: ignore[method-assign]

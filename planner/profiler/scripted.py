"""Functions that TorchScript compiles: recorded as the Python that they are, which computes the same."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch


@contextmanager
def unscripted_functions() -> Iterator[None]:
    """Have `torch.jit.script` give back functions as they are inside: a function mode sees nothing of compiled ones.

    Modules it compiles as ever, and they are refused by name. In training nothing is changed: plans call what the
    functions call, and modules that are called whole call the compiled ones.
    """
    original = torch.jit.script

    def script(obj: Any, *args: Any, **kwargs: Any) -> Any:
        return obj if isinstance(obj, FunctionType) else original(obj, *args, **kwargs)

    torch.jit.script = script
    try:
        yield
    finally:
        torch.jit.script = original

"""Example inputs for any number of rows, also from a function that takes none and always gives the same batch."""

import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from planner.errors import CaptureError


def takes_rows(function: Callable[..., Any]) -> bool:
    """Return whether a function can be called with a number of rows; what does not tell is taken to."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins don't tell
        return True
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(item.kind in (*by_position, inspect.Parameter.VAR_POSITIONAL) for item in parameters)


def for_any_rows(function: Callable[..., Any], path: Path) -> Callable[[int], Any]:
    """Return a function of a number of rows: the one given, or where it takes none, its batch repeated or cut to it.

    The rows are dimension 0 of the first tensor, and of every other tensor that has as many there: others stay as they
    are. CaptureError where there are none to repeat.
    """
    if takes_rows(function):
        return function

    @functools.wraps(function)
    def make(batch_size: int) -> Any:
        found = function()
        sizes = [int(tensor.shape[0]) for tensor in _tensors(found)]
        if 0 in sizes[:1]:
            raise CaptureError(
                f"{path.name}: {function.__name__}() takes no number of rows, and the first dimension of its first "
                "tensor is 0: there is no row to repeat",
                hint=f"write it as def {function.__name__}(batch_size), for any number of rows",
            )
        if not sizes or sizes[0] == batch_size:
            return found
        rows = [row % sizes[0] for row in range(batch_size)]
        return _map(found, rows, sizes[0])

    return make


def _is_batch(value: Any) -> bool:
    return hasattr(value, "dim") and hasattr(value, "shape") and len(value.shape) > 0


def _tensors(value: Any) -> Iterator[Any]:
    if _is_batch(value):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def _map(value: Any, rows: list[int], num_rows: int) -> Any:
    if _is_batch(value):
        return value[rows] if value.shape[0] == num_rows else value
    if isinstance(value, dict):
        return {key: _map(item, rows, num_rows) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [_map(item, rows, num_rows) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value

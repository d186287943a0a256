"""Functions in the files of a model's own classes, by the module whose class stands there: 'layers.3:sample'."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

Function = Callable[..., Any]


def own_files(owner: object) -> Iterator[dict[str, Any]]:
    """Yield the names of the files in which the classes of an object stand, the nearest first, torch's left out."""
    for item in type(owner).__mro__:
        module = sys.modules.get(item.__module__)
        if module is not None and item.__module__.partition(".")[0] not in ("torch", "builtins"):
            yield vars(module)


def own_function(owner: object, name: str) -> tuple[dict[str, Any], Function] | None:
    """Return the function of a name that is defined in a file of an object's classes, with that file's names."""
    for names in own_files(owner):
        found = names.get(name)
        if isinstance(found, FunctionType) and found.__module__ == names["__name__"]:
            return names, found
    return None


@contextmanager
def replaced(changes: list[tuple[dict[str, Any], str, Function]]) -> Iterator[None]:
    """Let names of files be other functions inside."""
    before = [(names, name, names[name]) for names, name, _ in changes]
    for names, name, function in changes:
        names[name] = function
    try:
        yield
    finally:
        for names, name, function in before:
            names[name] = function

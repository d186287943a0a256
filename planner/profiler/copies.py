"""Copies of modules that know nothing of the modules they were copied from."""

import copy
import operator
from collections.abc import Iterator
from pickle import PicklingError
from types import CellType, FunctionType
from typing import Any

from torch import nn

Memo = dict[int, Any]
# What copying raises: of kinds that refuse, and of objects whose own code doesn't expect to be asked
_NOT_COPIED = (TypeError, ValueError, KeyError, AttributeError, RuntimeError, copy.Error, PicklingError)


def copy_module(module: nn.Module, memo: Memo) -> nn.Module:
    """Return a deep copy of a module; `memo` maps the ids of objects to what takes their place.

    `copy.deepcopy` keeps functions as they are: one that a module holds and that reads the module's own parts from
    where it was defined (`self.mlp = lambda x: act(fc(x))`) would go on to call the parts of the original. What can't
    be copied (a lock, a dict that raises KeyError for an attribute it lacks) is shared.
    """
    try:
        made: nn.Module = copy.deepcopy(module, trial := dict(memo))
    except _NOT_COPIED:
        trial = memo | {id(value): value for value in _not_copied(module, memo)}
        made = copy.deepcopy(module, trial)
    memo.update(trial)
    for inner in made.modules():
        for name, value in vars(inner).items():
            vars(inner)[name] = _rebound(value, memo)
    return made


def _not_copied(module: nn.Module, memo: Memo) -> Iterator[Any]:
    for inner in module.modules():
        for key, value in vars(inner).items():
            if key not in ("_parameters", "_buffers", "_modules"):
                try:
                    copy.deepcopy(value, dict(memo))
                except _NOT_COPIED:
                    yield value


def _rebound(value: Any, memo: Memo) -> Any:
    """Return a value in which functions read the copies of what they read."""
    if id(value) in memo:
        return memo[id(value)]
    if type(value) is list:
        items = [_rebound(item, memo) for item in value]
        return value if all(map(operator.is_, items, value)) else items
    if type(value) is dict:
        found = {key: _rebound(item, memo) for key, item in value.items()}
        return value if all(map(operator.is_, found.values(), value.values())) else found
    if type(value) is not FunctionType or value.__closure__ is None:
        return value
    cells = tuple(CellType() for _ in value.__closure__)
    copied = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
    copied.__kwdefaults__ = value.__kwdefaults__
    memo[id(value)] = copied
    for cell, original in zip(cells, value.__closure__, strict=True):
        try:
            cell.cell_contents = _rebound(original.cell_contents, memo)
        except ValueError:  # not set yet
            continue
    return copied

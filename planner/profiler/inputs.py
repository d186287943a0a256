"""What a model is given beside tensors: arguments in their order, and constants that its program was recorded for."""

import inspect
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from planner.model_file import ModelFile, split_arguments
from planner.names import plain_text
from planner.profiler import user_code as user

Constants = dict[str, bool | int | float | str | None]


def argument_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of a model's arguments, in the order of positions."""
    return tuple(inspect.signature(model.forward).parameters)


def input_constants(file: ModelFile, model: nn.Module) -> Constants:
    """Return the numbers, flags and texts among a model's inputs by name, what was not given by its default.

    Those that differ between two numbers of rows are None: the program computes them from the rows.
    """
    first, second = (_constants(model, *split_arguments(user.example_inputs(file, rows))) for rows in (2, 3))
    return {name: value if second.get(name) == value else None for name, value in first.items()}


def _constants(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Constants:
    parameters = inspect.signature(model.forward).parameters
    names = list(parameters)
    given = {(names[i] if i < len(names) else f"input_{i}"): value for i, value in enumerate(args)} | kwargs
    defaults = {name: item.default for name, item in parameters.items() if item.default is not item.empty}
    return dict(_leaves(defaults | given))


def _leaves(named: dict[str, Any]) -> Iterator[tuple[str, bool | int | float | str]]:
    for name, value in named.items():
        if isinstance(value, tuple | list) and not isinstance(value, torch.Size):
            yield from _leaves({f"{name}_{index}": item for index, item in enumerate(value)})
        elif isinstance(value, dict):
            yield from _leaves({f"{name}_{key}": item for key, item in value.items()})
        elif isinstance(value, bool | int | float | str) and _can_be_told(value):
            yield name, value


def _can_be_told(value: bool | float | str) -> bool:
    try:
        return math.isfinite(value) if not isinstance(value, str) else bool(plain_text(value))
    except ValueError:
        return False

"""Inputs: what a step is given, by the names that the plan has for it."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from planner.emitter.runtime.checks import PlanError
from planner.emitter.runtime.generated import ARGUMENTS, CONSTANTS


def _named_inputs(inputs: Any) -> dict[str, Tensor]:
    """Return the tensors among a model's inputs (by position or by name) by name, nested ones with an index.

    Numbers, flags and texts are part of the plan's code: others than it was written for are an error.
    """
    if not isinstance(inputs, Mapping):
        inputs = inputs if isinstance(inputs, tuple | list) else (inputs,)
        inputs = {ARGUMENTS[i] if i < len(ARGUMENTS) else f"input_{i}": value for i, value in enumerate(inputs)}
    found: dict[str, Tensor] = {}
    for name, value in _input_leaves(inputs):
        if isinstance(value, Tensor):
            found[name] = value
            continue
        expected = CONSTANTS.get(name)
        fixed = expected is not None or (name not in CONSTANTS and value is not None)
        if fixed and value != expected:
            profiled = f"profiled with {expected!r}" if name in CONSTANTS else "profiled without it"
            raise PlanError(
                f"input {name!r} is {value!r}, and this plan's model was {profiled}\n"
                "hint: give what example_inputs gives, or profile and solve again"
            )
    return found


def _input_leaves(named: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in named.items():
        if isinstance(value, tuple | list):
            yield from _input_leaves({f"{name}_{index}": item for index, item in enumerate(value)})
        elif isinstance(value, Mapping):
            yield from _input_leaves({f"{name}_{key}": item for key, item in value.items()})
        elif value is None or isinstance(value, Tensor | bool | int | float | str):
            yield name, value

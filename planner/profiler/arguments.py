"""Turns the arguments of a recorded program into Python values, and Python values into named results."""

import math
import operator
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from planner.arguments import (
    MODEL_DTYPE,
    BatchFloat,
    BatchInt,
    Constant,
    Device,
    Dtype,
    Fields,
    ParamRef,
    Ref,
    TrainingValue,
    leaves,
)
from planner.errors import ProfileError
from planner.names import function_name

Environment = dict[str, Any]

_NAMESPACES: dict[str, Any] = {
    "torch": torch,
    "torch.nn.functional": torch.nn.functional,
    "torch.special": torch.special,
    "torch.fft": torch.fft,
    "torch.linalg": torch.linalg,
    "torch._C._nn": torch._C._nn,
    "operator": operator,
    "math": math,
}


@dataclass(frozen=True)
class Target:
    """Where and for what nodes run: rows of the batch, device, the dtype that `MODEL_DTYPE` stands for."""

    rows: int
    device: torch.device
    dtype: torch.dtype


def find_function(name: str) -> Callable[..., Any]:
    """Return the function of a validated dotted name; ProfileError where this torch has none of that name."""
    namespace, _, attribute = function_name(name).rpartition(".")
    found: Callable[..., Any] | None = getattr(_NAMESPACES[namespace], attribute, None)
    if found is None:
        raise ProfileError(f"torch {torch.__version__} has no function {name!r}", hint="profile the model again")
    return found


def find_dtype(name: str, model_dtype: torch.dtype) -> torch.dtype:
    """Return the torch dtype of a program's name."""
    found = model_dtype if name == MODEL_DTYPE else getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ProfileError(f"torch {torch.__version__} has no dtype {name!r}", hint="profile the model again")
    return found


def resolve(value: Any, parameter: Callable[[str], torch.Tensor], target: Target) -> Any:
    """Return an argument with everything resolved that is the same in every run; `Ref`s stay."""
    match value:
        case ParamRef(name):
            return parameter(name)
        case BatchInt() | BatchFloat():
            return value.at(target.rows)
        case Dtype(name):
            return find_dtype(name, target.dtype)
        case Device():
            return target.device
        case TrainingValue(training, _):
            return training
        case Constant(name):
            return getattr(torch, name)
        case Fields():
            return value.map(lambda item: resolve(item, parameter, target))
        case slice():
            return slice(*(resolve(item, parameter, target) for item in (value.start, value.stop, value.step)))
        case tuple():
            return tuple(resolve(item, parameter, target) for item in value)
        case list():
            return [resolve(item, parameter, target) for item in value]
        case dict():
            return {key: resolve(item, parameter, target) for key, item in value.items()}
    return value


class _Fields(SimpleNamespace):
    """An object with fields that are also read by key or position, as Hugging Face outputs are."""

    def __getitem__(self, key: Any) -> Any:
        return vars(self)[key] if isinstance(key, str) else [v for v in vars(self).values() if v is not None][key]


def fill(value: Any, environment: Environment) -> Any:
    """Return a resolved argument with its references replaced by values."""
    match value:
        case Ref(name):
            return environment[name]
        case Fields(items, in_order):
            named = {name: fill(item, environment) for name, item in items}
            return namedtuple("Fields", named)(**named) if in_order else _Fields(**named)
        case slice():
            return slice(*(fill(item, environment) for item in (value.start, value.stop, value.step)))
        case tuple():
            return tuple(fill(item, environment) for item in value)
        case list():
            return [fill(item, environment) for item in value]
        case dict():
            return {key: fill(item, environment) for key, item in value.items()}
    return value


def bind(structure: Any, value: Any, environment: Environment) -> None:
    """Enter the tensors of a result into the environment, by the structure that names them."""
    match structure:
        case Ref(name):
            environment[name] = value
        case Fields(items):
            for name, item in items:
                if any(isinstance(leaf, Ref) for leaf in leaves(item)):  # some objects have no key for what is None
                    bind(item, value[name] if isinstance(value, dict) else getattr(value, name), environment)
        case tuple() | list():
            for item, part in zip(structure, value, strict=True):
                bind(item, part, environment)
        case dict():
            for key, item in structure.items():
                bind(item, value[key], environment)

"""Refuses parameters that lie in the same memory without being one parameter (`b.weight.data = a.weight.data`).

One process trains such a pair as one array of numbers, which two gradients and two optimizer states change. No plan
does: each GPU would have an array of its own. A tie is one parameter with two names.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from planner.errors import CaptureError


@dataclass(frozen=True)
class _Place:
    """The bytes [start, stop) of a storage, and whose they are."""

    storage: "weakref.ref[Any]"
    start: int
    stop: int
    owner: nn.Parameter


class ParameterMemory:
    """Which parameters shared memory as they were registered; afterwards they have no values."""

    def __init__(self) -> None:
        self._places: dict[int, list[_Place]] = {}
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []

    def enter(self, parameter: nn.Parameter, values: torch.Tensor) -> None:
        """Enter the values that a parameter is registered with, which live on while another may share them."""
        if is_lazy(values):
            return
        storage, size = values.untyped_storage(), values.element_size()
        start = int(values.storage_offset()) * size
        last = sum((length - 1) * stride for length, stride in zip(values.shape, values.stride(), strict=True))
        place = _Place(weakref.ref(storage), start, start + (last + 1) * size if values.numel() else start, parameter)
        key = int(storage._cdata)
        there = [other for other in self._places.get(key, []) if other.storage() is storage]
        for other in there:
            if other.owner is not parameter and max(start, other.start) < min(place.stop, other.stop):
                self._pairs.append((other.owner, parameter))
        self._places[key] = [*there, place]

    def check(self, model: nn.Module) -> None:
        """Raise CaptureError for two parameters of the model in the same memory, one of which is trained."""
        names = {}
        for name, parameter in model.named_parameters():
            names[id(parameter)] = name
            self.enter(parameter, parameter)  # where it lies by now
        for first, second in self._pairs:
            if id(first) in names and id(second) in names and (first.requires_grad or second.requires_grad):
                raise CaptureError(
                    f"parameters {names[id(first)]!r} and {names[id(second)]!r} lie in the same memory and are not one "
                    "parameter: on two GPUs each would be trained on its own",
                    hint="tie them as one Parameter: `b.weight = a.weight`, without .data",
                )

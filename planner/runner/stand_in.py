"""A loss to verify with where a model file has none: the gradients of any function of the outputs show an error."""

import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from planner.model_file import ModelFile

NOT_PROVED = (
    "your own loss: the model file has no loss_fn, and the mean square of every output stood in for it; add "
    "loss_fn(output) or loss_fn(output, target) to the file to verify with yours"
)


WITHOUT_ROWS = "outputs that are no rows, taken as every microbatch gives them"


def own_loss(output: Any) -> Tensor | None:
    """Return the loss that a model returns by itself: its output, or `loss` of it; None where there is none.

    A tensor of one number counts, whatever its dimensions: tell by an output for several rows whether it is a loss.
    """
    if isinstance(output, Tensor):
        return output if output.numel() == 1 else None
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return found if isinstance(found, Tensor) and found.numel() == 1 else None


def has_outputs_without_rows(output: Any) -> bool:
    """Return whether some floating output, of several rows, is one number: it may be anything but a sum over rows."""
    return any(tensor.is_floating_point() and tensor.numel() == 1 for tensor in _tensors(output))


def stand_in_loss(output: Any, target: Any = None, *, is_own: bool = False) -> Tensor:
    """Return the sum over a model's floating outputs of their mean square; its own loss where it returns one."""
    if is_own:
        found = own_loss(output)
        assert found is not None  # it had one before
        return found.reshape(())
    squares = [(tensor**2).mean() for tensor in _tensors(output) if tensor.is_floating_point() and tensor.numel()]
    return torch.stack([square.double() for square in squares]).sum() if squares else torch.zeros(())


def with_loss(model_file: ModelFile, *, is_own: bool) -> ModelFile:
    """Return a model file that has a loss: its own, or `stand_in_loss`; `is_own` says that the model returns one."""
    if model_file.loss_fn is not None:
        return model_file
    return dataclasses.replace(model_file, loss_fn=partial(stand_in_loss, is_own=is_own))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))

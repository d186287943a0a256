"""The models of the zoo as a user's file: functions that build each and make its inputs, and one loss for all."""

from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor

from tests.zoo import models


def loss_fn(output: Any) -> Tensor:
    """Return the mean square of every output together."""
    return torch.stack([(tensor.double() ** 2).mean() for tensor in _tensors(output)]).sum()


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if is_dataclass(value):
        value = vars(value)
    items = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
    return [tensor for item in items for tensor in _tensors(item)]


NAMES = (
    "transformer",
    "skips",
    "root_parameters",
    "convolutions",
    "functional_tie",
    "called_twice",
    "torch_encoder",
    "divided_and_read",
    "read_beside",
)

build_transformer = models.Transformer
inputs_transformer = models.INPUTS[models.Transformer]
build_skips = models.Skips
inputs_skips = models.INPUTS[models.Skips]
build_root_parameters = models.RootParameters
inputs_root_parameters = models.INPUTS[models.RootParameters]
build_convolutions = models.Convolutions
inputs_convolutions = models.INPUTS[models.Convolutions]
build_functional_tie = models.FunctionalTie
inputs_functional_tie = models.INPUTS[models.FunctionalTie]
build_called_twice = models.CalledTwice
inputs_called_twice = models.INPUTS[models.CalledTwice]
build_torch_encoder = models.TorchEncoder
inputs_torch_encoder = models.INPUTS[models.TorchEncoder]
build_divided_and_read = models.DividedAndRead
inputs_divided_and_read = models.INPUTS[models.DividedAndRead]
build_read_beside = models.ReadBeside
inputs_read_beside = models.INPUTS[models.ReadBeside]

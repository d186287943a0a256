"""Inputs in lists and dicts, beside numbers: what a data loader gives."""

from typing import Any

import torch
from torch import Tensor, nn


class Nested(nn.Module):
    """A list of differently wide inputs, a number between tensors, a dict, and a keyword with a dict in it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(4, 4), nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(
        self, features: list[Tensor], scale: float, pair: dict[str, Tensor], *, extra: dict[str, Any]
    ) -> dict[str, Any]:
        h = torch.tanh(self.a(features[0])) + torch.tanh(self.b(features[1]))
        h = self.c(h * scale) + pair["w"].unsqueeze(-1)
        return {"out": self.d(h) * extra["inner"][0].unsqueeze(-1), "kept": (h, None)}


def inputs(rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args = ([torch.randn(rows, 4), torch.randn(rows, 3)], 0.5, {"w": torch.rand(rows)})
    return args, {"extra": {"inner": (torch.rand(rows), "text")}}


class Listed(nn.Module):
    """The same by position alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(3, 4)

    def forward(self, features: tuple[Tensor, ...], scale: float, weights: Tensor) -> Tensor:
        return self.b(features[1] * scale) * weights.unsqueeze(-1) + torch.tanh(self.a(features[0]))


def listed_inputs(rows: int) -> tuple[Any, ...]:
    return (torch.randn(rows, 4), torch.randn(rows, 3)), 2.0, torch.rand(rows)


def loss_fn(output: Any) -> Tensor:
    tensors = [output] if isinstance(output, Tensor) else [output["out"], output["kept"][0]]
    return torch.stack([(tensor.double() ** 2).mean() for tensor in tensors]).sum()

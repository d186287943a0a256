"""Linear layers with a forward of their own, which says the product and the bias in other words than torch's."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 8


def added(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias, x.flatten(0, -2), weight.t()).view(*x.shape[:-1], -1)


def cast(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype), bias)


def scaled(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight * 0.5, bias) * 2.0


def multiplied(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x @ weight.T + bias


WAYS = {"added": added, "cast": cast, "scaled": scaled, "multiplied": multiplied}


class OwnLinear(nn.Linear):
    """Computes what a linear layer does, in one of the ways."""

    def __init__(self, inputs: int, outputs: int, way: str) -> None:
        super().__init__(inputs, outputs)
        self.way: Callable[[Tensor, Tensor, Tensor], Tensor] = WAYS[way]

    def forward(self, x: Tensor) -> Tensor:
        return self.way(x, self.weight, self.bias)


class Mlp(nn.Module):
    """A layer into the wide and one back, around which the input is added."""

    def __init__(self, way: str, hidden: int = 4 * WIDTH) -> None:
        super().__init__()
        self.up, self.down = OwnLinear(WIDTH, hidden, way), OwnLinear(hidden, WIDTH, way)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


def build(way: str, hidden: int = 4 * WIDTH) -> nn.Module:
    return nn.Sequential(Mlp(way, hidden), Mlp(way, hidden))


build_added, build_cast = partial(build, "added"), partial(build, "cast")
build_scaled, build_multiplied = partial(build, "scaled"), partial(build, "multiplied")
build_odd = partial(build, "added", 15)


def inputs(rows: int) -> tuple[Tensor]:
    return (torch.randn(rows, 3, WIDTH),)


def loss_fn(output: Tensor) -> Tensor:
    return (output**2).mean()

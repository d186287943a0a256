"""Models that write in place where stages may be cut: each class shows one kind, told in its docstring."""

from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 4


class Rectified(nn.Module):
    """Blocks whose first operation is an in-place ReLU, on what the layer before returned."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(RectifiedBlock() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class RectifiedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act, self.layer = nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.act(x))


class Scaled(nn.Module):
    """Blocks that scale their input in place, which is read again behind all of them: changed once, then left alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(ScaledBlock() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x + first


class ScaledBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2.0)
        return self.layer(x)


class Added(nn.Module):
    """Adds what a layer gives to a part of an earlier layer's tensor: Python takes the part before the layer runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x[:, 1:] += torch.tanh(layer(x * 1.5))[:, 1:]
        return x.sin()


class OfInput(nn.Module):
    """The model's own input is rectified in place, and read by its first layer alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Between(nn.Module):
    """In-place operations between the layers, on values that are read before and after, in one layer and in later."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h += 1
        y = self.b(h)
        y.add_(h)
        nn.functional.relu(y, True)
        return self.c(y) + h


class InputReadAgain(nn.Module):
    """Refused: the input is written in place, and read again by the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(self.act(x))) + x


class OtherView(nn.Module):
    """Refused: a view is written in place in the second layer, and its base read in the third."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        view = h.view(-1, 2, 2)
        y = self.b(h.clone())
        view.mul_(2)
        return self.c(y) + h


def inputs(rows: int) -> tuple[Tensor]:
    return (torch.randn(rows, WIDTH),)


def loss_fn(output: Any) -> Tensor:
    return (output.double() ** 2).mean()

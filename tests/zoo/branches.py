"""Models whose layers have several orders: towers that are recorded in turn, and branches that join."""

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

WIDTH = 8


class Block(nn.Module):
    """A residual block, which scales what it adds by a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return hidden + self.down(relu(self.up(self.norm(hidden)))) * mask


class Towers(nn.Module):
    """Two towers whose blocks run in turn; one scales its values in place, and both share a mask made of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.left_in, self.right_in = nn.Linear(4, WIDTH), nn.Linear(4, WIDTH)
        self.left = nn.ModuleList(Block() for _ in range(2))
        self.right = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(2 * WIDTH, 3)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        mask = (left.sum(-1, keepdim=True) > 0).to(left.dtype)
        a, b = self.left_in(left), self.right_in(right)
        for one, other in zip(self.left, self.right, strict=True):
            a = one(a, mask)
            b = other(b, 1 - mask)
            b.mul_(0.5)
        return self.head(torch.cat([a, b], -1))


def inputs_towers(batch_size: int) -> tuple[Tensor, Tensor]:
    """Return the inputs of both towers."""
    return torch.randn(batch_size, 5, 4), torch.randn(batch_size, 5, 4)


class Join(nn.Module):
    """Two values as one."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Bilinear(WIDTH, WIDTH, WIDTH)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return self.both(one, other)


class Shortcut(nn.Module):
    """Branches of one input that join, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, WIDTH)
        self.deep = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.side = nn.Linear(WIDTH, WIDTH)
        self.join = Join()
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, values: Tensor) -> Tensor:
        stem = self.stem(values)
        deep, side = self.deep(stem), self.side(stem)
        return self.head(self.join(deep, side) + side)


def inputs_shortcut(batch_size: int) -> Tensor:
    """Return the input."""
    return torch.randn(batch_size, 4)


def loss_fn(output: Tensor) -> Tensor:
    """Return the mean square."""
    return (output**2).mean()


build_towers, build_shortcut = Towers, Shortcut

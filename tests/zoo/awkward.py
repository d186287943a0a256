"""Blocks in which a careless division would be wrong: writes in place, shared weights, one weight read in two ways."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.division import LENGTH, WIDTH, Decoder, RmsNorm, Swiglu, inputs, loss_fn

__all__ = ["inputs", "loss_fn"]


class InPlace(nn.Module):
    """Residuals and activations written in place, after and before they are read by divided parts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.ReLU(inplace=True)
        self.down, self.side = nn.Linear(32, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x += self.down(self.act(self.up(self.norm(x * 1.0))))
        view = x.view(x.shape[0], LENGTH, 4, 4)
        view.mul_(0.5)
        y = self.side(x * 1.0)
        y.tanh_()
        x[:, 0] = 0.25
        return x + y


class Shared(nn.Module):
    """One linear layer called twice, one weight of two names, and a norm of divided heads."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.other.weight = self.up.weight
        self.norm, self.scale = RmsNorm(4), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        first = self.norm(self.up(x).view(x.shape[0], LENGTH, 4, 4)).flatten(2)
        second = self.up(x * self.scale) + self.other(x)
        return x + self.down(torch.tanh(first * second))


class BothForms(nn.Module):
    """A norm and a scale that whole and divided values share: no rank could tell which gradients to add up."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.scale = RmsNorm(4), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.norm(self.up(x * self.scale).view(x.shape[0], LENGTH, 4, 4)).flatten(2) * self.scale)
        return x + self.norm(y.view(x.shape[0], LENGTH, 4, 4)).flatten(2) * self.scale


class TwoWays(nn.Module):
    """A linear layer whose weight code reads too, a gate of both, and sums over the divided features."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.gate = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH), nn.Parameter(torch.ones(24) / 4)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.up(x)) * self.gate + F.linear(x, self.up.weight)
        total = h.sum(-1, keepdim=True) / 24
        picked = torch.stack([h, h * 2], dim=0).unbind(0)[1].flip(1).cumsum(1)
        return x + self.down(torch.where(picked > 0, picked, h)) * torch.sigmoid(total) + self.mean


class Rows(nn.Module):
    """Rows and sequence rolled, padded and joined around a divided part; the mean over features."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.norm, self.mix = Swiglu(), nn.LayerNorm(WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(self.norm(x.roll(1, dims=1)))
        joined = self.mix(torch.cat([y, x.flip(1)], dim=-1))
        first, rest = joined[:, :1], joined[:, 1:]
        return x - torch.cat([rest, first], dim=1).masked_fill(x > 2, 0.0) * y.mean(-1, keepdim=True)


build_in_place = partial(Decoder, InPlace)
build_shared = partial(Decoder, Shared)
build_both_forms = partial(Decoder, BothForms)
build_two_ways = partial(Decoder, TwoWays)
build_rows = partial(Decoder, Rows)

"""Models that draw random numbers: dropout, noise, random depth and random order."""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 8


def inputs(rows: int) -> tuple[Tensor]:
    return (torch.randn(rows, 4, WIDTH),)


def loss_fn(output: Any) -> Tensor:
    """Return the mean square of every output together."""
    tensors = [output] if isinstance(output, Tensor) else list(output)
    return torch.stack([(tensor.double() ** 2).mean() for tensor in tensors]).sum()


class Noise(nn.Module):
    """Noise like its input: no parameters, and nothing in its name tells that it is random."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.randn_like(x)


class NoisyBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.noise = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), Noise()

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        x = x + 0.1 * noise + self.noise(x)
        return x + self.down(torch.tanh(self.up(x)))


class SharedNoise(nn.Module):
    """Noise drawn once, from the input alone, and added in every block: all of them must see the same numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = Noise()
        self.blocks = nn.ModuleList(NoisyBlock() for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        noise = self.noise(x)
        for block in self.blocks:
            x = block(x, noise)
        return x, noise


class DropPath(nn.Module):
    """Stochastic depth: a residual branch is dropped for whole rows."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.p_skip = probability

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = x.new_empty(x.shape[0], 1, 1).bernoulli_(1 - self.p_skip)
        return x * kept / (1 - self.p_skip)


class DropBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.skip = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), DropPath(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.skip(self.down(torch.tanh(self.up(x))))


class StochasticDepth(nn.Module):
    """Stochastic depth in blocks, and a random choice of which of two layers counts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DropBlock() for _ in range(3))
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        coin = torch.rand(x.shape[0], 1, 1, device=x.device, dtype=x.dtype)
        return torch.where(coin < 0.5, self.left(x), self.right(x))


class Shuffled(nn.Module):
    """A random order of the sequence, as masked autoencoders and permutation models have."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        order = torch.rand(x.shape[:2], device=x.device).argsort(dim=1)
        back = order.argsort(dim=1)
        taken = self.first(torch.gather(x, 1, order.unsqueeze(-1).expand_as(x)))
        taken = torch.tanh(self.second(taken[:, :2]))
        filled = torch.cat([taken, taken.new_zeros(x.shape[0], 2, WIDTH)], 1)
        x = self.third(torch.gather(filled, 1, back.unsqueeze(-1).expand_as(filled)))
        return x[:, torch.randperm(4, device=x.device)] * torch.arange(1.0, 5.0, device=x.device).view(1, 4, 1)


class DropoutBlock(nn.Module):
    """Dropout on whole values, on divided ones, and inside attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.inner, self.outer = nn.Dropout(0.25), nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.25 if self.training else 0.0)
        x = x + self.outer(self.out(y.transpose(1, 2).reshape(rows, length, width)))
        return x + F.dropout(self.down(self.inner(torch.tanh(self.up(x)))), 0.25, self.training)


class Dropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DropoutBlock() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def spans(shape: tuple[int, int], fraction: float) -> Any:
    """Return which positions of each row are masked, as an array: the way of speech models."""
    mask = np.zeros(shape, dtype=bool)
    for row in mask:
        row[np.random.choice(shape[1], int(fraction * shape[1] + np.random.rand()), replace=False)] = True
    return mask


class SpecAugment(nn.Module):
    """Masks drawn with numpy between the layers, by a function of the file."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.masked = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.rand(WIDTH))
        self.blocks = nn.ModuleList(DropBlock() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.training:
            mask = torch.tensor(spans((x.shape[0], x.shape[1]), fraction=0.5), device=x.device, dtype=torch.bool)
            x[mask] = self.masked.to(x.dtype)
        for block in self.blocks:
            x = block(x)
        return x


class NumpyNoise(nn.Module):
    """A block that draws with numpy itself, and is called whole."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.tensor(np.random.standard_normal(tuple(x.shape)), device=x.device, dtype=x.dtype)
        return x + torch.tanh(self.linear(x + noise)) * random.random()


class NumpyBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NumpyNoise() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class SpansUsedOtherwise(SpecAugment):
    """What was drawn is looked at by other code than what makes a tensor of it."""

    def forward(self, x: Tensor) -> Tensor:
        drawn = spans((x.shape[0], x.shape[1]), fraction=0.5)
        return self.first(x) * torch.tensor(~drawn, device=x.device)[..., None]  # inverted


build_spec_augment = SpecAugment
build_numpy_blocks = NumpyBlocks
build_spans_used_otherwise = SpansUsedOtherwise
build_shared_noise = SharedNoise
build_stochastic_depth = StochasticDepth
build_shuffled = Shuffled
build_dropout = Dropout

"""Models that write in place where stages meet: what a stage reads after a write must be what one process reads."""

import torch
from torch import Tensor, nn

from tests.zoo.exact import loss_fn as loss_fn  # the loss of a model file
from tests.zoo.models import WIDTH
from tests.zoo.values import Mixer, _floats


class Writes(nn.Module):
    """Values written in place between layers, in four ways, after an earlier layer has read them, and read again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixer() for _ in range(5))
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        a = self.layers[0](x)
        b = self.layers[1](a.relu())
        a = a * 1.0
        a.masked_fill_(mask.unsqueeze(-1), 0.5)
        c = self.layers[2](b + a)
        kept = c.clone()
        kept[:, 1] = a[:, 0]
        kept[mask] = 0.25
        d = self.act(self.layers[3](kept)) + 0
        d.add_(kept).mul_(0.5)
        e = self.layers[4](d)
        return e + d + kept + self.act(c - 0.1)


class WritingBlocks(nn.Module):
    """Blocks that write their argument in place, so that what the model keeps of it changes too."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(WritingBlock() for _ in range(3))
        self.head = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        first = self.stem(x).tanh() + 0
        x = first * 2
        for block in self.blocks:
            x = block(x, first)
        return self.head(torch.cat([x, first], -1))


class WritingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = Mixer()

    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        first += 0.125
        x.mul_(0.5)
        return self.mix(x + first)


class Views(nn.Module):
    """A view whose base is written in a later layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        base = self.layers[0](x) * 1
        half = base[:, : WIDTH // 2]
        y = self.layers[1](base.tanh())
        base.add_(y)
        z = self.layers[2](y)
        return self.layers[3](z + torch.cat([half, half], -1))


class BaseOfViews(nn.Module):
    """A base whose view is written in a later layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        base = self.layers[0](x) * 1
        half = base[:, : WIDTH // 2]
        y = self.layers[1](base.tanh())
        half.add_(y[:, : WIDTH // 2])
        return self.layers[3](self.layers[2](y) + base)


class WrittenInput(nn.Module):
    """An input of the model that is written in place, and read by a later layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixer() for _ in range(4))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        y = self.layers[1](self.layers[0](x))
        bias.mul_(2.0)
        return self.layers[3](self.layers[2](y + bias)) + bias


class Filled(nn.Module):
    """A new tensor that several layers fill, slice by slice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_zeros(x.size(0), 4, WIDTH)
        for index, layer in enumerate(self.layers):
            x = layer(x)
            out[:, index] = x
        return out


class Accumulated(Filled):
    """A slice of an earlier layer's tensor that a later layer adds to."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        out[:, 1] += self.layers[0](x)
        return self.layers[1](out)


class ChainedViews(nn.Module):
    """Reshapes and transposes without a write, read on other stages than they are made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers[0](x)
        turned, halves = y.t(), y.chunk(2, -1)
        z = self.layers[1](y)
        z = self.layers[2](z + turned.t())
        return self.layers[3](z + torch.cat(halves[::-1], -1))


def _masked(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 3, WIDTH), torch.rand(rows, 3) > 0.5


def _two(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)


NAMES = ("writes", "writing_blocks", "filled", "chained_views", "accumulated")
build_accumulated, inputs_accumulated = Accumulated, _floats
build_writes, inputs_writes = Writes, _masked
build_writing_blocks, inputs_writing_blocks = WritingBlocks, _floats
build_filled, inputs_filled = Filled, _floats
build_chained_views, inputs_chained_views = ChainedViews, _floats
build_views, inputs_views = Views, _floats
build_base_of_views, inputs_base_of_views = BaseOfViews, _floats
build_written_input, inputs_written_input = WrittenInput, _two

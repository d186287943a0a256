"""Models whose forward enables autocast: what is computed under it can't be recorded."""

import torch
from torch import Tensor, nn

from tests.zoo.exact import loss_fn as loss_fn  # the loss of a model file

WIDTH = 8


class Block(nn.Module):
    """Its own autocast around its first product, and one that is off around the second."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.up(x)
        with torch.autocast("cpu", enabled=False):
            return x + self.down(torch.tanh(y.to(x.dtype)))


class OffBlock(Block):
    """Nothing but an autocast that is off, within one that is on."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
            return x + self.down(torch.tanh(self.up(x)))


class GpuBlock(Block):
    """One for a GPU, by a decorator."""

    @torch.autocast("cuda", dtype=torch.bfloat16)
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Blocks(nn.Module):
    """Four blocks between two linear layers."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Around(Blocks):
    """One around everything."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x)


def build_inside() -> nn.Module:
    return Blocks(Block)


def build_off() -> nn.Module:
    return Blocks(OffBlock)


def build_gpu() -> nn.Module:
    return Blocks(GpuBlock)


def build_around() -> nn.Module:
    return Around(OffBlock)


def example_inputs(batch_size: int) -> tuple[Tensor]:
    return (torch.randn(batch_size, 4, WIDTH),)

"""Models with buffers: persistent or not, updated in forward, read on several stages; one step depends on the last."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.exact import loss_fn as loss_fn  # the loss of a model file
from tests.zoo.models import WIDTH, ConvolutionBlock
from tests.zoo.values import Mixer, _floats, _images


class Tables(nn.Module):
    """Buffers of the root, persistent or not, that every stage reads, and one of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(0, 1, WIDTH))
        self.register_buffer("hidden", torch.linspace(1, 2, WIDTH), persistent=False)
        self.register_buffer("order", torch.arange(WIDTH).flip(0))
        self.register_buffer("nothing", None)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Mixer() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) * self.hidden
        for block in self.blocks:
            x = block(x + self.table)[:, self.order]
        return self.head(x) * self.hidden


class Running(nn.Module):
    """Every block divides by a running mean of its inputs, which it updates first, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(RunningBlock() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class RunningBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = Mixer()
        self.register_buffer("mean", torch.ones(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.count += 1
                self.mean.mul_(0.9).add_(x.detach().abs().mean(0), alpha=0.1)
        return self.mix(x * self.mean) / (1 + self.count)


class Assigned(nn.Module):
    """Buffers of the root and of blocks that forward replaces by new tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(AssignedBlock() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        self.scale = 0.5 * self.scale + 0.5 * x.detach().abs().mean(0)
        self.steps = self.steps + 1
        x = x / self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class AssignedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = Mixer()
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.mix(x) + self.seen
        self.seen = self.seen * 0.5 + x.detach().mean(0)
        return y


class Codebook(nn.Module):
    """Vector quantization: a codebook that is no parameter follows what is near it, and gradients pass through."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.quantize, self.decode = nn.Linear(WIDTH, WIDTH), Quantizer(), nn.Linear(WIDTH, WIDTH)
        self.before, self.after = Mixer(), Mixer()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        codes, loss = self.quantize(self.before(self.encode(x)))
        return self.decode(self.after(codes)), loss


class Quantizer(nn.Module):
    def __init__(self, codes: int = 6) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("codebook", torch.randn(codes, WIDTH))
        self.register_buffer("sizes", torch.ones(codes))
        self.register_buffer("sums", self.codebook.clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.project(x)
        with torch.no_grad():
            chosen = torch.cdist(x, self.codebook).argmin(-1)
            if self.training:
                hot = F.one_hot(chosen, self.sizes.numel()).to(x.dtype)
                self.sizes.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.sums.data.mul_(0.9).add_(hot.t() @ x, alpha=0.1)
                self.codebook.data.copy_(self.sums / self.sizes.unsqueeze(-1))
        nearest = F.embedding(chosen, self.codebook)
        loss = F.mse_loss(x, nearest.detach()) + (x @ self.codebook.t()).square().mean()
        return x + (nearest - x).detach(), loss


class Shared(nn.Module):
    """A counter of the root that one stage writes and another reads: no two processes can share it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.ones(WIDTH))
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Mixer() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        with torch.no_grad():
            self.level.mul_(0.5).add_(x.abs().mean(0))
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.level


class Normalized(nn.Module):
    """Batch norm, whose running statistics every microbatch updates."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.norm = nn.BatchNorm2d(WIDTH)
        self.body = nn.Sequential(*(ConvolutionBlock() for _ in range(3)))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, images: Tensor) -> Tensor:
        x = self.body(F.relu(self.norm(self.stem(images))))
        return self.head(x.mean((2, 3)))


NAMES = ("tables", "running", "assigned", "codebook", "normalized", "shared")  # the last is refused in two stages
build_tables, inputs_tables = Tables, _floats
build_running, inputs_running = Running, _floats
build_assigned, inputs_assigned = Assigned, _floats
build_codebook, inputs_codebook = Codebook, _floats
build_shared, inputs_shared = Shared, _floats
build_normalized, inputs_normalized = Normalized, _images

"""A mixture of experts as libraries write it: grouped products, router logits kept aside for a loss, a shared block."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, EXPERTS, TOKENS = 8, 3, 4


class Router(nn.Module):
    """Every token's two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(x, self.weight)
        weights, chosen = torch.topk(logits.softmax(-1), 2, dim=-1)
        return logits, weights, chosen


class Experts(nn.Module):
    """Each expert's matrix multiplies the rows that were sent to it: how many those are depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        expert, order = torch.sort(chosen.reshape(-1))
        counts = torch.histc(expert.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        stops = torch.cumsum(counts, 0, dtype=torch.int32)
        out = F.grouped_mm(x[order // 2], self.weight, offs=stops) * weights.reshape(-1)[order].unsqueeze(-1)
        return torch.empty_like(out).index_copy(0, order, out).view(-1, 2, WIDTH).sum(1)


class Shared(nn.Module):
    """One module of parameters that several blocks hold."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


class Scale(nn.Module):
    """A leaf that is not torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Block(nn.Module):
    """A hook keeps the router's logits for whoever reads them later."""

    def __init__(self, shared: Shared, scale: Scale) -> None:
        super().__init__()
        self.shared, self.scale, self.router, self.experts = shared, scale, Router(), Experts()

    def forward(self, x: Tensor) -> Tensor:
        flat = self.scale(x + self.shared(x)).reshape(-1, WIDTH)
        _, weights, chosen = self.router(flat)
        return x + self.experts(flat, weights, chosen).view_as(x)


class Mixture(nn.Module):
    """The routers' losses are divided by the number of tokens, a float that grows with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        shared, scale = Shared(), Scale()
        self.blocks = nn.ModuleList(Block(shared, scale) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.logits: list[Tensor] = []
        self.is_hooked = False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if not self.is_hooked:  # as libraries do, at the first forward
            for block in self.blocks:
                block.router.register_forward_hook(lambda module, inputs, output: self.logits.append(output[0]))
            self.is_hooked = True
        self.logits.clear()
        y = self.embed(x)
        for block in self.blocks:
            y = block(y)
        tokens = 0.0
        loss = torch.zeros(EXPERTS, dtype=torch.float32)
        for logits in self.logits:
            loss = loss + logits.softmax(-1).sum(0).square() / TOKENS
            tokens = tokens + logits.shape[0]
        return self.head(y), (loss / tokens).sum() * (1.0 / x.shape[0])


def build_model() -> nn.Module:
    return Mixture()


def example_inputs(rows: int) -> tuple[Tensor]:
    return (torch.randn(rows, TOKENS, WIDTH),)


def loss_fn(output: tuple[Tensor, Tensor]) -> Tensor:
    """Return a loss that reads both outputs."""
    return output[0].square().mean() + output[1]

"""Random numbers beside a loss that counts labels: what verify compares with must count as the plan does."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WORDS, WIDTH, LENGTH = 40, 16, 6


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + 0.1 * torch.randn_like(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def build_denoiser() -> nn.Module:
    return Denoiser()


def inputs(rows: int) -> tuple[Tensor]:
    return (torch.randint(0, WORDS, (rows, LENGTH)),)


def example_target(rows: int) -> Tensor:
    return torch.randint(0, WORDS, (rows, LENGTH))


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())

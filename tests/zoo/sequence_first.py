"""Inputs and target with the batch on dimension 1, a padding mask with it on 0, and class weights without rows."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 5


class Tagger(nn.Module):
    """torch's sequence-first encoder with a padding mask (rows, length), and a head tied to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16, padding_idx=0)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, ids: Tensor, padding: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(ids), src_key_padding_mask=padding))


def build_model() -> nn.Module:
    return Tagger()


def example_inputs(batch_size: int) -> dict[str, Tensor]:
    lengths = torch.randint(2, 6, (batch_size, 1))
    return {"ids": torch.randint(1, 32, (5, batch_size)), "padding": torch.arange(5) >= lengths}


def example_target(batch_size: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, CLASSES, (5, batch_size)), torch.rand(CLASSES) + 0.5


def loss_fn(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    labels, weights = target
    return F.cross_entropy(output.flatten(0, 1), labels.flatten(), weight=weights, reduction="none").mean()

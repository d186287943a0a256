"""Kinds of code that models are made of, one small model each: what a library wraps around layers, and odd inputs."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH = 8


def inputs(rows: int) -> tuple[Tensor]:
    return (torch.randn(rows, 3, WIDTH),)


def loss_fn(output: Any) -> Tensor:
    """Return the mean square of a tensor, or of a language model's logits."""
    tensor: Tensor = output if isinstance(output, Tensor) else output.logits
    return tensor.double().square().mean()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Spectral(Block):
    """The older spectral_norm, whose hook computes the weight before every call."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.utils.spectral_norm(self.up), nn.utils.spectral_norm(self.down)


class Parametrized(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = parametrizations.spectral_norm(self.up), parametrizations.spectral_norm(self.down)


class Recomputed(Block):
    """Computes a part in single precision, and again in backward; in either way of torch's."""

    reentrant = False

    def body(self, x: Tensor) -> Tensor:
        return super().forward(torch.softmax(x.float(), -1).type_as(x))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


class RecomputedReentrant(Recomputed):
    reentrant = True


class Sometimes(Block):
    """Experts that run only for rows in their range of levels: in some steps, some get no gradient at all."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        level = x.detach().flatten(1).mean(1)
        result = x
        for index, expert in enumerate(self.experts):
            chosen = ((level * 20).floor() == index - 6).nonzero().squeeze(1)
            if chosen.numel():
                result = result.index_add(0, chosen, expert(x[chosen]))
        return result


class Stack(nn.Module):
    def __init__(self, block: type[nn.Module], count: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def build_spectral() -> nn.Module:
    return Stack(Spectral)


def build_parametrized() -> nn.Module:
    return Stack(Parametrized)


def build_recomputed() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *Stack(Recomputed).layers)


def build_recomputed_reentrant() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *Stack(RecomputedReentrant).layers)


def build_sometimes() -> nn.Module:
    return Stack(Sometimes)


class Pieces(nn.Module):
    """Takes a list of tensors of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.stems = nn.ModuleList(nn.Linear(width, WIDTH) for width in (4, 6, 10))
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, pieces: list[Tensor]) -> Tensor:
        x = torch.stack([stem(piece).mean(1) for stem, piece in zip(self.stems, pieces, strict=True)], 1)
        for layer in self.layers:
            x = layer(x)
        return x


def inputs_pieces(rows: int) -> tuple[list[Tensor]]:
    return ([torch.randn(rows, length, width) for length, width in ((3, 4), (5, 6), (2, 10))],)


build_pieces = Pieces


class Synchronized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Conv1d(3, 3, 1), nn.SyncBatchNorm(3)) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


build_synchronized = Synchronized


def build_library_checkpointing() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=2, max_position_embeddings=16, **sizes))
    model.gradient_checkpointing_enable()
    return model


def inputs_library_checkpointing(rows: int) -> dict[str, object]:
    return {"input_ids": torch.randint(0, 32, (rows, 6)), "use_cache": False}

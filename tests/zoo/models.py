"""Small models: what each shows is said in its docstring. `FILES` gives each as a model file's functions."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.model_file import ModelFile

WIDTH = 8


class Block(nn.Module):
    """A block whose heads, head size and sequence are the same number: nothing may be told by matching values."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, width // self.heads).unbind(2)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.dropout(F.gelu(self.up(x)), 0.25, self.training))


class Transformer(nn.Module):
    """A chain of equal blocks with tied embedding and head."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Skips(nn.Module):
    """A U-shape: values skip over several layers, are concatenated, and one is written in place after its first use."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.down:
            x = F.relu(layer(x))
            kept.append(x)
        x = x.clone()
        x.mul_(0.5)
        for layer in self.up:
            x = torch.tanh(layer(torch.cat([x, kept.pop()], dim=-1)))
        return x.sum(-1)


class RootParameters(nn.Module):
    """Parameters and buffers on the model itself, read between its layers; several outputs in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("bias", torch.linspace(0, 1, WIDTH), persistent=False)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> dict[str, Any]:
        hidden = self.first(x) * self.scale + self.bias
        if mask is not None:
            hidden = hidden.masked_fill(~mask.unsqueeze(-1), 0.0)
        out = self.second(hidden) + self.shift
        return {"out": out, "norms": (hidden.norm(dim=-1), None)}


class Convolutions(nn.Module):
    """Convolutions with batch norm and in-place activations: blocks in a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.body = nn.Sequential(*(ConvolutionBlock() for _ in range(3)))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(self.stem(images)).mean((2, 3)))


class ConvolutionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.norm(self.conv(x)))


class Branching(nn.Module):
    """A branch on the data: no fixed program computes it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return x if x.sum() > 0 else -x


class BatchLoop(nn.Module):
    """A Python loop over the rows of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.layer(row) for row in x])


class DrawnTensor(nn.Module):
    """A tensor that is neither parameter nor buffer nor attribute, and other in every model that is built."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.tables = nn.Linear(WIDTH, WIDTH), [torch.randn(WIDTH)]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.tables[0]


class FunctionalTie(nn.Module):
    """An embedding's weight read again by a function at the other end, and a root parameter read at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.scale = nn.Embedding(32, 16), nn.Parameter(torch.ones(16))
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * self.scale
        for block in self.blocks:
            x = block(x)
        return F.linear(x * self.scale, self.embed.weight)


class CalledTwice(nn.Module):
    """A module called at both ends, and a root parameter passed to every block; an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.ends, self.gate = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(Gated() for _ in range(3))
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.ends(x)
        for block in self.blocks:
            x = block(x, self.gate)
        return self.ends(x)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x))) * gate


class TorchEncoder(nn.Module):
    """torch's own transformer layers, which are blocks like anybody's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(16, 32)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(ids)))


class DividedAndRead(nn.Module):
    """A root layer with the name of a part of the blocks, its weight read again by functions at the other end."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Gated() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.ones_like(x)
        y = self.down(torch.relu(self.up(x)))
        for block in self.blocks:
            y = block(y, gate)
        return F.linear(torch.relu(F.linear(y, self.up.weight, self.up.bias)), self.up.weight.t())


class ReadBeside(nn.Module):
    """A weight that the glue beside its layer reads must stay whole; arguments named like variables of emitted code."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Normed() for _ in range(2))

    def forward(self, batch: Tensor, dtype: Tensor) -> Tensor:
        x = torch.tanh(self.first(batch)) @ self.first.weight
        for block in self.blocks:
            x = block(x, dtype)
        return self.second(x)


class Normed(nn.Module):
    """Computed weights can't be divided; a reshape by the batch next to an argument of that name."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 2 * WIDTH))
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, batch: Tensor, device: Tensor) -> Tensor:
        return batch + self.down(torch.tanh(self.up(batch)).view(batch.shape[0], 2 * WIDTH)) * device


def _ids(rows: int) -> tuple[Tensor]:
    return (torch.randint(0, 32, (rows, 4)),)


def _floats(rows: int) -> tuple[Tensor]:
    return (torch.randn(rows, WIDTH),)


def _masked(rows: int) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, 3, WIDTH), "mask": torch.rand(rows, 3) > 0.3}


def _named(rows: int) -> dict[str, Tensor]:
    return {"batch": torch.randn(rows, WIDTH), "dtype": torch.randn(rows, WIDTH)}


def _images(rows: int) -> tuple[Tensor]:
    return (torch.randn(rows, 3, 6, 6),)


INPUTS: dict[type[nn.Module], Callable[[int], Any]] = {
    Transformer: _ids,
    Skips: _floats,
    RootParameters: _masked,
    Convolutions: _images,
    Branching: _floats,
    BatchLoop: _floats,
    DrawnTensor: _floats,
    FunctionalTie: _ids,
    CalledTwice: _floats,
    TorchEncoder: _ids,
    DividedAndRead: _floats,
    ReadBeside: _named,
}


def model_file(model: type[nn.Module], **options: Any) -> ModelFile:
    """Return a model of the zoo as what `load_model_file` gives."""
    return ModelFile(path=Path(__file__), build=lambda: model(**options), example_inputs=INPUTS[model])

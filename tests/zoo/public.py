"""Habits of published code, one small model each: what each shows is said in its docstring."""

import functools
import math
import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 16
SHIFT = torch.linspace(-1, 1, WIDTH).view(1, 1, WIDTH)


def loss_fn(output: Any) -> Tensor:
    """Return the mean square of every output together."""
    tensors = (
        [output] if isinstance(output, Tensor) else [value for value in output.values() if isinstance(value, Tensor)]
    )
    return torch.stack([(tensor.double() ** 2).mean() for tensor in tensors]).sum()


def rotations(width: int, length: int) -> Tensor:
    """Return complex numbers of absolute value one, [length, width / 2]."""
    angles = torch.outer(torch.arange(length), 1.0 / 100 ** (torch.arange(0, width, 2) / width))
    return torch.polar(torch.ones_like(angles), angles)


@functools.lru_cache
def distances(length: int) -> Tensor:
    """Return how far apart positions are; made once for a length."""
    positions = torch.arange(length)
    return (positions[None] - positions[:, None]).abs()


class Rotated(nn.Module):
    """A block that turns pairs of numbers, with a bias that every block gets from one cached function."""

    def __init__(self, length: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.weight = 1.0 / torch.arange(1, length + 1)
        self.kept: Tensor | None = None

    def mask(self, x: Tensor) -> Tensor:
        if self.kept is None or len(self.kept) < x.shape[1]:
            self.kept = torch.ones(x.shape[1], x.shape[1]).tril().to(x.device)
        return self.kept

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        turned = torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).double()) * turns)
        scores = -distances(x.shape[1]) * self.weight[: x.shape[1]] * self.mask(x)
        mixed = torch.einsum("ts,bsd->btd", scores.type_as(x).softmax(-1), turned.flatten(-2).type_as(x))
        return x + self.down(F.silu(self.up(mixed)))


class PlainTensors(nn.Module):
    """A table as a plain attribute of the model, which forward moves to its device; others inside blocks, in a list and
    under a global name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32)
        self.blocks = nn.ModuleList(Rotated() for _ in range(3))
        self.turns = rotations(WIDTH, 16)
        self.scale = torch.tensor(math.sqrt(WIDTH))
        self.bands = [2.0**number for number in torch.arange(3)]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * self.scale + sum(torch.sin(ids.unsqueeze(-1) * band) for band in self.bands) + SHIFT
        self.turns = self.turns.to(x.device)
        for block in self.blocks:
            x = block(x, self.turns[: ids.shape[1]])
        return self.head(x)


class Swish(nn.Module):
    """An activation with a buffer and a plain tensor of its own, and no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("beta", torch.tensor(1.5), persistent=False)
        self.shift = torch.tensor(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.beta * x) + self.shift


class Checked(nn.Module):
    """Checks of values, as statements and in torch itself; a hook that keeps what a layer returns; any object."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act = nn.Linear(WIDTH, 2 * WIDTH), Swish()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2 * WIDTH, 2 * WIDTH), self.act) for _ in range(2))
        self.head = nn.Linear(2 * WIDTH, 3)
        self.hooked = False
        self.kept: list[Tensor] = []

    def keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.kept.append(output)

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Any]:
        assert (mask >= 0).all(), "a mask is not negative"
        if mask is not None and not torch.isfinite(x).all():
            raise ValueError("not finite")
        if not self.hooked:
            self.blocks[0].register_forward_hook(self.keep)
            self.hooked = True
        self.kept = []
        x = self.act(self.first(x * mask))
        torch._check_tensor_all(mask < 2, lambda: "a mask is one or zero")
        for block in self.blocks:
            x = block(x)
        normal = torch.distributions.Normal(self.head(x), 1.0)
        return {"out": normal.mean + self.kept[0].mean(), "odds": normal.log_prob(torch.zeros(())), "cache": object()}


def ids(rows: int) -> tuple[Tensor]:
    return (torch.randint(0, 32, (rows, 6)),)


class Against(nn.Module):
    """A head with one parameter of its own that multiplies by another module's weight, which forward is given."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(32))

    def forward(self, x: Tensor, embedding: nn.Embedding) -> Tensor:
        return x @ embedding.weight.t() + self.bias


class Biased(nn.Module):
    def __init__(self, *, first: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.zeros(6, WIDTH)) if first else None
        self.wide = nn.Sequential(nn.Linear(WIDTH, WIDTH)).to(torch.float32)

    def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        self.wide = self.wide.to(torch.get_default_dtype())
        bias = self.bias if bias is None else bias
        return x + self.down(torch.relu(self.up(self.wide(x) + bias))), bias


class FirstHasMore(nn.Module):
    """Two blocks of which the first has a parameter that both use; modules that forward converts, or is given."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, WIDTH), Against()
        self.blocks = nn.ModuleList(Biased(first=index == 0) for index in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x, bias = self.embed(ids), None
        for block in self.blocks:
            x, bias = block(x, bias)
        return self.head(x, self.embed)


def masked(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, WIDTH), torch.ones(rows, WIDTH)


build_plain_tensors = PlainTensors
inputs_plain_tensors = ids
build_first_has_more = FirstHasMore
inputs_first_has_more = ids
build_checked = Checked
inputs_checked = masked


class Settings(dict[str, int]):
    """Settings read as attributes, which raise KeyError for one they lack: `copy.deepcopy` can't copy them."""

    __getattr__ = dict.__getitem__


class Closure(nn.Module):
    """A block whose MLP is a function kept as an attribute, which reads its parts where it was defined (minGPT)."""

    def __init__(self) -> None:
        super().__init__()
        self.settings, self._lock = Settings(width=WIDTH), threading.Lock()
        self.norm = nn.LayerNorm(WIDTH)
        self.parts = nn.ModuleDict({"up": nn.Linear(WIDTH, 2 * WIDTH), "down": nn.Linear(2 * WIDTH, WIDTH)})
        parts, steps = self.parts, [self.norm]
        self.mlp = lambda x: parts.down(torch.tanh(parts.up(steps[0](x))))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mlp(x)
        return out


class NumbersOfNumpy(nn.Module):
    """Numpy's numbers and arrays among arguments; a buffer that is moved to where it is; `.new` and `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.stem.weight.data = torch.tensor(np.random.default_rng(0).normal(0.0, 0.2, (WIDTH, WIDTH)).astype("f4"))
        self.register_buffer("table", torch.linspace(0, 1, 4 * WIDTH).view(4, WIDTH))
        self.blocks = nn.ModuleList(Closure() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.order = np.array([3, 1, 2, 0])

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        self.table = self.table.to(x.device)
        x = self.stem(x) * np.sqrt(WIDTH) + self.table[ids % np.int64(4)] + x.new_tensor(np.ones(WIDTH))
        x = torch.cat([x, x.data.new(x.size(0), WIDTH).zero_() * torch.tensor(np.float64(2.0))], -1)[:, :WIDTH]
        for block in self.blocks:
            x = block(x)[:, np.arange(WIDTH)]
        out: Tensor = self.head(x).view(-1, 4, WIDTH // 4)[:, self.order]
        return out


build_numbers_of_numpy = NumbersOfNumpy


def inputs_numbers_of_numpy(batch_size: int) -> tuple[Tensor, Tensor]:
    """Return rows and integers."""
    return torch.randn(batch_size, WIDTH), torch.arange(batch_size)


class MaskedEncoder(nn.Module):
    """`nn.TransformerEncoder` with a mask that forward computes and keeps, whose values torch's own code asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: Tensor | None = None
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None or self.mask.size(0) != x.size(1):
            self.mask = torch.log(torch.tril(torch.ones(x.size(1), x.size(1)))).to(x.device)
        out: Tensor = self.head(self.encoder(x, mask=self.mask))
        return out


build_masked_encoder = MaskedEncoder


def inputs_masked_encoder(batch_size: int) -> tuple[Tensor]:
    """Return rows of a sequence of five."""
    return (torch.randn(batch_size, 5, WIDTH),)


class ComplexProduct(nn.Module):
    """Layers that multiply by a matrix of complex numbers between Fourier transforms (state-space models)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.mixes = nn.ModuleList(Spectral() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for mix in self.mixes:
            x = x + mix(x)
        return x


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH // 2 + 1, WIDTH // 2 + 1, 2) * 0.2)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.fft.rfft(x) @ torch.view_as_complex(self.weight)
        out: Tensor = self.out(torch.fft.irfft(mixed, n=WIDTH))
        return out


build_complex_product = ComplexProduct


def inputs_complex_product(batch_size: int) -> tuple[Tensor]:
    """Return rows."""
    return (torch.randn(batch_size, WIDTH),)


class RowByRow(nn.Module):
    """A loop over the rows of the batch, in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.head(row) for row in self.stem(x)])


build_row_by_row = RowByRow
inputs_row_by_row = inputs_complex_product


class Bands(nn.Module):
    """Tables that forward reads one of, in a module that asks for the other one whenever it is moved (timm's rope)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bands", torch.linspace(1, 2, WIDTH), persistent=False)
        self.register_buffer("table", torch.sin(torch.arange(WIDTH) * self.bands), persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> "Bands":
        super()._apply(fn, recurse)
        self.bands = self.bands.to(torch.float32) if self.bands.dtype == torch.float16 else self.bands
        return self


class SeldomDropped(nn.Module):
    """Rows that a random number leaves out so seldom that it hardly ever does; a weight that is stored transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0].t())
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.empty(x.size(0), 1, dtype=x.dtype, device=x.device).bernoulli_(0.999)
        out: Tensor = x + self.out(torch.tanh(x @ self.weight)) * kept / 0.999
        return out


class Sequences(nn.Module):
    """A recognizer of sequences whose forward returns the loss of alignments (CTC) by the lengths it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.rope, self.stem = Bands(), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(SeldomDropped() for _ in range(4))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, text: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        rows, length, _ = x.shape
        x = (self.stem(x) * self.rope.table.requires_grad_(False)).flatten(0, 1)
        for block in self.blocks:
            x = block(x)
        log_probs = F.log_softmax(self.head(x), -1).view(rows, length, -1).transpose(0, 1)
        steps = torch.full((rows,), length, dtype=torch.long, device=x.device)
        return {"loss": F.ctc_loss(log_probs, text, steps, lengths)}


build_sequences = Sequences


def inputs_sequences(batch_size: int) -> dict[str, Tensor]:
    """Return rows, the text in each and how long it is."""
    text = torch.randint(1, 5, (batch_size, 3))
    return {"x": torch.randn(batch_size, 8, WIDTH), "text": text, "lengths": torch.randint(1, 4, (batch_size,))}


class StartsFromData(nn.Module):
    """A scale that its first batch sets (Glow's actnorm): a parameter that forward writes, in a module that looks at a
    value.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("started", torch.tensor(0, dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        if self.started.item() == 0:
            self.scale.data.copy_(1 / x.detach().std(0))
            self.started.fill_(1)
        return x * self.scale


def build_starts_from_data() -> nn.Module:
    """Return a model with such a scale between layers."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), StartsFromData(), nn.Linear(WIDTH, WIDTH))


inputs_starts_from_data = inputs_complex_product


class Detector(nn.Module):
    """A model that returns its features in training, and what it found in evaluation: how many, the values say."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.neck, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        scores = self.head(torch.tanh(self.neck(torch.tanh(self.stem(x)))))
        if self.training:
            return {"scores": scores}
        return [row[row > 0].tolist() for row in scores]


build_detector = Detector
inputs_detector = inputs_complex_product


class ComplexWeight(nn.Module):
    """A weight of complex numbers (Fourier neural operators as published)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(self.stem(x)) * self.weight, n=WIDTH)


build_complex_weight = ComplexWeight
inputs_complex_weight = inputs_complex_product


class HalvedGradient(nn.Module):
    """A value whose gradient a hook halves (MuZero's hidden state)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        x.register_hook(lambda gradient: gradient * 0.5)
        out: Tensor = self.head(x)
        return out


build_halved_gradient = HalvedGradient
inputs_halved_gradient = inputs_complex_product

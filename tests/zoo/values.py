"""Models whose values between layers are not one float tensor: each class shows one kind, told in its docstring."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.zoo.exact import loss_fn as loss_fn  # the loss of a model file

WIDTH = 8


class Mixer(nn.Module):
    """Two linear layers around a tanh, added to what comes in."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class LongSkips(nn.Module):
    """A value of the first layer that every later layer reads, and one of the second that only the last reads."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Joined() for _ in range(4))
        self.head = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        first = self.stem(x)
        second = torch.tanh(self.second(first))
        x = second
        for block in self.blocks:
            x = block(x, first)
        return self.head(torch.cat([x, second * first], -1))


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(2 * WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(torch.cat([x, first], dim=-1))))


class OddValues(nn.Module):
    """Integers, booleans, None, a number and a matrix without rows go from block to block beside the float value."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(OddBlock() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x)
        ids, mask, none, total, table = x.argmax(-1), x > 0, None, x.mean(), x.new_zeros(WIDTH, WIDTH)
        for block in self.blocks:
            x, ids, mask, none, total, table = block(x, ids, mask, none, total, table)
        return self.head(x) @ table, total


class OddBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.matrix = nn.Embedding(WIDTH, WIDTH), Mixer(), nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: Tensor, ids: Tensor, mask: Tensor, none: None, total: Tensor, table: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None, Tensor, Tensor]:
        y = self.mix(torch.where(mask, x, self.embed(ids))) * (1 + torch.tanh(total))
        table = 0.5 * table + torch.tanh(self.matrix(table)) + torch.eye(WIDTH, dtype=x.dtype, device=x.device)
        return y, (ids + 1) % WIDTH, ~mask, none, total + y.square().mean(), table


class State(NamedTuple):
    """What a block of `Structures` takes."""

    hidden: Tensor
    memory: tuple[Tensor, dict[str, Tensor]]


@dataclass
class Result:
    """What a block of `Structures` returns."""

    state: State
    extra: dict[str, Any]
    nothing: Tensor | None = None


class Structures(nn.Module):
    """Blocks that take named tuples and return dataclasses with dicts inside; so does the model."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(StructureBlock() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Result:
        x = self.stem(x)
        state, norms = State(x, (x * 2, {"first": x})), []
        for block in self.blocks:
            result = block(state)
            state = result.state
            norms.append(result.extra["norm"])
        return Result(State(self.head(state.hidden), state.memory), {"norms": norms}, result.nothing)


class StructureBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.side = Mixer(), Mixer()

    def forward(self, state: State) -> Result:
        hidden, (memory, kept) = state
        hidden = self.mix(hidden + kept["first"])
        memory = self.side(memory) + state.hidden
        return Result(State(hidden, (memory, {"first": kept["first"] * 0.5})), {"norm": hidden.norm(dim=-1)})


class OptionalInputs(nn.Module):
    """Keyword-only and optional inputs, given or not, that every block reads."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(OptionalBlock() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        scale: float = 0.5,
        positions: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, mask=mask, scale=scale, positions=positions, bias=bias)
        x = self.head(x)
        return x if mask is None else x * mask.unsqueeze(-1)


class OptionalBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.place = Mixer(), nn.Embedding(4, WIDTH)

    def forward(
        self, x: Tensor, *, mask: Tensor | None, scale: float, positions: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        if positions is not None:
            x = x + self.place(positions)
        if bias is not None:
            x = x + bias
        y = self.mix(x) * scale
        return y if mask is None else y.masked_fill(~mask.unsqueeze(-1), 0.0)


class SequenceFirst(nn.Module):
    """torch's own layers with the batch on dimension 1: ids, target and hidden states are (length, rows)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0) for _ in range(3))
        self.head = nn.Linear(16, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Recurrent(nn.Module):
    """LSTMs on (length, rows, width), their states (layers, rows, width) handed on; lengths (rows,) beside."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.rnns = nn.ModuleList(nn.LSTM(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x, state = self.stem(x), None
        for rnn in self.rnns:
            x, state = rnn(x, state)
        assert state is not None
        keep = torch.arange(x.size(0), device=x.device).unsqueeze(1) < lengths
        return self.head(x) * keep.unsqueeze(-1), state[0]


class Strided(nn.Module):
    """Values at cuts that are transposed, expanded, sliced and permuted, as are their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.blocks = nn.ModuleList(StridedBlock() for _ in range(4))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images).permute(0, 2, 3, 1)
        mean = x.mean((1, 2), keepdim=True).expand(-1, x.size(1), x.size(2), -1)
        for block in self.blocks:
            x, mean = block(x, mean)
        return self.head((x + mean)[:, ::2])


class StridedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.conv = Mixer(), nn.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        y = self.mix(x + mean).transpose(1, 2)
        z = self.conv(y.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return torch.stack([z, y], -1)[..., 0], y[:, :1, :1].expand(-1, z.size(1), z.size(2), -1)


def _floats(rows: int) -> tuple[Tensor]:
    return (torch.randn(rows, WIDTH),)


def _sequences(rows: int) -> tuple[Tensor]:
    return (torch.randn(rows, 3, WIDTH),)


def _given(rows: int) -> dict[str, Any]:
    return {
        "x": torch.randn(rows, 3, WIDTH),
        "mask": torch.rand(rows, 3) > 0.3,
        "positions": torch.arange(3),
        "bias": None,
    }


def _absent(rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(rows, 3, WIDTH), None), {"scale": 0.25, "bias": torch.randn(3, WIDTH)}


def _ids_first(rows: int) -> tuple[Tensor]:
    return (torch.randint(0, 32, (4, rows)),)


def _recurrent(rows: int) -> dict[str, Tensor]:
    return {"x": torch.randn(5, rows, WIDTH), "lengths": torch.randint(1, 6, (rows,))}


def _images(rows: int) -> tuple[Tensor]:
    return (torch.randn(rows, 3, 6, 6),)


NAMES = (
    "long_skips",
    "odd_values",
    "structures",
    "optional_given",
    "optional_absent",
    "sequence_first",
    "recurrent",
    "strided",
)
build_long_skips, inputs_long_skips = LongSkips, _floats
build_odd_values, inputs_odd_values = OddValues, _floats
build_structures, inputs_structures = Structures, _floats
build_optional_given, inputs_optional_given = OptionalInputs, _given
build_optional_absent, inputs_optional_absent = OptionalInputs, _absent
build_sequence_first, inputs_sequence_first = SequenceFirst, _ids_first
build_recurrent, inputs_recurrent = Recurrent, _recurrent
build_strided, inputs_strided = Strided, _images

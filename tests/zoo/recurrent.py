"""Models with state over time, computed weights and running statistics."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

WIDTH = 8


def inputs(rows: int) -> tuple[Tensor]:
    return (torch.randn(rows, 4, WIDTH),)


def inputs_packed(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 4, WIDTH), torch.randint(1, 5, (rows,))


def loss_fn(output: Any) -> Tensor:
    """Return the mean square of every output together."""
    tensors = [output] if isinstance(output, Tensor) else list(output)
    return torch.stack([(tensor.double() ** 2).mean() for tensor in tensors]).sum()


class Lstm(nn.Module):
    """torch's own recurrent layers: the state of one begins the next, and is an output too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.second = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.third = nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * WIDTH, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, state = self.first(x)
        y, (hidden, _) = self.second(y, state)
        y, _ = self.third(y)
        return self.head(y), hidden.transpose(0, 1)


class Cells(nn.Module):
    """A Python loop over time, with cells that keep their state between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.lower, self.upper = nn.LSTMCell(WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = cell = state = x.new_zeros(x.shape[0], WIDTH)
        outputs = []
        for step in range(x.shape[1]):
            hidden, cell = self.lower(x[:, step], (hidden, cell))
            state = self.upper(hidden, state)
            outputs.append(self.head(state))
        return torch.stack(outputs, 1)


class RecurrentBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gru = nn.LayerNorm(WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y, state = self.gru(self.norm(x), state)
        x = x + y
        return x + self.down(torch.relu(self.up(x))), state


class StateBetweenBlocks(nn.Module):
    """Blocks that hand their recurrent state to the next; the first has none."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RecurrentBlock() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for block in self.blocks:
            x, state = block(x, state)
        return x


class Packed(nn.Module):
    """A packed sequence: its shape depends on the lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.lstm = nn.Linear(WIDTH, WIDTH), nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.first(x), lengths.cpu(), batch_first=True, enforce_sorted=False)
        y, _ = self.lstm(packed)
        return pad_packed_sequence(y, batch_first=True)[0].mean(1)


class ComputedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = parametrizations.weight_norm(nn.Linear(WIDTH, 4 * WIDTH))
        self.down = parametrizations.spectral_norm(nn.Linear(4 * WIDTH, WIDTH))
        self.turn = parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.turn(self.down(torch.tanh(self.up(x))))


class ComputedWeights(nn.Module):
    """Parametrizations, in blocks and on layers of their own; one of them updates buffers in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.weight_norm(nn.Conv1d(4, 4, 3, padding=1))
        self.blocks = nn.ModuleList(ComputedBlock() for _ in range(2))
        self.last = parametrizations.spectral_norm(nn.Linear(WIDTH, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class HookedNorm(nn.Module):
    """The older weight_norm, whose hook makes the weight a plain attribute before every call."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(self.linear(x)))


class BatchStatistics(nn.Module):
    """Batch normalization: statistics of the microbatch, and running statistics that every forward moves."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Normalized() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


build_lstm = Lstm
build_cells = Cells
build_state_between_blocks = StateBetweenBlocks
build_packed = Packed
build_computed_weights = ComputedWeights
build_hooked_norm = HookedNorm
build_batch_statistics = BatchStatistics

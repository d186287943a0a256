"""Which layers are one class: what was recorded inside counts, not the module's class and not the names."""

from pathlib import Path

import torch
from torch import Tensor, nn

from planner.model_file import ModelFile
from planner.profiler.blocks import select_calls
from planner.profiler.capture import capture
from planner.profiler.class_keys import ClassKeys


class Shifting(nn.Module):
    """A block whose attribute, no argument and no parameter, steers what it computes."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift = shift
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor, index: int = 0, scale: float = 1.0) -> Tensor:
        """Return x after a shift that some blocks have."""
        if self.shift:
            x = x.roll(self.shift, 1)
        return x + self.norm(self.linear(x)) * scale


class Stack(nn.Module):
    """Blocks called with their index, and with a scale that is read."""

    def __init__(self, shifts: list[int], scales: list[float]) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)  # gradients flow to every block's input
        self.blocks = nn.ModuleList(Shifting(shift) for shift in shifts)
        self.scales = scales

    def forward(self, x: Tensor) -> Tensor:
        """Run the blocks."""
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            x = block(x, index, scale=self.scales[index])
        return x


class Attending(nn.Module):
    """torch's attention, whose number of heads is in none of its parameters."""

    def __init__(self, *heads: int) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.MultiheadAttention(8, count, batch_first=True) for count in heads)

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers."""
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, x, x, need_weights=False)[0]
        return x


class Choosing(nn.Module):
    """Blocks that hold the same linears and call one each, as adapters of a shared block are called."""

    def __init__(self, choices: list[int]) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(One(choice) for choice in choices)

    def forward(self, x: Tensor) -> Tensor:
        """Run the blocks."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class One(nn.Module):
    """Three equal linears, of which one is called."""

    def __init__(self, choice: int) -> None:
        super().__init__()
        self.choice = choice
        self.adapters = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Call the linear that is this block's."""
        return x + self.adapters[self.choice](x)


def classes(model: nn.Module, *, cost: bool = False) -> list[int]:
    """Return for each block the position of the first of its class, or of the first that costs the same."""
    file = ModelFile(path=Path("model.py"), build=lambda: model, example_inputs=lambda rows: (torch.ones(rows, 4, 8),))
    captured = capture(file)
    calls = [call for call in select_calls(captured.model, captured.calls) if call.kind == "module"][1:]
    keys = ClassKeys(captured)
    describe = keys.describe_cost if cost else keys.describe
    described = [describe([call], call.target) for call in calls]
    return [described.index(key) for key in described]


def test_an_index_that_nothing_reads_makes_no_class() -> None:
    assert classes(Stack([0, 0, 0], [1.0, 1.0, 1.0])) == [0, 0, 0]


def test_an_attribute_that_steers_the_block_makes_one() -> None:
    assert classes(Stack([0, 2, 0, 2], [1.0] * 4)) == [0, 1, 0, 1]


def test_a_constant_that_is_read_inside_makes_one() -> None:
    assert classes(Stack([0, 0, 0], [1.0, 0.5, 1.0])) == [0, 1, 0]


def test_settings_of_torchs_own_modules_count() -> None:
    assert classes(Attending(2, 4, 2)) == [0, 1, 0]


def test_blocks_that_share_a_module_are_one_class() -> None:
    model = Stack([0, 0, 0], [1.0] * 3)
    model.blocks[1].linear = model.blocks[2].linear = model.blocks[0].linear
    assert classes(model) == [0, 0, 0]


def test_frozen_blocks_are_a_class_of_their_own() -> None:
    model = Stack([0, 0, 0], [1.0] * 3)
    model.blocks[1].linear.weight.requires_grad_(False)
    assert classes(model) == [0, 1, 0]


def test_blocks_that_only_cost_the_same_are_two_classes() -> None:
    model = Choosing([0, 1, 0])
    assert classes(model) == [0, 1, 0]
    assert classes(model, cost=True) == [0, 0, 0]
    model = Stack([0, 0, 0, 2], [0.9, 0.8, 1.0, 0.9])
    assert classes(model) == [0, 1, 2, 3]
    assert classes(model, cost=True) == [0, 0, 2, 3], "a factor of one may be left out, and a shift costs"

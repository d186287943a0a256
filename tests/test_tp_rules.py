"""Tensor-parallel rules: what is inferred from a body, checked by dividing small layers by hand in one process."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.arguments import BatchInt
from planner.profiler.blocks import select_calls
from planner.profiler.capture import capture
from planner.profiler.classes import open_class, shardings_of
from planner.sharding import Sharding
from planner.tp_rules.operations import Context
from planner.tp_rules.shapes import reshaped
from planner.tp_rules.state import IllegalShardingError, Shard
from tests.zoo import models


def shardings(layer: type[nn.Module], degree: int, shape: tuple[int, ...] = (4, 16)) -> tuple[Sharding, ...]:
    """Return the shardings of a layer that is called as a block of a model with two of them."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.scale = nn.ModuleList(layer() for _ in range(2)), nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            x = x * self.scale  # gradients flow through the first block too
            for block in self.blocks:
                x = block(x)
            return x

    models.INPUTS[Model] = lambda rows: (torch.randn(rows, *shape),)
    captured = capture(models.model_file(Model))
    call = next(call for call in select_calls(captured.model, captured.calls) if call.kind == "module")
    return shardings_of(captured, call, open_class(captured, call), degree)


def test_a_block_is_divided_column_then_row_with_one_reduction_each() -> None:
    found, fewer = shardings(models.Block, 4)  # 4 heads of size 4, sequence 4, 4 ranks: all the same number
    assert found.styles == {"qkv": "column", "out": "row", "up": "column", "down": "row"}
    assert found.parameters["qkv.weight"].parts == 3
    assert [call.phase for call in found.collectives] == ["forward", "forward", "backward", "backward"]
    assert {call.bytes_per_row for call in found.collectives} == {4 * 16 * 4}
    assert [(move.kind, move.readers) for move in found.moves] == [("enter", ("qkv",)), ("enter", ("up",))]
    assert set(found.replicated) == {"norm.weight", "norm.bias", "out.bias", "down.bias"}
    assert (fewer.name, fewer.styles) == ("tensor_up_down", {"up": "column", "down": "row"})
    assert [call.phase for call in fewer.collectives] == ["forward", "backward"]


def test_shape_constants_are_rewritten_by_dimension_not_by_value() -> None:
    found, _ = shardings(models.Block, 2)
    # view(batch, length=4, 3, heads=4, size=4): only the heads shrink; reshape(batch, length=4, width=16): the width.
    values = {(rewrite.node.rstrip("_0123456789"), rewrite.path[1]): rewrite.value for rewrite in found.rewrites}
    assert values == {("view", 4): 2, ("reshape", 3): 8}


class OddHeads(nn.Module):
    """Three heads: attention does not divide by two, the MLP does."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(12, 12), nn.Linear(12, 12)
        self.up, self.down = nn.Linear(12, 32), nn.Linear(32, 12)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).view(x.shape[0], 4, 3, 4).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(x.shape[0], 4, 12)
        return x + self.down(torch.relu(self.up(x + self.out(y))))


def test_what_does_not_divide_stays_whole_and_says_why() -> None:
    (found,) = shardings(OddHeads, 2, (4, 12))
    assert found.styles == {"up": "column", "down": "row"}
    assert set(found.replicated) == {"q.weight", "q.bias", "out.weight", "out.bias", "down.bias"}
    assert "dimension 3 does not divide by 2" in found.replicated["q.weight"]
    assert all(found.replicated.values())


class NormInside(nn.Module):
    """A norm over the head size inside divided attention: its gradient is partial on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.norm, self.out = nn.Linear(16, 16), nn.LayerNorm(4), nn.Linear(16, 16)
        self.gate = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        q = self.norm(self.q(x).view(x.shape[0], 4, 4, 4)) * self.gate
        return x + self.out(q.flatten(2))


def test_whole_parameters_on_divided_values_have_partial_gradients() -> None:
    (found,) = shardings(NormInside, 2)
    assert found.styles == {"q": "column", "out": "row"}
    assert set(found.partial_gradients) == {"norm.weight", "norm.bias", "gate"}


class Softmax(nn.Module):
    """A softmax over what would be divided."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.softmax(self.up(x), dim=-1))


def test_an_operation_over_the_divided_dimension_refutes_the_division() -> None:
    assert shardings(Softmax, 2) == ()


BATCH = BatchInt(1)


@pytest.mark.parametrize(
    ("shard", "before", "after", "expected"),
    [
        (Shard(2), (BATCH, 4, 16), (BATCH, 4, 4, 4), Shard(2)),
        (Shard(2), (BATCH, 4, 4, 4), (BATCH, 4, 16), Shard(2)),
        (Shard(2, 3), (BATCH, 4, 48), (BATCH, 4, 3, 4, 4), Shard(3)),
        (Shard(2), (BATCH, 4, 48), (BATCH, 4, 4, 12), Shard(2)),
        (Shard(1), (BATCH, 4, 16), (BATCH, 64), Shard(1)),
        (Shard(1), (BatchInt(4), 16), (BATCH, 4, 16), Shard(2)),
        (Shard(2), (BATCH, 1, 16), (BATCH, 16), Shard(1)),
    ],
)
def test_reshapes_carry_the_divided_dimension(shard: Shard, before: object, after: object, expected: Shard) -> None:
    context = Context(degree=4, tensors={}, parameter_shapes={})
    assert reshaped(context, shard, before, after) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shard", "before", "after"),
    [
        (Shard(2), (BATCH, 4, 16), (BATCH, 4, 2, 8)),  # two groups can't go to four ranks
        (Shard(2), (BATCH, 4, 16), (BATCH, 64)),  # slices of the inner dimension come apart
    ],
)
def test_reshapes_that_would_scatter_slices_are_illegal(shard: Shard, before: object, after: object) -> None:
    context = Context(degree=4, tensors={}, parameter_shapes={})
    try:
        result = reshaped(context, shard, before, after)  # type: ignore[arg-type]
    except IllegalShardingError:
        return
    assert result.parts == 4, "or it is known to be divided within each of the outer dimension's parts"

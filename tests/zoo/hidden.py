"""Models whose values take other ways than arguments and results: caches, attributes, lists, functions of their own."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 8


def inputs(rows: int) -> tuple[Tensor]:
    return (torch.randn(rows, 4, WIDTH),)


def loss_fn(output: Any) -> Tensor:
    """Return the mean square of every output together."""
    tensors = [output] if isinstance(output, Tensor) else list(output)
    return torch.stack([(tensor.double() ** 2).mean() for tensor in tensors]).sum()


class Mlp(nn.Module):
    """What most of these models are made of: a block that can be divided."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Cache:
    """Holds a tensor for each layer, as key-value caches do."""

    def __init__(self) -> None:
        self.kept: dict[int, Tensor] = {}

    def update(self, layer: int, value: Tensor) -> Tensor:
        """Keep a layer's value; return it together with that of the layer before."""
        self.kept[layer] = value
        return value + self.kept[layer - 1] if layer else value


class Cached(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.mlp = index, Mlp()

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        return self.mlp(cache.update(self.index, torch.sin(x)))


class CacheObject(nn.Module):
    """An object goes from layer to layer and carries a value of each to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Cached(index) for index in range(4))

    def forward(self, x: Tensor) -> Tensor:
        cache = Cache()
        for block in self.blocks:
            x = block(x, cache)
        return x


class Remembering(nn.Module):
    """Keeps a value on itself for whoever reads it later."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.gate = Mlp(), nn.Linear(WIDTH, WIDTH)
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.sigmoid(self.gate(x))
        return self.mlp(x)


class Stashed(nn.Module):
    """Every block keeps a value on itself, and the model sums them when all have run: auxiliary losses, often."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Remembering() for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = block(x)
        return x, torch.stack([block.seen.mean() for block in self.blocks if block.seen is not None]).sum()


class StashedInLeaf(nn.Module):
    """A module without submodules that keeps a value on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))
        self.seen = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.seen = (x @ self.weight).square().mean()
        return torch.tanh(x @ self.weight)


class LeafStash(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlps = nn.ModuleList(Mlp() for _ in range(2))
        self.leaf = StashedInLeaf()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.mlps[1](self.leaf(self.mlps[0](x)))
        return x, self.leaf.seen


class Collecting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.router = Mlp(), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, losses: list[Tensor]) -> Tensor:
        losses.append(torch.softmax(self.router(x), -1).square().mean())
        return self.mlp(x)


class AuxiliaryLosses(nn.Module):
    """A list is given to every layer, which appends a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Collecting() for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        losses: list[Tensor] = []
        for block in self.blocks:
            x = block(x, losses)
        return x, torch.stack(losses).mean()


class Straight(torch.autograd.Function):
    """Rounds, and lets gradients through: a straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(4 * x) / 4

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(Straight.apply(x))


class FunctionInBlock(nn.Module):
    """A custom autograd function inside every block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Quantized() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Rounding(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Straight.apply(x)


class FunctionInLeaf(nn.Module):
    """A custom autograd function in a module of its own, called between blocks and inside them."""

    def __init__(self) -> None:
        super().__init__()
        self.round = Rounding()
        self.blocks = nn.ModuleList(nn.Sequential(Mlp(), Rounding()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(self.round(x))
        return x


class FunctionBetween(nn.Module):
    """A custom autograd function in the model's own forward, where no module holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = Straight.apply(block(x))
        return x


class SelfCheckpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.mlp, self.use_reentrant = Mlp(), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.mlp, x, use_reentrant=self.use_reentrant)


class CheckpointedBlocks(nn.Module):
    """Blocks that recompute themselves."""

    use_reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(SelfCheckpointed(self.use_reentrant) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class ReentrantBlocks(CheckpointedBlocks):
    use_reentrant = True


class CheckpointingModel(nn.Module):
    """The model's own forward recomputes its blocks."""

    use_reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Mlp() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return torch.tanh(checkpoint(torch.sin, x, use_reentrant=self.use_reentrant))


class ReentrantModel(CheckpointingModel):
    use_reentrant = True


build_cache_object = CacheObject
build_stashed = Stashed
build_leaf_stash = LeafStash
build_auxiliary_losses = AuxiliaryLosses
build_function_in_block = FunctionInBlock
build_function_in_leaf = FunctionInLeaf
build_function_between = FunctionBetween
build_checkpointed_blocks = CheckpointedBlocks
build_reentrant_blocks = ReentrantBlocks
build_checkpointing_model = CheckpointingModel
build_reentrant_model = ReentrantModel


class Memory(nn.Module):
    """Reads what its last forward kept: no program has that."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.memory: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.memory is not None:
            x = x + self.memory
        self.memory = x.detach()
        return self.second(x)


class ConstantMemory(Memory):
    """The same from a tensor that is there from the beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.zeros(4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) + self.memory  # ConstantMemory
        self.memory = x.detach().mean(0)
        return self.second(x)


class Counted(Memory):
    """A plain number that every forward changes."""

    steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.second(self.first(x) * self.steps)  # Counted


class LazyTable(Memory):
    """Keeps a table that depends on no data, made when it is first needed; and the last output, which nobody reads."""

    def forward(self, x: Tensor) -> Tensor:
        if self.memory is None or self.memory.shape[0] != x.shape[1]:
            self.memory = torch.arange(x.shape[1], device=x.device).float().unsqueeze(-1) * torch.ones_like(x[0])
        x = self.first(x) * torch.cos(self.memory)
        self.last = self.second(x)
        return self.last


build_memory = Memory
build_constant_memory = ConstantMemory
build_counted = Counted
build_lazy_table = LazyTable

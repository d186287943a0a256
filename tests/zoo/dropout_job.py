"""What the ranks of a plan of `randomness.Dropout` do, with dropout on."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from planner.runner.exactness import import_plan
from planner.runner.rank import RankContext
from tests.zoo import randomness


def train(context: RankContext, paths: list[Path], seed: int) -> list[dict[str, Any]]:
    """Return, for each plan: its loss, gradients, and what the first block's dropouts dropped in each microbatch."""
    found = []
    for path in paths:
        torch.manual_seed(seed)
        runtime = import_plan(path).setup(randomness.Dropout, randomness.loss_fn, device="cpu")
        dropped: dict[str, list[list[int]]] = {"inner": [], "outer": []}

        def keep(name: str, dropped: dict[str, list[list[int]]] = dropped) -> Any:
            def hook(module: nn.Module, args: Any, output: Tensor) -> None:
                dropped[name].append((output == 0).flatten().nonzero().flatten().tolist())

            return hook

        first = runtime.modules[0].get_submodule("blocks.0")
        handles = [getattr(first, name).register_forward_hook(keep(name)) for name in dropped]
        inputs = torch.randn(16, 4, randomness.WIDTH, generator=torch.Generator().manual_seed(3))
        loss = float(runtime.step(inputs))
        for handle in handles:
            handle.remove()
        gradients = runtime.full_gradients()
        found.append({"loss": loss, "gradients": gradients, **dropped})
    return found

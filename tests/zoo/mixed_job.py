"""A classifier whose labels are mostly left out in some rows, and what the ranks of its plan do in mixed precision."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.runner.exactness import import_plan
from planner.runner.rank import RankContext
from tests.zoo.kinds import WIDTH, Block, Stack

ROWS, LENGTH = 16, 3


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *Stack(Block).layers, nn.Linear(WIDTH, WIDTH))


def example_inputs(rows: int) -> tuple[Tensor]:
    return (torch.randn(rows, LENGTH, WIDTH),)


def example_target(rows: int) -> Tensor:
    return torch.randint(0, WIDTH, (rows, LENGTH))


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1).float(), target.flatten())


def train(context: RankContext, path: Path) -> dict[str, Any] | None:
    """Return, on rank 0, the loss and gradients of the plan beside one process in float32; None elsewhere."""
    torch.manual_seed(5)
    runtime = import_plan(path).setup(build_model, loss_fn, device="cpu", precision="bf16-mixed")
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(ROWS, LENGTH, WIDTH, generator=generator)
    target = torch.randint(0, WIDTH, (ROWS, LENGTH), generator=generator)
    target[: ROWS // 2, 1:] = -100  # the first microbatches and replica count a third of the others
    loss, gradients = float(runtime.step(inputs, target)), runtime.full_gradients()
    if gradients is None:
        return None
    torch.manual_seed(5)
    model = build_model()
    whole = loss_fn(model(inputs), target)
    whole.backward()
    one = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    halves = [slice(0, ROWS // 2), slice(ROWS // 2, ROWS)]
    sum(loss_fn(model(inputs[rows]), target[rows]) / 2 for rows in halves).backward()  # type: ignore[union-attr]
    evenly = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {
        "loss": abs(loss - float(whole)) / float(whole),
        "gradient": _worst(gradients, one),
        "counted evenly": _worst(evenly, one),
    }


def _worst(found: dict[str, Tensor | None], one: dict[str, Tensor | None]) -> float:
    """Return the difference of all gradients together, relative to the norm of one process's."""
    pairs = [(found[name], gradient) for name, gradient in one.items()]
    assert all(a is not None and b is not None for a, b in pairs)
    squares = [(float((a - b).norm()) ** 2, float(b.norm()) ** 2) for a, b in pairs if a is not None and b is not None]
    return (sum(a for a, _ in squares) / sum(b for _, b in squares)) ** 0.5

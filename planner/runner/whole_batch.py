"""One process on the whole batch at once: what a plan's microbatches must add up to, unless rows depend on others."""

import ast
import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from planner.records import read_text
from planner.runner.subject import available_bytes

# The whole batch's activations may take so much of the memory that is free; the rest is for gradients and copies.
_MEMORY_FRACTION = 0.4


@dataclass(frozen=True, kw_only=True)
class PlanLoss:
    """What a plan says of its loss: whether it counts over a step, and what `planner.model_profile.Loss` holds."""

    counts: bool = False
    degree: int = 0
    coupled: tuple[str, ...] = ()
    ignored: Mapping[str, int]


def read_plan_loss(path: Path) -> PlanLoss:
    """Return what a plan.py says of its loss, without running it; nothing where it was written by hand."""
    found: dict[str, Any] = {}
    counts = False
    for statement in ast.parse(read_text(path, what="plan")).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "LOSS":
            value = ast.literal_eval(statement.value)
            found = value if isinstance(value, dict) else {}
        elif isinstance(statement, ast.ClassDef) and statement.name != "PlanStage":
            counts |= any(
                isinstance(item, ast.Assign) and ast.unparse(item.targets[0]) == "step_counts"
                for item in statement.body
            )
    return PlanLoss(
        counts=counts,
        degree=int(found.get("degree", 0)),
        coupled=tuple(found.get("coupled", ())),
        ignored=dict(found.get("ignored", {})),
    )


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Put the buffers back that a forward inside changes."""
    before = copy.deepcopy(dict(model.named_buffers()))
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in before and buffer.shape == before[name].shape:
                    buffer.copy_(before[name])


def whole_batch_gradients(model: nn.Module, loss: Callable[[], Tensor]) -> tuple[float, dict[str, Tensor | None]]:
    """Return the loss of a whole batch and every parameter's gradient; the model is left as it was."""
    with kept_buffers(model):
        found = loss()
        if found.requires_grad:
            found.backward()  # type: ignore[no-untyped-call]
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = None
    return float(found), gradients


def activation_bytes(model: nn.Module, loss: Callable[[], Tensor]) -> int:
    """Return the bytes that a loss keeps for its backward, parameters left out."""
    known = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    total = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal total
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            total += storage.nbytes()
        return tensor

    with kept_buffers(model), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss()
    return total


def fits(num_bytes: int) -> bool:
    """Return whether activations of so many bytes can be kept here."""
    free = available_bytes()
    return free is None or num_bytes <= _MEMORY_FRACTION * free

"""What a process of a plan does with a case: one step of training as the case's own file describes it."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from planner.model_file import split_arguments
from planner.runner.exactness import import_plan
from planner.runner.rank import RankContext


def import_case(path: Path) -> ModuleType:
    """Return a case's Python file as a module."""
    spec = importlib.util.spec_from_file_location(f"case_{path.stem[:2]}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def next_token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def square_sum(output: Tensor) -> Tensor:
    return output.square().sum()


def total(output: Any) -> Tensor:
    return (output["out"] if isinstance(output, dict) else output).sum()


LOSSES = {"next token": next_token_loss, "squares": square_sum, "sum": total}


def one_process(path: Path, loss: str, learning_rate: float = 0.1) -> dict[str, Any]:
    """Return what one process gets for the whole batch: loss, output, gradients, and parameters after a step of SGD."""
    case = import_case(path)
    model = case.model()
    args, kwargs = split_arguments(case.inputs())
    output = model(*args, **kwargs)
    value = LOSSES[loss](output, *([args[0]] if loss == "next token" else []))
    value.backward()
    gradients = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    torch.optim.SGD(model.parameters(), learning_rate).step()
    return {
        "loss": value.item(),
        "output": output,
        "gradients": gradients,
        "parameters": {name: param.detach() for name, param in model.named_parameters()},
        "state": list(model.state_dict()),
    }


@contextmanager
def saved_bytes() -> Iterator[list[int]]:
    """Collect the bytes of what autograd saves inside, one number for each tensor."""
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def run_case(context: RankContext, plan_path: Path, path: Path, loss: str, is_sum: bool) -> dict[str, Any]:
    """Return what this rank got from one step on the case's own batch; what is whole stands on rank 0.

    A loss that is a sum over rows is given times the number of microbatches, since a step takes their mean.
    """
    case, plan = import_case(path), import_plan(plan_path)
    outputs: list[Any] = []

    def loss_fn(output: Any, *target: Tensor) -> Tensor:
        outputs.append(output)
        value = LOSSES[loss](output, *target)
        return value * plan.PLAN["num_microbatches"] if is_sum else value

    torch.manual_seed(0)
    args, kwargs = split_arguments(case.inputs())
    before = [arg.clone() for arg in args]
    runtime = plan.setup(case.model, loss_fn, device="cpu")
    stage = runtime.modules[0]
    inputs: Any = args
    if kwargs:
        inputs = dict(zip(plan_inputs(plan), args, strict=False)) | kwargs
    with saved_bytes() as saved:
        value = runtime.step(inputs, args[0] if loss == "next token" else None)
    gradients = runtime.full_gradients()
    held = sum(param.numel() for param in runtime.parameters())
    torch.optim.SGD(runtime.parameters(), 0.1).step()
    return {
        "loss": value.item(),
        "outputs": [detached(output) for output in outputs],
        "gradients": gradients,
        "parameters": runtime.full_parameters(),
        "local": {name: param.detach().clone() for name, param in runtime.named_parameters()},
        "state": list(stage.state_dict()),
        "buffers": {name: buffer.clone() for name, buffer in stage.named_buffers()},
        "held": held,
        "num_saved": len(saved),
        "optimizer_elements": sum(param.numel() for param in runtime.parameters() if param.requires_grad),
        "gradient_messages": [len(runtime._executor.returned), len(runtime._executor.back)],
        "inputs_kept": all(torch.equal(a, b) for a, b in zip(before, args, strict=True)),
    }


def plan_inputs(plan: ModuleType) -> list[str]:
    return [item if isinstance(item, str) else item.name for item in plan.INPUTS]


def detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return {key: detached(item) for key, item in value.items()} if isinstance(value, dict) else value

"""Checks: one error type, and what must hold before a plan can run."""

import hashlib
from typing import Any

import torch
from torch import nn

# The helper section uses facts of this version that PyTorch doesn't promise: composable `replicate`, styles of our
# own for `parallelize_module`, `torch._foreach_*`. Each is used in one function, and tested with this version only.
TESTED_TORCH = "2.13"


class PlanError(RuntimeError):
    """What keeps this plan from running, then one thing to do about it."""


def model_hash(model: nn.Module) -> str:
    """Return a short hash of the names and shapes of the model's parameters and buffers, in order."""
    named: list[tuple[str, Any]] = [*model.named_parameters(remove_duplicate=False)]
    named += model.named_buffers(remove_duplicate=False)
    text = "\n".join(f"{name} {tuple(tensor.shape)}" for name, tensor in named)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _check_torch() -> None:
    if torch.__version__.split(".")[:2] != TESTED_TORCH.split("."):
        raise PlanError(
            f"this plan.py was written for torch {TESTED_TORCH}, and torch {torch.__version__} is installed\n"
            f"hint: install torch {TESTED_TORCH}, or write plan.py again with a planner made for {torch.__version__}"
        )


def _check_model(model: nn.Module, expected: str) -> str:
    found = model_hash(model)
    if found != expected:
        raise PlanError(
            f"build_model() gives a model with hash {found}, and this plan was made for {expected}: "
            "names or shapes of parameters or buffers differ\n"
            "hint: profile and solve again for this model, or give the build_model that was profiled"
        )
    return found


def _check_layers(plan: dict[str, Any]) -> None:
    """Raise where the stages do not have every layer of the model once: PLAN was edited by hand."""
    expected = list(plan.get("layers") or ())
    found = [name for stage in plan["stages"] for name in stage["layers"]]
    if expected and found != expected:
        missing = [name for name in expected if name not in found]
        problem = f"leave out {', '.join(missing)}" if missing else "have a layer twice, or in another order"
        raise PlanError(
            f"the stages in PLAN {problem}: every layer must be in one stage, in the model's order\n"
            "hint: undo the edit, or solve again with --pin cuts=LAYER,LAYER"
        )


def _check_stages(plan: dict[str, Any], stages: tuple[Any, ...]) -> None:
    """Raise where the classes in STAGES are not those of PLAN's stages, first to last: they were edited by hand."""
    if len(stages) != len(plan["stages"]):
        raise PlanError(
            f"STAGES has {len(stages)} classes, and PLAN {len(plan['stages'])} stages\n"
            "hint: undo the edit, or solve again"
        )
    for index, stage in enumerate(stages):
        for value in (*stage.receives, *stage.sends):
            early = value.source is not None and value.source >= index
            if early or any(target <= index for target in value.targets):
                raise PlanError(
                    f"{stage.__name__} is at place {index} of STAGES, and passes {value.name!r} as another stage does: "
                    "the classes are not in the order of PLAN's stages\n"
                    "hint: undo the edit, or solve again"
                )


def _check_shape(
    what: str, tensor: torch.Tensor, shape: tuple[int, ...], give: str = "batches of the shape that was profiled"
) -> None:
    if tuple(tensor.shape) != tuple(shape):
        raise PlanError(
            f"{what} has shape {tuple(tensor.shape)}, and this plan was made for {tuple(shape)}\n"
            f"hint: give {give}, or profile and solve again with this one"
        )

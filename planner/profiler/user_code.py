"""Calls the functions of a model file; what they raise or return wrongly is told as theirs, with their line."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from planner.errors import CaptureError, PlannerError
from planner.example_rows import takes_rows
from planner.model_file import ModelFile, split_arguments, user_error

Loss = Callable[[Any], Any]


def build(file: ModelFile, build_with: Callable[[Callable[[], nn.Module]], nn.Module]) -> nn.Module:
    """Return the model that `build_with(file.build)` gives; CaptureError where there is none that can be recorded."""
    name = file.build_function
    if missing := _required_arguments(file.build):
        raise CaptureError(
            f"{file.path.name}: {name} needs {', '.join(missing)}, and is called without arguments",
            hint=f"give the arguments of {name} defaults, or name a function without any as {file.path.name}:NAME",
        )
    try:
        model: Any = build_with(file.build)
    except PlannerError:
        raise
    except (Exception, SystemExit) as error:
        raise user_error(error, file.path, name, function=file.build) from error
    if inspect.iscoroutine(model):
        model.close()  # else Python warns that nobody awaited it
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError(
            f"{file.path.name}: {name} returned a TorchScript module, whose forward can't be recorded",
            hint="return the Python model that was scripted or traced",
        )
    if not isinstance(model, nn.Module):
        raise CaptureError(
            f"{file.path.name}: {name} returned {type(model).__name__}, not an nn.Module",
            hint=f"return the model from {name}",
        )
    for part, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{file.path.name}: {part} is a TorchScript module, whose forward can't be recorded nor its parameters "
                "divided among processes",
                hint=f"build {part} as the Python module that was scripted or traced",
            )
    return model


def _required_arguments(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins don't tell
        return []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [item.name for item in parameters if item.default is item.empty and item.kind not in variadic]


def example_inputs(file: ModelFile, rows: int) -> Any:
    """Return what the file's function of inputs gives for a number of rows."""
    try:
        return file.example_inputs(rows)
    except (Exception, SystemExit) as error:
        raise user_error(error, file.path, f"{file.inputs_function}({rows})", function=file.example_inputs) from error


def example_target(file: ModelFile, rows: int) -> Any:
    """Return the file's example target for a number of rows; None where the file has none, or no loss."""
    if file.example_target is None or file.loss_fn is None:
        return None
    try:
        return file.example_target(rows)
    except (Exception, SystemExit) as error:
        raise user_error(error, file.path, f"example_target({rows})", function=file.example_target) from error


def loss(file: ModelFile, target: Any) -> Loss | None:
    """Return the file's loss as a function of the output; it raises CaptureError unless the loss is one number."""
    loss_fn = file.loss_fn
    if loss_fn is None:
        return None
    arguments = () if file.example_target is None else (target,)

    def call(output: Any) -> Any:
        try:
            found = loss_fn(output, *arguments)
        except PlannerError:  # of the recording, not of the user's code
            raise
        except (Exception, SystemExit) as error:
            hint = ""
            if isinstance(error, TypeError) and "argument" in str(error):
                hint = "it is called as loss_fn(output, target) where the file has example_target, else loss_fn(output)"
            raise user_error(error, file.path, "loss_fn", function=loss_fn, hint=hint) from error
        if not isinstance(found, torch.Tensor) or found.numel() != 1:
            is_tensor = isinstance(found, torch.Tensor)
            shown = f"a tensor of shape {tuple(found.shape)}" if is_tensor else f"a {type(found).__name__}"
            raise CaptureError(
                f"{file.path.name}: loss_fn returned {shown}, not one number",
                hint="return a scalar tensor from loss_fn, as .mean() gives",
            )
        return found

    return call


def model_call(file: ModelFile) -> str:
    """Return the call of the model with example inputs, as a user writes it."""
    given = example_inputs(file, 2)
    made = f"{file.inputs_function}({2 if takes_rows(file.example_inputs) else ''})"
    args, kwargs = split_arguments(given)
    if isinstance(given, torch.Tensor):
        return f"model({made})"
    if args and kwargs:
        return f"args, kwargs = {made}; model(*args, **kwargs)"
    return f"model({'**' if kwargs else '*'}{made})"


def user_line(error: BaseException) -> str:
    """Return 'file:line' of the innermost frame of an error that is not torch's; nothing where there is none."""
    found = ""
    trace = error.__traceback__
    while trace is not None:
        filename = trace.tb_frame.f_code.co_filename
        if "/torch/" not in filename and "planner/profiler" not in filename:
            found = f"{filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found

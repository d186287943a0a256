"""Losses and gradients of one process, and what makes them nothing to compare with."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from planner.errors import VerifyError
from planner.model_file import ModelFile, user_error
from planner.runner.batches import Batch, make_batches
from planner.runner.comparison import LARGEST
from planner.runner.draws import CountedDraws
from planner.runner.exact_job import ExactJob
from planner.runner.whole_batch import kept_buffers
from planner.units import counted


def train_step(model: nn.Module, model_file: ModelFile, batch: Batch, rows: int, scale: float = 1.0) -> float:
    """Return `scale` times the mean loss over the microbatches, with gradients accumulated in the model."""
    num_microbatches, total = batch.num_rows // rows / scale, 0.0
    for args, kwargs, target in batch.microbatches(rows):
        loss = loss_of_output(model(*args, **kwargs), model_file, target) / num_microbatches
        check_finite(float(loss))
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss)
    return total


def loss_of_output(output: Any, model_file: ModelFile, target: Any) -> Tensor:
    """Return the loss of an output, one number; VerifyError where it is none."""
    assert model_file.loss_fn is not None  # see `with_loss`
    try:
        loss = model_file.loss_fn(output) if target is None else model_file.loss_fn(output, target)
    except Exception as error:
        raise user_error(error, model_file.path, "computing the loss") from error
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shown = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise VerifyError(f"the loss has {shown}, not one number", hint="write loss_fn(output) in the model file")
    return loss.reshape(())


def loss_without_gradients(model: nn.Module, model_file: ModelFile, batch: Batch, rows: int) -> float:
    """Return the loss of the first `rows` rows; buffers that the forward changes are put back."""
    return float(
        loss_of_output(output_without_gradients(model, batch, rows), model_file, next(batch.microbatches(rows))[2])
    )


def output_without_gradients(model: nn.Module, batch: Batch, rows: int) -> Any:
    """Return the output for the first `rows` rows; buffers that the forward changes are put back."""
    with torch.no_grad(), kept_buffers(model):
        args, kwargs, _ = next(batch.microbatches(rows))
        return model(*args, **kwargs)


def output_of_rows(model: nn.Module, model_file: ModelFile, job: ExactJob) -> Any:
    """Return the output for several rows: of one alone, an output of a number per row looks like a loss."""
    rows = max(2, job.microbatch_size)
    [batch] = make_batches(model_file, model, rows, 1, padded=False)
    return output_without_gradients(model, batch, rows)


def check_finite(loss: float) -> None:
    """Raise VerifyError where a loss is infinite or no number."""
    if not math.isfinite(loss):
        raise VerifyError(
            f"the loss of one process is {loss}: there is nothing to compare with",
            hint="check example_inputs and loss_fn",
        )


def check_gradients(gradients: Mapping[str, Tensor | None]) -> None:
    """Raise VerifyError where a gradient of one process is beyond what can be compared, and any training survives."""
    for name, gradient in gradients.items():
        norm = 0.0 if gradient is None else float(gradient.norm())
        if not norm <= LARGEST:
            raise VerifyError(
                f"the gradient of {name!r} in one process has norm {norm:.1e}, above {LARGEST:.0e}: there is nothing "
                "to compare with",
                hint="check the scale of loss_fn and of what the model computes: AdamW squares gradients, and float32 "
                "ends at 3e+38",
            )


def check_mean(whole: float, mean: float, job: ExactJob) -> None:
    """Raise VerifyError where the whole batch's loss is the sum, not the mean, of its microbatches' losses."""
    count = job.global_batch_size // job.microbatch_size
    if count > 1 and whole != 0.0 and abs(whole - count * mean) <= 1e-9 * abs(whole):
        raise VerifyError(
            f"loss_fn sums over rows: the loss of the whole batch, {whole:.6g}, is {count} times the mean over its "
            f"microbatches of {counted(job.microbatch_size, 'row')}, {mean:.6g}. A plan takes that mean, so its "
            f"gradients would be {count} times too small",
            hint='return the mean over rows from loss_fn, as reduction="mean" does',
        )


def draws_numbers(model: nn.Module, model_file: ModelFile, batch: Batch, rows: int) -> bool:
    """Return whether random numbers may change the loss: those drawn here may happen to change nothing."""
    with CountedDraws() as draws:
        repeatable = is_repeatable(model, model_file, batch, rows)
    return draws.count > 0 or not repeatable


def is_repeatable(model: nn.Module, model_file: ModelFile, batch: Batch, rows: int) -> bool:
    """Return whether the same weights and data give the same loss, whatever the random state."""
    losses = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        losses.append(loss_without_gradients(model, model_file, batch, rows))
        check_finite(losses[-1])  # first: nan is not equal to itself, and no randomness
    return losses[0] == losses[1]


def check_repeatable(model: nn.Module, model_file: ModelFile, batch: Batch, rows: int) -> None:
    """Raise VerifyError where the loss is another with the same random numbers: then no two processes could agree."""
    if not is_repeatable(model, model_file, batch, rows):
        raise VerifyError(
            "the model's forward gives another loss each time, with the same weights, data and random numbers",
            hint="draw random values with torch (not with random or numpy), and keep nothing from one forward to the "
            "next but in buffers",
        )

"""The jobs that `verify` runs in other processes: one process's gradients, the plan's gradients, and their comparison.

"Equal to one process" means: two optimizer steps in float64, on data other than the capture's, weights perturbed and
dropout off; for every parameter norm(g - g_one) / norm(g_one) <= TOLERANCE. The one process uses the same microbatches,
or takes the whole batch at once where the plan counts over a step: the mean of microbatches is another loss then. The
whole batch is compared in any case, and a difference that nothing explains is a failure.
"""

import hashlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from planner.errors import PlannerError, VerifyError
from planner.model_file import ModelFile, load_model_file, model_hash, user_error
from planner.model_profile import BY_FREQUENCY
from planner.runner.after_steps import buffer_differences, changed_buffers, clip_difference
from planner.runner.batches import Batch, make_batches
from planner.runner.comparison import LARGEST, ZERO_FRACTION, compare_gradient, compare_initial, keep_furthest, loss_gap
from planner.runner.double import build_exact, exact_arithmetic
from planner.runner.draws import MatchedDraws, draws_like
from planner.runner.exact_job import Comparison, ExactJob, Outcome, Reference
from planner.runner.one_process import (
    check_finite,
    check_gradients,
    check_mean,
    check_repeatable,
    draws_numbers,
    loss_of_output,
    loss_without_gradients,
    output_of_rows,
    train_step,
)
from planner.runner.rank import RankContext
from planner.runner.stand_in import NOT_PROVED, WITHOUT_ROWS, has_outputs_without_rows, own_loss, with_loss
from planner.runner.whole_batch import (
    PlanLoss,
    activation_bytes,
    fits,
    kept_buffers,
    read_plan_loss,
    whole_batch_gradients,
)
from planner.shrink import Shrink, shrink_model_file
from planner.units import counted, format_bytes

NUM_STEPS = 2
LEARNING_RATE = 1e-3
_OWN_BUFFERS = "one process took the whole batch, or replicas and other microbatches update their own"


def inspect_model(context: RankContext, spec: str, inputs_function: str, shrink: Shrink | None) -> tuple[str, int]:
    """Return the model's hash and the number of elements of its parameters and buffers, without memory if it can."""
    model_file = shrink_model_file(load_model_file(spec, inputs=inputs_function), shrink)
    try:
        with torch.device("meta"):
            model = model_file.build()
    except Exception:  # noqa: BLE001 - building on the meta device is a saving; what is wrong shows in earnest below
        try:
            model = model_file.build()
        except Exception as error:
            raise user_error(error, model_file.path, f"{model_file.build_function}()") from error
    if not isinstance(model, nn.Module):
        raise VerifyError(
            f"{model_file.build_function}() returned {type(model).__name__}, not an nn.Module",
            hint="return the model from it",
        )
    return model_hash(model), sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))


def run_reference(context: RankContext, job: ExactJob) -> Reference:
    """Write the data, the parameters and each step's gradients of one process to a file; return what to tell of it."""
    model_file = shrink_model_file(load_model_file(job.model_spec, inputs=job.inputs_function), job.shrink)
    notes: list[str] = []
    not_proved: list[str] = []
    told = read_plan_loss(job.plan_path)
    count = job.global_batch_size // job.microbatch_size
    with exact_arithmetic() as mode, ExitStack() as stack:
        model, dropped = build_exact(model_file, job.seed)
        stack.enter_context(draws_like(import_plan(job.plan_path), model))
        is_own = False
        if model_file.loss_fn is None:
            output = output_of_rows(model, model_file, job)
            is_own = own_loss(output) is not None
            if not is_own:
                not_proved.append(NOT_PROVED)
                if has_outputs_without_rows(output):
                    told = replace(told, coupled=(*told.coupled, WITHOUT_ROWS))
        model_file = with_loss(model_file, is_own=is_own)
        if told.coupled and _rows_are_apart(model, model_file, job):  # but the loss does not tell of gradients
            told = replace(told, coupled=tuple(text for text in told.coupled if text.endswith(BY_FREQUENCY)))
        batches = _batches(model, model_file, job, told, not_proved)
        is_random = draws_numbers(model, model_file, batches[0], job.microbatch_size)
        if is_random:
            stack.enter_context(MatchedDraws())  # type: ignore[no-untyped-call]
            check_repeatable(model, model_file, batches[0], job.microbatch_size)
            told = replace(told, coupled=(*told.coupled, "random numbers, which are others for other numbers of rows"))
            batches = _batches(model, model_file, job, told, not_proved)  # in which every microbatch counts the same
        carried = _carried_buffers(model, model_file, batches[0], job.microbatch_size)

        def loss_of(batch: Batch, rows: int) -> Tensor:
            args, kwargs, target = next(batch.microbatches(rows))
            return loss_of_output(model(*args, **kwargs), model_file, target)

        with _training_alone(model_file):
            kept = activation_bytes(model, lambda: loss_of(batches[0], job.microbatch_size)) * count
        at_once = fits(kept)
        if not at_once:
            not_proved.append(f"the whole batch at once in one process: it keeps {format_bytes(kept)} for backward")
        # What microbatches must add up to is the whole batch, but where rows depend on one another or memory is short.
        adds_up = (told.counts or told.degree) and not told.coupled and at_once
        saved: dict[str, Any] = {
            "batches": batches,
            "parameters": {name: tensor.detach().clone() for name, tensor in model.named_parameters()},
            "steps": [],
            "whole": [],
            "is_random": is_random,
            "is_own": is_own,
            "buffers": {},
        }
        initial = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=True)
        for step, batch in enumerate(batches):
            context.report(f"one process, step {step + 1} of {NUM_STEPS}")
            whole = None
            if at_once:
                with _training_alone(model_file):
                    whole = whole_batch_gradients(model, partial(loss_of, batch, job.global_batch_size))
                check_finite(whole[0])
            if adds_up and whole is not None:
                loss = whole[0]
                for name, parameter in model.named_parameters():
                    given = whole[1][name]
                    parameter.grad = None if given is None else given.clone()
            else:
                with _training_alone(model_file):
                    loss = train_step(model, model_file, batch, job.microbatch_size, float(count) ** told.degree)
                if step == 0 and whole is not None and not told.degree:
                    check_mean(whole[0], loss, job)
            gradients = {
                name: None if parameter.grad is None else parameter.grad.clone()
                for name, parameter in model.named_parameters()
            }
            saved["steps"].append((loss, gradients))
            saved["whole"].append(whole)
            check_gradients(gradients)
            optimizer.step()
            optimizer.zero_grad()
        updated = changed_buffers(model, initial)
    if updated and job.same_microbatches and not (adds_up and at_once):
        saved["buffers"] = updated
    elif updated:
        not_proved.append(f"the values of buffers that forward updates ({_and_more(tuple(updated))}): {_OWN_BUFFERS}")
    torch.save(saved, job.reference_path)
    if dropped or mode.dropped:
        notes.append("dropout was off: with it, losses differ by chance")
        not_proved.append("dropout")
    if is_random:
        notes.append("random numbers were matched: every process drew the same, in every microbatch and step")
        not_proved.append("random numbers that differ from draw to draw")
    coupled = told.coupled
    if carried:
        coupled = (*coupled, f"what forward wrote before into {_and_more(carried)}, and reads")
    return Reference(
        notes=tuple(notes),
        not_proved=tuple(not_proved),
        coupled=coupled,
        carried=carried,
        has_gradients=any(g is not None and bool(g.any()) for g in saved["steps"][0][1].values()),
    )


@contextmanager
def _training_alone(model_file: ModelFile) -> Iterator[None]:
    """Tell what the model raises inside as its own: no plan has been run yet."""
    try:
        yield
    except Exception as error:
        raise user_error(error, model_file.path, "training in float64 in one process, without the plan,") from error


def _carried_buffers(model: nn.Module, model_file: ModelFile, batch: Batch, rows: int) -> tuple[str, ...]:
    """Return the buffers that a forward changes, where the next forward's loss is another for it."""
    with torch.no_grad(), kept_buffers(model):
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        losses: list[float] = []
        changed: tuple[str, ...] = ()
        for again in (False, True):
            if again and not changed:
                break
            torch.manual_seed(1)
            args, kwargs, target = next(batch.microbatches(rows))
            losses.append(float(loss_of_output(model(*args, **kwargs), model_file, target)))
            now = dict(model.named_buffers())
            changed = tuple(name for name, old in before.items() if name in now and not torch.equal(now[name], old))
    return changed if losses[0] != losses[-1] else ()


def _and_more(names: tuple[str, ...]) -> str:
    return repr(names[0]) + (f" and {counted(len(names) - 1, 'other buffer')}" if len(names) > 1 else "")


def _rows_are_apart(model: nn.Module, model_file: ModelFile, job: ExactJob) -> bool:
    """Return whether the loss of the whole batch is the microbatches' together, where all of them count the same.

    What was recorded can look as if rows depended on one another where they do not (experts that sort their tokens).
    """
    [batch] = make_batches(model_file, model, job.global_batch_size, 1, padded=False)
    with torch.no_grad(), kept_buffers(model):
        losses = [
            float(loss_of_output(model(*args, **kwargs), model_file, target))
            for args, kwargs, target in batch.microbatches(job.microbatch_size)
        ]
    whole, total = loss_without_gradients(model, model_file, batch, job.global_batch_size), sum(losses)
    return any(abs(whole - value) <= 1e-9 * max(1.0, abs(whole)) for value in (total, total / len(losses)))


def _batches(
    model: nn.Module, model_file: ModelFile, job: ExactJob, told: PlanLoss, not_proved: list[str]
) -> list[Batch]:
    """Return each step's data, with labels left out where the loss ignores some, and masks padded.

    Where rows depend on one another, a loss that counts is compared on data in which every microbatch counts the same.
    """
    uneven = not (told.coupled and told.counts)
    for ignored in (told.ignored if uneven else {}, {}):
        batches = make_batches(model_file, model, job.global_batch_size, NUM_STEPS, ignored=ignored, padded=uneven)
        try:
            loss_without_gradients(model, model_file, batches[0], job.microbatch_size)
        except (IndexError, RuntimeError, PlannerError):
            if not ignored:
                raise
            not_proved.append(f"labels left out ({', '.join(ignored)}): the model does not run with them")
            continue
        break
    if uneven:
        return batches
    not_proved.append(
        "microbatches that count differently (padding), beside a loss in which rows depend on others: every microbatch "
        "was given the same rows"
    )
    return [batch.repeated(job.microbatch_size) for batch in batches]


def run_plan(context: RankContext, job: ExactJob) -> Outcome | None:
    """Return, on rank 0, how far the plan is from one process; None elsewhere."""
    model_file = shrink_model_file(load_model_file(job.model_spec, inputs=job.inputs_function), job.shrink)
    plan = import_plan(job.plan_path)
    reference = torch.load(job.reference_path, weights_only=False, mmap=True)
    model_file = with_loss(model_file, is_own=reference["is_own"])
    exact = partial(exact_arithmetic, matched=reference["is_random"])
    batches: list[Batch] = reference["batches"]
    inputs: list[Any] = []

    def build() -> nn.Module:
        with exact_arithmetic():
            model, _ = build_exact(model_file, job.seed)
        inputs.extend(batch.inputs_of_step(model) for batch in batches)
        return model

    torch.manual_seed(job.seed)  # the same on every rank, as `setup` asks
    # "fp32" computes in the dtype that the model is built in: float64
    runtime = plan.setup(build, model_file.loss_fn, device="cpu", precision="fp32")
    worst: dict[str, Comparison] = {}
    unread = {
        name for name in reference["parameters"] if all(gradients[name] is None for _, gradients in reference["steps"])
    }
    keep_furthest(worst, runtime.full_parameters(), reference["parameters"], 0, compare_initial, unread)
    optimizer = torch.optim.AdamW(runtime.parameters(), lr=LEARNING_RATE, foreach=True)
    loss_difference = clip = 0.0
    whole_difference: float | None = None
    for step, batch in enumerate(batches):
        if context.rank == 0:
            context.report(f"the plan on {context.num_processes} processes, step {step + 1} of {NUM_STEPS}")
        loss_one, gradients_one = reference["steps"][step]
        with exact():
            loss = float(runtime.step(inputs[step], batch.target))
        loss_difference = max(loss_difference, loss_gap(loss, loss_one))
        floor = ZERO_FRACTION * max((float(g.norm()) for g in gradients_one.values() if g is not None), default=0.0)
        gradients = runtime.full_gradients()
        compare = partial(compare_gradient, floor=floor)
        keep_furthest(worst, gradients, gradients_one, step + 1, compare)
        if gradients is not None and (whole := reference["whole"][step]) is not None:
            differences = [compare(gradients.get(name), one)[0] for name, one in whole[1].items() if one is not None]
            whole_difference = max(whole_difference or 0.0, loss_gap(loss, whole[0]), *differences)
        if step == len(batches) - 1:
            clip = clip_difference(runtime, gradients_one.values())
        optimizer.step()
        runtime.zero_grad()
    buffers = runtime.full_buffers() if reference["buffers"] else None
    if context.rank != 0:
        return None
    return Outcome(
        loss_difference=loss_difference,
        comparisons=list(worst.values()),
        whole_batch_difference=whole_difference,
        clip_difference=min(clip, LARGEST),
        buffers={
            name: min(difference, LARGEST)
            for name, difference in buffer_differences(buffers or {}, reference["buffers"]).items()
        },
    )


def import_plan(path: Path) -> ModuleType:
    """Return plan.py as a module of its own name."""
    name = f"planner_plan_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise VerifyError(f"{path} is not a Python file", hint="give the plan.py that `planner solve` wrote")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module

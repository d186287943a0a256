"""Captures a model's forward as a tree of calls that is valid for any batch, model dtype and training flag.

The forward is recorded several times under fake tensors: with another number of rows, another dtype, and in evaluation
mode. Constants that change between recordings are what depends on those things; a structure that changes is an error
(rows) or keeps the training code (evaluation).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from planner.arguments import BatchInt, Ref, leaves, map_argument
from planner.errors import CaptureError
from planner.model_file import ModelFile, model_hash, split_arguments
from planner.profiler import user_code as user
from planner.profiler.collectives import check_alone
from planner.profiler.hidden import open_escaping
from planner.profiler.merging import (
    ROWS,
    TRIED_ROWS,
    StructureDiffersError,
    dtype_leaf,
    merge,
    polynomial,
    rows_dim,
    rows_leaf,
    same_leaf,
    training_leaf,
)
from planner.profiler.meta_build import build_meta
from planner.profiler.one_recording import input_tensors, named_arguments, record_once
from planner.profiler.parameters import check_initialized
from planner.profiler.recording import Call, Recording, Unsupported
from planner.profiler.skips import HINT, has_skips, insert_choices, skip_notes, without_skipped
from planner.profiler.state import Attributes, changed_modules, state_of
from planner.program import Tensor
from planner.units import counted

_SAME_FOR_ALL_ROWS = (
    "a forward whose structure depends on the batch size can't be cut into microbatches; "
    "make it independent of the batch, or put that code into a module of its own"
)


@dataclass(frozen=True)
class Capture:
    """A model's forward as calls, and the model on the meta device that was recorded.

    Values of one number in `storages` share memory. `base` is the recording that the others were merged into,
    `changed_modules` have other attributes after a call than they were built with.
    """

    model: nn.Module
    model_hash: str
    inputs: dict[str, int]
    targets: dict[str, int]
    calls: tuple[Call, ...]
    loss_calls: tuple[Call, ...]
    output: Any
    loss: Any
    tensors: dict[str, Tensor]
    updated_buffers: tuple[str, ...]
    storages: dict[str, int]
    notes: tuple[str, ...]
    base: Recording
    changed_modules: frozenset[str]


def _check_rows(file: ModelFile, model: nn.Module) -> None:
    """Raise CaptureError where the number of rows asked for does not show in the inputs, one for one."""
    first, second = ROWS
    fewer, more = (input_tensors(model, *split_arguments(user.example_inputs(file, rows))) for rows in ROWS)
    name = file.inputs_function
    rule = (
        f"{name}(batch_size) must return batch_size rows: make tensors of shape (batch_size, ...). A model of one "
        "sample (a graph, say) can't be cut into microbatches: wrap it in a module that takes rows of samples"
    )
    for key, tensor in fewer.items():
        if tensor.dim() > 0 and tensor.shape[0] == 0:
            raise CaptureError(f"{file.path.name}: {name}({first}) gives {key!r} with 0 rows, not {first}", hint=rule)
    if set(fewer) != set(more):
        raise CaptureError(
            f"{file.path.name}: {name}({first}) gives {counted(len(fewer), 'tensor')}, {name}({second}) {len(more)}: "
            "the number of tensors depends on the batch size, and microbatches are cut out of the rows of tensors",
            hint=rule,
        )
    changed = {key: tensor.shape for key, tensor in fewer.items() if key in more and tensor.shape != more[key].shape}
    if not fewer:
        for key, value in named_arguments(model, *split_arguments(user.example_inputs(file, first))).items():
            if not isinstance(value, None | bool | int | float | str | tuple | list | dict):
                raise CaptureError(
                    f"{file.path.name}: {name}({first}) gives {key!r} of type {type(value).__name__}, which is not "
                    "looked into, and no other tensor",
                    hint=f"pass the tensors of {key} as arguments of their own, or in a tuple, list or dict",
                )
    if not changed:
        shown = next((f"{key!r} of shape {tuple(tensor.shape)}" for key, tensor in fewer.items()), "no tensor at all")
        raise CaptureError(
            f"{file.path.name}: {name}({first}) and {name}({second}) both give {shown}: the batch size is ignored",
            hint=rule,
        )
    for key, shape in changed.items():
        other = more[key].shape
        grown = [there - here for here, there in zip(shape, other, strict=False)]
        if len(shape) != len(other) or second - first not in grown:
            raise CaptureError(
                f"{file.path.name}: {name}({first}) gives {key!r} of shape {tuple(shape)}, {name}({second}) of shape "
                f"{tuple(other)}: it does not grow by one per row",
                hint=rule,
            )


def _check_stateless(
    file: ModelFile, meta: nn.Module, dtype: torch.dtype | None, base: Recording, state: Attributes
) -> None:
    """Raise CaptureError where a forward reads what an earlier one left on the modules: it is another forward then."""
    listed = ", ".join(".".join(part for part in key if part) for key in list(state)[:3])
    what = f"kept from one forward for the next outside of buffers ({listed}{' and others' if len(state) > 3 else ''})"
    hint = "register what a forward keeps for the next as a buffer, and write it in place; or don't read it there"
    try:
        again = record_once(file, meta, ROWS[0], dtype, training=True, all_floats=False, state=state)
        merge(base, again, same_leaf)
    except CaptureError as error:
        raise CaptureError(f"{error.message}\nin a second forward, because of what is {what}", hint=hint) from error
    except StructureDiffersError as error:
        raise CaptureError(f"{error.location}: {error.what} in a second forward differs: {what}", hint=hint) from None


def _check_decisions(file: ModelFile, meta: nn.Module, dtype: torch.dtype | None, base: Recording) -> None:
    """Raise CaptureError where a random decision in Python does more than leave out modules one by one."""
    other = record_once(file, meta, ROWS[0], dtype, training=True, all_floats=False, takes_unlikely=True)
    try:
        merge(without_skipped(base), other, same_leaf)
    except CaptureError as error:
        raise CaptureError(f"{base.decisions[0]}: {error.message}", hint=error.hint) from None
    except StructureDiffersError as error:
        raise CaptureError(
            f"{base.decisions[0]}: a random number decides in Python what runs, and it decides about more than leaving "
            f"out whole modules: {error.what} is otherwise ({error.location})",
            hint=HINT,
        ) from None


def capture(file: ModelFile, *, dtype: torch.dtype | None = None) -> Capture:
    """Return the model's forward as calls; CaptureError names the statement that can't be recorded.

    `dtype` replaces that of the model's floating parameters and inputs.
    """
    meta = user.build(file, build_meta)
    check_initialized(meta, f"{file.build_function}()")
    check_alone(meta)
    _check_rows(file, meta)
    first, second = ROWS
    with changed_modules(meta) as changed:
        base = record_once(file, meta, first, dtype, training=True, all_floats=False)
    if state := state_of(base, dict(meta.named_parameters(remove_duplicate=False))):
        _check_stateless(file, meta, dtype, base, state)
    if base.decisions:
        _check_decisions(file, meta, dtype, base)
    open_escaping(base.calls, (*base.inputs.values(), *base.targets.values()), (base.output, base.loss))
    notes = [f"{line}: a check of values, which a plan does not make" for line in base.checks]

    # What is spelled out has to be no draw: then the model is built a second time for the second recording.
    other = user.build(file, build_meta) if base.constants else meta
    more_rows = record_once(file, other, second, dtype, training=True, all_floats=False)
    _check_constants(base, more_rows)
    try:
        merged, rows_numbers = merge(base, more_rows, rows_leaf)
    except StructureDiffersError as error:
        raise CaptureError(
            f"{error.location}: {error.what} differs between batches of {first} and {second} rows",
            hint=_SAME_FOR_ALL_ROWS,
        ) from None

    tried = TRIED_ROWS
    double = record_once(file, meta, tried, torch.float64, training=True, all_floats=True)
    double_numbers: dict[int, int] = {}
    try:
        merged, double_numbers = merge(merged, double, partial(dtype_leaf, tried))
    except StructureDiffersError as error:
        tried = first
        double = record_once(file, meta, tried, torch.float64, training=True, all_floats=True)
        try:
            merged, double_numbers = merge(merged, double, partial(dtype_leaf, tried))
        except StructureDiffersError as same_rows:
            location, what = same_rows.location, same_rows.what
            notes.append(f"{location}: {what} depends on the dtype; recorded for the profile's dtype only")
        else:
            raise CaptureError(
                f"{error.location}: {error.what} differs between batches of {first} and {TRIED_ROWS} rows",
                hint=_SAME_FOR_ALL_ROWS,
            ) from None

    skips_in_evaluation = False
    try:
        evaluation = record_once(file, meta, first, dtype, training=False, all_floats=False)
        skips_in_evaluation = bool(evaluation.decisions)
        merged, _ = merge(merged, evaluation, training_leaf)
    except StructureDiffersError as error:
        notes.append(f"{error.location}: {error.what} differs in evaluation mode; the training code is recorded")
    except CaptureError as error:  # what a model does with its output when it is not trained, or a loss without it
        why = error.message.partition("\n")[0]
        notes.append(f"evaluation mode can't be recorded, so the training code is, for both: {why}")

    tensors: dict[str, Tensor] = {}
    for number, tensor in base.tensors.items():
        if number in rows_numbers:
            more, other_dtype = more_rows.tensors[rows_numbers[number]], double_numbers.get(number, -1)
            try:
                tensors[str(number)] = _tensor(tensor, more, double.tensors.get(other_dtype), tried)
            except StructureDiffersError as error:
                raise CaptureError(
                    f"{_maker(base.calls, number)}: {error.what}, which no batch between has to follow",
                    hint=_SAME_FOR_ALL_ROWS,
                ) from None
    if has_skips(merged.calls):
        notes += skip_notes(merged.calls)
        merged = insert_choices(merged, tensors, in_evaluation=skips_in_evaluation)
    return Capture(
        model=meta,
        model_hash=model_hash(meta),
        inputs=base.inputs,
        targets=base.targets,
        calls=tuple(merged.calls),
        loss_calls=tuple(merged.loss_calls),
        output=_returned(merged.output, notes),
        loss=merged.loss,
        tensors=tensors,
        updated_buffers=base.updated_buffers,
        storages={str(number): int(t.untyped_storage()._cdata) for number, t in base.tensors.items()},
        notes=tuple(dict.fromkeys(notes)),
        base=base,
        changed_modules=frozenset(changed | {owner for owner, _ in base.kept}),
    )


def _returned(output: Any, notes: list[str]) -> Any:
    """Return the output with a text for what no plan can return (a cache), so that the rest keeps its place."""

    def change(leaf: Any) -> Any:
        if not isinstance(leaf, Unsupported):
            return leaf
        notes.append(f"the model's output holds a {leaf.description}, which a plan can't return: a text stands for it")
        return f"<{leaf.description}>"

    return map_argument(output, change)


def _check_constants(base: Recording, other: Recording) -> None:
    for (location, values), (_, others) in zip(base.constants, other.constants, strict=False):
        if repr(values) != repr(others):  # equal where both are NaN
            raise CaptureError(
                f"{location}: the values of a tensor that is neither parameter nor buffer differ between two calls of "
                f"the function that builds the model",
                hint="register it as a buffer (register_buffer), so that a plan takes it from the model it is given",
            )


def _maker(calls: list[Call], number: int) -> str:
    """Return where a value is made."""
    for call in calls:
        for inner in call.body:
            if (found := _maker([inner], number)) != "the model":
                return found
        if Ref(str(number)) in list(leaves(call.result)):
            return call.location or call.target
    return "the model"


def _tensor(base: torch.Tensor, more: torch.Tensor, double: torch.Tensor | None, rows: int) -> Tensor:
    dims = tuple(rows_dim(int(a), int(b)) for a, b in zip(base.shape, more.shape, strict=True))
    if double is not None:
        dims = tuple(
            dim if dim == size else polynomial(dim if isinstance(dim, BatchInt) else BatchInt(0, dim), rows, int(size))
            for dim, size in zip(dims, double.shape, strict=True)
        )
    follows = double is not None and double.dtype == torch.float64 and base.is_floating_point()
    return Tensor(
        shape=dims,
        dtype=str(base.dtype).removeprefix("torch."),
        requires_grad=base.requires_grad,
        follows_model_dtype=follows,
    )

"""Records a model once, under fake tensors, and leaves it as it was."""

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from planner.errors import CaptureError, PlannerError
from planner.example_rows import takes_rows
from planner.model_file import ModelFile, gpu_hint, split_arguments
from planner.profiler import user_code as user
from planner.profiler.blocks import find_blocks
from planner.profiler.drawn import Drawn
from planner.profiler.fake import make_fake
from planner.profiler.merging import (
    ROWS,
    TRIED_ROWS,
)
from planner.profiler.plain_tensors import emptied_caches
from planner.profiler.recorder import record
from planner.profiler.recording import DrewError, Recording
from planner.profiler.state import Attributes, attributes_of, changed_since, set_state
from planner.profiler.torch_internals import FakeTensorMode, quiet_fake_tensors
from planner.profiler.whole import WholeRuns


def input_tensors(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors among a model's arguments by the names of its parameters; nested ones get an index."""
    return dict(named_tensors(named_arguments(model, args, kwargs)))


def named_arguments(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by the names of the parameters of forward; those beyond them by number."""
    names = list(inspect.signature(model.forward).parameters)
    return {(names[i] if i < len(names) else f"input_{i}"): value for i, value in enumerate(args)} | kwargs


def named_tensors(named: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of named structures by name; nested ones get an index or key."""
    for name, value in named.items():
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, tuple | list):
            yield from named_tensors({f"{name}_{index}": item for index, item in enumerate(value)})
        elif isinstance(value, dict):
            yield from named_tensors({f"{name}_{key}": item for key, item in value.items()})


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return a structure of tuples, lists and dicts with every tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(map_tensors(item, change) for item in value)
    if isinstance(value, dict):
        return {key: map_tensors(item, change) for key, item in value.items()}
    return value


def record_once(
    file: ModelFile,
    meta: nn.Module,
    rows: int,
    dtype: torch.dtype | None,
    *,
    training: bool,
    all_floats: bool,
    state: Attributes | None = None,
    takes_unlikely: bool = False,
) -> Recording:
    """Return one recording of the model on fake tensors; `all_floats` gives buffers the dtype too.

    `state` are plain attributes as an earlier forward left them.
    """
    with _attributes_kept(meta), emptied_caches(meta) as empty_caches:
        before = attributes_of(meta)

        def run(drawing: tuple[str, ...]) -> Recording:
            options = {"training": training, "all_floats": all_floats, "takes_unlikely": takes_unlikely}
            return _record(file, meta, rows, dtype, empty_caches, state or {}, drawing, **options)

        return replace(_with_draws(run), kept=changed_since(meta, before))


def _with_draws(run: Callable[[tuple[str, ...]], Recording]) -> Recording:
    """Return a recording; where code draws with Python's or numpy's generators, one with its functions as draws."""
    first: CaptureError | None = None
    drawing: tuple[str, ...] = ()
    while True:
        try:
            return run(drawing)
        except CaptureError as error:
            first = first or error
            cause = next((item for item in _causes(error) if isinstance(item, DrewError)), None)
            more = () if cause is None else tuple(name for name in cause.functions if name not in drawing)
            if not more and (cause is not None or Drawn.__name__ in error.message):  # what was drawn is used otherwise
                raise first from first.__cause__
            if not more:
                raise
            drawing += more


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those that it was raised from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__


def _record(
    file: ModelFile,
    meta: nn.Module,
    rows: int,
    dtype: torch.dtype | None,
    empty_caches: Callable[[], None],
    state: Attributes,
    drawing: tuple[str, ...],
    *,
    training: bool,
    all_floats: bool,
    takes_unlikely: bool,
) -> Recording:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        before = dict(meta.named_buffers(remove_duplicate=False))
        make_fake(meta, mode, dtype, buffers=all_floats)
        originals: dict[int, torch.Tensor | None] = {
            id(tensor): before[name] for name, tensor in meta.named_buffers(remove_duplicate=False)
        }
        for module in meta.modules():
            module.training = training and module.training

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            """Return a fake tensor of its own for every input: two that are one in the example may differ later."""
            with mode:
                target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
                made = torch.empty(tensor.shape, dtype=target, device="cpu")
            originals[id(made)] = tensor
            return made

        args, kwargs = split_arguments(map_tensors(user.example_inputs(file, rows), fake))
        target = map_tensors(user.example_target(file, rows), fake)
        loss = user.loss(file, target)
        with mode, quiet_fake_tensors():
            named = input_tensors(meta, args, kwargs)
            targets = dict(named_tensors({"target": target}))
            whole = WholeRuns(originals, _containers_of_blocks(meta))
            begin = partial(set_state, meta, state)
            return record(
                meta,
                args,
                kwargs,
                named,
                targets,
                loss,
                whole,
                begin,
                empty_caches=empty_caches,
                takes_unlikely=takes_unlikely,
                drawing=drawing,
            )
    except PlannerError:
        raise
    except (Exception, SystemExit) as error:
        hint = f"run {user.model_call(file)} by itself; recording uses fake tensors on the CPU"
        line, asked = user.user_line(error), ""
        if rows != ROWS[0]:  # which passed before
            asked = f" with {rows} rows{' in float64' if dtype == torch.float64 else ''}"
            hint = f"a forward must take any number of rows, in any dtype: {', '.join(map(str, ROWS))} rows are tried, "
            hint += f"and {TRIED_ROWS} in float64"
        if not takes_rows(file.example_inputs):
            name = file.inputs_function
            hint += (
                f"; {name}() takes no number of rows: write it as def {name}(batch_size) unless these are dimension 0 "
            )
            hint += "of its first tensor, and of those that have as many there"
        if isinstance(error, Exception) and dtype not in (None, torch.float32, torch.float64):
            hint = f"the model was built in {dtype}: try --dtype float32"
        hint = gpu_hint(error) or hint
        raise CaptureError(
            f"{file.path}: the model raised in forward{asked}: {type(error).__name__}: {error}"
            f"{line and f' (at {line})'}",
            hint=hint,
        ) from error


def _containers_of_blocks(model: nn.Module) -> frozenset[str]:
    """Return the modules that hold blocks: what is called whole holds none, or a plan would have nothing to cut."""
    names = (block.split(".") for block in find_blocks(model))
    return frozenset(".".join(parts[:end]) for parts in names for end in range(len(parts)))


@contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[None]:
    """Give modules back everything they had, parameters too: a forward may keep values on them, here fake ones."""
    before = [(module, dict(vars(module))) for module in model.modules()]
    kinds = (list, dict, OrderedDict)
    listed = [(value, copy.copy(value)) for _, kept in before for value in kept.values() if type(value) in kinds]
    try:
        yield
    finally:
        for module, kept in before:
            vars(module).clear()
            vars(module).update(kept)
        for value, content in listed:
            value.clear()
            value.extend(content) if isinstance(value, list) else value.update(content)

"""Data for an exact comparison: other values than the capture saw, padded where the model takes a mask."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from planner.errors import VerifyError
from planner.model_file import ModelFile, split_arguments, user_error

DATA_SEED = 90210  # the capture's is another; step i uses DATA_SEED + i
_MASK = re.compile(r"(^|_|\s)(attention_|padding_|pad_)mask$|^mask$")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One step's data: positional and keyword arguments of the model, and the target (None without one).

    `batch_dims` are, for each tensor in order, the dimension that is the rows of the batch; None without rows.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    num_rows: int
    batch_dims: tuple[int | None, ...]

    def microbatches(self, rows: int) -> Iterator[tuple[tuple[Any, ...], dict[str, Any], Any]]:
        """Yield arguments and target of each block of `rows`, in order."""
        for start in range(0, self.num_rows, rows):
            dims = iter(self.batch_dims)

            def cut(tensor: Tensor, start: int = start, dims: Iterator[int | None] = dims) -> Tensor:
                dim = next(dims)
                return tensor if dim is None else tensor.narrow(dim, start, min(rows, self.num_rows - start))

            args, kwargs, target = _map(cut, (self.args, self.kwargs, self.target))
            yield args, kwargs, target

    def repeated(self, rows: int) -> "Batch":
        """Return a batch of which every block of `rows` is the first one."""
        dims = iter(self.batch_dims)

        def repeat(tensor: Tensor) -> Tensor:
            dim = next(dims)
            return tensor if dim is None else torch.cat([tensor.narrow(dim, 0, rows)] * (self.num_rows // rows), dim)

        args, kwargs, target = _map(repeat, (self.args, self.kwargs, self.target))
        return replace(self, args=args, kwargs=kwargs, target=target)

    def inputs_of_step(self, model: nn.Module) -> tuple[Any, ...] | dict[str, Any]:
        """Return the inputs as a plan's `step` takes them: a dict by name, or a tuple by position."""
        if not self.kwargs:
            return self.args
        if not self.args:
            return self.kwargs
        return dict(zip(_positional_names(model), self.args, strict=False)) | self.kwargs


def make_batches(
    model_file: ModelFile,
    model: nn.Module,
    num_rows: int,
    num_steps: int,
    *,
    ignored: Mapping[str, int] | None = None,
    padded: bool = True,
) -> list[Batch]:
    """Return a batch for each step, in float64: no two alike where the values may vary.

    `ignored` maps inputs and targets that are labels to the value that leaves one out: some are left out, in every row
    another part. Without `padded` masks stay as they are, too.
    """
    draws = [_draw(model_file, num_rows, DATA_SEED + step) for step in range(num_steps)]
    longer = list(_leaves(_draw(model_file, num_rows + 1, DATA_SEED)))
    batches = []
    for step, draw in enumerate(draws):
        others = list(_leaves(draws[step - 1]))
        generator = torch.Generator().manual_seed(DATA_SEED + step)
        leaves = dict(zip(_leaf_names(draw, model), _leaves(draw), strict=True))
        if len(leaves) != len(others) or len(leaves) != len(longer):
            raise VerifyError(
                f"{model_file.inputs_function} returns another number of tensors at another call",
                hint="return the same arguments for every batch size",
            )
        changed: list[Tensor] = []
        known: dict[tuple[int, bool], Tensor] = {}  # a tensor given twice stays one, unless it is ids and labels
        sources = list(_source_names(draw, model))
        batch_dims = []
        for (name, leaf), source, other, long in zip(leaves.items(), sources, others, longer, strict=True):
            sizes = zip(leaf.shape, long.shape, strict=False)
            rows_dim = next((dim for dim, pair in enumerate(sizes) if pair == (num_rows, num_rows + 1)), None)
            key = (id(leaf), source in (ignored or {}))
            if key not in known:
                new = leaf
                if num_steps > 1 and leaf.shape == other.shape and torch.equal(leaf, other) and not _MASK.search(name):
                    new = _vary(leaf, generator, rows_dim or 0)
                if key[1] and rows_dim is not None:
                    new = _leave_out(new, (ignored or {})[source], rows_dim, generator)
                elif padded and rows_dim is not None and _MASK.search(name):
                    new = _pad(new) if rows_dim == 0 else _pad(new.transpose(0, rows_dim)).transpose(0, rows_dim)
                known[key] = new.double() if new.is_floating_point() else new.clone()
            changed.append(known[key])
            batch_dims.append(rows_dim)

        args, kwargs, target = _map(partial(_next_of, iter(changed)), draw)
        batches.append(Batch(args=args, kwargs=kwargs, target=target, num_rows=num_rows, batch_dims=tuple(batch_dims)))
    return batches


def _draw(model_file: ModelFile, num_rows: int, seed: int) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    torch.manual_seed(seed)
    try:
        args, kwargs = split_arguments(model_file.example_inputs(num_rows))
        target = model_file.example_target(num_rows) if model_file.example_target is not None else None
    except Exception as error:
        raise user_error(error, model_file.path, f"making inputs for {num_rows} rows") from error
    return args, kwargs, target


def _vary(tensor: Tensor, generator: torch.Generator, dim: int) -> Tensor:
    """Return other values for a tensor that every call gives alike; rows (along `dim`) that are all the same stay."""
    if tensor.is_floating_point():
        finite = tensor.double()[tensor.isfinite()]  # infinities mask: they stay, and say nothing of the others
        spread = float(finite.std()) if finite.numel() > 1 else 0.0
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        return tensor.double() + 0.1 * (spread or 1.0) * noise
    if tensor.numel() < 2 or tensor.dtype == torch.bool or bool((tensor == tensor.narrow(dim, 0, 1)).all()):
        return tensor
    order = torch.randperm(tensor.numel(), generator=generator)  # values that occur are values that are allowed
    return tensor.flatten()[order].view(tensor.shape)


def _pad(mask: Tensor) -> Tensor:
    """Return a mask [rows, length] of one value with the other value at the end of every second row."""
    if mask.dim() != 2 or mask.shape[1] < 2 or not bool((mask == mask[0, 0]).all()) or mask[0, 0] not in (0, 1):
        return mask
    padded = mask.clone()
    rows, length = mask.shape
    for row in range(min(1, rows - 1), rows, 2):
        padded[row, length - 1 - row % (length // 2) :] = 1 - int(mask[0, 0])
    return padded


def _next_of(tensors: Iterator[Tensor], _: Tensor) -> Tensor:
    return next(tensors)


_PARTS = (0.0, 0.3, 0.6, 0.85)  # of a row's labels that are left out, row by row in turn


def _leave_out(labels: Tensor, index: int, rows_dim: int, generator: torch.Generator) -> Tensor:
    """Return labels some of which are `index`, which a loss ignores: of every row another part, but not its last."""
    rows = labels.clone().movedim(rows_dim, 0)
    if rows.is_floating_point() or rows.numel() < 2:
        return labels
    for row in range(rows.shape[0]):
        chosen = torch.rand(rows[row].shape, generator=generator) < _PARTS[row % len(_PARTS)]
        if chosen.dim():  # a model may look for the last label that counts, and not find one
            chosen.view(-1)[-1] = False
        rows[row] = torch.where(chosen, torch.full_like(rows[row], index), rows[row])
    return rows.movedim(0, rows_dim)


def _source_names(draw: tuple[Any, ...], model: nn.Module) -> Iterator[str]:
    """Yield for each leaf, in order, the name that a profile has for it: nested ones get an index or key."""
    args, kwargs, target = draw
    names = _positional_names(model)
    positional = {(names[i] if i < len(names) else f"input_{i}"): value for i, value in enumerate(args)}

    def nested(name: str, value: Any) -> Iterator[str]:
        if isinstance(value, Tensor):
            yield name
        elif isinstance(value, tuple | list | dict):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in items:
                yield from nested(f"{name}_{key}", item)

    for name, value in [*positional.items(), *kwargs.items(), ("target", target)]:
        yield from nested(name, value)


def _map(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return a structure of tuples, lists and dicts with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: _map(change, item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        items = [_map(change, item) for item in value]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*items)
        return type(value)(items)
    return value


def _leaves(value: Any) -> Iterator[Tensor]:
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _map(keep, value)
    return iter(found)


def _leaf_names(draw: tuple[tuple[Any, ...], dict[str, Any], Any], model: nn.Module) -> Iterator[str]:
    """Yield a name for each leaf, in order, each once: the argument's, with the position of nested ones before it."""
    args, kwargs, target = draw
    names = _positional_names(model)
    named = [(names[index] if index < len(names) else f"argument {index}", value) for index, value in enumerate(args)]
    for index, (name, value) in enumerate([*named, *kwargs.items(), ("target", target)]):
        leaves = list(_leaves(value))
        for position in range(len(leaves)):
            yield name if len(leaves) == 1 and name != "target" else f"{index}.{position} {name}"


def _positional_names(model: nn.Module) -> list[str]:
    parameters = inspect.signature(model.forward).parameters.values()
    return [item.name for item in parameters if item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD)]

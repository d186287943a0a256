"""Runs for real a module whose code looks at values, to learn what it returns: such a module is then called whole.

The code inside runs as it is, on whatever data a training step brings: only the shapes of its results are fixed, and
those must not depend on the data either.
"""

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from planner.errors import CaptureError
from planner.profiler.copies import copy_module
from planner.profiler.torch_internals import FakeTensor, unset_fake_temporarily

_WEIGHT_STD = 0.02
_SEEDS = (11, 12)
_LARGEST_FRACTION = 0.25  # of the machine's memory, for the module and its gradients' sake


def set_outside(names: Iterable[str], where: str = "") -> CaptureError:
    """Return the error of attributes that the model's forward sets on modules which a plan calls as one."""
    listed = sorted(set(names))
    shown = ", ".join(map(repr, listed[:3])) + (f" and {len(listed) - 3} others" if len(listed) > 3 else "")
    return CaptureError(
        f"{f'{where}: ' if where else ''}the model's forward sets {shown} from outside of a module that a plan calls "
        "as one",
        hint="set it in the forward of the module that reads it, or of its layer, or pass it as an argument: a plan "
        "calls layers, not the code between them",
    )


class CannotRunError(Exception):
    """A module that can't be called whole; the message says why."""


class WholeRuns:
    """Runs modules on real tensors in place of fake ones.

    `originals` has, by the id of a fake tensor, the real one it stands for: inputs of the model, and buffers.
    `containers` are the modules that hold blocks, which are never called whole.
    """

    def __init__(self, originals: Mapping[int, torch.Tensor | None], containers: frozenset[str]) -> None:
        self._originals = originals
        self._containers = containers
        self._left: dict[str, tuple[nn.Module, str, torch.Tensor]] = {}

    def run(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return fake tensors like the results of a module; CannotRunError where it has to be opened, or fails.

        What it keeps on itself becomes a tensor that nobody made, so that code that reads it is refused.
        """
        if name in self._containers:
            raise CannotRunError("it holds the layers between which a plan may cut")
        try:
            with unset_fake_temporarily():
                first, changed = self._run_once(module, args, kwargs, _SEEDS[0])
                second, _ = self._run_once(module, args, kwargs, _SEEDS[1])
        except CannotRunError:
            raise
        except Exception as error:
            raise CannotRunError(f"run by itself it raises {type(error).__name__}: {error}") from error
        if _form(first) != _form(second):
            raise CannotRunError("what it returns has another shape for other data")
        for owner, key in changed:
            inner, left = module.get_submodule(owner), torch.empty(())
            setattr(inner, key, left)
            self._left[".".join(part for part in (name, owner, key) if part)] = (inner, key, left)
        return map_tensors(first, lambda found: found if isinstance(found, FakeTensor) else _fake_like(found))

    def check_left(self) -> None:
        """Raise CaptureError where other code has changed what a module that ran here left on itself."""
        if names := [name for name, (inner, key, left) in self._left.items() if vars(inner).get(key) is not left]:
            raise set_outside(names)

    def _run_once(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int
    ) -> tuple[Any, list[tuple[str, str]]]:
        """Return the results, inputs that are passed through as the fake ones, and the attributes that changed."""
        _check_size(module)
        generator = torch.Generator().manual_seed(seed)
        real = self._copy(module, generator)
        given: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def make(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in given:
                given[id(tensor)] = (tensor, self._real(tensor, generator))
            return given[id(tensor)][1]

        filled, named = map_tensors(args, make), map_tensors(kwargs, make)
        lengths = [len(value) for value in _containers((filled, named))]
        versions = [value._version for _, value in given.values()]
        before = {owner: plain_attributes(vars(inner)) for owner, inner in real.named_modules()}
        weights = {name: value.detach().clone() for name, value in real.named_parameters()}
        result = real(*filled, **named)
        for name, value in real.named_parameters():
            if real.training and not torch.equal(weights[name], value):
                raise CannotRunError(f"it changes its own parameter {name!r}, which is for the training loop to do")
        if [value._version for _, value in given.values()] != versions:
            raise CannotRunError("it writes into its arguments")
        if [len(value) for value in _containers((filled, named))] != lengths:
            raise CannotRunError("it changes a list or dict that it is given")
        changed = [
            (owner, key)
            for owner, inner in real.named_modules()
            for key, value in vars(inner).items()
            if not key.startswith("_") and not same(before[owner].get(key), value)
        ]
        back = {id(value): tensor for tensor, value in given.values()}
        return map_tensors(result, lambda found: back.get(id(found), found)), changed

    def _copy(self, module: nn.Module, generator: torch.Generator) -> nn.Module:
        memo: dict[int, Any] = {}
        for inner in module.modules():
            for tensor in (*inner._parameters.values(), *inner._buffers.values()):
                if tensor is not None and id(tensor) not in memo:
                    memo[id(tensor)] = self._real(tensor, generator)
            for value in vars(inner).values():
                if isinstance(value, FakeTensor):
                    memo[id(value)] = None
        return copy_module(module, memo)

    def _real(self, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        original = self._originals.get(id(tensor))
        is_param = isinstance(tensor, nn.Parameter)
        if original is not None and not original.is_meta and not isinstance(original, FakeTensor):
            value = original.detach().to("cpu", tensor.dtype, copy=True)
        elif tensor.is_floating_point():
            value = torch.randn(tensor.shape, generator=generator).mul_(_WEIGHT_STD if is_param else 1.0)
            value = value.to(tensor.dtype)
        else:
            value = torch.zeros(tensor.shape, dtype=tensor.dtype)
        if is_param:
            return nn.Parameter(value, requires_grad=tensor.requires_grad)
        return value.requires_grad_().clone() if tensor.requires_grad else value  # a leaf can't be written in place


def _check_size(module: nn.Module) -> None:
    size = sum(tensor.numel() * tensor.element_size() for tensor in (*module.parameters(), *module.buffers()))
    limit = _LARGEST_FRACTION * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > limit:
        raise CannotRunError(f"its {size / 2**30:.1f} GiB of parameters are too many to run it on this machine")


def _fake_like(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty(tensor.shape, dtype=tensor.dtype)
    return made.requires_grad_().clone() if tensor.requires_grad else made


def _form(value: Any) -> Any:
    """Return a structure with tensors replaced by what is known of them."""
    return map_tensors(value, lambda found: (tuple(found.shape), found.dtype, found.requires_grad))


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return a structure of tuples, lists, dicts and dataclasses with `change` applied to its tensors."""
    match value:
        case torch.Tensor():
            return change(value)
        case tuple() if hasattr(value, "_fields"):
            return type(value)(*(map_tensors(item, change) for item in value))
        case tuple() | list():
            return type(value)(map_tensors(item, change) for item in value)
        case dict():
            changed = copy.copy(value)
            for key, item in value.items():
                changed[key] = map_tensors(item, change)
            return changed
    if hasattr(type(value), "__dataclass_fields__"):
        changed = copy.copy(value)
        for key in value.__dataclass_fields__:
            object.__setattr__(changed, key, map_tensors(getattr(value, key), change))
        return changed
    return value


def _containers(value: Any) -> Iterator[Any]:
    if isinstance(value, list | dict):
        yield value
    if isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _containers(item)


def plain_attributes(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return attributes, with lists and dicts copied: they may be added to."""
    return {key: copy.copy(value) if type(value) in (list, dict) else value for key, value in attributes.items()}


def same(before: Any, after: Any) -> bool:
    """Return whether an attribute still is what it was; lists and dicts are compared by their items."""
    if type(after) in (list, dict):
        items = (before, after) if isinstance(after, list) else (list(before or ()), list(after))
        return type(before) is type(after) and len(before) == len(after) and all(map(same, *items))
    return before is after or (isinstance(after, bool | int | float | str) and before == after)

"""Finds what a model keeps from one forward to the next outside its buffers: a counter, a memory of what it saw.

A program has the values of one forward. What is only kept (for people to look at, or as an auxiliary loss) is harmless,
and so is a cache of what depends on no data; what the next forward reads is not.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from planner.arguments import ParamRef, Ref, leaves
from planner.profiler.recording import Call, Recording
from planner.profiler.whole import map_tensors, plain_attributes, same

# By module name and attribute.
Attributes = dict[tuple[str, str], Any]

_OWN = {"training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}
_HOOKS = {"_forward_hooks", "_forward_pre_hooks"}  # a forward may install some, and note that it did
# Of what they read, these give only the shape, dtype or device of all but their first argument.
_LIKE = ("_like", "type_as", "to", "expand_as", "view_as", "reshape_as")


def attributes_of(model: nn.Module) -> Attributes:
    """Return the plain attributes of every module, its hooks among them; lists and dicts are copied."""
    return {
        (name, key): dict(value) if key in _HOOKS else value
        for name, module in model.named_modules()
        for key, value in plain_attributes(vars(module)).items()
        if key not in _OWN and (key in _HOOKS or not key.endswith("_hooks"))
    }


def attributes_to_set(module: nn.Module) -> dict[str, Any]:
    """Return what code outside of a module may set on it: its plain attributes without hooks, and its mode."""
    return {
        key: value
        for key, value in plain_attributes(vars(module)).items()
        if key == "training" or not (key in _OWN or key.endswith("_hooks"))
    }


@contextmanager
def changed_modules(model: nn.Module) -> Iterator[set[str]]:
    """Yield a set that gets the modules which have other attributes after a call of theirs than before the first."""
    before = {id(module): (name, attributes_to_set(module)) for name, module in model.named_modules()}
    found: set[str] = set()
    original = nn.Module.__call__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = original(module, *args, **kwargs)
        name, attributes = before.get(id(module), ("", {}))
        if name and name not in found:
            now = attributes_to_set(module)
            if len(now) != len(attributes) or not all(same(attributes.get(key), value) for key, value in now.items()):
                found.add(name)
        return result

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield found
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]


def changed_since(model: nn.Module, before: Attributes) -> Attributes:
    """Return the plain attributes that are others than they were."""
    return {key: value for key, value in attributes_of(model).items() if not same(before.get(key), value)}


def set_state(model: nn.Module, state: Attributes) -> None:
    """Give modules the attributes of an earlier forward; tensors become others, which no recording knows."""
    for (owner, key), value in state.items():
        if key in _HOOKS:
            vars(model.get_submodule(owner))[key] = OrderedDict(value)
            continue
        other = map_tensors(value, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
        vars(model.get_submodule(owner))[key] = other


def state_of(recording: Recording, parameters: Mapping[str, Any]) -> Attributes:
    """Return the attributes that a forward changed, without tensors that depend on no input and no parameter."""
    numbers = {id(tensor): str(number) for number, tensor in recording.tensors.items()}
    dependent = {str(number) for number in recording.inputs.values()}

    def visit(calls: list[Call]) -> None:
        for call in calls:
            visit(call.body)
            read = list(leaves((call.args, call.kwargs)))
            if call.target.startswith("new_") or call.target.endswith("_like"):
                read = []
            elif call.target.endswith(_LIKE):
                read = read[:1]
            if call.kind == "module" or any(
                (isinstance(leaf, Ref) and leaf.name in dependent)
                or (isinstance(leaf, ParamRef) and leaf.name in parameters)
                for leaf in read
            ):
                dependent.update(leaf.name for leaf in leaves(call.result) if isinstance(leaf, Ref) and not call.body)

    visit(recording.calls)

    def is_state(value: Any) -> bool:
        return not isinstance(value, torch.Tensor) or numbers.get(id(value), "") in {*dependent, ""}

    return {key: value for key, value in recording.kept.items() if is_state(value)}

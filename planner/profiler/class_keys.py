"""Tells which layers are the same computation, so that each layer class is opened, divided and measured once.

Two layers of one module class with equal parameters may still compute different things: a block may shift its windows,
or attend to all or to near tokens, by a number that it keeps as an attribute. So what counts is what was recorded
inside them, and an argument that nothing inside reads (the index of the layer) does not.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from planner.arguments import Fields, ParamRef, Ref
from planner.profiler.capture import Capture
from planner.profiler.recording import Call, Unsupported

Key = tuple[Any, ...]


class ClassKeys:
    """Makes a key for a layer; the keys of two layers are equal where they are the same computation, names aside."""

    def __init__(self, captured: Capture) -> None:
        self._captured = captured
        self._modules = dict(captured.model.named_modules(remove_duplicate=False))
        self._names: dict[int, str] = {}
        for name, owned in (*self._modules.items(), *_tensors(captured.model)):
            self._names.setdefault(id(owned), name)
        self._aliases: dict[str, dict[str, str]] = {}
        self._inner: dict[str, int] | None = None  # numbers in place of names
        self._states: dict[str, Key] = {}
        self._settings: dict[int, Key] = {}

    def describe(self, calls: Iterable[Call], module: str) -> Key:
        """Return the key of a layer: `calls` are its module's call and its glue."""
        self._inner = None
        numbering: dict[str, int] = {}
        return tuple(self._call(call, module, numbering, inside=False) for call in calls)

    def describe_cost(self, calls: Iterable[Call], module: str) -> Key:
        """Return a key that is equal for layers that cost the same.

        Modules and parameters inside are numbered as they appear, so that two blocks that call one of several equal
        modules each are alike; and so are blocks that drop more the deeper they stand.
        """
        self._inner = {}
        numbering: dict[str, int] = {}
        return tuple(self._call(call, module, numbering, inside=False) for call in calls)

    def _call(self, call: Call, layer: str, numbering: dict[str, int], *, inside: bool) -> Key:
        def canonical(value: Any) -> Any:
            return self._freeze(value, layer, numbering)

        if call.kind != "module":
            what: Key = (call.kind, call.target)
        elif inside:  # its parameters are among those of the module that holds it
            what = (self._named(call.target, layer), self._module_settings(call))
        else:
            what = (self._named(call.target, layer), self._module_settings(call), self._state(call.target))
        if call.kind != "module" or not call.body:
            arguments = (canonical(call.args), canonical(call.kwargs))
            return (*what, call.no_grad, call.in_place, arguments, canonical(call.result))
        passed = (_values_only(canonical(call.args)), _values_only(canonical(call.kwargs)))
        body = tuple(self._call(inner, layer, numbering, inside=True) for inner in call.body)
        return (*what, call.no_grad, call.in_place, passed, body, canonical(call.result))

    def _freeze(self, value: Any, layer: str, numbering: dict[str, int]) -> Any:
        """Return an argument as something hashable that tells types apart, with values numbered as they appear."""
        match value:
            case Ref(name):
                if name in numbering:
                    return ("value", numbering[name])
                numbering[name] = len(numbering)
                known = self._captured.tensors.get(name)
                described = (known.shape, known.dtype, known.requires_grad, known.follows_model_dtype) if known else ()
                return ("value", numbering[name], described)
            case ParamRef(name):
                return ("parameter", self._named(name, layer))
            case Fields(items):
                return ("fields", tuple((name, self._freeze(item, layer, numbering)) for name, item in items))
            case dict():
                return ("dict", tuple((key, self._freeze(item, layer, numbering)) for key, item in value.items()))
            case tuple() | list():
                return (type(value).__name__, tuple(self._freeze(item, layer, numbering) for item in value))
            case Unsupported():
                return ("unsupported", value.description)
            case float() if self._inner is not None and value not in (0.0, 1.0):  # with these, some calls do nothing
                return ("float",)
        return (type(value).__name__, repr(value))

    def _named(self, name: str, layer: str) -> str | int:
        local = self._relative(name, layer)
        return local if self._inner is None else self._inner.setdefault(local, len(self._inner))

    def _relative(self, name: str, layer: str) -> str:
        """Return a name relative to the layer's module; what only others hold keeps its whole name.

        A recording has one name for what several blocks share: that of the first.
        """
        if not layer or name == layer:
            return "" if name == layer else name
        if name.startswith(f"{layer}."):
            return name.removeprefix(f"{layer}.")
        if layer not in self._aliases:
            module = self._modules[layer]
            held = (*module.named_modules(remove_duplicate=False), *_tensors(module))
            self._aliases[layer] = {self._names[id(owned)]: local for local, owned in held}
        return self._aliases[layer].get(name, name)

    def _state(self, name: str) -> Key:
        """Return what is known of a module's parameters and buffers, ties inside it included; each by its name and the
        position of the first of those that are one, or without names by position alone."""
        if name not in self._states:
            module = self._modules[name]
            first: dict[int, int] = {}
            self._states[name] = tuple(
                (local, first.setdefault(id(t), position), tuple(t.shape), t.dtype, t.requires_grad)
                for position, (local, t) in enumerate(_tensors(module))
            )
        state = self._states[name]
        return state if self._inner is None else tuple(item[1:] for item in state)

    def _module_settings(self, call: Call) -> Key:
        """Return the class of a module and, where its inside was not recorded, the plain attributes that steer it."""
        module = self._modules[call.target]
        if id(module) not in self._settings:
            kind = type(module)
            plain = () if call.body else (repr(module), _plain_attributes(module))
            self._settings[id(module)] = (f"{kind.__module__}.{kind.__qualname__}", plain)
        return self._settings[id(module)]


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _plain_attributes(module: nn.Module) -> Key:
    return tuple(
        (f"{name}.{key}", repr(value))
        for name, inner in module.named_modules()
        for key, value in sorted(vars(inner).items())
        if not key.startswith("_") and isinstance(value, bool | int | float | str | tuple | list | None)
    )


def _values_only(frozen: Any) -> Any:
    """Return frozen arguments without their constants: where the inside was recorded, it shows what they do."""
    if not isinstance(frozen, tuple):
        return None
    if frozen and frozen[0] in ("value", "parameter"):
        return frozen
    if frozen and frozen[0] in ("tuple", "list"):
        return (frozen[0], tuple(_values_only(item) for item in frozen[1]))
    if frozen and frozen[0] in ("dict", "fields"):
        return (frozen[0], tuple((key, _values_only(item)) for key, item in frozen[1]))
    return None

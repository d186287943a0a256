"""Builds models without their weights, whatever their constructors do.

Two hooks work together while the user's code builds the model: a parameter moves to the meta device as it is
registered, and a dispatch mode keeps every large tensor from being made for real. Small tensors are real, so that
constructors may read them (drop rates from `linspace`, masks, tables of indices); what is computed from a tensor
without values has none either. A constructor that reads a value nobody has is run again for real, within half of the
memory that is free.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from planner.errors import CaptureError
from planner.profiler.free_memory import free_bytes, is_out_of_memory
from planner.profiler.memory import LiveBytes, makes_storage
from planner.profiler.parameters import check_trainable
from planner.profiler.shared_memory import ParameterMemory
from planner.profiler.user_code import user_line
from planner.units import format_bytes

LARGE_BYTES = 16 * 2**20  # a mask of 2048 x 2048 numbers is still real, a layer's weights at full size are not
LARGE_EMPTY_BYTES = 2**20  # what is made to be filled is most often a weight
REAL_BYTES = 2**30  # of all real tensors that live at once
_EMPTY = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.empty_strided.default,
}
_REAL_BUILD_FRACTION = 0.5  # of the memory that is free, where a model has to be built for real


def build_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """Return the model with its parameters on the meta device; buffers are real, large ones are on meta too.

    CaptureError where the constructor reads values of parameters and the model is too large to be built for real.
    """
    mode, memory = _WithoutValues(), ParameterMemory()
    try:
        with _parameters_on_meta(memory), mode:
            model = build()
    except Exception as error:
        if not (mode.missed or "meta" in str(error) or isinstance(error, RuntimeError)):
            raise  # else tensors without values may be the cause: `weight.data = values` needs one device, say
        model = _build_for_real(build, error)
    if isinstance(model, nn.Module):
        memory.check(model)
        check_trainable(model)
        _move_parameters(model)
    return model


def _build_for_real(build: Callable[[], nn.Module], reason: Exception) -> nn.Module:
    limit = int(free_bytes() * _REAL_BUILD_FRACTION)
    try:
        with _Limited(limit):
            return build()
    except (_LimitError, MemoryError, RuntimeError) as error:
        if not isinstance(error, _LimitError) and not is_out_of_memory(error):
            raise
        raise CaptureError(
            f"{user_line(reason) or 'build_model'}: building the model reads values of large tensors "
            f"({type(reason).__name__}: {reason}), and building it with values takes more than "
            f"{format_bytes(limit)}, half of the memory that is free here",
            hint="keep code that reads parameters out of build_model, or profile on a machine with more memory",
        ) from error


@contextmanager
def _parameters_on_meta(memory: ParameterMemory) -> Iterator[None]:
    """Move every parameter to the meta device as it is registered; one that is registered twice stays one."""
    original = nn.Module.register_parameter
    moved: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(module, name, param)
        if param is None or param.device.type == "meta" or is_lazy(param):
            return
        reference, meta = moved.get(id(param), (None, None))
        if meta is None or reference is None or reference() is not param:  # weak: the values are to be freed
            meta = _on_meta(param)
            memory.enter(meta, param)
            moved[id(param)] = (weakref.ref(param), meta)
        module._parameters[name] = meta

    nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def _on_meta(param: nn.Parameter) -> nn.Parameter:
    meta = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
    meta.__dict__.update(param.__dict__)
    return meta


def _move_parameters(model: nn.Module) -> None:
    """Move the parameters that are not on the meta device yet; ties are kept."""
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and param.device.type != "meta" and not is_lazy(param):
                if id(param) not in moved:
                    moved[id(param)] = _on_meta(param)
                module._parameters[name] = moved[id(param)]


class _WithoutValues(LiveBytes):  # type: ignore[no-untyped-call]
    """Keeps large tensors from having values: what makes one gives a tensor on the meta device.

    `missed` tells whether an operator failed for want of a value.
    """

    def __init__(self) -> None:
        super().__init__()
        self.missed = False
        # Small tensors that were written in place with values nobody has, by storage.
        self._unknown: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(self._is_unknown(item) for item in _tensors((args, kwargs))):
            return self._run_on_meta(func, args, kwargs)
        if makes_storage(func):
            try:
                meta = _call_on_meta(func, args, kwargs, {})
            except (NotImplementedError, RuntimeError):  # has no kernel for meta, or reads values
                meta = ()
            size = sum(item.untyped_storage().nbytes() for item in _tensors(meta) if item.layout == torch.strided)
            limit = min(LARGE_BYTES, LARGE_EMPTY_BYTES) if func in _EMPTY else LARGE_BYTES
            if size > limit or (size and self.live + size > REAL_BYTES):
                return meta
        result = func(*args, **kwargs)
        if not any(item.device.type == "meta" for item in _tensors(result)):
            self.follow(func, result)
        return result

    def _is_unknown(self, tensor: torch.Tensor) -> bool:
        if tensor.device.type == "meta":
            return True
        if not self._unknown:
            return False
        if tensor.layout != torch.strided:
            return False
        storage = tensor.untyped_storage()
        found = self._unknown.get(int(storage._cdata))
        return found is not None and found() is storage

    def _run_on_meta(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        stand_ins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        try:
            result = _call_on_meta(func, args, kwargs, stand_ins)
        except Exception:
            self.missed = True
            raise
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[position] if position < len(args) else kwargs.get(argument.name)
                for tensor in _tensors(written):
                    if tensor.device.type != "meta":
                        storage = tensor.untyped_storage()
                        self._unknown[int(storage._cdata)] = weakref.ref(storage)
        originals = {id(stand_in): original for original, stand_in in stand_ins.values()}
        return _map(result, lambda tensor: originals.get(id(tensor), tensor))


def _call_on_meta(
    func: Any, args: Any, kwargs: dict[str, Any], stand_ins: dict[int, tuple[torch.Tensor, torch.Tensor]]
) -> Any:
    """Return what an operator gives on the meta device; enters the tensors that stood in for real ones."""

    def stand_in(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "meta":
            return tensor
        if id(tensor) not in stand_ins:
            meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            stand_ins[id(tensor)] = (tensor, meta)
        return stand_ins[id(tensor)][1]

    named = {key: _map(value, stand_in) for key, value in kwargs.items() if key != "pin_memory"}
    if any(argument.name == "device" for argument in func._schema.arguments):
        named["device"] = torch.device("meta")
    return func(*_map(args, stand_in), **named)


class _LimitError(Exception):
    pass


class _Limited(LiveBytes):  # type: ignore[no-untyped-call]
    """Raises `_LimitError` before the tensors that live take more than `limit` bytes."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if makes_storage(func):
            try:
                size = sum(item.untyped_storage().nbytes() for item in _tensors(_call_on_meta(func, args, kwargs, {})))
            except (NotImplementedError, RuntimeError):
                size = 0
            if self.live + size > self._limit:
                raise _LimitError
        result = func(*args, **kwargs)
        self.follow(func, result)
        return result


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _map(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        return type(value)(_map(item, change) for item in value)
    return value

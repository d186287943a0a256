"""What a layer keeps and needs: tensors saved for backward by owner, live bytes through forward and backward.

Works on real tensors and on fake ones alike, because it looks at storages: two views of one storage count once, and a
view of a part of a storage keeps all of it. Workspaces of kernels are seen on CUDA only, by the allocator's statistics.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from planner.profiler.segment import SegmentRunner


@dataclass(frozen=True)
class MemoryNumbers:
    """Bytes of one run of a layer; the fields are those of `LayerCost`."""

    activation_bytes: int
    saved_input_bytes: int
    saved_output_bytes: int
    transient_bytes: int


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that names the tensor's storage while that lives."""
    return int(tensor.untyped_storage()._cdata)


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the tensors' storages, each storage once."""
    return sum({storage_key(t): t.untyped_storage().nbytes() for t in tensors}.values())


class SavedTensors:
    """The tensors that autograd saves for backward inside `watch()`."""

    def __init__(self) -> None:
        self._saved: dict[int, weakref.ref[Any]] = {}  # weak, for what is freed again before the forward ends

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Collect what is saved by operations run inside."""

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            self._saved[int(storage._cdata)] = weakref.ref(storage)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    def take_bytes(self, runner: SegmentRunner, outputs: Iterable[torch.Tensor]) -> tuple[int, int, int]:
        """Return the bytes saved and still alive of (others, inputs, outputs); forget them.

        Parameters, buffers and the values that a stage shares between its layers are left out.
        """
        inputs = {storage_key(value) for value in runner.inputs.values()}
        results = {storage_key(value) for value in outputs}
        shared = [value for value in runner.shared.values() if isinstance(value, torch.Tensor)]
        ignored = {storage_key(value) for value in (*runner.parameters, *runner.buffers, *shared)}
        others = from_inputs = from_outputs = 0
        for key, reference in self._saved.items():
            storage = reference()
            if storage is None or key in ignored:
                continue
            size = storage.nbytes()
            if key in inputs:
                from_inputs += size
            elif key in results:
                from_outputs += size
            else:
                others += size
        self._saved.clear()
        return others, from_inputs, from_outputs


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the bytes of storages that operations run inside have made and that are still alive.

    `peak` is the largest since the last `restart`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def restart(self) -> int:
        """Forget the peak so far; return the bytes alive now."""
        self.peak = self.live
        return self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.follow(func, result)
        return result

    def follow(self, func: Any, result: Any) -> None:
        """Count the storages of an operation's result that are new."""
        if isinstance(result, torch.Tensor):
            if makes_storage(func):
                self._add(result)
        elif isinstance(result, tuple | list) and makes_storage(func):
            for item in result:
                if isinstance(item, torch.Tensor):
                    self._add(item)

    def _add(self, tensor: torch.Tensor) -> None:
        if tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        key = int(storage._cdata)
        if key in self._known:
            return
        size = storage.nbytes()
        if not size:
            return

        def freed(reference: Any) -> None:
            del self._known[key]
            self.live -= size

        self._known[key] = weakref.ref(storage, freed)
        self.live += size
        self.peak = max(self.peak, self.live)


_MAKES_STORAGE: dict[Any, bool] = {}


def makes_storage(func: Any) -> bool:
    """Return whether an operator's results are new storages: neither views of its arguments nor written in place."""
    if func not in _MAKES_STORAGE:
        returns = func._schema.returns
        alias = any(item.alias_info is not None for item in returns) or func._schema.name in _UNDECLARED_VIEWS
        _MAKES_STORAGE[func] = bool(returns) and not alias
    return _MAKES_STORAGE[func]


_UNDECLARED_VIEWS = {"aten::_unsafe_view", "aten::_reshape_alias"}


class _Seed(torch.autograd.Function):
    """A scalar whose backward hands out gradients that nothing but the engine holds, as in the middle of a model."""

    @staticmethod
    def forward(ctx: Any, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.like = [(tuple(out.shape), out.stride(), out.dtype, out.device) for out in outputs]
        return outputs[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(
            torch.empty_strided(shape, stride, dtype=dtype, device=device) for shape, stride, dtype, device in ctx.like
        )


def seed_backward(outputs: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """Return a scalar from which backward reaches every output that has a gradient, or None where none has.

    Give backward a gradient of the scalar (`seed.detach()` is free); those of the outputs have undefined values.
    """
    differentiable = [out for out in outputs if out.requires_grad]
    if not differentiable:
        return None
    seed: torch.Tensor = _Seed.apply(*differentiable)  # type: ignore[no-untyped-call]
    return seed


@contextmanager
def accumulated_gradients(runner: SegmentRunner) -> Iterator[None]:
    """Give every trainable parameter a gradient to add to, as all microbatches but the first find it."""
    before = [param.grad for param in runner.trainable]
    with runner.active():
        for param in runner.trainable:
            param.grad = torch.zeros_like(param)
    try:
        yield
    finally:
        for param, grad in zip(runner.trainable, before, strict=True):
            param.grad = grad
        for value in runner.grad_inputs:
            value.grad = None


def follow_memory(
    runner: SegmentRunner, live: LiveBytes, between: Callable[[torch.Tensor | None], None] = lambda seed: None
) -> MemoryNumbers:
    """Return the memory of one forward and backward, followed by `live`, which is entered here.

    Transient bytes of the forward are those beside what stays (results and saved tensors); of the backward, those
    beside what was there at its start: the gradients of results and inputs are among them, those of parameters only
    until they are added to. `between` is called after the forward with the seed of the backward, None where nothing
    has a gradient.
    """
    saved = SavedTensors()
    with accumulated_gradients(runner), runner.active(), live:
        live.restart()
        with saved.watch():
            outputs = runner.forward()
        activation, from_inputs, from_outputs = saved.take_bytes(runner, outputs)
        transient = live.peak - live.live
        seed = seed_backward(outputs)
        targets = [*runner.trainable, *runner.grad_inputs]
        del outputs
        between(seed)
        if seed is not None and targets:
            start = live.restart()
            torch.autograd.backward(seed, seed.detach(), inputs=targets)
            transient = max(transient, live.peak - start)
    return MemoryNumbers(activation, from_inputs, from_outputs, transient)


def follow_cuda_memory(runner: SegmentRunner) -> MemoryNumbers:
    """Return the memory of one forward and backward by the CUDA allocator's statistics; run the layer once before."""
    device = runner.target.device
    saved = SavedTensors()
    with accumulated_gradients(runner):
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        with saved.watch():
            outputs = runner.forward()
        activation, from_inputs, from_outputs = saved.take_bytes(runner, outputs)
        transient = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
        seed = seed_backward(outputs)
        targets = [*runner.trainable, *runner.grad_inputs]
        del outputs
        if seed is not None and targets:
            torch.cuda.reset_peak_memory_stats(device)
            start = torch.cuda.memory_allocated(device)
            torch.autograd.backward(seed, seed.detach(), inputs=targets)
            transient = max(transient, torch.cuda.max_memory_allocated(device) - start)
    return MemoryNumbers(activation, from_inputs, from_outputs, max(0, transient))

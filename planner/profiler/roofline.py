"""Computes what a layer costs on a GPU that isn't here, by running it on fake tensors and pricing every operator.

    time of an operator = launch overhead
        + max(FLOPs / (peak x matmul efficiency), bytes / (bandwidth x memory efficiency))

(the roofline of Williams, Waterman and Patterson, CACM 52(4), 2009). A recurrent layer launches kernels for every step,
each after the one before, and takes no less than their overheads. Views, allocations and what moves nothing are free.
Bytes are those of an operator's arguments and results, each read or written once: operators are taken as torch runs
them uncompiled.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from planner.cluster import Gpu
from planner.errors import ProfileError
from planner.profiler.flops import ATTENTION, count_flops
from planner.profiler.gpu_kernels import GpuKernels, dependent_launches, run_operator
from planner.profiler.memory import LiveBytes, MemoryNumbers, follow_memory, makes_storage
from planner.profiler.segment import SegmentRunner
from planner.profiler.torch_internals import FakeTensor
from planner.recomputation import recomputed_under

# What attention kernels reach of what plain matrix products reach: 0.45 and 0.77 of the peak of an A100 in an
# exploratory fit to 553 published training runs (FlashAttention 2, fp16 and bf16). Not measured here.
ATTENTION_EFFICIENCY = 0.58

_FREE = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::_unsafe_view",
    "aten::_reshape_alias",
    "aten::set_",
    "aten::scalar_tensor",
}
_WRITE_ONLY = {"aten::copy_", "aten::fill_", "aten::zero_", "aten::normal_", "aten::bernoulli_"}
# Operators that read as much of their first tensor as they write, however large that is.
_GATHERS = {"aten::embedding", "aten::index", "aten::index_select", "aten::gather", "aten::select_scatter"}


@dataclass(frozen=True)
class ComputedNumbers:
    """What a layer costs on a GPU by computation; the fields are those of `LayerCost`."""

    forward_time_s: float
    backward_input_time_s: float
    backward_weight_time_s: float
    forward_flops: int
    launches: tuple[int, int, int]
    memory: MemoryNumbers


class PricedOperators(LiveBytes):  # type: ignore[no-untyped-call]
    """Adds up time, FLOPs and launches that operators run inside would take on a GPU, and follows their memory."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.gpu = gpu
        self.time_s = 0.0
        self.flops = 0
        self.launches = 0
        self._seconds_per_byte = 1 / (gpu.memory_bandwidth * gpu.memory_efficiency)
        self._seconds_per_flop: dict[torch.dtype, float] = {}

    def take(self) -> tuple[float, int, int]:
        """Return the seconds, FLOPs and launches of kernels since the last call, and start again."""
        taken = (self.time_s, self.flops, self.launches)
        self.time_s, self.flops, self.launches = 0.0, 0, 0
        return taken

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        kwargs = kwargs or {}
        result = run_operator(func, args, kwargs)
        kind = _kind(func)
        if kind.new:
            self.follow(func, result)
        if kind.free:
            return result
        flops = count_flops(func, args, kwargs, result)
        if flops and _multiplied(args).is_complex:  # four products of real parts, and their sums
            flops *= 4
        moved = kind.bytes_moved(args, kwargs, result)
        if not moved and not flops:  # of nothing: no kernel
            return result
        time_s = moved * self._seconds_per_byte
        if flops:
            self.flops += flops
            compute_s = flops * self._flop_time(func, args)
            if func.overloadpacket in ATTENTION:
                compute_s /= ATTENTION_EFFICIENCY
                if _is_causal(func, args, kwargs):  # blocks of pairs that the mask empties are skipped
                    compute_s /= 2
            time_s = max(time_s, compute_s)
        launches = dependent_launches(func, args)
        self.launches += launches
        self.time_s += max(time_s + self.gpu.launch_overhead, launches * self.gpu.launch_overhead)
        return result

    def _flop_time(self, func: Any, args: tuple[Any, ...]) -> float:
        """Return seconds per FLOP for the dtype of the matrices that an operator multiplies."""
        dtype = _multiplied(args)
        if dtype.is_complex:  # computed in real parts
            dtype = dtype.to_real()
        if dtype not in self._seconds_per_flop:
            name = str(dtype).removeprefix("torch.")
            peak = self.gpu.peak_flops.get(name)
            if not peak:
                known = ", ".join(sorted(self.gpu.peak_flops)) or "none"
                raise ProfileError(
                    f"GPU {self.gpu.name!r} has no peak_flops for {name} (it has {known}), which {func} needs",
                    hint=f"add {name} to the GPU's file, or profile in a dtype it has (--dtype)",
                )
            self._seconds_per_flop[dtype] = 1 / (peak * self.gpu.matmul_efficiency)
        return self._seconds_per_flop[dtype]


def _multiplied(args: tuple[Any, ...]) -> torch.dtype:
    """Return the dtype of the matrices that an operator multiplies."""
    dtypes = [item.dtype for item in args if isinstance(item, torch.Tensor)]
    return next((dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex), dtypes[0])


class _Kind:
    """What pricing needs to know of an operator, read from its schema once."""

    def __init__(self, func: Any) -> None:
        schema = getattr(func, "_schema", None)
        name = schema.name if schema is not None else ""
        returns = schema.returns if schema is not None else ()
        self.new = schema is not None and makes_storage(func)
        is_view = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        self.free = schema is None or is_view or name in _FREE or name.startswith("prim::")
        self._skip_first = name in _WRITE_ONLY
        self._gathers = name in _GATHERS

    def bytes_moved(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
        """Return the bytes that an operator reads and writes."""
        written = _bytes(result)
        if self._gathers:
            return 2 * written + _bytes(args[1:])
        return written + _bytes(args[1:] if self._skip_first else args) + _bytes(tuple(kwargs.values()))


_KINDS: dict[Any, _Kind] = {}


def _kind(func: Any) -> _Kind:
    if func not in _KINDS:
        _KINDS[func] = _Kind(func)
    return _KINDS[func]


def _bytes(value: Any) -> int:
    """Return the bytes of the tensors in a value; a tensor expanded over a dimension is read once."""
    if isinstance(value, torch.Tensor):
        count = value.numel()
        if count and 0 in value.stride():
            for size, stride in zip(value.shape, value.stride(), strict=True):
                if stride == 0:
                    count //= size
        return count * value.itemsize
    if isinstance(value, tuple | list):
        return sum(_bytes(item) for item in value)
    return 0


def _is_causal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if "is_causal" in kwargs:
        return bool(kwargs["is_causal"])
    position = next((i for i, item in enumerate(func._schema.arguments) if item.name == "is_causal"), len(args))
    return bool(args[position]) if position < len(args) else False


def compute_numbers(runner: SegmentRunner, gpu: Gpu) -> ComputedNumbers:
    """Return what a layer costs on `gpu`; its tensors are fake, but for code that only real ones can go through.

    The weight part of the backward is the whole less what the gradients of inputs alone take, as when measured; adding
    to the gradients of earlier microbatches is in it. ProfileError where the GPU has no peak for a dtype.
    """
    priced = PricedOperators(gpu)
    forward_s, forward_flops, forward_launches = 0.0, 0, 0
    input_s, input_launches = 0.0, 0

    def price_inputs(seed: torch.Tensor | None) -> None:
        nonlocal forward_s, forward_flops, forward_launches, input_s, input_launches
        forward_s, forward_flops, forward_launches = priced.take()
        if seed is not None and runner.grad_inputs and runner.trainable:
            torch.autograd.grad(seed, runner.grad_inputs, seed.detach(), retain_graph=True, allow_unused=True)
            input_s, _, input_launches = priced.take()

    kernels = GpuKernels if runner.fake_mode is not None else nullcontext  # real tensors have the CPU's
    with runner.named_errors(), kernels(), recomputed_under(kernels):
        memory = follow_memory(runner, priced, price_inputs)
    backward_s, _, launches = priced.take()
    if not runner.trainable:
        input_s, input_launches = backward_s, launches
    return ComputedNumbers(
        forward_s,
        min(input_s, backward_s),
        max(0.0, backward_s - input_s),
        forward_flops,
        (forward_launches, min(input_launches, launches), max(0, launches - input_launches)),
        memory,
    )

"""Measures what a layer costs on the device at hand: the median of repeated runs after warm-up, with their spread."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from planner.profiler.flops import count_flops
from planner.profiler.memory import LiveBytes, MemoryNumbers, accumulated_gradients, follow_cuda_memory, follow_memory
from planner.profiler.segment import SegmentRunner

_GRADIENT = 1e-3  # of every element of a result: small, so that what repeats add up stays finite in half precision


@dataclass(frozen=True)
class Repeats:
    """How often a layer is run: `warm_up` times unseen, then `least` to `most` times, until `budget_s` is spent."""

    warm_up: int = 2
    least: int = 5
    most: int = 30
    budget_s: float = 0.3


DEFAULT_REPEATS = Repeats()


@dataclass(frozen=True)
class Times:
    """Medians of `num_repeats` runs of a layer; `spread_fraction` is that of forward and backward together."""

    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    spread_fraction: float
    num_repeats: int


@dataclass(frozen=True)
class MeasuredNumbers:
    """What a layer was measured to cost on this device."""

    times: Times
    forward_flops: int
    memory: MemoryNumbers


class _CpuClock:
    def time(self, work: Callable[[], Any]) -> tuple[float, Any]:
        """Return the seconds that `work` takes, and its result."""
        start = time.perf_counter()
        result = work()
        return time.perf_counter() - start, result


class _CudaClock:
    """Times by events in the stream; what the host needs to launch counts only where the device waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def time(self, work: Callable[[], Any]) -> tuple[float, Any]:
        """Return the seconds that `work` takes on the device, and its result."""
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(self._device)
        start.record()
        result = work()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3, result


def spread(values: list[float]) -> float:
    """Return the interquartile range of values over their median; 0 for fewer than two or a median of 0."""
    middle = statistics.median(values)
    if len(values) < 2 or middle <= 0:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


def measure_times(runner: SegmentRunner, repeats: Repeats) -> Times:
    """Return the times of a layer.

    The backward is run twice: for the gradients of inputs alone, then whole, adding to the parameters' gradients. The
    weight part is the difference. With no input, or no parameter, to find gradients for, the whole is the other part.
    """
    clock = _CudaClock(runner.target.device) if runner.target.device.type == "cuda" else _CpuClock()
    inputs, trainable = runner.grad_inputs, runner.trainable
    forward: list[float] = []
    backward_input: list[float] = []
    backward: list[float] = []
    with accumulated_gradients(runner):
        started = time.perf_counter()
        run = 0
        while _go_on(run - repeats.warm_up, time.perf_counter() - started, repeats):
            if run == repeats.warm_up:
                started = time.perf_counter()
            forward_s, outputs = clock.time(runner.forward)
            input_s = whole_s = 0.0
            ends = [out for out in outputs if out.requires_grad]
            if ends and (inputs or trainable):
                grads = [torch.full_like(out, _GRADIENT) for out in ends]
                if inputs and trainable:
                    input_s, _ = clock.time(
                        lambda: torch.autograd.grad(ends, inputs, grads, retain_graph=True, allow_unused=True)  # noqa: B023
                    )
                for value in inputs:
                    value.grad = None
                whole_s, _ = clock.time(lambda: torch.autograd.backward(ends, grads, inputs=[*trainable, *inputs]))  # noqa: B023
            if run >= repeats.warm_up:
                forward.append(forward_s)
                backward_input.append(input_s)
                backward.append(whole_s)
            del outputs, ends
            run += 1
    whole = statistics.median(backward)
    part = min(statistics.median(backward_input), whole) if trainable else whole
    return Times(
        forward_s=statistics.median(forward),
        backward_input_s=part,
        backward_weight_s=whole - part,
        spread_fraction=spread([a + b for a, b in zip(forward, backward, strict=True)]),
        num_repeats=len(forward),
    )


def _go_on(done: int, spent_s: float, repeats: Repeats) -> bool:
    return done < repeats.least or (done < repeats.most and spent_s < repeats.budget_s)


class _Flops(LiveBytes):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.follow(func, result)
        self.flops += count_flops(func, args, kwargs, result)
        return result


def measure_numbers(runner: SegmentRunner, repeats: Repeats = DEFAULT_REPEATS) -> MeasuredNumbers:
    """Return what a layer costs on its device; ProfileError names a layer that doesn't fit or can't be run."""
    followed = _Flops()
    forward_flops = 0

    def forward_done(seed: torch.Tensor | None) -> None:
        nonlocal forward_flops
        forward_flops = followed.flops

    with runner.named_errors():
        times = measure_times(runner, repeats)
        memory = follow_memory(runner, followed, forward_done)
        if runner.target.device.type == "cuda":
            memory = follow_cuda_memory(runner)
    return MeasuredNumbers(times, forward_flops, memory)

"""What layers cost on each GPU type of a cluster: profiled there, or scaled from the type that the profile is of.

A profile holds times of one type, and those of others that were merged into it (`merged_profile`). Times on a type that
nobody profiled are scaled by roofline (Williams, Waterman and Patterson, CACM 52(4), 2009), at the intensity that the
layer's own time shows:

    launching = min(time, launches x launch overhead)                       on the profiled type
    computing = min(time - launching, FLOPs / (peak x matmul efficiency))
    time'     = launches x launch overhead of the other type
              + computing x ratio of (peak x matmul efficiency)
              + (time - launching - computing) x ratio of (memory bandwidth x memory efficiency)

for the forward and for each half of the backward, which does the FLOPs of a forward. Beside profiles computed for the
other type it is within 4 % for every layer of Llama 3 8B and of a small GPT (H100 to A100, L40S and B200; November
2026). Measured profiles don't count launches: they are taken as memory's. A profile for the type itself
(`planner profile --gpu`) is better.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from planner.cluster import Cluster, Gpu, read_gpu, shipped_gpu
from planner.cost.layers import LayerNumbers
from planner.cost.states import memory_bytes_per_s
from planner.errors import PlannerError, ProfileError
from planner.model_profile import LayerClass, LayerCost, ModelProfile


def profiled_type(profile: ModelProfile) -> Gpu | None:
    """Return the GPU type whose times a profile holds; None for a CPU, and for one that no file describes.

    An imported profile is of none either: without FLOPs nothing can be scaled.
    """
    origin = profile.provenance
    name = origin.gpu or (shipped_gpu(origin.device) if origin.device_type == "cuda" else None)
    if origin.imported_from:
        return None
    try:
        return read_gpu(name) if name else None
    except PlannerError:  # its file is gone
        return None


class GpuCosts:
    """Costs of a profile's layer classes by GPU type of a cluster."""

    def __init__(self, profile: ModelProfile, cluster: Cluster) -> None:
        self._profile, self._cluster = profile, cluster
        self._types = list(dict.fromkeys(group.gpu for group in cluster.node_groups))
        self._merged = {name for layer_class in profile.layer_classes for name in layer_class.costs_by_gpu}
        self._scaled: dict[tuple[str, str], tuple[LayerCost, ...]] = {}

    @cached_property
    def _own(self) -> Gpu | None:
        return profiled_type(self._profile)

    def is_scaled(self, gpu: str) -> bool:
        """Return whether times on a type are scaled from another's; ProfileError where they can't be."""
        if gpu in self._merged or self._is_own(gpu):
            return False
        if self._own is not None:
            return True
        if len(self._types) == 1:  # nothing to compare with: taken as they are, which commands warn of
            return False
        raise ProfileError(
            f"the cluster {self._cluster.name!r} mixes {' and '.join(self._types)}; the profile "
            f"{self._profile.name!r} has times of {self._profile.provenance.device!r}, which can't be scaled",
            hint=f"profile for each type (--gpu {gpu}), and give a --profile for each",
        )

    def _is_own(self, gpu: str) -> bool:
        origin = self._profile.provenance
        if gpu == origin.gpu or self._cluster.gpus[gpu].device_name == origin.device != "":
            return True
        return self._own is not None and self._own.name == gpu

    def costs(self, layer_class: LayerClass, gpu: str) -> tuple[LayerCost, ...]:
        """Return what a class costs on a type; ProfileError where nothing tells."""
        if gpu in self._merged:
            if gpu not in layer_class.costs_by_gpu:
                raise ProfileError(
                    f"layer class {layer_class.name!r} has no costs on {gpu}, where others have",
                    hint=f"profile the whole model with --gpu {gpu}",
                )
            return layer_class.costs_by_gpu[gpu]
        if not self.is_scaled(gpu):
            return layer_class.costs
        key = (layer_class.name, gpu)
        if key not in self._scaled:
            assert self._own is not None
            rescaling = Rescaling.of(self._own, self._cluster.gpus[gpu], self._profile.provenance.dtype)
            self._scaled[key] = tuple(map(rescaling.scale, layer_class.costs))
        return self._scaled[key]


def scaled_types(profile: ModelProfile, cluster: Cluster) -> tuple[str, ...]:
    """Return the cluster's GPU types whose times are scaled from the profile's; ProfileError where they can't be."""
    costs = GpuCosts(profile, cluster)
    return tuple(gpu for gpu in dict.fromkeys(group.gpu for group in cluster.node_groups) if costs.is_scaled(gpu))


@dataclass(frozen=True, slots=True)
class Rescaling:
    """From one type to another: FLOPs per second there, both launch overheads, and how much longer things take."""

    flops_per_s: float
    launch_s: float
    other_launch_s: float
    slower_flops: float
    slower_bytes: float

    @classmethod
    def of(cls, own: Gpu, other: Gpu, dtype: str) -> "Rescaling":
        """Return how times in `dtype` are scaled; ProfileError where a type has no peak for it."""
        rates = []
        for gpu in (own, other):
            if not (peak := gpu.peak_flops.get(dtype)):
                raise ProfileError(
                    f"times can't be scaled from {own.name} to {other.name}: {gpu.name} has no peak_flops for {dtype}",
                    hint=f"profile for {other.name} itself (--gpu), or add {dtype} to the GPU's file",
                )
            rates.append(peak * gpu.matmul_efficiency)
        slower_bytes = memory_bytes_per_s(own) / memory_bytes_per_s(other)
        return cls(rates[0], own.launch_overhead, other.launch_overhead, rates[0] / rates[1], slower_bytes)

    def scale(self, cost: LayerCost) -> LayerCost:
        """Return a layer's cost on the other type."""
        names = ("forward_time_s", "backward_input_time_s", "backward_weight_time_s")
        changed: dict[str, object] = {"source": "scaled"}
        for name, launches in zip(names, cost.launches, strict=True):
            seconds = getattr(cost, name)
            launching = min(seconds, launches * self.launch_s)
            computing = min(seconds - launching, cost.forward_flops / self.flops_per_s)
            changed[name] = (
                launches * self.other_launch_s
                + computing * self.slower_flops
                + (seconds - launching - computing) * self.slower_bytes
            )
        return cost.model_copy(update=changed)


def slowest_numbers(numbers: Sequence[LayerNumbers]) -> LayerNumbers:
    """Return what a layer costs on GPUs of several types that work in step: of each number the largest."""
    return _of_each(max, numbers)


def least_numbers(numbers: Sequence[LayerNumbers]) -> LayerNumbers:
    """Return what a layer costs at least on any of several types: of each number the smallest."""
    return _of_each(min, numbers)


def _of_each(choose: Callable[[Iterable[Any]], Any], numbers: Sequence[LayerNumbers]) -> LayerNumbers:
    if len(numbers) == 1:
        return numbers[0]
    return LayerNumbers(**{name: choose(getattr(found, name) for found in numbers) for name in LayerNumbers.__slots__})

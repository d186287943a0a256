"""The price of one stage: its times per microbatch and per step, and its bytes; and of a device group its memory."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cluster import Gpu
from planner.cost.communication import Route, collective_s
from planner.cost.layers import LayerNumbers
from planner.cost.memory import StageValues, activation_bytes, held_bytes, transient_bytes
from planner.cost.places import DataRoutes
from planner.cost.states import WORKING_BYTES, StateRules, cast_s, optimizer_s
from planner.prediction import MemoryUse


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of one stage: per microbatch first, then per step. `forward_s` and `backward_s` are compute alone.

    `weight_s` is what of `backward_s` the gradients of weights take.
    """

    forward_s: float
    backward_s: float
    weight_s: float
    recompute_s: float
    forward_comm_s: float
    backward_comm_s: float
    cast_s: float
    gather_s: float
    reduce_s: float
    optimizer_s: float

    def forward_action_s(self, *, comm: bool = True) -> float:
        """A forward; without communication if `comm` is False."""
        return self.forward_s + (self.forward_comm_s if comm else 0.0)

    def backward_action_s(self, *, comm: bool = True) -> float:
        """A backward, recomputation included; without communication if `comm` is False."""
        return self.backward_s + self.recompute_s + (self.backward_comm_s if comm else 0.0)

    def input_action_s(self, *, comm: bool = True) -> float:
        """What of a backward comes before the gradients of weights: recomputation and collectives are part of it."""
        return max(0.0, self.backward_action_s(comm=comm) - self.weight_s)


@dataclass(frozen=True, slots=True)
class StageBytes:
    """What one GPU holds for a stage. `kept_bytes` are those of a microbatch from its forward to its backward.

    Where backwards are split, `kept_bytes` last until the gradient of inputs, and `waiting_bytes` from then until that
    of weights.
    """

    param_bytes: int
    grad_bytes: int
    optimizer_bytes: int
    kept_bytes: int
    waiting_bytes: int
    transient_bytes: int
    buffer_bytes: int
    bucket_bytes: int


def stage_elements(
    layers: Sequence[LayerNumbers],
    repeats: Sequence[tuple[tuple[int, ...], bool, int]],
    first: int,
    stop: int,
    earlier: Sequence[tuple[int, int]] = (),
) -> tuple[int, int]:
    """Return the trainable and the frozen parameter elements of one GPU of the stage of layers [first, stop).

    `repeats` are storages that several layers read, as (layers, trainable, local elements): held once, by the first of
    them. `earlier` are the spans of earlier stages on the same GPU.
    """
    trainable = sum(layer.trainable for layer in layers[first:stop])
    frozen = sum(layer.frozen for layer in layers[first:stop])
    for readers, is_trainable, elements in repeats:
        inside = sum(first <= reader < stop for reader in readers)
        if inside and not any(start <= reader < end for reader in readers for start, end in earlier):
            inside -= 1
        if is_trainable:
            trainable -= inside * elements
        else:
            frozen -= inside * elements
    return max(trainable, 0), max(frozen, 0)


def stage_times(
    layers: Sequence[LayerNumbers],
    first: int,
    stop: int,
    remade: Collection[int],
    elements: tuple[int, int],
    rules: StateRules,
    gpu: Gpu,
    tp_degree: int,
    tp_route: Route,
    routes: DataRoutes,
) -> StageTimes:
    """Return the times of the stage of layers [first, stop).

    A recomputed layer runs its forward again, collectives included. Gradients are reduced after the last backward
    (`DataRoutes.reduce_s`); what is sharded is gathered once, at the start.
    """
    own = layers[first:stop]
    trainable, frozen = elements
    grad_bytes = trainable * rules.grad_bytes_per_element
    partial = sum(layer.partial for layer in own) * rules.grad_bytes_per_element
    working_bytes = (trainable + frozen) * WORKING_BYTES[rules.precision]
    return StageTimes(
        forward_s=sum(layer.forward_s for layer in own),
        backward_s=sum(layer.backward_s for layer in own),
        weight_s=sum(layer.backward_weight_s for layer in own),
        recompute_s=sum(layers[index].forward_s for index in range(first, stop) if index in remade),
        forward_comm_s=sum(layer.forward_comm_s for layer in own),
        backward_comm_s=sum(layer.backward_comm_s for layer in own)
        + sum(layers[index].forward_comm_s for index in range(first, stop) if index in remade),
        cast_s=cast_s(trainable + frozen, rules, gpu),
        gather_s=routes.gather_s(working_bytes, rules),
        reduce_s=routes.reduce_s(grad_bytes, rules) + collective_s("all_reduce", partial, tp_degree, tp_route),
        optimizer_s=optimizer_s(trainable, rules, gpu),
    )


def stage_bytes(
    layers: Sequence[LayerNumbers],
    inputs: Sequence[int],
    values: StageValues,
    messages: StageValues,
    first: int,
    stop: int,
    remade: Collection[int],
    elements: tuple[int, int],
    rules: StateRules,
    *,
    split: bool,
) -> StageBytes:
    """Return what one GPU of the stage of layers [first, stop) holds; `split` backwards keep what they recompute.

    `messages` are those of the stage's `values` that come from other GPUs or go there.
    """
    trainable, frozen = elements
    received = values.received_bytes
    kept = activation_bytes(layers, inputs, received, first, stop, remade)
    return StageBytes(
        param_bytes=rules.param_bytes(trainable + frozen),
        grad_bytes=rules.grad_bytes(trainable),
        optimizer_bytes=rules.optimizer_bytes(trainable),
        kept_bytes=kept,
        waiting_bytes=max(kept, activation_bytes(layers, inputs, received, first, stop, ())),
        transient_bytes=transient_bytes(layers, first, stop, () if split else remade),
        buffer_bytes=messages.buffer_bytes,
        bucket_bytes=rules.bucket_bytes(max(layer.trainable for layer in layers[first:stop])),
    )


def group_memory(
    stages: Sequence[StageBytes], held: NDArray[np.int64], reserve_bytes: int, *, split: bool
) -> MemoryUse:
    """Return the peak memory of one GPU of the group of `stages`; `held` is `schedule.held_at_once` of the group.

    The most that activations take at once, and of what lives while one action runs the largest.
    """
    kept = [stage.kept_bytes for stage in stages] + ([stage.waiting_bytes for stage in stages] if split else [])
    return MemoryUse(
        param_bytes=sum(stage.param_bytes for stage in stages),
        grad_bytes=sum(stage.grad_bytes for stage in stages),
        optimizer_bytes=sum(stage.optimizer_bytes for stage in stages),
        activation_bytes=held_bytes(held, kept),
        transient_bytes=max(stage.transient_bytes for stage in stages),
        communication_bytes=sum(stage.buffer_bytes for stage in stages) + max(stage.bucket_bytes for stage in stages),
        reserve_bytes=reserve_bytes,
    )

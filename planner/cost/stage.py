"""The price of one stage: its times per microbatch and per step, and its memory by owner."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from planner.cluster import Gpu
from planner.cost.communication import Route, collective_s
from planner.cost.layers import LayerNumbers
from planner.cost.memory import StageValues, activation_bytes, transient_bytes
from planner.cost.places import DataRoutes
from planner.cost.states import WORKING_BYTES, StateRules, cast_s, optimizer_s
from planner.plan import MemoryUse


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of one stage: per microbatch first, then per step. `forward_s` and `backward_s` are compute alone."""

    forward_s: float
    backward_s: float
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


def stage_elements(
    layers: Sequence[LayerNumbers], repeats: Sequence[tuple[tuple[int, ...], bool, int]], first: int, stop: int
) -> tuple[int, int]:
    """Return the trainable and the frozen parameter elements of one GPU of the stage of layers [first, stop).

    `repeats` are storages that several layers read, as (layers, trainable, local elements): held once.
    """
    trainable = sum(layer.trainable for layer in layers[first:stop])
    frozen = sum(layer.frozen for layer in layers[first:stop])
    for readers, is_trainable, elements in repeats:
        inside = sum(first <= reader < stop for reader in readers)
        if inside > 1:
            if is_trainable:
                trainable -= (inside - 1) * elements
            else:
                frozen -= (inside - 1) * elements
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
        recompute_s=sum(layers[index].forward_s for index in range(first, stop) if index in remade),
        forward_comm_s=sum(layer.forward_comm_s for layer in own),
        backward_comm_s=sum(layer.backward_comm_s for layer in own)
        + sum(layers[index].forward_comm_s for index in range(first, stop) if index in remade),
        cast_s=cast_s(trainable + frozen, rules, gpu),
        gather_s=routes.gather_s(working_bytes, rules),
        reduce_s=routes.reduce_s(grad_bytes, rules) + collective_s("all_reduce", partial, tp_degree, tp_route),
        optimizer_s=optimizer_s(trainable, rules, gpu),
    )


def stage_memory(
    layers: Sequence[LayerNumbers],
    inputs: Sequence[int],
    values: StageValues,
    first: int,
    stop: int,
    remade: Collection[int],
    elements: tuple[int, int],
    rules: StateRules,
    in_flight: int,
    reserve_bytes: int,
) -> MemoryUse:
    """Return the peak memory of one GPU of the stage, `in_flight` microbatches being between forward and backward."""
    trainable, frozen = elements
    kept = activation_bytes(layers, inputs, values.received_bytes, first, stop, remade)
    return MemoryUse(
        param_bytes=rules.param_bytes(trainable + frozen),
        grad_bytes=rules.grad_bytes(trainable),
        optimizer_bytes=rules.optimizer_bytes(trainable),
        activation_bytes=in_flight * kept,
        transient_bytes=transient_bytes(layers, first, stop, remade),
        communication_bytes=values.buffer_bytes
        + rules.bucket_bytes(max(layer.trainable for layer in layers[first:stop])),
        reserve_bytes=reserve_bytes,
    )

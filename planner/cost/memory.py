"""Bytes that live and die with microbatches: activations, values between stages, transients.

A layer keeps `activation_bytes` from its forward to its backward. Between two neighbours the tensor is the output of
one and the input of the other: kept once, as large as what either saves, unless the second reads nothing of the first
(`LayerNumbers.apart`): then they are two. A recomputed layer keeps its inputs only,
and has its activations again while its own backward runs. What a stage receives it holds as long as any of it.

Where backwards are split, everything is kept until the gradients of weights are done, and what is recomputed for the
gradient of inputs stays from then on. Of what is kept some could go after the gradient of inputs; the gradients of
outputs that those of weights need come instead. Qi et al., "Zero Bubble Pipeline Parallelism" (2023), count less bytes
for the weights of a transformer block alone than for its whole backward, and hold the larger number too.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.layers import LayerNumbers
from planner.model_profile import ModelProfile


@dataclass(frozen=True, slots=True)
class StageValues:
    """Bytes of the values that enter and leave a stage per microbatch, each once; `_grad` where gradients flow."""

    received_bytes: int
    received_grad_bytes: int
    sent_bytes: int
    sent_grad_bytes: int

    @property
    def buffer_bytes(self) -> int:
        """Buffers beside the activations: the next input received ahead, outputs until sent, gradients alike.

        Of the gradients that come back one is in use while the next is received.
        """
        return self.received_bytes + self.sent_bytes + 2 * self.sent_grad_bytes + self.received_grad_bytes


def input_bytes(profile: ModelProfile, rows: int) -> tuple[int, ...]:
    """Return for every layer the bytes of the values of other layers that it reads."""
    total = [0] * len(profile.layers)
    for edge in profile.edges:
        for consumer in edge.consumers:
            total[consumer] += edge.num_bytes(rows)
    return tuple(total)


def stage_values(
    profile: ModelProfile, rows: int, first: int, stop: int, beside: Sequence[tuple[int, int]] = ()
) -> StageValues:
    """Return what the stage of layers [first, stop) receives and sends; nothing from and to the spans `beside` it."""

    def near(layer: int) -> bool:
        return any(start <= layer < end for start, end in beside)

    received = received_grad = sent = sent_grad = 0
    for edge in profile.edges:
        if edge.producer >= stop or edge.consumers[-1] < first:
            continue
        if edge.producer < first:
            if not near(edge.producer) and any(first <= consumer < stop for consumer in edge.consumers):
                received += edge.num_bytes(rows)
                received_grad += edge.num_bytes(rows) if edge.needs_grad else 0
        elif stop <= edge.consumers[-1] and not all(near(c) for c in edge.consumers if c >= stop):
            sent += edge.num_bytes(rows)
            sent_grad += edge.num_bytes(rows) if edge.needs_grad else 0
    return StageValues(received, received_grad, sent, sent_grad)


def between_bytes(left: int, own: int, layer: LayerNumbers) -> int:
    """Return what is kept between a layer that saves `left` of its output and the next `layer`, with `own` inputs."""
    return left + own if layer.apart else max(left, own)


def activation_bytes(
    layers: Sequence[LayerNumbers], inputs: Sequence[int], received: int, first: int, stop: int, remade: Collection[int]
) -> int:
    """Return what the stage of layers [first, stop) keeps of one microbatch; `remade` are recomputed layers."""
    total = max(received, 0 if first in remade else layers[first].saved_input_bytes)
    for index in range(first, stop):
        layer = layers[index]
        if index not in remade:
            total += layer.activation_bytes
        left = layers[index - 1].saved_output_bytes if index > first and index - 1 not in remade else 0
        if index > first:
            total += between_bytes(left, inputs[index] if index in remade else layer.saved_input_bytes, layer)
    return total + (0 if stop - 1 in remade else layers[stop - 1].saved_output_bytes)


def transient_bytes(layers: Sequence[LayerNumbers], first: int, stop: int, remade: Collection[int]) -> int:
    """Return the most that lives only while one layer of [first, stop) runs, remade activations included."""
    return max(
        layers[index].transient_bytes + (layers[index].activation_bytes if index in remade else 0)
        for index in range(first, stop)
    )


def held_bytes(rows: NDArray[np.int64], per_microbatch: Sequence[int]) -> int:
    """Return the most that is held at once: the largest product of a row of counts with bytes per microbatch."""
    large = sum(per_microbatch) * int(rows.max()) >= 2**62  # Python's own integers, where 64 bits might not do
    return int((rows @ np.array(per_microbatch, dtype=object if large else np.int64)).max())

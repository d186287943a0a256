"""Prices of every candidate stage [a, b) at once, as arrays indexed [a, b] with 0 <= a < b <= num_layers.

The numbers are those of `planner.cost`, from the same layer tables; only sums over layers become differences of prefix
sums. What a candidate plan costs is still said by `cost.evaluate`: the solver reads bounds from here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.cluster import Gpu
from planner.cost.communication import Route, collective_s
from planner.cost.evaluate import Pricer
from planner.cost.layers import LayerNumbers
from planner.cost.memory import between_bytes
from planner.cost.places import DataRoutes
from planner.cost.states import WORKING_BYTES, StateRules, cast_s, optimizer_s
from planner.sharding import Collective
from planner.solver.recompute import RecomputeChoices

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def prefix_sums(values: Sequence[float]) -> Floats:
    """Return the sums of the first 0, 1, ... values."""
    return np.concatenate(([0.0], np.cumsum(np.asarray(values, dtype=np.float64))))


def _prefix_ints(values: Sequence[int]) -> Ints:
    return np.array([0, *accumulate(values)], dtype=np.int64)


def differences(prefix: NDArray[np.generic]) -> NDArray[np.generic]:
    """Return prefix[b] - prefix[a] as an array [a, b]."""
    return prefix[None, :] - prefix[:, None]  # type: ignore[operator]


def running_max(values: Ints) -> Ints:
    """Return max(values[a:b]) as an array [a, b]; 0 where b <= a."""
    count = len(values)
    table = np.zeros((count + 1, count + 1), dtype=np.int64)
    for first in range(count):
        table[first, first + 1 :] = np.maximum.accumulate(values[first:])
    return table


@dataclass(frozen=True, slots=True)
class Crossing:
    """What candidate stages receive and buffer, and the edges by the cuts they cross, for one microbatch size."""

    received: Ints
    buffers: Ints
    inputs: tuple[int, ...]
    edges: tuple[tuple[int, tuple[int, ...], int, bool], ...]
    """(producer, consumers, bytes, needs_grad)"""
    crossing_bytes: Floats
    """bytes that cross the cut before each layer: forward, and back where gradients flow (2 x layers + 1)"""
    next_bytes: Floats
    """the same of what one layer hands to the next"""

    @classmethod
    def of(cls, pricer: Pricer, rows: int) -> "Crossing":
        """Return the crossings of a profile's edges for a microbatch of `rows`."""
        count = len(pricer.profile.layers)
        received = np.zeros((count + 1, count + 1), dtype=np.int64)
        received_grad, sent, sent_grad = received.copy(), received.copy(), received.copy()
        edges = []
        across, following = np.zeros((2, count + 1)), np.zeros((2, count + 1))
        for edge in pricer.profile.edges:
            num_bytes = edge.num_bytes(rows)
            ways = np.array([num_bytes, num_bytes if edge.needs_grad else 0])
            across[:, edge.producer + 1 : edge.consumers[-1] + 1] += ways[:, None]
            if edge.producer + 1 in edge.consumers:
                following[:, edge.producer + 1] += ways
            edges.append((edge.producer, edge.consumers, num_bytes, edge.needs_grad))
            for first in range(edge.producer + 1, edge.consumers[-1] + 1):
                consumer = next(c for c in edge.consumers if c >= first)
                received[first, consumer + 1 :] += num_bytes
                received_grad[first, consumer + 1 :] += num_bytes if edge.needs_grad else 0
            sent[: edge.producer + 1, edge.producer + 1 : edge.consumers[-1] + 1] += num_bytes
            if edge.needs_grad:
                sent_grad[: edge.producer + 1, edge.producer + 1 : edge.consumers[-1] + 1] += num_bytes
        buffers = received + sent + 2 * sent_grad + received_grad
        return cls(received, buffers, pricer.inputs(rows), tuple(edges), across, following)


_LEAST = ("trainable", "frozen", "largest", "transient", "activations", "kept_all", "kept_least")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTable:
    """Layer numbers at one microbatch size, tensor-parallel degree, sharding, route and GPU types, summed over stages.

    `kept_all` are activation bytes with nothing recomputed, `kept_least` a lower bound of any choice, and `best_ratio`
    the most bytes that a second of recomputation can save.
    """

    route: Route
    crossing: Crossing
    forward: Floats
    backward: Floats
    forward_sum: Floats
    backward_sum: Floats
    weight_sum: Floats
    """of backward, what the gradients of weights take"""
    partial_sum: Ints
    trainable: Ints
    frozen: Ints
    largest: Ints
    transient: Ints
    activations: Ints
    """bytes that each layer keeps for its own backward"""
    kept_all: Ints
    kept_least: Ints
    best_ratio: Floats
    forced_sum: Floats
    any_forced: bool
    choices: RecomputeChoices | None

    @classmethod
    def of(
        cls,
        pricer: Pricer,
        crossing: Crossing,
        rows: int,
        tp_degree: int,
        shardings: dict[str, str],
        route: Route,
        allowed: Sequence[tuple[bool, ...]],
        gpus: Sequence[str] = (),
    ) -> "LayerTable":
        """Return the table of one choice of sharding; `allowed` says which layers may be kept and recomputed.

        `gpus` names the types of a stage's GPUs, by default the cluster's first.
        """
        layers = pricer.layer_table(rows, tp_degree, shardings, route, gpus)
        count, inputs = len(layers), crossing.inputs
        forward = np.array([layer.forward_s + layer.forward_comm_s for layer in layers])
        backward = np.array([layer.backward_s + layer.backward_comm_s for layer in layers])
        remake = np.array([layer.recompute_s for layer in layers])
        trainable = np.asarray(differences(_prefix_ints([layer.trainable for layer in layers])), dtype=np.int64)
        frozen = np.asarray(differences(_prefix_ints([layer.frozen for layer in layers])), dtype=np.int64)
        for readers, is_trainable, elements in pricer.repeats(tp_degree, shardings):
            inside = np.asarray(
                differences(_prefix_ints([1 if index in readers else 0 for index in range(count)])), dtype=np.int64
            )
            held = trainable if is_trainable else frozen
            held -= np.maximum(inside - 1, 0) * elements
        # What recomputing layer l can save at most, per second: act_l, its saved output, its saved inputs.
        saved = np.array(
            [
                layer.activation_bytes
                + layer.saved_output_bytes
                + max(0, layer.saved_input_bytes - min(layer.saved_input_bytes, inputs[index]))
                if True in allowed[index]
                else 0
                for index, layer in enumerate(layers)
            ],
            dtype=np.float64,
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(saved > 0, saved / remake, 0.0)
        best_ratio = np.zeros((count + 1, count + 1))
        for first in range(count):
            best_ratio[first, first + 1 :] = np.maximum.accumulate(ratio[first:])
        least = [0 if True in allowed[i] else layers[i].activation_bytes for i in range(count)]
        return cls(
            route=route,
            crossing=crossing,
            forward=forward,
            backward=backward,
            forward_sum=prefix_sums(forward.tolist()),
            backward_sum=prefix_sums(backward.tolist()),
            weight_sum=prefix_sums([layer.backward_weight_s for layer in layers]),
            partial_sum=_prefix_ints([layer.partial for layer in layers]),
            trainable=np.maximum(trainable, 0),
            frozen=np.maximum(frozen, 0),
            largest=running_max(np.array([layer.trainable for layer in layers], dtype=np.int64)),
            transient=running_max(np.array([layer.transient_bytes for layer in layers], dtype=np.int64)),
            activations=np.array([layer.activation_bytes for layer in layers], dtype=np.int64),
            kept_all=_kept(layers, crossing, [layer.activation_bytes for layer in layers], remade=False),
            kept_least=_kept(layers, crossing, least, remade=True),
            best_ratio=best_ratio,
            forced_sum=prefix_sums([remake[i] if allowed[i] == (True,) else 0.0 for i in range(count)]),
            any_forced=any(allowed[i] == (True,) for i in range(count)),
            choices=RecomputeChoices(layers, inputs, allowed, [layer.layer_class for layer in pricer.profile.layers]),
        )

    @classmethod
    def least(cls, tables: Sequence["LayerTable"]) -> "LayerTable":
        """Return a table no number of which is above that of any of `tables`, which differ in sharding alone."""

        def lowest(name: str) -> NDArray[Any]:
            found: NDArray[Any] = np.min([getattr(table, name) for table in tables], axis=0)
            return found

        forward, backward = lowest("forward"), lowest("backward")
        partial = np.min([np.diff(table.partial_sum) for table in tables], axis=0)
        return cls(
            route=tables[0].route,
            crossing=tables[0].crossing,
            forward=forward,
            backward=backward,
            forward_sum=prefix_sums(forward.tolist()),
            backward_sum=prefix_sums(backward.tolist()),
            weight_sum=prefix_sums(np.min([np.diff(table.weight_sum) for table in tables], axis=0).tolist()),
            partial_sum=_prefix_ints(partial.tolist()),
            best_ratio=np.max([table.best_ratio for table in tables], axis=0),
            forced_sum=prefix_sums(np.min([np.diff(table.forced_sum) for table in tables], axis=0).tolist()),
            any_forced=tables[0].any_forced,
            choices=None,
            **{name: lowest(name) for name in _LEAST},
        )


def _kept(layers: Sequence[LayerNumbers], crossing: Crossing, own: Sequence[int], *, remade: bool) -> Ints:
    """Return the activation bytes with nothing recomputed, or a lower bound of any choice (`remade`)."""
    count, inputs = len(layers), crossing.inputs
    between = [0] * count
    for index in range(1, count):
        saved = layers[index].saved_input_bytes
        if remade:
            between[index] = min(saved, inputs[index])
        else:
            between[index] = between_bytes(layers[index - 1].saved_output_bytes, saved, layers[index])
    sums = _prefix_ints([a + b for a, b in zip(own, between, strict=True)])
    kept = np.asarray(differences(sums), dtype=np.int64) - np.array([*between, 0], dtype=np.int64)[:, None]
    first = np.array([*(0 if remade else layer.saved_input_bytes for layer in layers), 0], dtype=np.int64)
    kept += np.maximum(crossing.received, first[:, None])
    if not remade:
        kept += np.array([0, *(layer.saved_output_bytes for layer in layers)], dtype=np.int64)[None, :]
    return kept


@dataclass(frozen=True, slots=True)
class StateTable:
    """What a candidate stage holds and does once per step: bytes, and seconds before and after the microbatches."""

    fixed_bytes: Ints
    ready_s: Floats
    tail_s: Floats

    @classmethod
    def of(
        cls,
        table: LayerTable,
        rules: StateRules,
        gpu: Gpu,
        tp_degree: int,
        routes: DataRoutes | Route,
        reserve_bytes: int,
    ) -> "StateTable":
        """Return the state table of a layer table; the formulas are those of `cost.stage`, applied to arrays.

        One route will do where states are sharded over all replicas, or over none.
        """
        over = DataRoutes(routes, routes) if isinstance(routes, Route) else routes
        shards = rules.num_shards
        trainable, total = table.trainable, table.trainable + table.frozen
        fixed = rules.param_bytes(total) + rules.grad_bytes(trainable) + rules.optimizer_bytes(trainable)
        fixed = fixed + rules.bucket_bytes(table.largest) + table.crossing.buffers + reserve_bytes

        def ring(kind: Collective, num_bytes: Floats, ranks: int, route: Route) -> Floats:
            """Return the seconds of a collective on an array of sizes: linear in bytes but for the latency."""
            per_byte = collective_s(kind, 1.0, ranks, Route(route.bandwidth_bytes_per_s, 0.0))
            latency = collective_s(kind, 1.0, ranks, Route(float("inf"), route.latency_s))
            return np.where(num_bytes > 0, per_byte * num_bytes + latency, 0.0)

        width = rules.grad_bytes_per_element
        grads = trainable.astype(np.float64) * width
        partial = np.asarray(differences(table.partial_sum), dtype=np.float64) * width
        tail = ring("reduce_scatter", grads, shards, over.within)
        tail = tail + ring("all_reduce", grads / shards, rules.dp_degree // shards, over.across)
        tail = tail + ring("all_reduce", np.maximum(partial, 0.0), tp_degree, table.route)
        tail = tail + grads * (optimizer_s(1.0, rules, gpu) / width)
        ready = total.astype(np.float64) * cast_s(1.0, rules, gpu)
        ready = ready + ring(
            "all_gather", total.astype(np.float64) * WORKING_BYTES[rules.precision], shards, over.within
        )
        return cls(np.asarray(fixed, dtype=np.int64), ready, tail)

    @classmethod
    def least(cls, tables: Sequence["StateTable"]) -> "StateTable":
        """Return a table no number of which is above that of any of `tables`."""
        return cls(
            np.min([table.fixed_bytes for table in tables], axis=0),
            np.min([table.ready_s for table in tables], axis=0),
            np.min([table.tail_s for table in tables], axis=0),
        )

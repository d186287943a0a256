"""Gradients of parameters that layers of several stages share: summed between the stages, once per step.

Every stage has reduced its own by then; a GPU holds the part that tensor parallelism and sharding leave it. Where all
stages hold it in the same way, the GPUs of the same position sum theirs by an all-reduce. Otherwise each GPU receives
from every other stage the parts that it holds itself, each from one GPU that has them (`pairing.parameter_slices`), and
adds them up:

    seconds = latency + max over GPUs of max(bytes sent, bytes received) / bandwidth of the slowest route
"""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import permutations

from planner.cost.communication import collective_s, slowest
from planner.cost.layers import REPLICATED, parameter_sharding, tie_conflict
from planner.cost.places import Places
from planner.cost.states import MASTER_BYTES
from planner.errors import UsageError
from planner.graph import SharedStorage
from planner.model_profile import ModelProfile
from planner.pairing import Layout, parameter_slices
from planner.plan import Plan, Stage


def tied_sums(
    profile: ModelProfile, shared: Sequence[SharedStorage], plan: Plan, places: Places
) -> list[tuple[tuple[int, ...], float]]:
    """Return (stages that hold it, seconds) for every trainable parameter that several stages share.

    UsageError where layers divide a shared parameter in ways that no slices of one another.
    """
    stage_of = [index for index, stage in enumerate(plan.stages) for _ in stage.layers]
    shardings = {
        layer: plan.stages[stage].shardings.get(profile.layers[layer].layer_class, REPLICATED)
        for layer, stage in enumerate(stage_of)
    }
    degrees = {layer: plan.stages[stage].tp_degree for layer, stage in enumerate(stage_of)}
    found = []
    for storage in shared:
        if conflict := tie_conflict(profile, storage, degrees, shardings):
            a, b = (profile.layers[layer].name for layer in conflict)
            raise UsageError(
                f"layers {a!r} and {b!r} share parameter {storage.name!r}, which the plan divides differently",
                hint="give both layers shardings that divide it the same way",
            )
        reading = sorted({stage_of[layer] for layer in storage.layers}, reverse=True)
        # Stages on the same GPUs hold it once: the first of them stands for all.
        holders = tuple(sorted({plan.stages[stage].gpus: stage for stage in reading}.values()))
        if not storage.trainable or len(holders) == 1:
            continue
        divided = {
            stage_of[layer]: parameter_sharding(profile, layer, name, degrees[layer], shardings[layer]) is not None
            for layer, name in storage.names
        }
        stages = [plan.stages[index] for index in holders]
        layouts = [
            Layout(stage.tp_degree, stage.dp_degree, stage.num_shards(plan.data_parallel), divided[index])
            for index, stage in zip(holders, stages, strict=True)
        ]
        width = MASTER_BYTES[plan.precision]
        found.append((holders, _sum_s(storage.num_elements, width, stages, layouts, places)))
    return found


def _sum_s(num_elements: int, width: int, stages: Sequence[Stage], layouts: Sequence[Layout], places: Places) -> float:
    """Return the seconds of summing a gradient of so many elements of `width` bytes between stages."""
    if len(set(layouts)) == 1:
        divided_over = layouts[0].tp_degree if layouts[0].divided else 1
        groups = zip(*(stage.gpus for stage in stages), strict=True)
        part = num_elements // divided_over * width / layouts[0].shard_degree
        return collective_s("all_reduce", part, len(stages), slowest({places.ring(group) for group in groups}))
    length = math.lcm(*(layout.num_pieces for layout in layouts))
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    pairs: set[tuple[int, int]] = set()
    for (source, held), (target, wanted) in permutations(zip(stages, layouts, strict=True), 2):
        share = length // math.lcm(held.num_pieces, wanted.num_pieces)
        for piece in parameter_slices(held, wanted):
            pair = (source.gpus[piece.source], target.gpus[piece.target])
            sent[pair[0]] += (piece.stop - piece.start) * share
            received[pair[1]] += (piece.stop - piece.start) * share
            pairs.add(pair)
    route = places.message_route(*zip(*pairs, strict=True))
    most = max(*sent.values(), *received.values())
    return route.latency_s + most / length * num_elements * width / route.bandwidth_bytes_per_s

"""What the stages of a plan send one another per microbatch, in seconds of the busiest GPU's own link.

Values go straight to every stage that reads them, row slice by row slice (`pairing`): all ranks of a tensor-parallel
group hold a stage's whole output, so each receiver gets its rows from one of them. A GPU's link is busy for what that
GPU sends or receives, whichever is more, and the slowest of the routes counts. What has no rows (`Edge.fixed_bytes`)
goes to a replica with its first rows, and its gradient comes back the same way.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from planner.cost.communication import Route, transfer_s
from planner.cost.places import Places
from planner.cost.simulation import Message
from planner.model_profile import Edge, ModelProfile
from planner.pairing import row_slices
from planner.plan import Stage


@dataclass(frozen=True, slots=True)
class Exchange:
    """One direction of a message: who sends to whom, by position, and the different loads that links have.

    A load is the parts of a microbatch's rows (of all replicas together, `num_parts`) and the number of times that
    values without rows pass.
    """

    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    loads: tuple[tuple[int, int], ...]
    num_parts: int


def stage_messages(profile: ModelProfile, stages: Sequence[Stage], places: Places) -> list[Message]:
    """Return what goes from each stage to later ones on other GPUs, and the gradients that come back; in order."""
    stage_of = [index for index, stage in enumerate(stages) for _ in stage.layers]
    edges: dict[tuple[int, int], list[Edge]] = {}
    for edge in profile.edges:
        source = stage_of[edge.producer]
        for target in dict.fromkeys(stage_of[consumer] for consumer in edge.consumers):
            if stages[target].gpus != stages[source].gpus:  # stages of one device group hand over what they hold
                edges.setdefault((source, target), []).append(edge)
    messages = []
    for (source, target), crossing in sorted(edges.items()):
        returned = [edge for edge in crossing if edge.needs_grad]
        forward_s, forward_route = _busy(stages[source], stages[target], crossing, places, back=False)
        backward_s, backward_route = _busy(stages[source], stages[target], returned, places, back=True)
        messages.append(
            Message(
                source=source,
                target=target,
                forward_busy_s=forward_s,
                forward_latency_s=forward_route.latency_s,
                backward_busy_s=backward_s,
                backward_latency_s=backward_route.latency_s,
                has_gradient=bool(returned),
            )
        )
    return messages


def _busy(source: Stage, target: Stage, edges: Sequence[Edge], places: Places, *, back: bool) -> tuple[float, Route]:
    """Return for how long the values of `edges` (`back`: their gradients) keep the busiest link busy, and the route."""
    degrees = (source.tp_degree, source.dp_degree, target.tp_degree, target.dp_degree)
    sender, receiver = (target.gpus, source.gpus) if back else (source.gpus, target.gpus)
    exchange = between(*degrees, back=back)
    route = places.message_route(
        map(sender.__getitem__, exchange.senders), map(receiver.__getitem__, exchange.receivers)
    )
    rows_of_part = source.microbatch_size * source.dp_degree // exchange.num_parts
    most = max(
        sum(round(edge.bytes_per_row * (parts * rows_of_part)) + times * edge.fixed_bytes for edge in edges)
        for parts, times in exchange.loads
    )
    return transfer_s(most, route), route


@lru_cache(maxsize=4096)
def between(source_tp: int, source_dp: int, target_tp: int, target_dp: int, *, back: bool = False) -> Exchange:
    """Return who sends to whom, and the loads, between stages of these degrees; `back`: of the gradients."""
    num_parts = math.lcm(source_dp, target_dp)
    if back:
        pieces = row_slices(target_tp, target_dp, source_tp, source_dp)
    else:
        pieces = row_slices(source_tp, source_dp, target_tp, target_dp)
    sent: dict[int, tuple[int, int]] = {}
    received: dict[int, tuple[int, int]] = {}
    for piece in pieces:
        has_fixed = piece.start % (num_parts // target_dp) == 0  # the first rows of a replica of the later stage
        for loads, position in ((sent, piece.source), (received, piece.target)):
            parts, times = loads.get(position, (0, 0))
            loads[position] = (parts + piece.stop - piece.start, times + has_fixed)
    return Exchange(
        senders=tuple(piece.source for piece in pieces),
        receivers=tuple(piece.target for piece in pieces),
        loads=tuple(sorted({*sent.values(), *received.values()})),
        num_parts=num_parts,
    )

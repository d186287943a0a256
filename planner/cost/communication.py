"""Seconds of messages and collectives over the links between given GPUs.

Rings: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005), with the
bandwidth term shown optimal by Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms" (2009).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from planner.cluster import Link
from planner.sharding import Collective


@dataclass(frozen=True, slots=True)
class Route:
    """What a group of GPUs talks over: bytes per second of one GPU in one direction, and seconds per message."""

    bandwidth_bytes_per_s: float
    latency_s: float


def ring_route(nodes: Sequence[tuple[int, Link, Link]]) -> Route:
    """Return the route of a ring over a group with so many ranks on each of its nodes, which have the given links.

    Between nodes every rank of the group in a node brings its own share of the network, as the rings of NCCL do: the
    node's bandwidth is theirs together, at most that inside the node. The slowest node counts.
    """
    if len(nodes) == 1:
        _, inside, _ = nodes[0]
        return Route(inside.bandwidth, inside.latency)
    alone = min(outside.bandwidth for _, _, outside in nodes)
    together = min(count * outside.bandwidth for count, _, outside in nodes)
    within = min(inside.bandwidth for _, inside, _ in nodes)
    return Route(max(alone, min(together, within)), max(outside.latency for _, _, outside in nodes))


def slowest(routes: Iterable[Route]) -> Route:
    """Return a route as slow as the slowest in each respect: groups that work in parallel wait for one another."""
    found = list(routes)
    return Route(min(r.bandwidth_bytes_per_s for r in found), max(r.latency_s for r in found))


def transfer_s(num_bytes: float, route: Route) -> float:
    """Return the seconds for which a message keeps its link busy; it arrives a latency later."""
    return num_bytes / route.bandwidth_bytes_per_s if num_bytes else 0.0


def collective_s(kind: Collective, num_bytes: float, num_ranks: int, route: Route) -> float:
    """Return the seconds of a ring collective on a tensor of `num_bytes`, the whole of it, over `num_ranks`.

    All-gather and reduce-scatter pass n-1 times a part of 1/n; an all-reduce is one after the other.
    """
    if num_ranks == 1 or num_bytes == 0:
        return 0.0
    one_way = (num_ranks - 1) * (route.latency_s + num_bytes / num_ranks / route.bandwidth_bytes_per_s)
    return 2.0 * one_way if kind == "all_reduce" else one_way

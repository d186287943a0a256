"""Over what the stages of a setting talk, found without a look at every one of thousands of GPUs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from planner.cluster import Cluster
from planner.cost.communication import Route


@dataclass(frozen=True, slots=True)
class StageRoutes:
    """Over what the stages of given degrees talk, by stage: inside it for tensor and data parallelism, to the next."""

    tensor: tuple[Route, ...]
    data: tuple[Route, ...]
    messages: tuple[Route, ...]
    around: Route
    """from the last stage to the first: where a device group has several stages"""


def regular_node_size(cluster: Cluster) -> int | None:
    """Return the GPUs of every node where only the last node may have fewer, so that rank r is on node r // size.

    None where nodes have links of their own: then it counts which ones a group is on.
    """
    if not cluster.has_equal_links:
        return None
    *groups, last = cluster.node_groups
    size = groups[0].gpus_per_node if groups else last.gpus_per_node
    regular = all(group.gpus_per_node == size for group in groups)
    return size if regular and (last.gpus_per_node == size or (last.count == 1 and last.gpus_per_node < size)) else None


def representatives(cluster: Cluster, stage: tuple[int, ...], tp_degree: int) -> tuple[int, ...]:
    """Return consecutive ranks with the same routes as `stage`, fewer where its nodes repeat.

    How the groups of a stage lie over whole nodes repeats every lcm(node, tp_degree) ranks. The first such period
    of whole nodes stays, whole periods after it are cut out, and so all that is told apart is still there: the number
    of a group's ranks on a node, and whether it is on one node.
    """
    size = regular_node_size(cluster)
    if size is None:
        return stage
    period = math.lcm(size, tp_degree)
    head = -stage[0] % size + period
    cut = max(0, (len(stage) - head) // period - 1) * period
    return stage[:head] + stage[head + cut :]


def least_route(routes: Sequence[Route]) -> Route:
    """Return a route at least as fast as each."""
    return Route(max(r.bandwidth_bytes_per_s for r in routes), min(r.latency_s for r in routes))

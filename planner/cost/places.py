"""Where the GPUs of a cluster are, and over what groups of them talk; looked up once, since plans have thousands."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import eq

from planner.cluster import Cluster, Gpu, Link
from planner.cost.communication import Route, collective_s, ring_route, slowest
from planner.cost.states import StateRules


@dataclass(frozen=True, slots=True)
class DataRoutes:
    """Over what replicas of a stage talk: within the groups that share one copy of its states, and between these."""

    within: Route
    across: Route

    def reduce_s(self, grad_bytes: float, rules: StateRules) -> float:
        """Return the seconds in which the gradients of all replicas are summed, each GPU keeping its shard of the sum.

        Reduce-scatter within the group, then an all-reduce of the shard between groups: Zhao et al., "PyTorch FSDP:
        Experiences on Scaling Fully Sharded Data Parallel" (2023), 3.2.2, hybrid sharding. Sharded over all replicas
        only the first is left, sharded over none only the second.
        """
        shards = rules.num_shards
        scattered = collective_s("reduce_scatter", grad_bytes, shards, self.within)
        return scattered + collective_s("all_reduce", grad_bytes / shards, rules.dp_degree // shards, self.across)

    def gather_s(self, working_bytes: float, rules: StateRules) -> float:
        """Return the seconds in which every GPU gets the whole working copy from its shard group."""
        return collective_s("all_gather", working_bytes, rules.num_shards, self.within)


class Places:
    """Nodes, types and routes of the GPUs of a cluster; keeps what it was asked for."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._rings: dict[tuple[int, ...], Route] = {}
        self._between: dict[int, Route] = {}  # by the ranks on the node with fewest, where nodes have equal links
        self._types: dict[tuple[int, ...], dict[str, int]] = {}
        self._tensor: dict[tuple[tuple[int, ...], int], Route] = {}
        self._data: dict[tuple[tuple[int, ...], int, int], DataRoutes] = {}

    @cached_property
    def node_of(self) -> list[int]:
        """The node of every GPU."""
        return [
            node
            for node, size in enumerate(
                group.gpus_per_node for group in self.cluster.node_groups for _ in range(group.count)
            )
            for _ in range(size)
        ]

    @cached_property
    def _links(self) -> list[tuple[Link, Link]]:
        """The links inside every node, and from it to others."""
        groups = self.cluster.node_groups
        return [links for group in groups for links in [self.cluster.links_of(group)] * group.count]

    @cached_property
    def _inside(self) -> list[Route]:
        """The route of rings inside every node."""
        return [ring_route([(1, *links)]) for links in self._links]

    @cached_property
    def _has_equal_links(self) -> bool:
        return self.cluster.has_equal_links

    def count_types(self, gpus: Sequence[int]) -> dict[str, int]:
        """Return how many of some GPUs are of each type, in the order of the cluster's groups."""
        groups, key = self.cluster.node_groups, tuple(gpus)
        if len({group.gpu for group in groups}) == 1:
            return {groups[0].gpu: len(key)}
        if key in self._types:
            return self._types[key]
        ends = list(accumulate(group.count * group.gpus_per_node for group in groups))
        counts = Counter(bisect_right(ends, rank) for rank in gpus)
        found: Counter[str] = Counter()
        for index in sorted(counts):
            found[groups[index].gpu] += counts[index]
        self._types[key] = dict(found)
        return self._types[key]

    def types_of_first(self, num_gpus: int) -> tuple[str, ...]:
        """Return the types of the first GPUs, each once."""
        found, first = dict[str, None](), 0
        for group in self.cluster.node_groups:
            if first < num_gpus:
                found[group.gpu] = None
            first += group.count * group.gpus_per_node
        return tuple(found)

    def gpus(self, gpus: Sequence[int]) -> tuple[Gpu, ...]:
        """Return the types of some GPUs, each once."""
        return tuple(self.cluster.gpus[name] for name in self.count_types(gpus))

    def ring(self, ranks: tuple[int, ...]) -> Route:
        """Return the route of a ring over a group; see `communication.ring_route`."""
        if ranks not in self._rings:
            self._rings[ranks] = self._ring(ranks)
        return self._rings[ranks]

    def _ring(self, ranks: Iterable[int]) -> Route:
        nodes = list(map(self.node_of.__getitem__, ranks))
        if len(set(nodes)) == 1:
            return self._inside[nodes[0]]
        counts = Counter(nodes)
        if not self._has_equal_links:
            return ring_route([(count, *self._links[node]) for node, count in counts.items()])
        fewest = min(counts.values())
        if fewest not in self._between:
            self._between[fewest] = ring_route([(fewest, *self._links[0])] * 2)
        return self._between[fewest]

    def tensor_route(self, gpus: Sequence[int], tp_degree: int) -> Route:
        """Return the route of a stage's tensor-parallel groups, which work in step."""
        key = (tuple(gpus), tp_degree)
        if key not in self._tensor:
            groups = (gpus[start : start + tp_degree] for start in range(0, len(gpus), tp_degree))
            self._tensor[key] = slowest({self._ring(group) for group in groups})
        return self._tensor[key]

    def data_routes(self, gpus: Sequence[int], tp_degree: int, shard_degree: int) -> DataRoutes:
        """Return the routes of a stage's replicas: neighbouring ones, `shard_degree` at a time, share their states."""
        key = (tuple(gpus), tp_degree, shard_degree)
        if key not in self._data:
            within, across = set[Route](), set[Route]()
            for index in range(tp_degree):
                replicas = gpus[index::tp_degree]
                if shard_degree > 1:
                    starts = range(0, len(replicas), shard_degree)
                    within |= {self._ring(replicas[start : start + shard_degree]) for start in starts}
                if shard_degree < len(replicas):
                    across |= {self._ring(replicas[shard::shard_degree]) for shard in range(shard_degree)}
            alone = self._ring(gpus[:1])
            self._data[key] = DataRoutes(slowest(within or {alone}), slowest(across or {alone}))
        return self._data[key]

    def message_route(self, sources: Iterable[int], targets: Iterable[int]) -> Route:
        """Return the route of messages from each source to each target at the same time: the slowest counts."""
        starts, stops = map(self.node_of.__getitem__, sources), map(self.node_of.__getitem__, targets)
        if self._has_equal_links:
            together = set(map(eq, starts, stops))
            links = [self._links[0][0 if is_inside else 1] for is_inside in sorted(together)]
        else:
            ends = set(zip(starts, stops, strict=True))
            links = [self._links[end][0 if a == b else 1] for a, b in sorted(ends) for end in (a, b)]
        return slowest(Route(link.bandwidth, link.latency) for link in links)

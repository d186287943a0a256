"""The prices of other planners' plans, straight from their definitions: what `benchmarks/peers.py` checks ours with.

Nothing here is used to find a plan. Each function raises ValueError where a plan is none.
"""

import math
from collections.abc import Sequence

from planner.peers.dnn_partitioning import Workload
from planner.peers.pipedream import PipeDreamGraph, PipeDreamSettings, PipeDreamStage
from planner.peers.piper import PiperProblem, PiperStage


def _check_order(parts: Sequence[frozenset[int]], edges: Sequence[tuple[int, int]], count: int) -> None:
    """Raise ValueError unless the parts are all nodes, each once, and every edge goes on or stays."""
    if sorted(node for part in parts for node in part) != list(range(count)):
        raise ValueError("a node is in no part, or in two")
    place = {node: position for position, part in enumerate(parts) for node in part}
    for source, target in edges:
        if place[source] > place[target]:
            raise ValueError(f"the edge from {source} to {target} goes from part {place[source]} to {place[target]}")


def pipedream_price(graph: PipeDreamGraph, settings: PipeDreamSettings, stages: Sequence[PipeDreamStage]) -> float:
    """Return the seconds of a minibatch in the slowest stage."""
    return _PipeDream(graph, settings).level(len(settings.num_machines) - 1, stages, frozenset(), len(graph.nodes))


class _PipeDream:
    def __init__(self, graph: PipeDreamGraph, settings: PipeDreamSettings) -> None:
        self.graph, self.settings = graph, settings
        self.edges = [(source, target) for source, after in enumerate(graph.successors) for target in after]
        self.before: dict[int, set[int]] = {}

    def ancestors(self, node: int) -> set[int]:
        if node not in self.before:
            direct = {source for source, target in self.edges if target == node}
            self.before[node] = direct.union(*(self.ancestors(other) for other in direct))
        return self.before[node]

    def crossing_bytes(self, done: frozenset[int]) -> float:
        """Return what leaves a set of nodes: its last ones, and those before one of these that others read too."""
        last = {node for node in done if not any(target in done for target in self.graph.successors[node])}
        read = {
            before
            for node in last
            for before in self.ancestors(node)
            for target in self.graph.successors[before]
            if target != node and target not in self.ancestors(node)
        }
        return sum(self.graph.nodes[node].activation_bytes for node in last | read)

    def level(self, level: int, stages: Sequence[PipeDreamStage], done: frozenset[int], count: int) -> float:
        machines, bandwidth = self.settings.num_machines[level], self.settings.bandwidths[level]
        within = self.settings.num_machines[level - 1] if level else 1
        slowest, used = 0.0, 0
        for position, stage in enumerate(stages):
            replicas = stage.replicas
            used += replicas
            nodes = [self.graph.nodes[node] for node in stage.nodes]
            weights, after = sum(node.parameter_bytes for node in nodes), done | stage.nodes
            for source, target in self.edges:
                if target in after and source not in after:
                    raise ValueError(f"node {target} runs before node {source}, which it reads")
            work = sum(node.time_s for node in nodes)
            if level:
                if frozenset().union(*(part.nodes for part in stage.inner)) != stage.nodes:
                    raise ValueError("the stages inside of a stage are other nodes")
                work = self.level(level - 1, stage.inner, done, count)
            sync = 4 * (replicas - 1) * weights / (bandwidth * replicas) / (1 if position else within)
            time = (work + sync) / replicas
            held = weights + sum(node.activation_bytes for node in nodes)
            if math.ceil((machines - used) / replicas) * held > self.settings.memory_bytes:
                raise ValueError(f"stage {position} holds more than {self.settings.memory_bytes:.3g} bytes")
            if self.settings.boundaries_cost and position:
                time = max(time, 2 * self.crossing_bytes(done) / (bandwidth * replicas))
                if len(after) < count:
                    time = max(time, 2 * self.crossing_bytes(after) / (bandwidth * replicas))
            slowest, done = max(slowest, time), after
        if used > machines or (used < machines and not self.settings.fewer_machines):
            raise ValueError(f"{used} of {machines} machines are used")
        return slowest


def workload_price(workload: Workload, devices: Sequence[tuple[str, frozenset[int]]]) -> float:
    """Return the ms of the largest load."""
    parts = [nodes for _, nodes in devices]
    forward = [edge for edge in workload.edges if not any(workload.is_backward[node] for node in edge)]
    _check_order(parts, forward, len(workload.sizes))
    place = {node: position for position, part in enumerate(parts) for node in part}
    together: dict[int, set[int]] = {}
    for node, colour in enumerate(workload.colours):
        together.setdefault(colour, set()).add(place[node])
    if any(len(places) > 1 for places in together.values()):
        raise ValueError("nodes of one colour are on two devices")
    for kind, limit in (("accelerator", workload.num_accelerators), ("cpu", workload.num_cpus)):
        if sum(found == kind for found, _ in devices) > limit:
            raise ValueError(f"more than {limit} of {kind} are used")
    loads = []
    for kind, nodes in devices:
        if kind == "cpu":
            loads.append(sum(workload.cpu_ms[node] for node in nodes))
            continue
        if sum(workload.sizes[node] for node in nodes) > workload.accelerator_bytes:
            raise ValueError("an accelerator holds too much")
        moved = {source for source, target in workload.edges if (source in nodes) != (target in nodes)}
        work = sum(workload.accelerator_ms[node] for node in nodes)
        loads.append(work + sum(workload.moving_ms[node] for node in moved))
    return max(loads)


def piper_price(problem: PiperProblem, stages: Sequence[PiperStage]) -> float:
    """Return the seconds of a microbatch in the slowest stage."""
    _check_order([frozenset(s.nodes) for s in stages], [edge[:2] for edge in problem.edges], len(problem.configs))
    if sum(stage.dp_degree * stage.tp_degree for stage in stages) > problem.num_devices:
        raise ValueError(f"more than {problem.num_devices} devices are used")
    slowest, following = 0.0, 0
    for stage in reversed(stages):
        d, t, nodes = stage.dp_degree, stage.tp_degree, set(stage.nodes)
        following += d
        if problem.num_microbatches % d:
            raise ValueError(f"{d} replicas don't divide {problem.num_microbatches} microbatches")
        chosen = {node: problem.configs[node][t][1 if node in stage.recomputed else 0] for node in nodes}
        sent = 0.0
        for source, target, size in problem.edges:
            if target in nodes and source not in nodes:
                sent += 2 * (size + problem.incoming[target][t].get(source, 0.0))
            if source in nodes and target not in nodes:
                sent += 2 * (size + problem.outgoing[source][t].get(target, 0.0))
        sync = sum(4 * (d - 1) * c.parameter_bytes / (d * problem.num_microbatches) for c in chosen.values())
        time = sent / (d * problem.bandwidth) + sync / problem.bandwidth + sum(c.time for c in chosen.values()) / d
        memory = sum(c.memory_a * math.ceil(following / d) + c.memory_b for c in chosen.values())
        if memory > problem.memory_bytes * (1 + 1e-12):
            raise ValueError(f"a stage holds {memory:.6g} bytes of {problem.memory_bytes:.6g}")
        slowest = max(slowest, time)
    if following > problem.num_microbatches:
        raise ValueError(f"{following} replicas in all, of {problem.num_microbatches} microbatches")
    return slowest

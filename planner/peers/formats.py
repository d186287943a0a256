"""Which planner a file is of, and its graph: what `planner import` reads."""

import json
from pathlib import Path
from typing import Literal

from planner.errors import UsageError
from planner.peers.dnn_partitioning import Workload, read_workload, units_of
from planner.peers.imported import ImportedGraph, NodeCost
from planner.peers.pipedream import PipeDreamGraph, read_graph
from planner.peers.piper import PiperProblem, read_problem

Format = Literal["pipedream", "piper", "dnn-partitioning"]


def format_of(path: Path) -> Format:
    """Return whose a file is by what it holds; UsageError where it is nobody's."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} can't be read: {error}", hint="give a text file") from None
    if "forward_compute_time=" in text and " -- " in text:
        return "pipedream"
    try:
        data = json.loads(text)
    except ValueError:
        data = None
    keys = set(data) if isinstance(data, dict) else set()
    if {"mbsInBatch", "nodes", "edges"} <= keys:
        return "piper"
    if {"maxFPGAs", "nodes", "edges"} <= keys:
        return "dnn-partitioning"
    raise UsageError(
        f"{path} is no file of a planner that is known",
        hint="give a graph.txt of PipeDream, or a JSON file of Piper or dnn-partitioning",
    )


def read_imported(path: Path, kind: Format) -> ImportedGraph:
    """Return the graph in a file."""
    if kind == "pipedream":
        return _from_pipedream(read_graph(path))
    if kind == "piper":
        return _from_piper(read_problem(path))
    return _from_workload(read_workload(path))


def _from_pipedream(graph: PipeDreamGraph) -> ImportedGraph:
    edges = [(source, target) for source, after in enumerate(graph.successors) for target in after]
    return ImportedGraph(
        names=tuple(node.key for node in graph.nodes),
        kinds=tuple(node.name for node in graph.nodes),
        costs=tuple(
            {1: NodeCost(node.forward_s, node.backward_s, node.activation_bytes, node.parameter_bytes)}
            for node in graph.nodes
        ),
        edges=tuple((source, target, graph.nodes[source].activation_bytes) for source, target in edges),
    )


def _from_piper(problem: PiperProblem) -> ImportedGraph:
    costs: list[dict[int, NodeCost]] = []
    for node in problem.configs:
        by_degree: dict[int, NodeCost] = {}
        for degree, (kept, *others) in node.items():
            # recomputing runs the forward once more; without that choice, a third is forward
            forward = min(max(others[0].time - kept.time, 0.0), kept.time) if others else kept.time / 3
            backward = kept.time - forward
            by_degree[degree] = NodeCost(forward, backward, kept.memory_a, kept.parameter_bytes)
        costs.append(by_degree)
    return ImportedGraph(
        names=problem.names,
        kinds=problem.names,
        costs=tuple(costs),
        edges=problem.edges,
        notes=(
            "what tensor parallelism sends at an edge is not in the file's times, and not in this profile",
            "a forward takes what recomputing it adds; the rest is backward",
        ),
    )


def _from_workload(workload: Workload) -> ImportedGraph:
    """Return units as nodes: forward nodes with the backward nodes of their colour."""
    units = units_of(workload)
    count = len(units.successors)
    members: list[list[int]] = [[] for _ in range(count)]
    for node, unit in enumerate(units.unit):
        members[unit].append(node)
    costs = []
    for nodes in members:
        forward, backward = (
            sum(workload.accelerator_ms[n] for n in nodes if workload.is_backward[n] == side) / 1000.0
            for side in (False, True)
        )
        costs.append({1: NodeCost(forward, backward, sum(workload.sizes[n] for n in nodes), 0.0)})
    unsupported = [node for node, ms in enumerate(workload.accelerator_ms) if ms == float("inf")]
    if unsupported:
        raise UsageError(
            f"node {workload.names[unsupported[0]]!r} runs on no accelerator, and a profile is of accelerators",
            hint="take it out of the graph",
        )
    sizes: dict[tuple[int, int], float] = {}
    for (source, target), size in zip(workload.edges, workload.edge_sizes, strict=True):
        first, second = units.unit[source], units.unit[target]
        if not workload.is_backward[source] and not workload.is_backward[target] and first != second:
            sizes[first, second] = sizes.get((first, second), 0.0) + size
    return ImportedGraph(
        names=tuple(workload.names[nodes[0]] for nodes in members),
        kinds=tuple(workload.names[nodes[0]] for nodes in members),
        costs=tuple(costs),
        edges=tuple((source, target, size) for (source, target), size in sizes.items()),
        notes=("a node's size counts as kept for backward; times of CPUs are left out",),
    )

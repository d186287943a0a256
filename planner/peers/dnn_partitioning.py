"""dnn-partitioning's workloads and its objective: the largest load of a device, each with a contiguous part.

Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators", NeurIPS 2020: max-load.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np

from planner.errors import UsageError
from planner.solver.core.bottleneck import Devices, StageOption, best_chain
from planner.solver.core.lattice import Floats, Lattice, down_sets

MAX_STATES = 20_000
BLOCK = 512  # states of a block of a product


@dataclass(frozen=True)
class Workload:
    """A workload: per node ms on a CPU and on an accelerator, bytes it holds, ms to move its output, and its colour.

    Nodes of one colour stand on one device; backward nodes follow the forward nodes of theirs. An infinite time is that
    of a device which does not support the node.
    """

    names: tuple[str, ...]
    cpu_ms: tuple[float, ...]
    accelerator_ms: tuple[float, ...]
    sizes: tuple[float, ...]
    moving_ms: tuple[float, ...]
    colours: tuple[int, ...]
    is_backward: tuple[bool, ...]
    edges: tuple[tuple[int, int], ...]
    edge_sizes: tuple[float, ...]
    num_accelerators: int
    num_cpus: int
    accelerator_bytes: float


def read_workload(path: Path) -> Workload:
    """Read a workload's JSON file."""
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        nodes, edges = data["nodes"], data["edges"]
        index = {node["id"]: position for position, node in enumerate(nodes)}
        moving = [0.0] * len(nodes)
        for edge in edges:
            moving[index[edge["sourceId"]]] = float(edge["cost"])
        return Workload(
            names=tuple(str(node["name"]) for node in nodes),
            cpu_ms=tuple(float(node["cpuLatency"]) for node in nodes),
            accelerator_ms=tuple(
                float(node["fpgaLatency"]) if node["supportedOnFpga"] else float("inf") for node in nodes
            ),
            sizes=tuple(float(node["size"]) for node in nodes),
            moving_ms=tuple(moving),
            colours=tuple(int(node.get("colorClass", -1 - position)) for position, node in enumerate(nodes)),
            is_backward=tuple(bool(node.get("isBackwardNode", False)) for node in nodes),
            edges=tuple((index[edge["sourceId"]], index[edge["destId"]]) for edge in edges),
            edge_sizes=tuple(float(edge.get("size", 0.0)) for edge in edges),
            num_accelerators=int(data["maxFPGAs"]),
            num_cpus=int(data["maxCPUs"]),
            accelerator_bytes=float(data["maxSizePerFPGA"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} is no workload of dnn-partitioning: {error!r}", hint="give one of their JSON files"
        ) from None


@dataclass(frozen=True)
class Units:
    """What stands together: each node's unit, by unit those that come after it, and who shares which output.

    `readers` are sets of units, one that makes an output and those that read it, with the ms to move it; a device that
    has some of a set and not all pays that.
    """

    unit: tuple[int, ...]
    successors: tuple[tuple[int, ...], ...]
    readers: tuple[tuple[frozenset[int], float], ...]


def units_of(workload: Workload) -> Units:
    """Return the units of a workload: colours, and as one all those on a cycle.

    A part of the graph is contiguous in the forward nodes. Colours of backward nodes alone count as forward nodes, with
    the edges of their backward nodes reversed.
    """
    colours = {colour: position for position, colour in enumerate(dict.fromkeys(workload.colours))}
    own = [colours[colour] for colour in workload.colours]
    forward = {unit for unit, backward in zip(own, workload.is_backward, strict=True) if not backward}
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(range(len(colours)))
    for source, target in workload.edges:
        first, second = own[source], own[target]
        if not workload.is_backward[source] and not workload.is_backward[target]:
            graph.add_edge(first, second)
        elif workload.is_backward[source] and workload.is_backward[target] and not {first, second} <= forward:
            graph.add_edge(second, first)
    graph.remove_edges_from([(unit, unit) for unit in graph if graph.has_edge(unit, unit)])
    joined = nx.condensation(graph)
    place: dict[int, int] = joined.graph["mapping"]
    unit = tuple(place[position] for position in own)
    sets: dict[frozenset[int], float] = {}
    reading: list[set[int]] = [{place} for place in unit]
    for source, target in workload.edges:
        reading[source].add(unit[target])
    for node, found in enumerate(reading):
        if len(found) > 1 and workload.moving_ms[node]:
            key = frozenset(found)
            sets[key] = sets.get(key, 0.0) + workload.moving_ms[node]
    return Units(
        unit, tuple(tuple(sorted(joined.successors(node))) for node in range(len(joined))), tuple(sets.items())
    )


class WorkloadOracle:
    """A stage on an accelerator takes its nodes' ms, and those to move each output that crosses its boundary."""

    def __init__(self, workload: Workload) -> None:
        units = units_of(workload)
        self.lattice = down_sets(units.successors, limit=MAX_STATES)
        self.units = units

        def sums(values: Sequence[float]) -> Floats:
            totals = np.zeros(len(units.successors))
            np.add.at(totals, list(units.unit), values)
            return self.lattice.sums(totals)

        latencies = [0.0 if math.isinf(ms) else ms for ms in workload.accelerator_ms]
        unsupported = sums([float(math.isinf(ms)) for ms in workload.accelerator_ms])
        work, sizes, on_cpu = sums(latencies), sums(workload.sizes), sums(workload.cpu_ms)
        times = moving_times(self.lattice, units)
        count = self.num_states
        for first in range(0, count, BLOCK):
            rows = slice(first, min(first + BLOCK, count))
            part = times[rows, first:]
            part += work[None, first:] - work[rows, None]
            too_large = sizes[None, first:] - sizes[rows, None] > workload.accelerator_bytes
            part[too_large | (unsupported[None, first:] > unsupported[rows, None])] = np.inf
        self._options = [StageOption("accelerator", (1, 0), times)] if workload.num_accelerators else []
        if workload.num_cpus:
            inside = np.isfinite(times) | self.lattice.inside
            self._options.append(
                StageOption("cpu", (0, 1), np.where(inside, on_cpu[None, :] - on_cpu[:, None], np.inf))
            )

    @property
    def num_states(self) -> int:
        """The number of down-sets."""
        return self.lattice.num_states

    def options(self, used: Devices) -> Iterator[StageOption]:
        """Yield the kinds of device, which are the same wherever a stage stands."""
        yield from self._options


def moving_times(lattice: Lattice, units: Units) -> Floats:
    """Return, for every pair of down-sets, the ms to move what crosses the boundary of the stage between them.

    With n(D) the units of a set in down-set D, the stage between I and J pays if 0 < n(J) - n(I) < size: summed over
    the values of n(I), each a product of two matrices of zeros and ones. Infinite where I is not inside J.
    """
    count = lattice.num_states
    left: list[Floats] = []
    right: list[Floats] = []
    for found, cost in units.readers:
        inside = lattice.members[:, sorted(found)].sum(axis=1)
        for held in range(len(found)):
            left.append((inside == held) * cost)
            right.append(((inside > held) & (inside < held + len(found))).astype(np.float64))
    times = np.full((count, count), np.inf)
    ahead = np.array(left).T if left else np.zeros((count, 0))
    behind = np.array(right) if right else np.zeros((0, count))
    for first in range(0, count, BLOCK):
        rows = slice(first, min(first + BLOCK, count))
        times[rows, first:] = np.where(lattice.inside[rows, first:], ahead[rows] @ behind[:, first:], np.inf)
    return times


@dataclass(frozen=True)
class Placement:
    """The devices of a placement, kind and nodes each, and the largest load; no devices where nothing fits."""

    max_load_ms: float
    devices: tuple[tuple[str, frozenset[int]], ...]


def solve_workload(workload: Workload) -> Placement:
    """Return the placement with the least max-load."""
    oracle = WorkloadOracle(workload)
    chain = best_chain(oracle, (workload.num_accelerators, workload.num_cpus), all_devices=False)
    devices = []
    for stage in chain.stages:
        units = oracle.lattice.members[stage.stop] & ~oracle.lattice.members[stage.start]
        nodes = frozenset(node for node, unit in enumerate(oracle.units.unit) if units[unit])
        devices.append((stage.label, nodes))
    return Placement(chain.bottleneck, tuple(devices))

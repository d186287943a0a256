"""Piper's inputs: nodes that can be divided, replicated and recomputed, and what edges between stages cost.

Tarnawski et al., "Piper: Multidimensional Planner for DNN Parallelization", NeurIPS 2021, section 3.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.errors import UsageError


@dataclass(frozen=True)
class PiperConfig:
    """A node on t devices: seconds of a microbatch, bytes of its parameters, and of memory: A for each microbatch in
    flight, B once.
    """

    time: float
    parameter_bytes: float
    memory_a: float
    memory_b: float


@dataclass(frozen=True)
class PiperProblem:
    """Nodes' configurations by tensor-parallel degree (kept, or recomputed), bytes that cross edges, and limits.

    `incoming` and `outgoing`: per node and degree, by the node at the other end, what an edge that is cut adds there.
    """

    names: tuple[str, ...]
    configs: tuple[dict[int, tuple[PiperConfig, ...]], ...]
    edges: tuple[tuple[int, int, float], ...]
    incoming: tuple[dict[int, dict[int, float]], ...]
    outgoing: tuple[dict[int, dict[int, float]], ...]
    num_devices: int
    memory_bytes: float
    bandwidth: float
    num_microbatches: int


@dataclass(frozen=True)
class PiperStage:
    """Nodes on `dp_degree` x `tp_degree` devices, some of them recomputed."""

    nodes: tuple[int, ...]
    dp_degree: int
    tp_degree: int
    recomputed: tuple[int, ...]


@dataclass(frozen=True)
class PiperPlan:
    """The stages of a plan, the time of its slowest, and a proven bound of that; no stages where nothing fits."""

    bottleneck: float
    lower_bound: float
    stages: tuple[PiperStage, ...]


def read_problem(path: Path) -> PiperProblem:
    """Read a Piper JSON file."""
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        index = {node["id"]: position for position, node in enumerate(data["nodes"])}
        for node in data["nodes"]:
            for listed in node["TMPCs"].values():
                first, *others = [(config["syncTimeFw"], config["syncTimeBw"]) for config in listed]
                if any(other != first for other in others):
                    raise UsageError(
                        f"{path}: configurations of node {node['id']} differ in what they synchronise",
                        hint="give the recomputed one what the other one has",
                    )
        return PiperProblem(
            names=tuple(str(node["name"]) for node in data["nodes"]),
            configs=tuple(
                {int(degree): tuple(map(_config, listed)) for degree, listed in node["TMPCs"].items()}
                for node in data["nodes"]
            ),
            edges=tuple(
                (index[edge["sourceId"]], index[edge["destId"]], float(edge["communicationCost"]))
                for edge in data["edges"]
            ),
            incoming=tuple(_added(node, "syncTimeFw", index) for node in data["nodes"]),
            outgoing=tuple(_added(node, "syncTimeBw", index) for node in data["nodes"]),
            num_devices=int(data["maxDevices"]),
            memory_bytes=float(data["maxMemoryPerDevice"]),
            bandwidth=float(data["bandwidth"]),
            num_microbatches=int(data["mbsInBatch"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is no input of Piper: {error!r}", hint="give one of their JSON files") from None


def _config(data: dict[str, Any]) -> PiperConfig:
    return PiperConfig(
        time=float(data["timePerSample"]),
        parameter_bytes=float(data["parameterSize"]),
        memory_a=float(data["memoryUsageA"]),
        memory_b=float(data["memoryUsageB"]),
    )


def _added(node: dict[str, Any], key: str, index: dict[Any, int]) -> dict[int, dict[int, float]]:
    """Return, by degree, the bytes that the edges of a node add; edges to nodes that are not there are left out."""
    return {
        int(degree): {index[int(other)]: float(size) for other, size in listed[0][key].items() if int(other) in index}
        for degree, listed in node["TMPCs"].items()
    }

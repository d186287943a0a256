"""The cases in `tests/cases`: their JSON as the tool's types, and what solving one gives."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from planner.cluster import Cluster
from planner.model_profile import LayerClass, ModelProfile
from planner.solver import Solution, SolveRequest, solve
from tests.strategies import ORIGIN, chain_profile, layer_cost, make_cluster

FOLDER = Path(__file__).parent / "cases"
MS, MB = 1e-3, 10**6


def case_path(number: int, suffix: str) -> Path:
    """Return the file of a case."""
    [path] = FOLDER.glob(f"{number:02}-*.{suffix}")
    return path


def read_case(number: int) -> dict[str, Any]:
    """Return the JSON of a case."""
    data: dict[str, Any] = json.loads(case_path(number, "json").read_text())
    return data


def case_profile(layers: Sequence[dict[str, Any]], *, frozen: bool = False) -> ModelProfile:
    """Return a chain of the layers: seconds from `fwd_ms` and `bwd_ms`, parameters of 4 bytes from `param_mb`.

    A microbatch of n rows takes n times the time of one. Nothing is communicated. Equal layers are of one class.
    """
    names: dict[tuple[float, float, float, int], str] = {}
    keys = [
        (
            float(layer["fwd_ms"]),
            float(layer.get("bwd_ms", 0.0)),
            float(layer.get("param_mb", 0.0)),
            int(layer.get("params", 0)),
        )
        for layer in layers
    ]
    for key in keys:
        names.setdefault(key, f"class{len(names)}")
    classes = []
    for (forward, backward, param_mb, params), name in names.items():
        elements = params or round(param_mb * MB / 4)
        held = {"frozen": elements} if frozen else {"params": elements}
        cost = layer_cost(forward_s=forward * MS, backward_s=backward * MS, **held)  # type: ignore[arg-type]
        classes.append(LayerClass(name=name, module_class="Layer", costs=(cost,)))
    return chain_profile(classes, [names[key] for key in keys], names=[layer["name"] for layer in layers])


def solve_case(
    profile: ModelProfile, cluster: Cluster | int, pins: dict[str, object] | None = None, *, batch: int = 32
) -> Solution:
    """Return what the solver answers; SGD without momentum, so that parameters and gradients are all that is held."""
    cluster = make_cluster(cluster) if isinstance(cluster, int) else cluster
    request = SolveRequest(
        num_gpus=cluster.num_gpus,
        global_batch_size=batch,
        optimizer="sgd",
        pins=tuple((key, str(value)) for key, value in (pins or {}).items()),
    )
    return solve(profile, cluster, request, origin=ORIGIN)


def sizes(solution: Solution) -> list[int]:
    """Return the number of layers of every stage."""
    assert solution.plan is not None
    return [len(stage.layers) for stage in solution.plan.stages]


def bounds(solution: Solution) -> list[int]:
    """Return the index of every stage's first layer, and the number of layers."""
    found = [0]
    for size in sizes(solution):
        found.append(found[-1] + size)
    return found


def bottleneck_ms(solution: Solution) -> float:
    """Return the milliseconds per microbatch of the slowest stage."""
    assert solution.plan is not None
    assert solution.plan.prediction is not None
    return max(stage.time_s for stage in solution.plan.prediction.stages) / MS

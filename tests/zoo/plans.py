"""Plans made by hand for profiles (even cuts, uniform degrees), and what runs them."""

from pathlib import Path
from typing import Any

from planner.emitter import emit, write_plan
from planner.graph import shared_storages
from planner.model_profile import ModelProfile
from planner.plan import DataParallel, Origin, Plan, Schedule, Stage
from planner.profiler import profile_model
from planner.runner import VerifyReport, verify
from planner.runner.pool import WorkerPool


def even_plan(
    profile: ModelProfile,
    *,
    pp_degree: int = 1,
    tp_degree: int = 1,
    dp_degree: int = 1,
    microbatch_size: int = 2,
    num_microbatches: int = 4,
    schedule: Schedule = "1f1b",
    data_parallel: DataParallel = "replicated",
    recompute: bool = False,
    sharding: str = "tensor",
) -> Plan:
    """Return a plan that gives every stage as many layers, and divides what can be divided.

    `sharding` names the candidate taken of classes that have it; the others are divided as "tensor".
    """
    names = [layer.name for layer in profile.layers]
    pp_degree = min(pp_degree, len(names))
    bounds = [len(names) * index // pp_degree for index in range(pp_degree + 1)]
    size = tp_degree * dp_degree
    shared = {profile.layers[layer].layer_class for storage in shared_storages(profile) for layer in storage.layers}
    all_tied = len(shared) == 2 and bool(profile.tied)  # an embedding and its head divide alike
    stages = []
    for index in range(pp_degree):
        part = range(bounds[index], bounds[index + 1])
        classes = {profile.layer_class(layer).name: profile.layer_class(layer) for layer in part}
        divided = {
            name: sharding if item.sharding(sharding, tp_degree) else "tensor"
            for name, item in classes.items()
            if item.sharding("tensor", tp_degree) and (name not in shared or all_tied)
        }
        stages.append(
            Stage(
                layers=tuple(names[layer] for layer in part),
                tp_degree=tp_degree,
                dp_degree=dp_degree,
                microbatch_size=microbatch_size,
                recompute=tuple(names[layer] for layer in part) if recompute else (),
                shardings=divided,
                gpus=tuple(range(index * size, (index + 1) * size)),
            )
        )
    origin = Origin(
        model_path=profile.provenance.model_path,
        model_hash=profile.provenance.model_hash,
        build_function=profile.provenance.build_function,
        inputs_function=profile.provenance.inputs_function,
        profile_path="profile.json",
        profile_hash="",
        cluster="",
        cluster_hash="",
        torch_version=profile.provenance.torch_version,
        planner_version="",
    )
    return Plan(
        global_batch_size=num_microbatches * microbatch_size * dp_degree,
        num_microbatches=num_microbatches,
        schedule=schedule,
        data_parallel=data_parallel,
        optimizer="adamw",
        precision="fp32",
        stages=tuple(stages),
        origin=origin,
    )


# Every kind of structure is tried in these, two to four processes each.
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"pp_degree": 2},
    {"pp_degree": 3, "schedule": "gpipe", "recompute": True},
    {"pp_degree": 2, "tp_degree": 2},
    {"pp_degree": 2, "dp_degree": 2, "data_parallel": "sharded"},
)
LAYOUT_IDS = ("pp2", "pp3", "pp2 tp2", "pp2 dp2")


def profile_zoo(spec: str, inputs: str = "example_inputs") -> ModelProfile:
    """Return the profile of a model file, computed for what `LAYOUTS` have."""
    return profile_model(
        spec, inputs=inputs, gpu="h100-sxm", dtype="float32", microbatch_sizes=(1, 2), tp_degrees=(1, 2)
    )


def check_exact(profile: ModelProfile, layout: dict[str, Any], pool: WorkerPool, folder: Path) -> VerifyReport:
    """Emit and verify an even plan; assert that it computes what one process does."""
    path = folder / "plan.py"
    write_plan(emit(even_plan(profile, **layout), profile), path)
    report = verify(path, pool=pool, timeout_s=120)
    assert report.ok, report.rows[:3]
    return report

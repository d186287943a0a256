"""Every kind of structure of the zoo, emitted and run: equal to one process in loss and every gradient."""

from pathlib import Path

import pytest

from planner.emitter import emit, write_plan
from planner.model_profile import ModelProfile
from planner.profiler import profile_model
from planner.runner import verify
from planner.runner.pool import WorkerPool
from tests.zoo.exact import NAMES
from tests.zoo.plans import even_plan

ZOO = Path(__file__).parent / "zoo" / "exact.py"
LAYOUTS = (
    {"pp_degree": 2},
    {"pp_degree": 3, "schedule": "gpipe", "recompute": True},
    {"pp_degree": 2, "tp_degree": 2},
    {"pp_degree": 2, "dp_degree": 2},
    {"tp_degree": 2, "dp_degree": 2, "data_parallel": "sharded"},
)


@pytest.fixture(scope="module", params=NAMES)
def profile(request: pytest.FixtureRequest) -> ModelProfile:
    return profile_model(
        f"{ZOO}:build_{request.param}",
        inputs=f"inputs_{request.param}",
        gpu="h100-sxm",
        dtype="float32",
        microbatch_sizes=(1, 2),
        tp_degrees=(1, 2),
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: " ".join(str(value) for value in layout.values()))
def test_exact(profile: ModelProfile, pool: WorkerPool, tmp_path: Path, layout: dict[str, object]) -> None:
    path = tmp_path / "plan.py"
    write_plan(emit(even_plan(profile, **layout), profile), path)  # type: ignore[arg-type]
    report = verify(path, pool=pool, timeout_s=120)
    assert report.ok, report.rows[:3]


def test_the_stages_of_a_replica_may_be_neighbours(pool: WorkerPool, tmp_path: Path) -> None:
    """The replicas of a stage, which has tied parameters too, are on ranks that are not."""
    profile = profile_model(
        f"{ZOO}:build_transformer",
        inputs="inputs_transformer",
        gpu="h100-sxm",
        dtype="float32",
        microbatch_sizes=(1, 2),
        tp_degrees=(1,),
    )
    plan = even_plan(profile, pp_degree=2, dp_degree=2, data_parallel="sharded")
    stages = [stage.replace(gpus=(index, index + 2)) for index, stage in enumerate(plan.stages)]
    write_plan(emit(plan.replace(stages=tuple(stages)), profile), tmp_path / "plan.py")
    report = verify(tmp_path / "plan.py", pool=pool, timeout_s=120)
    assert report.ok, report.rows[:3]

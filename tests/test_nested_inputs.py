"""Inputs in lists and dicts reach the stages that read them, given to `step` as to the model."""

from pathlib import Path

import pytest

from planner.emitter import emit, write_plan
from planner.profiler import profile_model
from planner.runner import verify
from planner.runner.pool import WorkerPool
from tests.zoo.plans import even_plan

ZOO = Path(__file__).parent / "zoo" / "nested.py"


@pytest.mark.parametrize(
    ("name", "inputs", "expected"),
    [
        ("Nested", "inputs", ["features_0", "features_1", "pair_w", "extra_inner_0"]),
        ("Listed", "listed_inputs", ["features_0", "features_1", "weights"]),
    ],
)
def test_exact(name: str, inputs: str, expected: list[str], pool: WorkerPool, folder: Path) -> None:
    profile = profile_model(
        f"{ZOO}:{name}", inputs=inputs, gpu="h100-sxm", dtype="float32", microbatch_sizes=(1, 2), tp_degrees=(1,)
    )
    assert list(profile.program.inputs) == expected
    for layout in ({"pp_degree": len(profile.layers)}, {"pp_degree": 2, "dp_degree": 2}):
        write_plan(emit(even_plan(profile, **layout), profile), folder / "plan.py", force=True)  # type: ignore[arg-type]
        report = verify(folder / "plan.py", pool=pool, timeout_s=120)
        assert report.ok, (layout, report.rows[:3])

"""Habits of published code: emitted and run, equal to one process in loss and every gradient."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from planner.emitter import emit, write_plan
from planner.profiler import profile_model
from planner.runner import verify
from planner.runner.pool import WorkerPool
from tests.zoo.plans import even_plan

ZOO = Path(__file__).parent / "zoo" / "public.py"


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool() as pool:
        yield pool


@pytest.mark.parametrize("name", ["plain_tensors"])
def test_is_exact(pool: WorkerPool, tmp_path: Path, name: str) -> None:
    profile = profile_model(
        f"{ZOO}:build_{name}",
        inputs=f"inputs_{name}",
        gpu="h100-sxm",
        dtype="float32",
        microbatch_sizes=(1, 2),
        tp_degrees=(1, 2),
    )
    for number, layout in enumerate(({"pp_degree": 2}, {"pp_degree": 2, "tp_degree": 2})):
        path = tmp_path / f"plan_{number}.py"
        write_plan(emit(even_plan(profile, **layout), profile), path)
        report = verify(path, pool=pool, timeout_s=120)
        assert report.ok, report.rows[:3]

"""Kinds of code that models are made of: emitted, run and equal to one process, or refused by name."""

from functools import cache
from pathlib import Path

import pytest

from planner.emitter import emit, write_plan
from planner.errors import CaptureError
from planner.model_file import load_model_file
from planner.model_profile import ModelProfile
from planner.runner.batches import make_batches
from planner.runner.double import build_exact, exact_arithmetic
from planner.runner.pool import WorkerPool
from tests.zoo.plans import LAYOUT_IDS, LAYOUTS, check_exact, even_plan, profile_zoo

ZOO = Path(__file__).parent / "zoo" / "kinds.py"
# Deprecated, and in use.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*spectral_norm.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.* is deprecated:FutureWarning"),
]


INPUTS = {"pieces": "inputs_pieces", "library_checkpointing": "inputs_library_checkpointing"}


@cache
def profile_of(name: str) -> ModelProfile:
    return profile_zoo(f"{ZOO}:build_{name}", INPUTS.get(name, "inputs"))


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("spectral", "pp2"),
        ("parametrized", "pp2"),
        ("recomputed", "pp2"),
        ("recomputed_reentrant", "pp2"),
        ("recomputed_reentrant", "pp3"),
        ("recomputed", "pp2 tp2"),
        ("library_checkpointing", "pp2 tp2"),
        ("sometimes", "pp2"),
        ("sometimes", "pp2 dp2"),
        ("pieces", "pp2 tp2"),
        ("pieces", "pp2 dp2"),
    ],
)
def test_exact(name: str, layout: str, pool: WorkerPool, tmp_path: Path) -> None:
    check_exact(profile_of(name), LAYOUTS[LAYOUT_IDS.index(layout)], pool, tmp_path)


def test_some_parameters_get_gradients_in_one_step_only() -> None:
    file = load_model_file(f"{ZOO}:build_sometimes", inputs="inputs")
    without: list[set[str]] = []
    with exact_arithmetic():
        model, _ = build_exact(file)
        for batch in make_batches(file, model, 8, 2, padded=False):
            model.zero_grad()
            for args, kwargs, _ in batch.microbatches(2):
                output = model(*args, **kwargs)
                output.square().mean().backward()
            without.append({name for name, parameter in model.named_parameters() if parameter.grad is None})
    assert without[0] & without[1]
    assert without[0] - without[1]


def test_norms_that_join_all_processes_are_refused() -> None:
    with pytest.raises(CaptureError) as caught:
        profile_of("synchronized")
    assert "'layers.0.1' and 2 more" in caught.value.message
    assert "nn.BatchNorm" in caught.value.hint


@pytest.mark.parametrize("layout", [{"pp_degree": 2}, {"pp_degree": 2, "dp_degree": 2, "data_parallel": "sharded"}])
def test_a_loss_that_counts_weighs_rows_alike_in_mixed_precision(
    layout: dict[str, object], pool: WorkerPool, tmp_path: Path
) -> None:
    profile = profile_zoo(str(ZOO.parent / "mixed_job.py"))
    path = tmp_path / "plan.py"
    replicas = 2 if "dp_degree" in layout else 1
    plan = even_plan(profile, **layout, num_microbatches=8 // replicas)  # type: ignore[arg-type]
    write_plan(emit(plan, profile), path)
    found = pool.run("tests.zoo.mixed_job:train", path, num_processes=2 * replicas, timeout_s=120)[0]
    assert found["loss"] < 5e-3
    assert found["gradient"] < 0.03  # bfloat16 has 8 bits
    assert found["counted evenly"] > 0.1  # what microbatches that count alike would give

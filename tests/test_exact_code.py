"""Kinds of code people write in a forward: each is exact in every layout, or refused with the line that stops it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from planner.emitter import emit, write_plan
from planner.errors import CaptureError
from planner.model_profile import ModelProfile
from planner.profiler import profile_model
from planner.runner import verify
from planner.runner.pool import WorkerPool
from tests.zoo.plans import even_plan

ZOO = Path(__file__).parent / "zoo"
EXACT = (
    "hidden:cache_object",
    "hidden:stashed",
    "hidden:leaf_stash",
    "hidden:auxiliary_losses",
    "hidden:function_in_block",
    "hidden:function_in_leaf",
    "hidden:checkpointed_blocks",
    "hidden:reentrant_blocks",
    "hidden:checkpointing_model",
    "hidden:reentrant_model",
)
LAYOUTS = (
    {"pp_degree": 2, "tp_degree": 2, "recompute": True},
    {"pp_degree": 2, "dp_degree": 2},
)


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool() as pool:
        yield pool


def profiled(model: str) -> ModelProfile:
    """Return the profile of 'file:model' of the zoo."""
    file, name = model.split(":")
    source = (ZOO / f"{file}.py").read_text()
    inputs = f"inputs_{name}" if f"def inputs_{name}(" in source else "inputs"
    return profile_model(
        f"{ZOO / file}.py:build_{name}",
        inputs=inputs,
        gpu="h100-sxm",
        dtype="float32",
        microbatch_sizes=(1, 2),
        tp_degrees=(1, 2),
    )


@pytest.mark.parametrize("model", EXACT)
def test_exact(model: str, pool: WorkerPool, tmp_path: Path) -> None:
    profile = profiled(model)
    for layout in LAYOUTS:
        path = tmp_path / f"{'_'.join(layout)}.py"
        write_plan(emit(even_plan(profile, **layout), profile), path)  # type: ignore[arg-type]
        report = verify(path, pool=pool, timeout_s=120)
        assert report.ok, (layout, report.rows[:3])


def test_what_keeps_values_elsewhere_is_opened() -> None:
    names = [layer.name for layer in profiled("hidden:stashed").layers]
    assert names[:4] == ["blocks.0.gate", "blocks.0.mlp", "blocks.1.gate", "blocks.1.mlp"]
    assert [layer.name for layer in profiled("hidden:function_in_block").layers] == [f"blocks.{i}" for i in range(4)]


def line_of(file: str, text: str) -> str:
    """Return 'path:line' of the line of a file of the zoo that holds a text."""
    path = ZOO / f"{file}.py"
    [number] = [index for index, line in enumerate(path.read_text().splitlines(), 1) if text in line]
    return f"{path}:{number}"


def test_a_function_of_ones_own_between_layers_is_refused_with_its_line() -> None:
    with pytest.raises(CaptureError) as caught:
        profiled("hidden:function_between")
    assert line_of("hidden", "x = Straight.apply(block(x))") in caught.value.message
    assert "custom autograd function" in caught.value.message
    assert "a module of its own" in caught.value.hint

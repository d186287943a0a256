"""Layers that read what the model's forward sets on them: opened and equal to one process, or refused by name."""

from functools import cache
from pathlib import Path

import pytest

from planner.errors import CaptureError
from planner.model_profile import ModelProfile
from planner.runner.pool import WorkerPool
from tests.zoo.plans import LAYOUT_IDS, LAYOUTS, check_exact, profile_zoo
from tests.zoo.resets import NAMES

ZOO = Path(__file__).parent / "zoo" / "resets.py"


@cache
def profile_of(name: str) -> ModelProfile:
    return profile_zoo(f"{ZOO}:build_{name}", "inputs")


@pytest.mark.parametrize("layout", [LAYOUT_IDS[0], LAYOUT_IDS[2]])
@pytest.mark.parametrize("name", NAMES)
def test_exact(name: str, layout: str, pool: WorkerPool, tmp_path: Path) -> None:
    check_exact(profile_of(name), LAYOUTS[LAYOUT_IDS.index(layout)], pool, tmp_path)


def test_layers_are_opened_only_where_code_outside_sets_what_they_read() -> None:
    called = {node.target for node in profile_of("cut_spikes").program.nodes if node.kind == "module"}
    assert called == {f"layers.{index}.mix" for index in range(4)}
    called = {node.target for node in profile_of("reset_inside").program.nodes if node.kind == "module"}
    assert called == {f"layers.{index}" for index in range(4)}


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("softened", "'layers.0.1.negative_slope'"),
        ("frozen", "'layers.0.1.training'"),
        ("looking_spikes", "'layers.0.neuron.level'"),
        ("looking_and_reset", "'layers.0.neuron.level'"),
    ],
)
def test_what_can_not_be_opened_is_refused_by_name(name: str, named: str) -> None:
    with pytest.raises(CaptureError) as caught:
        profile_of(name)
    assert named in caught.value.message

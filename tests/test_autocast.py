"""A forward's own autocast: a block that has one is called whole, one around blocks is refused with its line."""

from pathlib import Path

import pytest

from planner.errors import CaptureError
from planner.model_profile import ModelProfile
from planner.runner.pool import WorkerPool
from tests.zoo.plans import check_exact, profile_zoo

pytestmark = pytest.mark.filterwarnings("ignore:CUDA is not available")

MODELS = Path(__file__).parent / "zoo" / "autocast.py"


def profile_of(name: str) -> ModelProfile:
    return profile_zoo(f"{MODELS}:build_{name}")


@pytest.mark.parametrize("name", ["inside", "gpu"])
def test_a_block_with_its_own_autocast_is_called_whole(name: str) -> None:
    profile = profile_of(name)
    assert profile.called_whole == tuple(f"blocks.{index}" for index in range(4))
    assert any("torch.autocast" in note and "called whole" in note for note in profile.notes)


def test_a_block_called_whole_keeps_its_autocast(tmp_path: Path) -> None:
    with WorkerPool() as pool:
        check_exact(profile_of("inside"), {"pp_degree": 2}, pool, tmp_path)


def test_an_autocast_that_is_off_changes_nothing() -> None:
    assert profile_of("off").called_whole == ()


def test_an_autocast_around_the_layers_is_refused_with_its_line() -> None:
    with pytest.raises(
        CaptureError, match=r"autocast\.py:\d+: the model computes this under its own torch\.autocast"
    ) as caught:
        profile_of("around")
    assert "--precision bf16-mixed" in caught.value.hint

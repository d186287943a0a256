"""Values of every kind between layers: emitted, run, and equal to one process in loss and every gradient."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from planner.model_profile import ModelProfile
from planner.runner.pool import WorkerPool
from tests.zoo.plans import LAYOUT_IDS, LAYOUTS, check_exact, profile_zoo
from tests.zoo.values import NAMES

ZOO = Path(__file__).parent / "zoo"


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool() as pool:
        yield pool


@pytest.fixture(scope="module", params=[*NAMES, "tagger"])
def profile(request: pytest.FixtureRequest) -> ModelProfile:
    if request.param == "tagger":
        return profile_zoo(f"{ZOO / 'sequence_first.py'}")
    return profile_zoo(f"{ZOO / 'values.py'}:build_{request.param}", f"inputs_{request.param}")


@pytest.mark.parametrize("layout", LAYOUTS, ids=LAYOUT_IDS)
def test_exact(profile: ModelProfile, pool: WorkerPool, tmp_path: Path, layout: dict[str, Any]) -> None:
    check_exact(profile, layout, pool, tmp_path)

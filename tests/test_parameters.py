"""Parameters that are shared, frozen, unread or of no dimension: emitted, run, and equal to one process."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from planner.model_profile import ModelProfile
from planner.runner.pool import WorkerPool
from tests.zoo.parameters import NAMES
from tests.zoo.plans import LAYOUT_IDS, LAYOUTS, check_exact, profile_zoo

ZOO = Path(__file__).parent / "zoo" / "parameters.py"


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool() as pool:
        yield pool


@cache
def profile_of(name: str) -> ModelProfile:
    return profile_zoo(f"{ZOO}:build_{name}", f"inputs_{name}")


# What is frozen differs little from layout to layout: each kind in the two that do most.
FROZEN = {"first_half", "last_half", "alternate", "norms_only", "one_in_the_middle", "half_tied"}
CELLS = [(name, id_) for name in NAMES for id_ in (LAYOUT_IDS if name not in FROZEN else ("pp3", "pp2 dp2"))]


@pytest.mark.parametrize(("name", "layout"), CELLS)
def test_exact(name: str, layout: str, pool: WorkerPool, tmp_path: Path) -> None:
    report = check_exact(profile_of(name), LAYOUTS[LAYOUT_IDS.index(layout)], pool, tmp_path)
    assert not [row for row in report.rows if row.verdict == "unused"]  # what nothing reads is kept too

"""Writes in place where stages meet: equal to one process, or refused with the line that writes."""

from functools import cache
from pathlib import Path

import pytest

from planner.errors import CaptureError
from planner.model_profile import ModelProfile
from planner.runner.pool import WorkerPool
from tests.zoo.plans import LAYOUT_IDS, LAYOUTS, check_exact, profile_zoo
from tests.zoo.writes import NAMES

ZOO = Path(__file__).parent / "zoo" / "writes.py"


@cache
def profile_of(name: str) -> ModelProfile:
    return profile_zoo(f"{ZOO}:build_{name}", f"inputs_{name}")


# A block that writes over its argument can't be computed again: recomputation of it is refused, not wrong.
CELLS = [(name, id_) for name in NAMES for id_ in LAYOUT_IDS if (name, id_) != ("writing_blocks", "pp3")]


@pytest.mark.parametrize(("name", "layout"), CELLS)
def test_exact(name: str, layout: str, pool: WorkerPool, tmp_path: Path) -> None:
    check_exact(profile_of(name), LAYOUTS[LAYOUT_IDS.index(layout)], pool, tmp_path)


@pytest.mark.parametrize(
    ("name", "statement", "what"),
    [
        ("views", "base.add_(y)", "another view of the same tensor"),
        ("base_of_views", "half.add_(", "another view of the same tensor"),
        ("written_input", "bias.mul_(2.0)", "input 'bias'"),
    ],
)
def test_what_a_stage_would_miss_is_refused(name: str, statement: str, what: str) -> None:
    with pytest.raises(CaptureError) as caught:
        profile_of(name)
    line = next(number for number, text in enumerate(ZOO.read_text().splitlines(), 1) if statement in text)
    assert f"writes.py:{line}: " in caught.value.message
    assert f"writes in place, and {what} is read after that in another layer" in caught.value.message
    assert "x = x.clone()" in caught.value.hint

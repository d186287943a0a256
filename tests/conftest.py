"""What all tests share."""

import os
from pathlib import Path

import hypothesis
import pytest

os.environ.pop("COLUMNS", None)  # pytest-xdist gives its workers one; what is piped has a width of its own
os.environ.setdefault("OMP_NUM_THREADS", "1")  # also for the processes that tests start

# No deadline: the machine's speed decides no test. The same examples on every run: a failure can be seen again.
hypothesis.settings.register_profile("planner", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("planner")

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture
def repository() -> Path:
    """The root of the source tree."""
    return REPOSITORY


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is the working directory during the test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path

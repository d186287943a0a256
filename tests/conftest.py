"""What all tests share."""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from commands import Done, Run

from planner.cli.main import main
from planner.runner.pool import WorkerPool

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


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], folder: Path) -> Run:
    """A function that runs a command line inside an empty folder."""

    def run_line(*arguments: str) -> Done:
        code = main(arguments)
        out, err = capfd.readouterr()
        return Done(code, out, err)

    return run_line


class _SharedPool(WorkerPool):
    """A pool of a worker of pytest-xdist: with another beside it, no more than eight processes run at once."""

    def __init__(self, lock: Path) -> None:
        super().__init__()
        self._lock = lock

    def run(self, *args: Any, num_processes: int = 1, **kwargs: Any) -> list[Any]:
        """Run a job of up to four processes beside another of as many, and a larger one by itself."""
        with self._lock.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX if num_processes > 4 else fcntl.LOCK_SH)
            return super().run(*args, num_processes=num_processes, **kwargs)


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerPool]:
    """Processes for the jobs of all tests: a template that is started once has imported torch."""
    with _SharedPool(tmp_path_factory.getbasetemp().parent / "processes.lock") as pool:
        yield pool

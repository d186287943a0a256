"""What README shows is what the commands print; the demo goes the whole way.

After a change that is meant to change the output, write README anew: `UPDATE_README=1 pytest tests/test_readme.py`.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONSOLE = re.compile(r"```console\n(.*?)```", re.DOTALL)


@pytest.fixture
def checkout(repository: Path, tmp_path: Path) -> Path:
    """A folder with the examples, as in a clone."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(repository / "examples", tmp_path / "examples", ignore=ignored)
    return tmp_path


def environment() -> dict[str, str]:
    """The environment with the commands of this interpreter first on the path, as in an active virtual environment."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    kept = {name: value for name, value in os.environ.items() if name != "COLUMNS"}  # tables as wide as in a pipe
    return kept | {"PATH": path, "OMP_NUM_THREADS": "1"}


def run(command: str, folder: Path) -> str:
    """Return what a command of README prints to stdout."""
    done = subprocess.run(
        command, shell=True, cwd=folder, env=environment(), capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    lines = [line.rstrip() for line in done.stdout.strip().splitlines()]
    return "\n".join(lines)


def test_readme_shows_what_the_commands_print(repository: Path, checkout: Path) -> None:
    readme = repository / "README.md"
    text = readme.read_text()

    def play(block: re.Match[str]) -> str:
        commands = [line[2:] for line in block[1].splitlines() if line.startswith("$ ")]
        assert commands
        return "```console\n" + "\n".join(f"$ {command}\n{run(command, checkout)}" for command in commands) + "\n```"

    played = CONSOLE.sub(play, text)
    if os.environ.get("UPDATE_README"):
        readme.write_text(played)
    assert readme.read_text() == played


def test_the_demo_goes_the_whole_way(checkout: Path) -> None:
    done = subprocess.run(
        ["bash", "examples/gpt/demo.sh"],
        cwd=checkout,
        env=environment() | {"DEMO_STEPS": "3"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("proven optimal", "Bottleneck", "equal to one process", "within 0.0001", ": falls"):
        assert words in done.stdout
    assert (checkout / "plan.py").exists()
    assert (checkout / "profiles" / "gpt.json").exists()

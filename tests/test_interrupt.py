"""Ctrl-C in a terminal: the best so far with its gap, and progress until then."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from strategies import random_profile

from planner.model_profile import write_profile

REPOSITORY = Path(__file__).resolve().parent.parent

HANGS = """
import importlib, sys, time
from pathlib import Path
module = importlib.import_module("planner.solver.{module}")
from planner.cli.main import main

calls, then = 0, getattr(module, "{name}")


def hangs(*arguments, **options):
    global calls
    calls += 1
    if calls > {after}:
        time.sleep(0.2)
        Path("hangs").write_text("")
        time.sleep(600)
    return then(*arguments, **options)


module.{name} = hangs
sys.exit(main(sys.argv[1:]))
"""
AFTER_A_PLAN = """
import sys, time
from pathlib import Path
from planner.cli.main import main
from planner.cost import Pricer
from planner.solver.incumbent import Budget

priced, evaluate, spend = False, Pricer.evaluate, Budget.spend


def notes(self, plan):
    global priced
    priced = True
    return evaluate(self, plan)


def hangs(self):
    if priced:
        Path("hangs").write_text("")
        time.sleep(600)
    spend(self)


Pricer.evaluate, Budget.spend = notes, hangs
sys.exit(main(sys.argv[1:]))
"""


def interrupted(script: str, *arguments: str) -> tuple[int, str, str]:
    """Run a command whose work hangs, send Ctrl-C then, and return its exit code, stdout, and what the terminal saw."""
    Path("hangs").unlink(missing_ok=True)
    reader, terminal = pty.openpty()
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "TERM": "xterm", "COLUMNS": "140"}
    line = [sys.executable, "-c", script, *arguments]
    with subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=terminal, text=True) as command:
        os.close(terminal)
        try:
            limit = time.monotonic() + 100
            while not Path("hangs").exists() and command.poll() is None and time.monotonic() < limit:
                time.sleep(0.02)
            command.send_signal(signal.SIGINT)
            out, _ = command.communicate(timeout=100)
        finally:
            command.kill()
    seen = b""
    try:
        while part := os.read(reader, 65536):
            seen += part
    except OSError:  # the other end is closed
        pass
    os.close(reader)
    return command.returncode, out, seen.decode(errors="replace")


@pytest.fixture
def profiled(folder: Path) -> Path:
    """A working directory with a profile of layers that differ."""
    write_profile(random_profile(5, num_layers=8, num_classes=8, tp_degrees=()), Path("profiles/test.json"))
    return folder


SOLVE = ("solve", "--gpus", "4", "--global-batch-size", "8", "--json")


@pytest.mark.skipif(sys.platform != "linux", reason="terminals are Linux's")
def test_solve_gives_the_best_so_far(profiled: Path) -> None:
    code, out, seen = interrupted(AFTER_A_PLAN, *SOLVE, "--pin", "pp_degree=4")
    assert code == 0, seen
    told = json.loads(out)
    assert told["status"] == "feasible"
    assert told["lower_bound_s"] < told["step_time_s"]
    assert told["gap_fraction"] > 0
    assert "Traceback" not in seen
    assert Path("plan.py").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="terminals are Linux's")
@pytest.mark.parametrize(
    ("module", "arguments", "key"),
    [("pareto", (*SOLVE, "--pareto"), "pareto"), ("sensitivity", (), "sensitivity")],
)
def test_what_follows_the_search_is_ended_with_what_is_known(
    profiled: Path, module: str, arguments: tuple[str, ...], key: str
) -> None:
    if not arguments:
        subprocess.run(
            [sys.executable, "-m", "planner", *SOLVE],
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
            check=True,
            capture_output=True,
            timeout=100,
        )
        arguments = ("explain", "plan.py", "--sensitivity", "--json")
    code, out, seen = interrupted(HANGS.format(module=module, name="find", after=1), *arguments)
    assert code == 0, seen
    told = json.loads(out)
    assert told["status"] == "optimal"
    assert not told[key]["is_complete"]
    assert "Traceback" not in seen
    assert f"{key}: " in seen, "progress"


@pytest.mark.skipif(sys.platform != "linux", reason="terminals are Linux's")
def test_without_a_plan_the_repairs_found_so_far_are_told(profiled: Path) -> None:
    limits = ("--limit", "memory=1B", "--pin", "pp_degree=2", "--limit", "num_gpus=1..")
    whole = subprocess.run(
        [sys.executable, "-m", "planner", *SOLVE, *limits],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    repairs = json.loads(whole.stdout)["repairs"]
    assert len(repairs) >= 1
    script = HANGS.format(module="solve", name="find", after=6)
    code, out, seen = interrupted(script, *SOLVE, *limits)
    assert code == 1, seen
    told = json.loads(out)
    assert told["status"] == "infeasible"
    assert told["repairs"] == repairs[: len(told["repairs"])]
    assert "Traceback" not in seen


@pytest.mark.skipif(sys.platform != "linux", reason="terminals are Linux's")
def test_runners_up_end_the_search_for_more(profiled: Path) -> None:
    code, out, seen = interrupted(HANGS.format(module="runners_up", name="find", after=1), *SOLVE)
    assert code == 0, seen
    told = json.loads(out)
    assert told["status"] == "optimal"
    assert len(told["runners_up"]) == 1
    assert "solve: runner-up 2" in seen

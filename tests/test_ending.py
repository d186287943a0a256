"""The command ends when it is done or stopped, whatever the model's file started as it was imported."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

STARTS = """
import multiprocessing, os, subprocess, sys, threading, time
from pathlib import Path
import torch

threading.Thread(target=lambda: time.sleep(600)).start()
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
child.start()
orphan = "import os, sys, time; os.fork() and sys.exit(); print(os.getpid(), flush=True); time.sleep(600)"
process = subprocess.Popen([sys.executable, "-c", orphan], stdout=subprocess.PIPE, text=True)
second = process.stdout.readline().strip()
Path("pids").write_text(f"{child.pid} {second}")


def build_model():
    if os.environ.get("WAITS"):
        Path("waits").write_text("")
        time.sleep(600)
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))


def example_inputs(batch_size):
    return torch.randn(batch_size, 2)
"""


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
@pytest.mark.parametrize("stopped", [False, True], ids=["done", "stopped"])
def test_threads_and_processes_of_a_model_file_end_with_the_command(tmp_path: Path, stopped: bool) -> None:
    (tmp_path / "model.py").write_text(STARTS)
    environment = os.environ | ({"WAITS": "1"} if stopped else {})
    line = [sys.executable, "-m", "planner", "profile", "model.py", "--microbatch-sizes", "1", "--json"]
    with subprocess.Popen(
        line, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as command:
        try:
            if stopped:
                limit = time.monotonic() + 100
                while not (tmp_path / "waits").exists() and time.monotonic() < limit:
                    time.sleep(0.05)
                command.send_signal(signal.SIGTERM)
            out, told = command.communicate(timeout=120)
        finally:
            command.kill()
    assert command.returncode == (143 if stopped else 0), told
    assert "Traceback" not in told
    assert "1 thread and 2 processes that the model's code had left running" in told
    assert ('"num_layers"' in out) != stopped
    assert not any(running(int(pid)) for pid in (tmp_path / "pids").read_text().split())

"""Models larger than the memory there is: profiled a layer at a time, or one clear error for a layer that is too large.

Each runs in a process of its own with a limit on its data, under which building the model fails.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("resource", reason="limits of a process are Unix")

MODEL = """
import os

import torch
from torch import nn

WIDTH, LAYERS = int(os.environ.get("WIDTH", 2048)), 24  # 16 MiB a layer, 384 MiB in all


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def build_model():
    return nn.Sequential(*(Layer() for _ in range(LAYERS)))


def example_inputs(batch_size):
    return (torch.randn(batch_size, WIDTH),)


def loss_fn(output):
    return output.square().mean()
"""

LIMITED = """
import resource, sys
from pathlib import Path

import planner.profiler
from planner.cli.main import main

lines = Path("/proc/self/status").read_text().splitlines()
used = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))
resource.setrlimit(resource.RLIMIT_DATA, (used + int(sys.argv[1]) * 2**20,) * 2)
if sys.argv[2] == "build":
    sys.path.insert(0, ".")
    import model
    model.build_model()
    sys.exit("built")
sys.exit(main(sys.argv[2:]))
"""


def run(folder: Path, *arguments: str, width: int = 2048) -> subprocess.CompletedProcess[str]:
    """Run planner in a process that may take 200 MiB beside what it took to start."""
    (folder / "model.py").write_text(MODEL)
    return subprocess.run(
        [sys.executable, "-c", LIMITED, "200", *arguments],
        cwd=folder,
        # The limit is on address space, which the heap keeps of what was freed; what is mapped goes back at once.
        env={**os.environ, "WIDTH": str(width), "MALLOC_MMAP_THRESHOLD_": str(2**20)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


PROFILE = ("profile", "model.py", "--device", "cpu", "--microbatch-sizes", "1,2", "--tp", "1,2", "-o", "p.json")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads what the process has from /proc")
def test_a_model_larger_than_memory_is_profiled_a_layer_at_a_time(tmp_path: Path) -> None:
    built = run(tmp_path, "build")
    assert built.returncode == 1
    assert "can't allocate memory" in built.stderr, built.stderr
    profiled = run(tmp_path, *PROFILE, "--json")
    assert profiled.returncode == 0, profiled.stderr
    assert json.loads(profiled.stdout)["param_count"] == 24 * (2048 * 2048 + 2048)
    costs = [cost for item in json.loads((tmp_path / "p.json").read_text())["layer_classes"] for cost in item["costs"]]
    assert {cost["source"] for cost in costs} == {"measured"}
    assert max(cost["param_bytes"] for cost in costs) == 4 * (2048 * 2048 + 2048)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads what the process has from /proc")
def test_a_layer_larger_than_memory_is_one_clear_error(tmp_path: Path) -> None:
    refused = run(tmp_path, *PROFILE, width=8192)
    assert refused.returncode == 1
    error, hint = refused.stderr.strip().splitlines()[-2:]
    assert error.startswith("error: layer '0' with 1 rows doesn't fit cpu by itself: its parameters take 256 MiB")
    assert "MiB are free" in error
    assert "--gpu NAME" in hint
    assert not (tmp_path / "p.json").exists()

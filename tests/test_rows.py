"""How numbers follow the batch: linear, the pairs of a batch, or refused; two batches alone can't tell these apart."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from planner.emitter import emit, write_plan
from planner.errors import CaptureError
from planner.model_profile import NO_LOSS, write_profile
from planner.profiler import profile_model
from planner.runner import verify
from tests.zoo.plans import even_plan

TEXT = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        rows = x.shape[0]
        h = self.first(x)
        h = {code}
        return self.second(h)

def build_model():
    return Model()

def example_inputs(batch_size):
    return (torch.randn(batch_size, 8),)

def loss_fn(output):
    return output.square().mean()
"""


def profile(folder: Path, code: str):  # type: ignore[no-untyped-def]
    path = folder / "model.py"
    path.write_text(TEXT.format(code=code))
    return profile_model(str(path), gpu="h100-sxm", dtype="float32", microbatch_sizes=(1, 2, 4))


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("h / (rows * (rows - 1) + 1)", "`div` computes with the number of rows"),
        ("(h @ h.t()).reshape(rows * rows, 1).expand(-1, 8)", "`matmul` relates every row to every other"),
        ("h * (2 * rows + 1)", "`mul` computes with the number of rows"),
        ("torch.cat([h, torch.zeros(rows * (3 - rows) + rows * rows, 8)])", ""),
        ("h * rows", "a value of each row depends on the number of rows"),
        ("h + torch.arange(rows)[:, None] * 0.1", "`mul` computes with the numbers of the batch's rows"),
        ("h[torch.arange(rows).view(-1)] + h[torch.arange(rows), torch.arange(rows) * 0][:, None]", ""),
        ("h * torch.tensor(rows)", ""),  # the rows of the whole step
        ("(torch.full((rows, 1), rows) / rows) * h", ""),
    ],
)
def test_numbers_of_any_batch(tmp_path: Path, code: str, reason: str) -> None:
    found = profile(tmp_path, code)
    plan = tmp_path / "plan.py"
    write_plan(emit(even_plan(found, pp_degree=2, microbatch_size=4, num_microbatches=2), found), plan)
    report = verify(plan, timeout_s=120)
    assert report.ok, report.rows[:3]
    if reason:
        assert any(reason in told and "model.py:13" in told for told in report.coupled), report.coupled
        assert any(reason in told for told in found.notes), found.notes
    else:
        assert not report.coupled
        assert (report.whole_batch_difference or 0.0) <= report.tolerance


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("(h + 0).mul_(rows)", "`mul` computes with the number of rows"),
        ("h + rows", "`add` computes with the number of rows"),
        ("h * torch.tensor(rows + 1)", "`tensor` computes with the number of rows"),
        ("h * rows / rows", ""),
        ("h * rows * 2 / (rows * 3)", ""),
        ("h.view(rows * 2, 4).view(rows, 8)", ""),
    ],
)
def test_what_computes_with_rows_is_named(tmp_path: Path, code: str, reason: str) -> None:
    loss = profile(tmp_path, code).loss
    if not reason:
        assert loss is None
        return
    assert loss is not None
    assert [reason in text and "model.py:13" in text for text in loss.coupled] == [True]


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("h[: max(1, rows // 2)]", "the constant 1 (5 in float64 with 11 rows)"),
        ("torch.cat([h, torch.zeros(-rows % 8, 8)])[:, :8]", "2 and 11 rows"),
        ("h if rows < 8 else h + 1", "differs between batches of 2 and 11 rows"),
        ("h * (1 << (rows - 1).bit_length())", "is 2, 4 and 16 with 2, 3 and 11 rows"),
    ],
)
def test_other_numbers_are_refused(tmp_path: Path, code: str, told: str) -> None:
    with pytest.raises(CaptureError) as caught:
        profile(tmp_path, code)
    assert told in str(caught.value)
    assert "model.py:1" in str(caught.value)  # the statement's line


def test_a_loss_that_was_not_profiled_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.py"
    path.write_text(TEXT.format(code="h").partition("def loss_fn")[0])
    monkeypatch.chdir(tmp_path)
    found = profile_model(str(path), gpu="h100-sxm", dtype="float32", microbatch_sizes=(1, 2, 4))
    assert not found.loss_is_known
    source = emit(even_plan(found, pp_degree=2, num_microbatches=2), found)
    assert source.count("    loss_is_known = False\n") == 1, "the last stage alone gets the loss"
    assert NO_LOSS in found.notes
    write_profile(found, tmp_path / "profile.json")
    solve = [
        "solve",
        "--profile",
        "profile.json",
        "-o",
        "plan.py",
        "--gpus",
        "1",
        "--global-batch-size",
        "4",
        "--pin",
        "num_microbatches=2",
    ]
    done = subprocess.run([sys.executable, "-m", "planner", *solve], capture_output=True, text=True, check=True)
    assert "averaged evenly over microbatches" in done.stdout + done.stderr
    train = "import model, plan; plan.setup(model.build_model, lambda output: output.mean())"
    one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        one["MASTER_PORT"] = str(free.getsockname()[1])
    done = subprocess.run(
        [sys.executable, "-c", train], capture_output=True, text=True, check=True, env={**os.environ, **one}
    )
    assert "loss_fn is averaged evenly over microbatches" in done.stderr

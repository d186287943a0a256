"""How numbers follow the batch: linear, the pairs of a batch, or refused; two batches alone can't tell these apart."""

from pathlib import Path

import pytest

from planner.emitter import emit, write_plan
from planner.errors import CaptureError
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
    "code",
    [
        "h / (rows * (rows - 1) + 1)",
        "(h @ h.t()).reshape(rows * rows, 1).expand(-1, 8)",
        "h * (2 * rows + 1)",
        "torch.cat([h, torch.zeros(rows * (3 - rows) + rows * rows, 8)])",
    ],
)
def test_numbers_of_any_batch(tmp_path: Path, code: str) -> None:
    found = profile(tmp_path, code)
    plan = tmp_path / "plan.py"
    write_plan(emit(even_plan(found, pp_degree=2, microbatch_size=4, num_microbatches=2), found), plan)
    report = verify(plan, timeout_s=120)
    assert report.ok, report.rows[:3]


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

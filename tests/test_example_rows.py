"""Example inputs from functions that take no number of rows, and verification of models without a loss."""

from pathlib import Path

import pytest
import torch

from planner.emitter import emit, write_plan
from planner.errors import CaptureError, VerifyError
from planner.example_rows import for_any_rows, takes_rows
from planner.model_file import load_model_file
from planner.profiler import profile_model
from planner.runner import verify
from planner.runner.pool import WorkerPool
from planner.runner.stand_in import NOT_PROVED, own_loss, stand_in_loss
from tests.zoo.plans import even_plan

HERE = Path("case.py")
FIXED = """
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

def inputs():
    return (torch.arange(6.0).reshape(2, 3),)

def example_target():
    return torch.zeros(2, 3)
"""


def test_a_fixed_batch_is_repeated_and_cut() -> None:
    table, scale = torch.tensor([[1, 2], [3, 4]]), torch.tensor(2.0)

    def inputs() -> object:
        return (table,), {"scale": scale, "flag": True, "nested": [table[:, 0]]}

    make = for_any_rows(inputs, HERE)
    (args, kwargs) = make(5)
    assert args[0].tolist() == [[1, 2], [3, 4], [1, 2], [3, 4], [1, 2]]
    assert kwargs["nested"][0].tolist() == [1, 3, 1, 3, 1]
    assert kwargs["scale"] is scale
    assert kwargs["flag"] is True
    assert make(1)[0][0].tolist() == [[1, 2]]
    assert make(2)[0][0] is table


def test_functions_of_rows_are_called_with_them() -> None:
    def of_rows(batch_size: int) -> int:
        return batch_size

    def optional(rows: int = 2) -> int:
        return rows

    assert for_any_rows(of_rows, HERE) is of_rows
    assert for_any_rows(optional, HERE) is optional
    assert takes_rows(lambda *args: args)
    assert not takes_rows(lambda *, rows=2: rows)
    assert takes_rows(dict)


def test_tensors_without_the_rows_of_the_first_stay_as_they_are() -> None:
    given = {"x": torch.ones(2, 3), "table": torch.ones(7, 3), "labels": torch.ones(2)}
    found = for_any_rows(lambda: given, HERE)(4)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
        "x": (4, 3),
        "table": (7, 3),
        "labels": (4,),
    }
    with pytest.raises(CaptureError) as caught:
        for_any_rows(lambda: torch.ones(0, 3), HERE)(4)
    assert "the first dimension of its first tensor is 0" in caught.value.message
    assert "(batch_size), for any number of rows" in caught.value.hint


TABLE_FIRST = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, mask, x):
        return self.b((mask + x @ x.transpose(1, 2)) @ self.a(x))

def model():
    return Model()

def inputs():
    return torch.ones(5, 5), torch.ones(2, 5, 4)
"""


def test_rows_taken_from_the_wrong_tensor_are_told_where_the_model_fails(folder: Path) -> None:
    (folder / "case.py").write_text(TABLE_FIRST)
    with pytest.raises(CaptureError) as caught:
        profile_model("case.py:model", inputs="inputs", gpu="h100-sxm", dtype="float32")
    assert "run model(*inputs()) by itself" in caught.value.hint
    assert "write it as def inputs(batch_size) unless these are dimension 0 of its first tensor" in caught.value.hint


def test_a_file_of_functions_without_rows_goes_the_whole_way(folder: Path) -> None:
    (folder / "case.py").write_text(FIXED)
    file = load_model_file("case.py:model", inputs="inputs")
    assert file.notes == (
        "inputs() takes no number of rows: those that it returns, along dimension 0, are repeated",
        "example_target() takes no number of rows: those that it returns, along dimension 0, are repeated",
    )
    profile = profile_model("case.py:model", inputs="inputs", gpu="h100-sxm", dtype="float32", microbatch_sizes=(1,))
    assert file.notes[0] in profile.notes
    write_plan(emit(even_plan(profile, pp_degree=2), profile), folder / "plan.py")
    report = verify(folder / "plan.py", timeout_s=120)
    assert report.ok
    assert NOT_PROVED in report.not_proved  # no loss_fn: another stood in


def test_the_loss_of_a_model_is_its_own_where_it_has_one() -> None:
    x = torch.tensor([[1.0, 3.0]], requires_grad=True)
    assert own_loss({"loss": x.sum(), "out": x}) == 4.0
    assert own_loss(x.sum()) == 4.0
    assert own_loss(x) is None
    assert own_loss({"out": x}) is None
    assert stand_in_loss({"out": x, "none": None, "ids": torch.tensor([5])}) == 5.0
    assert stand_in_loss((x, [2 * x])) == 25.0
    assert stand_in_loss({"loss": x.sum(), "out": x}, is_own=True) == 4.0
    assert own_loss({"loss": x}) is None  # a number for each row is no loss


# What a model returns, and why microbatches change the loss that stands in for its own: nothing where they don't.
LOSSES = {
    "a number per row": ("self.b(y)", ""),
    "a dict with the loss": ('{"loss": F.cross_entropy(y, y.argmax(-1)), "logits": y}', ""),
    "outputs and a loss": ("(y, F.mse_loss(y, x).exp())", "outputs that are no rows"),
    "batch norm": ("self.b(self.norm(y))", "batch norm takes mean and variance"),
    "gradients divided by counts": ("self.b(self.table(x.long()).mean(1) + y)", "how often a microbatch has an index"),
    "rows related": ("self.b((y @ y.T).softmax(-1) @ y)", "relates every row to every other"),
}
WITHOUT_LOSS = """
import torch
from torch import nn
from torch.nn import functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.table = nn.Embedding(9, 4, scale_grad_by_freq=True)

    def forward(self, x):
        y = torch.tanh(self.a(x))
        return RETURNED

def model():
    torch.manual_seed(0)
    return Model()

def inputs(rows):
    return torch.randn(rows, 4).abs().clamp(max=8)
"""


@pytest.mark.parametrize("name", LOSSES)
def test_what_stands_in_for_a_loss_fails_no_right_plan(pool: WorkerPool, folder: Path, name: str) -> None:
    returned, why = LOSSES[name]
    (folder / "case.py").write_text(WITHOUT_LOSS.replace("RETURNED", returned))
    profile = profile_model("case.py:model", inputs="inputs", gpu="h100-sxm", dtype="float32", microbatch_sizes=(2,))
    plan = even_plan(profile, microbatch_size=2 if name == "batch norm" else 1)
    write_plan(emit(plan, profile), folder / "plan.py")
    report = verify(folder / "plan.py", pool=pool, timeout_s=120)
    assert report.ok
    assert report.whole_batch_difference is not None
    assert (report.whole_batch_difference < 1e-12) == (not why)
    told = [note for note in report.notes if note.startswith("microbatches change this loss")]
    assert len(told) == bool(why)
    assert all(why in note for note in told)
    assert (NOT_PROVED in report.not_proved) == (name != "a dict with the loss")


def test_a_loss_that_needs_several_rows_says_so(pool: WorkerPool, folder: Path) -> None:
    related = "F.cross_entropy(y @ y.T, torch.arange(len(y)))"  # of one row, it is zero
    (folder / "case.py").write_text(WITHOUT_LOSS.replace("RETURNED", related))
    profile = profile_model("case.py:model", inputs="inputs", gpu="h100-sxm", dtype="float32", microbatch_sizes=(1,))
    write_plan(emit(even_plan(profile, microbatch_size=1), profile), folder / "plan.py")
    with pytest.raises(VerifyError, match="no parameter of one process has a gradient") as caught:
        verify(folder / "plan.py", pool=pool, timeout_s=120)
    assert "a microbatch has 1 row: solve with more, as with --pin microbatch_size=2" in caught.value.hint

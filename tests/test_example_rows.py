"""Example inputs from functions that take no number of rows, and verification of models without a loss."""

from pathlib import Path

import pytest
import torch

from planner.emitter import emit, write_plan
from planner.errors import CaptureError
from planner.example_rows import for_any_rows, takes_rows
from planner.model_file import load_model_file
from planner.profiler import profile_model
from planner.runner import verify
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


def test_a_batch_whose_rows_can_not_be_told_is_an_error() -> None:
    def inputs() -> object:
        return {"x": torch.ones(2, 3), "table": torch.ones(7, 3)}

    with pytest.raises(CaptureError) as caught:
        for_any_rows(inputs, HERE)(4)
    assert "the first dimensions of its tensors are 2, 7" in caught.value.message
    assert "def inputs(batch_size)" in caught.value.hint


def test_a_file_of_functions_without_rows_goes_the_whole_way(folder: Path) -> None:
    (folder / "case.py").write_text(FIXED)
    file = load_model_file("case.py:model", inputs="inputs")
    assert file.notes == (
        "inputs() takes no number of rows: those that it returns are repeated",
        "example_target() takes no number of rows: those that it returns are repeated",
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
    assert stand_in_loss({"loss": x.sum(), "out": x}) == 4.0

"""Parameters that are shared, frozen, unread or of no dimension: emitted, run, and equal to one process."""

from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner.errors import CaptureError
from planner.model_file import ModelFile
from planner.model_profile import ModelProfile
from planner.profiler.capture import capture
from planner.runner.pool import WorkerPool
from tests.zoo.parameters import NAMES
from tests.zoo.plans import LAYOUT_IDS, LAYOUTS, check_exact, profile_zoo

ZOO = Path(__file__).parent / "zoo" / "parameters.py"


@cache
def profile_of(name: str) -> ModelProfile:
    return profile_zoo(f"{ZOO}:build_{name}", f"inputs_{name}")


# What is frozen differs little from layout to layout: each kind in the two that do most.
FROZEN = {"first_half", "last_half", "alternate", "norms_only", "one_in_the_middle", "half_tied"}
CELLS = [(name, id_) for name in NAMES for id_ in (LAYOUT_IDS if name not in FROZEN else ("pp3", "pp2 dp2"))]


@pytest.mark.parametrize(("name", "layout"), CELLS)
def test_exact(name: str, layout: str, pool: WorkerPool, tmp_path: Path) -> None:
    report = check_exact(profile_of(name), LAYOUTS[LAYOUT_IDS.index(layout)], pool, tmp_path)
    assert not [row for row in report.rows if row.verdict == "unused"]  # what nothing reads is kept too


class Codebook(nn.Module):
    """Changes its own parameters in forward, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.codes, self.how = nn.Linear(8, 8, bias=False), how
        self.scale: nn.Parameter | None = None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.codes.weight
        match self.how:
            case "replace":
                self.codes.weight = nn.Parameter(weight * 0.9)
            case "data":
                weight.data = F.normalize(weight.data)
            case "write through data":
                weight.data.copy_(F.normalize(weight.data))
            case "write":
                with torch.no_grad():
                    weight[0].clamp_(-1, 1)
            case "make":
                self.scale = nn.Parameter(torch.ones(8))
            case "in evaluation" if not self.training:
                with torch.no_grad():
                    weight.div_(2)
            case "same":
                self.codes.weight = weight
                self.codes.requires_grad_(True)
        return x @ self.codes.weight


def codebook_file(how: str) -> ModelFile:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), Codebook(how))

    return ModelFile(path=Path(__file__), build=build, example_inputs=lambda rows: torch.randn(rows, 8))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("replace", "forward replaces parameter '1.codes.weight'"),
        ("data", "forward writes parameter '1.codes.weight' in place"),
        ("write through data", "forward writes parameter '1.codes.weight' in place"),
        ("write", "forward writes parameter '1.codes.weight' in place"),
        ("make", "forward makes parameter '1.scale'"),
    ],
)
def test_a_forward_that_changes_its_parameters_is_refused_with_the_line(how: str, message: str) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(codebook_file(how))
    assert message in caught.value.message
    path, line = caught.value.message.partition(": ")[0].rsplit(":", 1)
    code = Path(path).read_text().splitlines()
    written = {"replace": "nn.Parameter(weight", "data": ".data = ", "make": "nn.Parameter(torch.ones"}
    assert written.get(how, "_(") in code[int(line) - 1]


def test_a_forward_that_keeps_its_parameters_is_recorded() -> None:
    capture(codebook_file("same"))
    capture(codebook_file("in evaluation"))


def test_a_lazy_module_that_no_batch_went_through_is_refused() -> None:
    file = ModelFile(path=Path(__file__), build=lambda: nn.LazyLinear(8), example_inputs=lambda n: torch.randn(n, 8))
    with pytest.raises(CaptureError) as caught:
        capture(file)
    assert "'weight' has no shape until the first forward" in caught.value.message


def looked_up(how: str) -> nn.Module:
    """Return an embedding and a linear layer, with something that a plan can't keep to."""
    options = {"max_norm": 1.0} if "norm" in how else {"sparse": True} if how == "sparse" else {}
    model = nn.Sequential(nn.Embedding(9, 4, **options), nn.Linear(4, 4))  # type: ignore[arg-type]
    weight = model[1].weight
    assert isinstance(weight, nn.Parameter)
    if how == "gradient hook":
        weight.register_hook(lambda gradient: gradient * 0.5)
    elif how == "hook after accumulation":
        weight.register_post_accumulate_grad_hook(lambda parameter: None)
    elif how == "norm of what is frozen":
        model[0].requires_grad_(False)
    return model


def looked_up_file(how: str) -> ModelFile:
    return ModelFile(
        path=Path(__file__), build=lambda: looked_up(how), example_inputs=lambda n: torch.arange(2 * n).view(n, 2) % 9
    )


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("norm", "'0' has max_norm=1: its forward scales the rows that it looks up in place"),
        ("sparse", "'0' has sparse=True: its gradient is a sparse tensor"),
        ("gradient hook", "parameter '1.weight' has a hook on its gradient"),
        ("hook after accumulation", "parameter '1.weight' has a hook on its gradient"),
    ],
)
def test_what_no_plan_trains_as_one_process_does_is_refused(how: str, message: str) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(looked_up_file(how))
    assert message in caught.value.message


def test_an_embedding_that_is_frozen_may_scale_its_rows() -> None:
    assert len(capture(looked_up_file("norm of what is frozen")).calls) == 2


SAME = "lie in the same memory and are not one parameter"


def share(how: str) -> nn.Module:
    """Return two linear layers whose weights have to do with one another."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    first, second = model
    assert isinstance(first, nn.Linear)
    assert isinstance(second, nn.Linear)
    numbers = torch.randn(32)
    weight, parts = first.weight, numbers.view(2, 4, 4)
    if how == "data":
        second.weight.data = weight.data
    elif how == "parameter of the other's values":
        second.weight = nn.Parameter(weight.detach())
    elif how == "transposed":
        second.weight = nn.Parameter(weight.detach().t())
    elif how in ("two of one tensor", "parts of one tensor", "overlapping parts"):
        first.weight = nn.Parameter(parts[0])
        start = {"two of one tensor": 0, "parts of one tensor": 16, "overlapping parts": 15}[how]
        second.weight = nn.Parameter(numbers[start : start + 16].view(4, 4))
    elif how == "values that are read":
        assert bool(weight.detach().isfinite().all())
        second.weight.data = weight.data
    elif how == "both frozen":
        second.weight = nn.Parameter(weight.detach(), requires_grad=False)
        weight.requires_grad_(False)
    elif how == "tied":
        second.weight = nn.Parameter(weight.detach())
        second.weight = weight
    elif how == "copied":
        second.weight.data.copy_(weight.data)
    return model


@pytest.mark.parametrize(
    "how",
    [
        "data",
        "parameter of the other's values",
        "transposed",
        "two of one tensor",
        "overlapping parts",
        "values that are read",
    ],
)
def test_parameters_in_the_same_memory_are_refused(how: str) -> None:
    file = ModelFile(path=Path(__file__), build=lambda: share(how), example_inputs=lambda n: torch.randn(n, 4))
    with pytest.raises(CaptureError, match=f"'0.weight' and '1.weight' {SAME}") as caught:
        capture(file)
    assert "b.weight = a.weight" in caught.value.hint


@pytest.mark.parametrize("how", ["parts of one tensor", "both frozen", "tied", "copied"])
def test_parameters_of_their_own_are_recorded(how: str) -> None:
    file = ModelFile(path=Path(__file__), build=lambda: share(how), example_inputs=lambda n: torch.randn(n, 4))
    assert len(capture(file).calls) == 2

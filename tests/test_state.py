"""Buffers that forward reads and updates: emitted, run, and equal to one process; or refused."""

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from planner.emitter import emit
from planner.errors import CaptureError, EmitError
from planner.graph import shared_updates
from planner.model_file import ModelFile
from planner.model_profile import ModelProfile
from planner.profiler.capture import capture
from planner.runner import verify
from planner.runner.pool import WorkerPool
from tests.strategies import make_cluster
from tests.test_solver import ask, planned
from tests.zoo.models import WIDTH
from tests.zoo.plans import LAYOUT_IDS, LAYOUTS, check_exact, even_plan, profile_zoo
from tests.zoo.state import NAMES

ZOO = Path(__file__).parent / "zoo" / "state.py"


@cache
def profile_of(name: str) -> ModelProfile:
    return profile_zoo(f"{ZOO}:build_{name}", f"inputs_{name}")


# With replicas each has its own running values: that is another computation, which profile's notes tell.
REPLICATED = {"tables", "normalized"}
CELLS = [(name, id_) for name in NAMES[:-1] for id_ in LAYOUT_IDS if name in REPLICATED or id_ != "pp2 dp2"]


@pytest.mark.parametrize(("name", "layout"), CELLS)
def test_exact(name: str, layout: str, pool: WorkerPool, tmp_path: Path) -> None:
    check_exact(profile_of(name), LAYOUTS[LAYOUT_IDS.index(layout)], pool, tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            "dict(self._stage.named_buffers())",
            "{name: buffer + 1 for name, buffer in self._stage.named_buffers()}",
            "after the steps buffer 'blocks.",
        ),
        ("norm = square.sqrt()", "norm = 2 * square.sqrt()", "clip_grad_norm_ is off"),
    ],
)
def test_what_a_plan_leaves_is_compared(pool: WorkerPool, tmp_path: Path, old: str, new: str, told: str) -> None:
    profile, path = profile_of("running"), tmp_path / "plan.py"
    text = emit(even_plan(profile, pp_degree=2), profile)
    assert old in text
    path.write_text(text.replace(old, new))
    report = verify(path, pool=pool, timeout_s=120)
    assert not report.ok
    assert all(row.is_equal for row in report.rows)
    assert any(told in note for note in report.notes), report.notes


def test_updated_buffers_of_replicas_are_not_proved(pool: WorkerPool, tmp_path: Path) -> None:
    report = check_exact(profile_of("normalized"), LAYOUTS[LAYOUT_IDS.index("pp2 dp2")], pool, tmp_path)
    assert any(text.startswith("the values of buffers that forward updates ('norm.") for text in report.not_proved)


def test_what_forward_updates_is_known_and_told() -> None:
    assert profile_of("tables").updated_buffers == ()
    updated = profile_of("assigned").updated_buffers
    assert updated[:2] == ("scale", "steps")
    assert "blocks.2.seen" in updated
    [note] = (note for note in profile_of("codebook").notes if "reads buffer 'quantize.codebook'" in note)
    assert "dp_degree stays 1" in note


@pytest.mark.parametrize("name", ["assigned", "codebook"])
def test_a_buffer_that_is_read_and_updated_allows_no_replicas(name: str) -> None:
    profile = profile_of(name)
    buffer = profile.carried_buffers[0]
    with pytest.raises(EmitError) as caught:
        emit(even_plan(profile, pp_degree=1, dp_degree=2), profile)
    assert f"forward updates buffer {buffer!r}" in caught.value.message
    cluster = make_cluster(2)
    assert planned(ask(profile, cluster, 4)).stages[0].dp_degree == 1
    conflict = ask(profile, cluster, 4, ("dp_degree", "2")).conflict
    assert conflict is not None
    assert conflict.constraint == "buffers"
    assert f"forward updates buffer {buffer!r}" in conflict.message


def test_statistics_that_training_does_not_read_allow_replicas() -> None:
    assert profile_of("normalized").carried_buffers == ()
    assert profile_of("tables").carried_buffers == ()


def test_a_buffer_of_two_stages_is_refused_and_not_planned() -> None:
    profile = profile_of("shared")
    with pytest.raises(EmitError) as caught:
        emit(even_plan(profile, pp_degree=2), profile)
    assert "updates buffer 'level', and layers 'stem' and 'head' read it, on stages 0 and 1" in caught.value.message
    assert set(shared_updates(profile)) == {1, 2, 3, 4}
    cluster = make_cluster(2)
    assert planned(ask(profile, cluster, 4)).pp_degree == 1
    conflict = ask(profile, cluster, 4, ("pp_degree", "2")).conflict
    assert conflict is not None
    assert conflict.constraint == "buffers"
    assert "layers 'stem' and 'head' read buffer 'level', which forward updates" in conflict.message


class Grows(nn.Module):
    """Replaces a buffer by one of another shape, or by one that has a gradient."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(WIDTH, WIDTH), how
        self.register_buffer("seen", torch.zeros(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        self.seen = torch.cat([self.seen, x.detach()]) if self.how == "shape" else x.mean(0, keepdim=True)
        return x


@pytest.mark.parametrize(("how", "message"), [("shape", "float32 of shape (3, 8)"), ("gradient", "has a gradient")])
def test_a_buffer_that_can_not_be_kept_is_refused(how: str, message: str) -> None:
    file = ModelFile(
        path=Path(__file__), build=lambda: Grows(how), example_inputs=lambda rows: torch.randn(rows, WIDTH)
    )
    with pytest.raises(CaptureError) as caught:
        capture(file)
    assert "forward replaces buffer 'seen'" in caught.value.message
    assert message in caught.value.message

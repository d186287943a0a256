"""Losses of every kind: microbatches on several processes give what one process gives for the whole batch at once."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planner.emitter import emit, write_plan
from planner.errors import VerifyError
from planner.model_profile import ModelProfile
from planner.profiler import profile_model
from planner.runner import verify
from planner.runner.pool import WorkerPool
from tests.case_files import read_case
from tests.zoo.losses import KINDS, write_model
from tests.zoo.plans import even_plan

EVERYWHERE = {"ignored labels", "several terms", "loss in the model", "guarded count"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2 dp2": {"pp_degree": 2, "dp_degree": 2},
    "pp2": {"pp_degree": 2},
    "pp2 tp2": {"pp_degree": 2, "tp_degree": 2},
    "dp2 sharded": {"dp_degree": 2, "data_parallel": "sharded", "recompute": True},
}
TRAINED = [name for name in KINDS if name not in ("given losses", "untrained parameters")]
CELLS = [(name, layout) for name in TRAINED for layout in LAYOUTS if layout == "pp2 dp2" or name in EVERYWHERE]


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ModelProfile]:
    """Return the profile of a kind, made once."""

    @functools.cache
    def profile(name: str) -> ModelProfile:
        path = write_model(name, tmp_path_factory.mktemp("loss"))
        options: dict[str, Any] = {"dtype": "float32", "microbatch_sizes": (1, 2), "tp_degrees": (1, 2)}
        return profile_model(str(path), gpu="h100-sxm", **options)

    return profile


@pytest.mark.parametrize(("name", "layout"), CELLS)
def test_equal_to_the_whole_batch(
    profiles: Callable[[str], ModelProfile], pool: WorkerPool, tmp_path: Path, name: str, layout: str
) -> None:
    profile, path = profiles(name), tmp_path / "plan.py"
    write_plan(emit(even_plan(profile, num_microbatches=4, **LAYOUTS[layout]), profile), path)
    report = verify(path, pool=pool, timeout_s=120)
    assert report.ok, (report.rows[:3], report.notes)
    assert report.whole_batch_difference is not None
    assert "labels left out" not in str(report.not_proved)
    if coupled := KINDS[name].coupled:
        assert report.whole_batch_difference > 1e-3
        assert coupled in str(report.coupled)
        assert any(note.startswith("microbatches may change this loss") for note in profile.notes)
    else:
        assert report.whole_batch_difference <= 1e-10
        assert report.coupled == ()


COUNTED_AND_COUPLED = """
import torch
from torch import nn
from torch.nn import functional as F

def build_model():
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    model[0].weight.grad = torch.ones(16, 6)  # as a file that has trained leaves it
    return model

def example_inputs(batch_size):
    return (torch.randn(batch_size, 6),)

def example_target(batch_size):
    return torch.randint(0, 3, (batch_size,))

def loss_fn(output, target):
    return F.cross_entropy(output, target, weight=torch.tensor([1.0, 4.0, 9.0]))
"""


def test_a_loss_that_counts_beside_rows_that_are_coupled(pool: WorkerPool, tmp_path: Path) -> None:
    """No process can be both the whole batch and its microbatches: compared where they count alike, and told."""
    model, path = tmp_path / "model.py", tmp_path / "plan.py"
    model.write_text(COUNTED_AND_COUPLED)
    profile = profile_model(str(model), gpu="h100-sxm", dtype="float32", microbatch_sizes=(4,))
    write_plan(emit(even_plan(profile, pp_degree=2, dp_degree=2, microbatch_size=4), profile), path)
    report = verify(path, pool=pool, timeout_s=120)
    assert report.ok, (report.rows[:3], report.notes)
    assert "every microbatch was given the same rows" in str(report.not_proved)
    plan = path.read_text()
    path.write_text(plan.replace("reduction='sum'", "reduction='mean'"))
    assert path.read_text() != plan
    with pytest.raises(VerifyError, match=r"loss_fn gives .* for a microbatch"):
        verify(path, pool=pool, timeout_s=120)


UNTRAINED = {"anchor", "number", "probe.weight", "probe.bias", "body.blocks.0.up.bias", "unused.weight", "unused.bias"}


@pytest.mark.parametrize("layout", ["pp2", "pp2 tp2", "pp2 dp2", "dp2 sharded"])
def test_a_parameter_without_gradient_has_none(
    profiles: Callable[[str], ModelProfile], pool: WorkerPool, tmp_path: Path, layout: str
) -> None:
    profile, path = profiles("untrained parameters"), tmp_path / "plan.py"
    write_plan(emit(even_plan(profile, num_microbatches=4, **LAYOUTS[layout]), profile), path)
    report = verify(path, pool=pool, timeout_s=120)
    assert report.ok, report.rows[:9]
    assert {row.name for row in report.rows if row.verdict == "no gradient"} == UNTRAINED
    assert any(note.startswith("7 parameters without gradient, as in one process") for note in report.notes)


@pytest.mark.parametrize(
    ("layout", "num_microbatches"), [({}, 2), ({"dp_degree": 2}, 1), ({"dp_degree": 2, "data_parallel": "sharded"}, 1)]
)
def test_case_39_mean_loss_with_padding(
    profiles: Callable[[str], ModelProfile],
    pool: WorkerPool,
    tmp_path: Path,
    layout: dict[str, Any],
    num_microbatches: int,
) -> None:
    losses = read_case(39)["microbatches"]
    profile, path = profiles("given losses"), tmp_path / "plan.py"
    plan = even_plan(profile, microbatch_size=1, num_microbatches=num_microbatches, **layout)
    write_plan(emit(plan, profile), path)
    results = pool.run("tests.zoo.losses:step_of_losses", str(path), losses, num_processes=plan.num_gpus, timeout_s=60)
    assert [loss for loss, _ in results] == [1.25] * plan.num_gpus
    assert results[0][1] == 1.25  # the gradient of the weight is the mean loss over the weight


def test_another_loss_than_the_profiled_one_is_refused(
    profiles: Callable[[str], ModelProfile], pool: WorkerPool, tmp_path: Path
) -> None:
    path = tmp_path / "plan.py"
    profile = profiles("masked mean")
    write_plan(emit(even_plan(profile), profile), path)
    text = path.read_text()
    assert "mul.sum() / 2" not in text
    path.write_text(text.replace("return mean", "return 2 * mean").replace("return div", "return 2 * div"))
    with pytest.raises(
        VerifyError, match=r"loss_fn gives .* for a microbatch, and the loss that this plan was made for"
    ):
        verify(path, pool=pool, timeout_s=60)


@pytest.mark.parametrize("name", ["hf_gpt2", "hf_llama3_8b"])
def test_hugging_face_losses_leave_labels_out(pool: WorkerPool, tmp_path: Path, name: str) -> None:
    pytest.importorskip("transformers")
    model = Path(__file__).parent / "models" / f"{name}.py"
    options: dict[str, Any] = {"dtype": "float32", "microbatch_sizes": (1, 2), "tp_degrees": (1, 2)}
    profile, path = profile_model(str(model), gpu="h100-sxm", **options), tmp_path / "plan.py"
    assert profile.loss is not None
    assert profile.loss.ignored == {"labels": -100}
    write_plan(emit(even_plan(profile, pp_degree=2, dp_degree=2), profile), path)
    report = verify(path, pool=pool, timeout_s=200)
    assert report.ok, report.rows[:3]
    assert report.whole_batch_difference is not None
    assert report.whole_batch_difference <= 1e-10
    assert not any("labels" in text for text in report.not_proved)

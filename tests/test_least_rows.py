"""A layer that needs several rows in a microbatch: batch statistics of one value are none."""

from pathlib import Path

import pytest

from planner.cluster import default_cluster
from planner.errors import ProfileError
from planner.model_profile import ModelProfile
from planner.profiler import profile_model
from planner.solver import Solution, SolveRequest, solve
from tests.zoo.solved import origin_of

MODEL = """
import torch
from torch import nn

def build_model():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4), nn.BatchNorm1d(4))

def example_inputs(batch_size):
    return (torch.randn(batch_size, 4),)

def loss_fn(output):
    return output.square().mean()
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "model.py"
    path.write_text(MODEL)
    return path


@pytest.fixture(scope="module")
def profile(path: Path) -> ModelProfile:
    return profile_model(str(path), gpu="h100-sxm", dtype="float32", microbatch_sizes=(1, 2, 4), tp_degrees=(1,))


def test_the_profile_tells_how_many_rows_every_layer_runs_with(profile: ModelProfile) -> None:
    assert profile.least_rows == 2
    assert {cost.microbatch_size for item in profile.layer_classes for cost in item.costs} == {2, 4}
    [note] = [text for text in profile.notes if "rows" in text]
    assert "fewer than 2 rows" in note
    assert "more than 1 value per channel" in note


def test_no_plan_has_fewer(profile: ModelProfile) -> None:
    cluster = default_cluster(2, "h100-sxm")

    def solved(batch: int, *pins: tuple[str, str]) -> Solution:
        request = SolveRequest(num_gpus=2, global_batch_size=batch, precision="fp32", pins=pins)
        return solve(profile, cluster, request, origin=origin_of(profile))

    plan = solved(4, ("pp_degree", "2")).plan
    assert plan is not None
    assert plan.microbatch_size >= 2
    refused = solved(8, ("microbatch_size", "1"))
    assert refused.plan is None
    assert refused.conflict is not None
    assert refused.conflict.constraint == "least-rows"
    assert "needs 2 rows" in refused.conflict.message
    assert refused.repairs


def test_a_layer_that_never_runs_is_an_error(path: Path) -> None:
    with pytest.raises(ProfileError, match="more than 1 value per channel"):
        profile_model(str(path), gpu="h100-sxm", dtype="float32", microbatch_sizes=(1,), tp_degrees=(1,))

"""Layers that are left out at random: the same distribution in a program without branches, or a refusal."""

from pathlib import Path

import pytest
import torch

from planner.emitter import emit, write_plan
from planner.errors import CaptureError
from planner.model_profile import ModelProfile
from planner.profiler import profile_model
from planner.runner import verify
from tests.zoo.plans import even_plan

MODEL = """
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.layerdrop, self.head = nn.ModuleList(Layer() for _ in range(3)), {p}, nn.Linear(8, 8)

    def forward(self, x):
        for layer in self.layers:
            {body}
        return self.head(x)

def build_model():
    return Model()

def example_inputs(batch_size):
    return (torch.randn(batch_size, 8),)

def loss_fn(output):
    return output.square().mean()
"""
SKIP = "x = x if self.training and torch.rand([]) < self.layerdrop else layer(x)"


def profiled(folder: Path, body: str, p: float = 0.25) -> ModelProfile:
    path = folder / "model.py"
    path.write_text(MODEL.format(body=body, p=p))
    return profile_model(str(path), gpu="h100-sxm", dtype="float32", microbatch_sizes=(1, 2), tp_degrees=(1, 2))


@pytest.mark.parametrize(
    "body",
    [
        SKIP,
        "x = layer(x) if not self.training or torch.rand(()) >= self.layerdrop else x",
    ],
)
def test_a_plan_leaves_layers_out_as_often(tmp_path: Path, body: str) -> None:
    profile = profiled(tmp_path, body)
    draws = [node for node in profile.program.nodes if node.target.endswith("dropout")]
    assert [node.args[1] for node in draws] == [0.25] * 3
    assert not any(node.target.endswith("rand") for node in profile.program.nodes)
    assert any("left out at random (probability 0.25)" in note for note in profile.notes)
    path = tmp_path / "plan.py"
    write_plan(emit(even_plan(profile, pp_degree=2, tp_degree=2), profile), path)
    report = verify(path, timeout_s=120)
    assert report.ok, report.rows[:3]
    assert "dropout" in report.not_proved


def test_the_choice_in_a_program_is_the_models(tmp_path: Path) -> None:
    profile = profiled(tmp_path, SKIP)
    [first, *_] = [node for node in profile.program.nodes if node.target == "torch.where"]
    flag, result, given = (argument.name for argument in first.args)
    made = {name: node for node in profile.program.nodes for name in node.writes()}
    assert made[result].target == "layers.0"
    assert given == "x"
    assert made[flag].target == "operator.ne", "kept where dropout kept the one"
    kept = torch.nn.functional.dropout(torch.ones(20_000), 0.25, True) != 0
    assert abs(float(kept.double().mean()) - 0.75) < 0.02


@pytest.mark.parametrize(
    "body",
    [
        "x = layer(x) * 2 if torch.rand([]) < self.layerdrop else layer(x)",
        "x = -x if torch.rand([]) < self.layerdrop else layer(x)",
        "x = x * 2 if torch.rand([]) < self.layerdrop else x",
        "x = x if torch.rand(1).item() < self.layerdrop else layer(x)",
        "x = x if torch.rand([]) * 2 < 2 * self.layerdrop else layer(x)",
    ],
)
def test_other_random_decisions_are_refused_with_their_line(tmp_path: Path, body: str) -> None:
    with pytest.raises(CaptureError) as caught:
        profiled(tmp_path, body)
    line = MODEL[: MODEL.index("{body}")].count("\n") + 1
    assert f"model.py:{line}" in caught.value.message
    assert "random number" in caught.value.message
    assert "layerdrop=0.0" in caught.value.hint


def test_a_decision_by_data_and_a_random_number_is_one_by_data(tmp_path: Path) -> None:
    with pytest.raises(CaptureError) as caught:
        profiled(tmp_path, "x = x if torch.rand([]) < x.mean() else layer(x)")
    assert "reads the value of a tensor" in caught.value.message
    assert "layerdrop" not in caught.value.hint

"""Values of every kind between layers: emitted, run, and equal to one process in loss and every gradient."""

from pathlib import Path
from typing import Any

import pytest
import torch

from planner.emitter import emit
from planner.emitter.runtime import inputs as runtime_inputs
from planner.emitter.runtime.checks import PlanError
from planner.model_profile import ModelProfile
from planner.runner.pool import WorkerPool
from tests.zoo.plans import LAYOUT_IDS, LAYOUTS, check_exact, even_plan, profile_zoo
from tests.zoo.values import NAMES

ZOO = Path(__file__).parent / "zoo"


@pytest.fixture(scope="module", params=[*NAMES, "tagger"])
def profile(request: pytest.FixtureRequest) -> ModelProfile:
    if request.param == "tagger":
        return profile_zoo(f"{ZOO / 'sequence_first.py'}")
    return profile_zoo(f"{ZOO / 'values.py'}:build_{request.param}", f"inputs_{request.param}")


@pytest.mark.parametrize("layout", LAYOUTS, ids=LAYOUT_IDS)
def test_exact(profile: ModelProfile, pool: WorkerPool, tmp_path: Path, layout: dict[str, Any]) -> None:
    check_exact(profile, layout, pool, tmp_path)


def test_arguments_and_constants_are_known() -> None:
    profile = profile_zoo(f"{ZOO / 'values.py'}:build_optional_absent", "inputs_optional_absent")
    assert profile.arguments == ("x", "mask", "scale", "positions", "bias")
    assert profile.constants == {"scale": 0.25}
    text = emit(even_plan(profile), profile)
    assert 'ARGUMENTS = ("x", "mask", "scale", "positions", "bias")' in text
    assert 'CONSTANTS = {"scale": 0.25}' in text


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((1.0, 2.0, 0.25, None, 3.0), ""),
        ({"bias": 3.0, "x": 1.0}, ""),
        ((1.0, [2.0, 3.0]), "mask_0 mask_1 x"),
        ({"x": 1.0, "scale": 0.5}, "input 'scale' is 0.5, and this plan's model was profiled with 0.25"),
        ({"x": 1.0, "scale": None}, "input 'scale' is None, and this plan's model was profiled with 0.25"),
        ({"x": 1.0, "other": "text"}, "input 'other' is 'text', and this plan's model was profiled without it"),
    ],
)
def test_inputs_are_taken_by_name(monkeypatch: pytest.MonkeyPatch, inputs: Any, message: str) -> None:
    """A None between positions is none of the next one's; other constants than those of the plan are refused."""
    monkeypatch.setattr(runtime_inputs, "ARGUMENTS", ("x", "mask", "scale", "positions", "bias"))
    monkeypatch.setattr(runtime_inputs, "CONSTANTS", {"scale": 0.25, "rows": None})

    def tensors(value: Any) -> Any:
        if isinstance(value, float) and value >= 1:
            return torch.tensor(value)
        if isinstance(value, dict):
            return {key: tensors(item) for key, item in value.items()}
        return type(value)(map(tensors, value)) if isinstance(value, tuple | list) else value

    if "input" in message:
        with pytest.raises(PlanError) as caught:
            runtime_inputs._named_inputs(tensors(inputs))
        assert message in str(caught.value)
        return
    named = runtime_inputs._named_inputs(tensors(inputs))
    assert float(named["x"]) == 1.0
    assert "bias" not in named or float(named["bias"]) == 3.0
    assert not message or sorted(named) == message.split()

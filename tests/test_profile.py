"""Whole profiles: counts against known values, the same file from all sources, refusals."""

import json
from pathlib import Path

import pytest

from planner.errors import CaptureError, FileFormatError, UsageError
from planner.model_profile import ModelProfile, read_profile, write_profile
from planner.profiler import profile_model

MODELS = Path(__file__).parent / "models"
NAMES = ("hf_gpt2", "hf_llama3_8b", "hf_vit")
pytest.importorskip("transformers", reason="the models are of transformers")


def expected(name: str) -> dict[str, object]:
    values: dict[str, object] = json.loads((MODELS / f"{name}.json").read_text())
    return values


@pytest.fixture(scope="module", params=NAMES)
def computed(request: pytest.FixtureRequest) -> tuple[str, ModelProfile]:
    """A model at its real size, computed for a GPU that isn't here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODEL_SIZE", "full")
        return request.param, profile_model(
            str(MODELS / f"{request.param}.py"), gpu="h100-sxm", microbatch_sizes=(1, 2), tp_degrees=(1, 2)
        )


def test_full_size_counts(computed: tuple[str, ModelProfile]) -> None:
    name, profile = computed
    values = expected(name)
    full: dict[str, object] = values["full"]  # type: ignore[assignment]
    assert profile.param_count == values["param_count"]
    assert profile.forward_flops_per_row == pytest.approx(full["fwd_flops"], rel=1e-3)
    assert {frozenset(group) for group in profile.tied} == {frozenset(group) for group in full["tied"]}  # type: ignore[attr-defined]


def test_repeated_layers_are_one_class(computed: tuple[str, ModelProfile]) -> None:
    name, profile = computed
    blocks = {"hf_gpt2": ("GPT2Block", 12), "hf_llama3_8b": ("LlamaDecoderLayer", 32), "hf_vit": ("ViTLayer", 12)}
    layer_class, count = blocks[name]
    assert [layer.layer_class for layer in profile.layers].count(layer_class) == count
    divided = next(item for item in profile.layer_classes if item.name == layer_class)
    assert divided.sharding("tensor", 2), "a transformer block divides by two"


def test_a_divided_layer_costs_less_of_everything(computed: tuple[str, ModelProfile]) -> None:
    _, profile = computed
    block = max(profile.layer_classes, key=lambda item: sum(item.name == layer.layer_class for layer in profile.layers))
    whole, half = (next(c for c in block.costs if c.tp_degree == t and c.microbatch_size == 1) for t in (1, 2))
    assert half.param_bytes < 0.6 * whole.param_bytes
    assert half.forward_flops == pytest.approx(whole.forward_flops / 2, rel=0.05)
    assert half.activation_bytes < whole.activation_bytes
    assert half.forward_time_s < whole.forward_time_s


@pytest.mark.parametrize("name", NAMES)
def test_measured_and_computed_profiles_are_of_one_form(name: str, tmp_path: Path) -> None:
    options = {"microbatch_sizes": (1, 2), "tp_degrees": (1, 2)}
    measured = profile_model(str(MODELS / f"{name}.py"), device="cpu", **options)  # type: ignore[arg-type]
    computed = profile_model(str(MODELS / f"{name}.py"), gpu="h100-sxm", dtype="float32", **options)  # type: ignore[arg-type]
    assert measured.param_count == expected(name)["tiny_param_count"]
    assert measured.program == computed.program
    assert measured.layers == computed.layers
    assert measured.edges == computed.edges
    for ours, theirs in zip(measured.layer_classes, computed.layer_classes, strict=True):
        assert (ours.name, ours.shardings) == (theirs.name, theirs.shardings)
        for a, b in zip(ours.costs, theirs.costs, strict=True):
            assert (a.microbatch_size, a.tp_degree, a.param_bytes) == (b.microbatch_size, b.tp_degree, b.param_bytes)
            assert a.forward_flops == b.forward_flops
            assert a.source == "measured"
            assert a.num_repeats >= 5
            assert b.source == "computed"
    write_profile(measured, tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == measured


def test_a_program_may_not_call_what_it_pleases(tmp_path: Path) -> None:
    profile = profile_model(str(MODELS / "hf_vit.py"), gpu="h100-sxm", microbatch_sizes=(1,), tp_degrees=(1,))
    path = tmp_path / "profile.json"
    write_profile(profile, path)
    text = path.read_text()
    assert "torch.nn.functional.cross_entropy" in text
    for name in ("os.system", "torch.load", "torch.hub.load", "builtins.eval", "torch.nn.functional.x; import os"):
        path.write_text(text.replace("torch.nn.functional.cross_entropy", name))
        with pytest.raises(FileFormatError) as caught:
            read_profile(path)
        assert "may not call" in caught.value.message


def test_a_model_that_raises_names_its_own_line(tmp_path: Path) -> None:
    model = tmp_path / "model.py"
    model.write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        raise KeyError('no such thing')\n"
        "def build_model(): return Net()\n"
        "def example_inputs(batch_size): return (torch.zeros(batch_size, 2),)\n"
    )
    with pytest.raises(CaptureError) as caught:
        profile_model(str(model), gpu="h100-sxm")
    assert "no such thing" in caught.value.message
    assert "model.py:4" in caught.value.message
    assert caught.value.hint


def test_cuda_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UsageError) as caught:
        profile_model(str(MODELS / "hf_vit.py"), device="cuda")
    assert "--gpu" in caught.value.hint


FLOAT32_ONLY = """
import torch
from torch import nn


class Wide(nn.Linear):
    def forward(self, x):
        if x.dtype == torch.bfloat16:
            raise RuntimeError("no kernel for bfloat16")
        return super().forward(x)


def build_model():
    return nn.Sequential(Wide(4, 4), Wide(4, 4))


def example_inputs(batch_size):
    return (torch.randn(batch_size, 4),)
"""


def test_a_model_that_fails_in_bfloat16_is_profiled_in_its_own_dtype(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(FLOAT32_ONLY)
    profile = profile_model(str(path), gpu="h100-sxm", microbatch_sizes=(1,), tp_degrees=(1,))
    assert profile.provenance.dtype == "float32"
    assert any("fails in bfloat16" in note and "model.py:9" in note for note in profile.notes)
    with pytest.raises(CaptureError, match=r"model\.py:9"):
        profile_model(str(path), gpu="h100-sxm", dtype="bfloat16")

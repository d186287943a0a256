"""Models at their real size, computed for a GPU that isn't here: figures beside those that were measured elsewhere.

`benchmarks/full_size.py` does the same for every model there is, with time and memory.
"""

import importlib.util
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from planner.model_profile import ModelProfile
from planner.profiler import profile_model

pytest.importorskip("transformers", reason="the models are of transformers")
HERE = Path(__file__).resolve().parent
FOLDERS = (HERE / "models", HERE.parents[1] / "shared" / "models")

# How many layers the classes of blocks have where nothing is divided (then classes that differ in names, or in how much
# they drop, are one): in Swin every second block shifts its windows.
BLOCKS = {
    "hf_deepseek_v3": {"DeepseekV3DecoderLayer": [58, 3]},  # with experts, and dense
    "hf_gemma2": {"Gemma2DecoderLayer": [26]},
    "hf_mixtral": {"MixtralDecoderLayer": [32]},
    "hf_zamba2": {"Zamba2MambaDecoderLayer": [45], "Zamba2HybridLayer": [9]},
    "timm_swin_tiny": {"SwinTransformerBlock": [3, 3, 2, 1, 1, 1, 1]},
    "timm_efficientnet_b0": {"InvertedResidual": [3, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1], "DepthwiseSeparableConv": [1]},
}


def find(name: str) -> Path:
    """Return the path of a model file."""
    if name.startswith("timm") and importlib.util.find_spec("timm") is None:  # not imported: it may need help to
        pytest.skip("timm is not installed")
    for folder in FOLDERS:
        if (folder / f"{name}.py").exists():
            return folder / f"{name}.py"
    pytest.skip(f"there is no {name}.py in {' or '.join(map(str, FOLDERS))}")


@pytest.fixture(scope="module", params=BLOCKS)
def computed(request: pytest.FixtureRequest) -> tuple[str, ModelProfile, dict[str, Any]]:
    """A model at its real size with what is known of it."""
    path = find(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODEL_SIZE", "full")
        profile = profile_model(str(path), gpu="h100-sxm", microbatch_sizes=(1,), tp_degrees=(1,))
    return request.param, profile, json.loads(path.with_suffix(".json").read_text())


def test_counts_are_those_measured_elsewhere(computed: tuple[str, ModelProfile, dict[str, Any]]) -> None:
    _, profile, known = computed
    full = known["full"]
    assert profile.param_count == known["param_count"]
    assert profile.forward_flops_per_row == pytest.approx(full["fwd_flops"], rel=1e-3)
    assert len(profile.tied) == full["tied_groups"]
    # the list there is cut short, in groups and in names
    assert all(any(set(group) <= set(ours) for ours in profile.tied) for group in full["tied"])


def test_layers_left_out_at_random_all_count() -> None:
    path = find("hf_wav2vec2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODEL_SIZE", "full")
        profile = profile_model(str(path), gpu="h100-sxm", microbatch_sizes=(1,), tp_degrees=(1,))
    known = json.loads(path.with_suffix(".json").read_text())
    assert profile.param_count == known["param_count"]
    index = [item.name for item in profile.layers].index("wav2vec2.encoder.layers.1")
    cost = profile.layer_class(index).costs[0]
    # the figure there is of a run that left out one of the twelve
    assert profile.forward_flops_per_row - known["full"]["fwd_flops"] == cost.forward_flops
    assert sum(item.layer_class == profile.layers[index].layer_class for item in profile.layers) >= 11


def test_repeated_blocks_are_found(computed: tuple[str, ModelProfile, dict[str, Any]]) -> None:
    name, profile, _ = computed
    module_class = {item.name: item.module_class for item in profile.layer_classes}
    found: dict[str, list[int]] = {}
    for layer_class, count in Counter(layer.layer_class for layer in profile.layers).items():
        found.setdefault(module_class[layer_class], []).append(count)
    for expected, counts in BLOCKS[name].items():
        assert sorted(found[expected], reverse=True) == counts

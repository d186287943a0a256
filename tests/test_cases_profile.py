"""Cases of `planner profile`: counts, ties, in-place operations, and the degrees that heads allow."""

import json
from pathlib import Path

import pytest
import torch

from planner.cli.main import main
from planner.errors import UsageError
from planner.model_profile import ModelProfile, read_profile, write_profile
from planner.profiler import profile_model, user_code
from planner.solver import Solution, SolveRequest, solve
from tests.case_files import case_path, read_case
from tests.case_job import import_case
from tests.strategies import ORIGIN, make_cluster


def by_command(number: int, output: str, *options: str) -> list[str]:
    """Return the command that profiles a case."""
    return ["profile", f"{case_path(number, 'py')}:model", "--inputs", "inputs", "-o", output, "--json", *options]


@pytest.mark.parametrize("device", [("--device", "cpu"), ("--gpu", "h100-sxm")])
def test_42_a_shared_linear_counts_once_and_its_work_thrice(
    folder: Path, capsys: pytest.CaptureFixture[str], device: tuple[str, str]
) -> None:
    found = []
    for output in ("first.json", "second.json"):
        assert main(by_command(42, output, *device, "--dtype", "float32", "--microbatch-sizes", "1")) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]  # profiling again gives the same counts
    assert found[0]["param_count"] == 10_100
    assert found[0]["forward_flops"] == 60_000
    profile = read_profile(folder / "first.json")
    assert [layer.name for layer in profile.layers] == ["p", "q", "r"]
    for index in range(3):
        [flops] = {cost.forward_flops for cost in profile.layer_class(index).costs if cost.microbatch_size == 1}
        assert flops == 20_000


def test_41_profiling_in_place_layers_changes_no_input(monkeypatch: pytest.MonkeyPatch) -> None:
    path = case_path(41, "py")
    case = import_case(path)
    [given] = case.inputs()
    seen: list[torch.Tensor] = []
    make = user_code.example_inputs

    def watched(file: object, rows: int) -> object:
        result = make(file, rows)  # type: ignore[arg-type]
        seen.extend((result[0], result[0].clone()))
        return result

    monkeypatch.setattr(user_code, "example_inputs", watched)
    profile = profile_model(f"{path}:model", inputs="inputs", device="cpu", microbatch_sizes=(3,), tp_degrees=(1,))
    assert seen
    assert all(torch.equal(tensor, before) for tensor, before in zip(seen[::2], seen[1::2], strict=True))
    assert torch.equal(given, case.inputs()[0])
    modules = {node.target for node in profile.program.nodes if node.kind == "module"}
    assert modules == {"0", "1", "2", "3"}  # all four run in the profile, the activations within the layers before them
    assert [layer.name for layer in profile.layers] == ["0", "2"]
    for layer in (0, 1):
        [cost] = profile.layer_class(layer).costs
        rows, width = 3, 4
        # The ReLU writes over the linear's output and keeps it: one tensor saved, the layer's own output.
        assert cost.saved_output_bytes == rows * width * 4
        assert cost.activation_bytes == 0
        assert cost.saved_input_bytes == (rows * width * 4 if layer else 0)


def test_41_a_cut_before_a_module_without_parameters_is_explained(folder: Path) -> None:
    profile = profile_model(f"{case_path(41, 'py')}:model", inputs="inputs", gpu="h100-sxm", dtype="float32")
    with pytest.raises(UsageError) as caught:
        answer(profile, 2, {"cuts": "1"})
    assert "'1', which is no layer" in caught.value.message
    assert "a part of its layer '0'" in caught.value.message
    assert "begins with a module that has parameters" in caught.value.hint
    found = answer(profile, 2, {"cuts": "2"}).plan
    assert found is not None
    assert [stage.layers for stage in found.stages] == [("0",), ("2",)]


def answer(profile: ModelProfile, gpus: int, pins: dict[str, object] | None = None) -> Solution:
    request = SolveRequest(
        num_gpus=gpus,
        global_batch_size=8 * gpus,
        pins=tuple((key, str(value)) for key, value in (pins or {}).items()),
        top=20,
    )
    return solve(profile, make_cluster(gpus, intra=(450e9, 5e-6)), request, origin=ORIGIN)


def configuration(number: int, folder: Path) -> Path:
    """Write the model of a case as a Hugging Face configuration."""
    pytest.importorskip("transformers")
    settings = read_case(number)["config"]
    small = {"vocab_size": 64, "intermediate_size": 2 * settings["hidden_size"], "max_position_embeddings": 32}
    data = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]} | settings | small
    (folder / "small").mkdir(exist_ok=True)
    (folder / "small" / "config.json").write_text(json.dumps(data))
    return folder / "small"


@pytest.mark.parametrize(("number", "heads", "allowed"), [(16, 4, [1, 2, 4]), (18, 10, [1, 2])])
def test_degrees_divide_the_key_value_heads(
    folder: Path, capsys: pytest.CaptureFixture[str], number: int, heads: int, allowed: list[int]
) -> None:
    case, path = read_case(number), configuration(number, folder)
    asked, gpus = case.get("tp_requested", 4), case["gpus"]
    options = ["--gpu", "h100-sxm", "--dtype", "float32", "--microbatch-sizes", "1"]
    assert main(["profile", str(path), *options, "--tp", str(asked)]) == 2
    error = capsys.readouterr().err
    assert f"num_key_value_heads={heads}" in error
    assert f"not divisible by {asked}" in error
    common = ", ".join(str(degree) for degree in range(1, heads + 1) if heads % degree == 0)
    assert f"degrees that divide all heads of the model: {common}" in error
    assert not (folder / "profiles").exists()  # before anything is divided
    assert main(["profile", str(path), *options, "-o", "profile.json"]) == 0
    assert f"no plan uses tp_degree {asked}" in capsys.readouterr().out
    profile = read_profile(folder / "profile.json")
    block = next(item for item in profile.layer_classes if item.module_class == "LlamaDecoderLayer")
    assert sorted({sharding.tp_degree for sharding in block.shardings} | {1}) == allowed
    refused = answer(profile, gpus, {"tp_degree": asked})
    assert refused.plan is None
    assert refused.conflict is not None
    assert refused.conflict.constraint == "heads"
    assert f"num_key_value_heads={heads}" in refused.conflict.message
    assert f"degrees that do are {', '.join(map(str, allowed))}" in refused.conflict.message
    free = answer(profile, gpus)
    assert free.plan is not None
    used = {free.plan.tp_degree, *(other.tp_degree for other in free.runners_up)}
    assert used <= set(allowed)
    for degree in allowed:  # filled up by pipeline or data parallelism
        pinned = answer(profile, gpus, {"tp_degree": degree})
        assert pinned.plan is not None
        assert pinned.plan.num_gpus == gpus
    write_profile(profile, folder / "again.json")
    assert read_profile(folder / "again.json") == profile

"""The helper section in one process: its text, action lists, outputs, stages."""

import ast
import importlib
import random
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from planner.emitter import runtime
from planner.emitter.runtime.build import _Filler
from planner.emitter.runtime.checks import PlanError, _check_stages, model_hash
from planner.emitter.runtime.communication import _join, _shard
from planner.emitter.runtime.executor import stage_actions
from planner.emitter.runtime.generators import _drawing_function, _seeded_generators
from planner.emitter.runtime.stage import Output, PlanStage, Value, _map_tensors, layers
from planner.emitter.source import helper_section
from planner.model_file import model_hash as profiled_hash
from planner.plan import EMITTED_SCHEDULES
from planner.schedule import group_actions as planned_actions
from tests.zoo.randomness import SpecAugment, spans


@pytest.mark.parametrize("schedule", EMITTED_SCHEDULES)
@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 7])
def test_actions_are_those_that_were_priced(schedule: str, num_stages: int, num_microbatches: int) -> None:
    for stage, planned in enumerate(planned_actions(schedule, num_stages, num_microbatches)):
        found = stage_actions(schedule, stage, num_stages, num_microbatches)
        assert found == [(action.kind, action.microbatch) for action in planned]


def test_hash_is_the_profilers() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model.append(model[0])
    assert model_hash(model) == profiled_hash(model)
    assert model_hash(nn.Sequential(nn.Linear(2, 4))) != model_hash(nn.Sequential(nn.Linear(2, 3)))


def test_only_functions_in_the_file_of_a_models_own_class_are_called() -> None:
    model = nn.Sequential(SpecAugment())
    assert _drawing_function(model, "0:spans") is spans
    for name in (":spans", "0:np", "0:random", "0:SpecAugment", "0:missing", "0:boolean_dispatch"):
        with pytest.raises(PlanError, match="which draws random numbers"):
            _drawing_function(model, name)


def test_generators_of_python_and_numpy_follow_torchs() -> None:
    def draw() -> tuple[float, float]:
        with _seeded_generators():
            return random.random(), float(np.random.rand())

    before = random.getstate(), np.random.get_state()[1].tolist()
    torch.manual_seed(5)
    first, second = draw(), draw()
    torch.manual_seed(5)
    assert first == draw() != second
    assert before == (random.getstate(), np.random.get_state()[1].tolist())


def test_helper_section_needs_torch_and_nothing_else() -> None:
    imports, text = helper_section()
    tree = ast.parse("\n".join([*imports, text]))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    others = {str(module).split(".")[0] for module in modules} - sys.stdlib_module_names
    assert others == {"torch"}


def test_files_of_the_helper_section_share_no_name() -> None:
    defined: dict[str, str] = {}
    for stem in runtime.FILES:
        module = importlib.import_module(f"planner.emitter.runtime.{stem}")
        for name, value in vars(module).items():
            if getattr(value, "__module__", None) == module.__name__ and not isinstance(value, type(module)):
                assert name not in defined, f"{name} is in {defined.get(name)} and {stem}"
                defined[name] = stem
    assert {"setup", "Runtime", "PlanStage", "Value", "TensorParallel", "enter", "recompute"} <= set(defined)


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(0, 1))
def test_shards_join_to_the_whole(parts: int, size: int, width: int, dim: int) -> None:
    shape = [5, 5]
    shape[dim] = parts * size * width
    whole = torch.arange(shape[0] * shape[1]).view(shape)
    shards = [_shard(whole, dim, parts, rank, size) for rank in range(size)]
    assert all(shard.shape[dim] == parts * width for shard in shards)
    assert torch.equal(_join(shards, dim, parts), whole)
    first = shards[-1].narrow(dim, 0, width)  # each part is cut by itself, not the fused tensor
    assert torch.equal(first, whole.narrow(dim, (size - 1) * width, width))


def test_output_is_read_as_hugging_face_outputs_are() -> None:
    output = Output(loss=torch.tensor(1.0), logits=torch.zeros(2))
    assert output.loss is output["loss"] is output[0]
    assert output[:2] == (output.loss, output.logits)
    with pytest.raises(AttributeError, match="no 'hidden', only loss, logits"):
        _ = output.hidden
    doubled = _map_tensors(lambda tensor: tensor + 1, {"a": [output, (output.loss,)], "b": 3})
    assert isinstance(doubled["a"][0], Output)
    assert doubled["a"][0].loss == doubled["a"][1][0] == 2.0
    assert doubled["b"] == 3


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        self.gain = nn.Parameter(torch.ones(2))
        self.register_buffer("shift", torch.ones(2), persistent=False)


class Top(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower()


class Part(PlanStage):
    module_names = ("tower.blocks.1", "tower.blocks.2")
    parameter_names = ("tower.gain", "tower.shift")

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        for layer in layers(self, "tower.blocks", 1, 3):
            x = layer(x)
        return (x * self.tower.gain + self.tower.shift,)


def test_stage_keeps_its_part_under_the_models_names() -> None:
    model = Top()
    stage = Part(model, dtype=torch.float32, device=torch.device("cpu"))
    names = {"tower.gain", *(f"tower.blocks.{i}.{key}" for i in (1, 2) for key in ("weight", "bias"))}
    assert {name for name, _ in stage.named_parameters()} == names
    assert [name for name, _ in stage.named_buffers()] == ["tower.shift"]
    assert "tower.shift" not in stage.state_dict()
    assert isinstance(stage.tower, Tower)
    assert stage.tower.gain is model.tower.gain
    x = torch.randn(1, 2)
    expected = model.tower.blocks[2](model.tower.blocks[1](x)) * model.tower.gain + model.tower.shift
    assert torch.equal(stage(x)[0], expected)
    assert len(model.tower.blocks) == 3  # the model itself is as it was


def test_in_place_writes_are_legal_on_what_comes_in_and_goes_out() -> None:
    class Writes(PlanStage):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            x.mul_(2)
            return (x.view(-1),)

    stage = Writes(nn.Module(), dtype=torch.float32, device=torch.device("cpu"))
    leaf = torch.ones(2, 2, requires_grad=True)
    (y,) = stage(x=leaf)
    y.add_(1)
    y.sum().backward()
    assert torch.equal(leaf.grad, torch.full((2, 2), 2.0))


def test_a_name_that_stages_need_is_refused() -> None:
    class Taken(PlanStage):
        module_names = ("units",)

    model = nn.Module()
    model.units = nn.Linear(1, 1)
    with pytest.raises(PlanError, match="calls a part 'units'"):
        Taken(model, dtype=torch.float32, device=torch.device("cpu"))


def test_float64_has_no_narrower_values() -> None:
    assert Value("x").dtype_in(torch.float32) is torch.float32
    assert Value("x", dtype=torch.float32).dtype_in(torch.bfloat16) is torch.float32
    assert Value("x", dtype=torch.float32).dtype_in(torch.float64) is torch.float64
    assert Value("x", dtype=torch.complex64).dtype_in(torch.float64) is torch.complex128
    assert Value("x", dtype=torch.complex64).dtype_in(torch.bfloat16) is torch.complex64
    assert Value("x", dtype=torch.int64).dtype_in(torch.float64) is torch.int64


class _First(PlanStage):
    sends = (Value("x", targets=(1,)),)


class _Last(PlanStage):
    receives = (Value("x", source=0),)


def test_stages_that_were_swapped_are_told() -> None:
    plan = {"stages": [{}, {}]}
    _check_stages(plan, (_First, _Last))
    with pytest.raises(PlanError, match="_Last is at place 0 of STAGES, and passes 'x' as another stage does"):
        _check_stages(plan, (_Last, _First))
    with pytest.raises(PlanError, match="STAGES has 1 classes, and PLAN 2 stages"):
        _check_stages(plan, (_First,))


def filled(change: dict[str, torch.Tensor | None], prefix: str = "") -> torch.Tensor:
    """Return a weight, tied to 'head.weight', that was filled from a checkpoint with changes."""
    checkpoint = {"embed.weight": torch.ones(2, 3), "head.weight": torch.ones(2, 3)} | change
    given = {prefix + name: value for name, value in checkpoint.items() if value is not None}
    with torch.device("meta"):
        module = nn.Linear(3, 2, bias=False)
    tied = (("embed.weight", "head.weight"),)
    _Filler(given, None, tied, torch.device("cpu")).fill("embed", module)
    return module.weight


def test_a_tied_parameter_has_the_values_that_the_checkpoint_has_by_either_name() -> None:
    values = torch.arange(6.0).view(2, 3)
    assert torch.equal(filled({}), torch.ones(2, 3))
    assert torch.equal(filled({"embed.weight": None, "head.weight": values}), values)
    assert torch.equal(filled({"embed.weight": values, "head.weight": None}), values)
    with pytest.raises(
        PlanError, match=r"other values for 'embed\.weight' than for 'head\.weight', and the model ties"
    ):
        filled({"head.weight": values})


@pytest.mark.parametrize(
    ("change", "prefix", "message"),
    [
        ({}, "module.", "the checkpoint has 'module.embed.weight': take 'module.' off its names"),
        (
            {"embed.weight": None, "head.weight": None, "weight": torch.ones(2, 3)},
            "",
            "the checkpoint has 'weight': put 'embed.' before its names",
        ),
        ({"embed.weight": None, "head.weight": None}, "", "hint: let `initialize` write it, or give a checkpoint"),
        ({"embed.weight": torch.ones(3, 3), "head.weight": None}, "", "hint: give a checkpoint of the model that was"),
    ],
)
def test_a_checkpoint_that_does_not_fit_says_what_to_do(
    change: dict[str, torch.Tensor | None], prefix: str, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        filled(change, prefix)

"""Captures compute what the model computes, at other batch sizes, and refuse what no program can hold."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner.errors import CaptureError, UsageError
from planner.model_file import split_arguments
from planner.profiler import profile_model
from planner.profiler.arguments import fill, resolve
from planner.profiler.blocks import find_blocks, select_calls
from planner.profiler.capture import Capture, capture
from planner.profiler.execute import Target, run_nodes
from planner.profiler.layers import build_program, divide, input_only_values, make_edges
from planner.profiler.one_recording import input_tensors
from planner.program import Program
from tests.zoo import models, public


def program_of(captured: Capture) -> Program:
    named = {str(number): name for name, number in captured.inputs.items()}
    return build_program(select_calls(captured.model, captured.calls), named, captured.output, captured.tensors)


def replay(program: Program, model: nn.Module, inputs: dict[str, Tensor], rows: int, dtype: torch.dtype) -> Any:
    """Run a program with the modules and parameters of a real model."""
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    environment: dict[str, Any] = dict(inputs)
    options = {"rows": rows, "device": torch.device("cpu"), "dtype": dtype}
    run_nodes(program.nodes, environment, module_call=model.get_submodule, parameter=tensors.__getitem__, **options)
    target = Target(**options)
    return fill(resolve(program.output, tensors.__getitem__, target), environment)


def tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in tensors_of(item)] if isinstance(value, list | tuple) else []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "model",
    [
        models.Transformer,
        models.Skips,
        models.RootParameters,
        models.Convolutions,
        models.FunctionalTie,
        models.CalledTwice,
        models.TorchEncoder,
    ],
)
def test_replay_equals_the_model_on_another_batch_in_another_dtype(model: type[nn.Module], dtype: torch.dtype) -> None:
    file = models.model_file(model)
    program = program_of(capture(file))
    torch.manual_seed(1)
    theirs = model().to(dtype)
    for module in theirs.modules():  # dropout off, batch statistics as in training
        module.training = isinstance(module, nn.BatchNorm2d)
    ours = copy.deepcopy(theirs)
    rows = 5
    args, kwargs = split_arguments(file.example_inputs(rows))
    cast = {n: t.to(dtype) if t.is_floating_point() else t for n, t in input_tensors(theirs, args, kwargs).items()}
    expected = tensors_of(theirs(**cast))
    # A program keeps its training-time constants in `resolve`; blocks called whole follow their module's flag.
    got = tensors_of(replay(program, ours, {name: tensor.clone() for name, tensor in cast.items()}, rows, dtype))
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    for outputs in (got, expected):
        sum((output.double() ** 2).sum() for output in outputs).backward()
    gradients = dict(theirs.named_parameters())
    for name, param in ours.named_parameters():
        assert (param.grad is None) == (gradients[name].grad is None)
        if param.grad is None:
            continue
        torch.testing.assert_close(param.grad, gradients[name].grad, rtol=1e-12, atol=0)


def test_equal_siblings_are_the_layers() -> None:
    assert find_blocks(models.Transformer()) == {f"blocks.{index}" for index in range(4)}
    assert find_blocks(models.Convolutions()) == {f"body.{index}" for index in range(3)}
    captured = capture(models.model_file(models.Transformer, layers=1))
    names = [segment.name for segment in divide(program_of(captured), captured.model, frozenset())]
    assert names == ["embed", "blocks.0", "head"], "a list of one block is a list of blocks"


def test_a_list_of_one_class_is_a_list_of_blocks_though_no_two_are_equal() -> None:
    found = find_blocks(public.FirstHasMore())
    assert found == {"blocks.0", "blocks.1"}


def test_a_class_that_is_a_family_in_one_list_is_one_in_every_list() -> None:
    class Unit(nn.Sequential):  # a composite attribute, of which every block has two
        def __init__(self, width: int) -> None:
            super().__init__(nn.Linear(width, width), nn.ReLU())

    class Block(nn.Module):
        def __init__(self, width: int, wider: int) -> None:
            super().__init__()
            self.first, self.second, self.last = Unit(width), Unit(width), nn.Linear(width, wider)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.second(self.first(x)))

    stages = nn.Sequential(
        nn.Sequential(Block(4, 8)), nn.Sequential(Block(8, 8), Block(8, 8)), nn.Sequential(Block(8, 12), Block(12, 16))
    )
    assert find_blocks(stages) == {"0.0", "1.0", "1.1", "2.0", "2.1"}


def test_edges_go_from_the_last_writer() -> None:
    captured = capture(models.model_file(models.Skips))
    program = program_of(captured)
    derived = input_only_values(program, captured.model)
    segments = divide(program, captured.model, derived)
    edges = {(edge.producer, edge.consumers) for edge in make_edges(program, segments, derived)}
    # down.0 to up.2 are layers 0 to 5: each kept value is read by the layer after it and by its partner.
    assert {(0, (1, 4)), (1, (2, 3))} <= {(p, tuple(c for c in cs if c != 5)) for p, cs in edges}
    assert all(producer < consumers[0] for producer, consumers in edges)
    assert (0, (4,)) not in edges


def test_values_that_follow_the_models_dtype_are_told_from_islands() -> None:
    class Island(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.first(x)
            return self.second(y), y.float()

    models.INPUTS[Island] = lambda rows: (torch.randn(rows, 8),)
    program = program_of(capture(models.model_file(Island)))
    followed = {name: tensor.follows_model_dtype for name, tensor in program.tensors.items()}
    assert followed == {"x": True, "first": True, "second": True, "float_2": False}


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (models.Branching, ("models.py", "reads the value of a tensor")),
        (models.BatchLoop, ("models.py", "differs between batches of 2 and 3 rows")),
        (models.DrawnTensor, ("models.py", "neither parameter nor buffer")),
    ],
)
def test_what_no_program_can_hold_is_refused_with_its_line(model: type[nn.Module], words: tuple[str, ...]) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(models.model_file(model))
    assert caught.value.hint
    for word in words:
        assert word in caught.value.message


def test_a_container_of_blocks_that_is_not_there() -> None:
    zoo = Path(__file__).parent / "zoo" / "exact.py"
    with pytest.raises(UsageError) as caught:
        profile_model(f"{zoo}:build_transformer", inputs="inputs_transformer", gpu="h100-sxm", blocks=("nope",))
    assert "--blocks names 'nope', which is no module of the model" in str(caught.value)

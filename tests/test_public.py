"""Habits of published code: emitted and run, equal to one process in loss and every gradient."""

from pathlib import Path

import pytest
import torch

from planner.emitter import emit, write_plan
from planner.errors import CaptureError, ProfileError
from planner.model_file import load_model_file
from planner.profiler import pricing, profile_model
from planner.profiler.capture import capture
from planner.runner import verify
from planner.runner.batches import _vary
from planner.runner.pool import WorkerPool
from tests.zoo.plans import even_plan

ZOO = Path(__file__).parent / "zoo" / "public.py"


def test_checks_of_values_are_told_and_computed_by_no_plan() -> None:
    captured = capture(load_model_file(f"{ZOO}:build_checked", inputs="inputs_checked"))
    lines = ZOO.read_text(encoding="utf-8").splitlines()
    told = [note.split(": ")[0].rpartition(":")[2] for note in captured.notes if "a check of values" in note]
    assert [lines[int(line) - 1].split("(")[0].split()[0] for line in told] == [
        "assert",
        "if",
        "torch._check_tensor_all",
        "normal",
        "return",
    ]
    assert not {"all", "isfinite", "ge", "lt"} & {call.target.rpartition(".")[2] for call in captured.calls}
    assert any("builtins.object" in note for note in captured.notes)


@pytest.mark.parametrize(
    "name",
    [
        *("plain_tensors", "checked", "first_has_more"),
        *("numbers_of_numpy", "masked_encoder", "complex_product", "sequences", "detector"),
    ],
)
def test_is_exact(pool: WorkerPool, tmp_path: Path, name: str) -> None:
    profile = profile_model(
        f"{ZOO}:build_{name}",
        inputs=f"inputs_{name}",
        gpu="h100-sxm",
        dtype="float32",
        microbatch_sizes=(1, 2),
        tp_degrees=(1, 2),
    )
    layouts = ({"pp_degree": 2}, {"pp_degree": 2, "tp_degree": 2})
    for number, layout in enumerate((*layouts, {"dp_degree": 2}) if name == "sequences" else layouts):
        path = tmp_path / f"plan_{number}.py"
        write_plan(emit(even_plan(profile, **layout), profile), path)
        report = verify(path, pool=pool, timeout_s=120)
        assert report.ok, report.rows[:3]


def test_a_way_to_divide_that_cannot_be_run_is_left_out_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def divided_nodes(*args: object) -> None:
        raise ProfileError("layer 'blocks.0': sizes differ", hint="none")

    monkeypatch.setattr(pricing, "divided_nodes", divided_nodes)
    profile = profile_model(
        f"{ZOO}:build_first_has_more", inputs="inputs_first_has_more", gpu="h100-sxm", microbatch_sizes=(1, 2)
    )
    assert not any(layer_class.shardings for layer_class in profile.layer_classes)
    assert all(cost.tp_degree == 1 for layer_class in profile.layer_classes for cost in layer_class.costs)
    assert any(note.startswith("not divided by tp 2: layer 'blocks.0': sizes differ") for note in profile.notes)


def test_a_block_that_resets_what_a_module_in_it_keeps_is_divided(tmp_path: Path) -> None:
    """Divided, its code is the plan's, and nothing resets there what the module keeps: the plan holds its code too."""
    (tmp_path / "model.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Scan(nn.Module):\n"
        "    state = None\n"
        "    def forward(self, x):\n"
        "        x = x * 2 if self.state is None else x + self.state.mean()\n"
        "        self.state = x\n        return x\n"
        "class Block(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.up, self.scan, self.down = nn.Linear(8, 32), Scan(), nn.Linear(32, 8)\n"
        "    def forward(self, x):\n"
        "        self.scan.state = None\n        return x + self.down(self.scan(self.up(x)))\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n        self.layers = nn.ModuleList([Block() for _ in range(3)])\n"
        "    def forward(self, x):\n"
        "        for layer in self.layers:\n            x = layer(x)\n        return x\n"
        "def build_model():\n    return Model()\n"
        "def example_inputs(batch_size):\n    return (torch.randn(batch_size, 8),)\n"
        "def loss_fn(output):\n    return output.square().mean()\n"
    )
    profile = profile_model(str(tmp_path / "model.py"), gpu="h100-sxm", dtype="float32", microbatch_sizes=(1, 2))
    assert all(layer_class.shardings for layer_class in profile.layer_classes)
    body = profile.layer_classes[0].body
    assert body is not None
    assert [node.target for node in body.nodes if node.kind == "module"] == ["up", "down"]


def test_a_number_of_results_that_follows_the_rows_is_told() -> None:
    with pytest.raises(CaptureError, match=r"the number of values \(2 or 3\) of `unbind` differs between batches"):
        capture(load_model_file(f"{ZOO}:build_row_by_row", inputs="inputs_row_by_row"))


def test_a_parameter_that_forward_sets_in_a_module_called_whole_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"1 can't be called whole: it changes its own parameter 'scale'"):
        capture(load_model_file(f"{ZOO}:build_starts_from_data", inputs="inputs_starts_from_data"))


def test_a_loss_that_reads_a_value_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(
        """import torch
def build_model():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
def example_inputs(batch_size):
    return torch.randn(batch_size, 4)
def loss_fn(output):
    return output.mean() if output.sum().item() > 0 else output.sum()
""",
        encoding="utf-8",
    )
    with pytest.raises(CaptureError, match=r"model.py:7: `item` in loss_fn reads the value of a tensor"):
        capture(load_model_file(str(path)))


def test_other_data_keeps_the_infinities_of_masks() -> None:
    mask = torch.full((5, 5), float("-inf")).triu(1)
    varied = _vary(mask, torch.Generator().manual_seed(0), 0)
    assert torch.equal(varied.isinf(), mask.isinf())
    assert not varied.isnan().any()
    assert bool((varied[mask == 0] != 0).all())


def test_a_model_that_can_be_trained_but_not_recorded_in_evaluation_is_told() -> None:
    captured = capture(load_model_file(f"{ZOO}:build_detector", inputs="inputs_detector"))
    (note,) = [note for note in captured.notes if note.startswith("evaluation mode can't be recorded")]
    assert "zoo/public.py:" in note
    assert "reads the value of a tensor" in note


def test_functions_that_torchscript_compiles_are_recorded_as_python(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(
        """import torch
@torch.jit.script
def fused_gelu(x):
    return x * 0.5 * (1.0 + torch.erf(x / 1.41421))
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)
    def forward(self, x):
        return self.down(fused_gelu(self.up(x)))
build_model = Net
def example_inputs(batch_size):
    return torch.randn(batch_size, 4)
""",
        encoding="utf-8",
    )
    script = torch.jit.script
    profile = profile_model(str(path), gpu="h100-sxm", dtype="float32", microbatch_sizes=(1, 2))
    assert "torch.erf" in {node.target for node in profile.program.nodes}
    assert torch.jit.script is script


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("complex_weight", "parameter 'weight' is complex64, and plans train real numbers"),
        ("halved_gradient", "`register_hook` in the model acts on a gradient in backward"),
    ],
)
def test_what_no_plan_trains_as_one_process_is_refused(name: str, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(load_model_file(f"{ZOO}:build_{name}", inputs=f"inputs_{name}"))


def test_asking_for_no_gradient_of_a_buffer_does_not_update_it() -> None:
    assert capture(load_model_file(f"{ZOO}:build_sequences", inputs="inputs_sequences")).updated_buffers == ()

"""Model files: what is found in them, and one clear error for each way in which they can be wrong."""

import json
import sys
from pathlib import Path

import pytest

from planner.errors import CaptureError, UsageError
from planner.model_file import load_model_file, model_hash, split_arguments, split_spec
from planner.profiler import profile_model
from planner.runner.subject import packages_to_preload

GOOD = """
import sys
from torch import nn
import torch
ARGUMENTS = list(sys.argv)

def build_model():
    import neighbour
    return nn.Linear(neighbour.SIZE, 2)

def make():
    return nn.Linear(1, 1)

def example_inputs(batch_size):
    return (torch.ones(batch_size, 3),)

def other_inputs(batch_size):
    return {"input": torch.ones(batch_size, 1)}

def loss_fn(output):
    return output.sum()

if __name__ == "__main__":
    raise SystemExit("not run as a program")
"""


@pytest.fixture(autouse=True)
def search_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_finds_the_functions_and_their_neighbours(folder: Path) -> None:
    (folder / "model.py").write_text(GOOD)
    (folder / "neighbour.py").write_text("SIZE = 3")
    found = load_model_file("model.py")
    assert tuple(found.build().weight.shape) == (2, 3)
    assert found.path == folder / "model.py"
    assert found.loss_fn is not None
    assert found.example_target is None
    assert found.build.__globals__["ARGUMENTS"] == [str(folder / "model.py")]
    named = load_model_file("model.py:make", inputs="other_inputs")
    assert (named.build_function, named.inputs_function) == ("make", "other_inputs")
    assert named.example_inputs(4)["input"].shape == (4, 1)
    del sys.modules["neighbour"]


def test_a_missing_file_and_a_missing_function_are_usage_errors(folder: Path) -> None:
    for spec in ("gone.py", "gone.py:make"):
        with pytest.raises(UsageError) as caught:
            load_model_file(spec)
        assert caught.value.message == "model file 'gone.py' does not exist"
        assert caught.value.hint
    (folder / "model.py").write_text(GOOD)
    with pytest.raises(UsageError) as caught:
        load_model_file("model.py:maker")
    assert "no function 'maker'" in caught.value.message
    assert "model.py:NAME" in caught.value.hint
    with pytest.raises(UsageError) as caught:
        load_model_file("model.py", inputs="gone")
    assert "--inputs NAME" in caught.value.hint


def test_shows_the_lines_to_add_with_the_classes_found_and_runs_nothing(folder: Path) -> None:
    (folder / "net.py").write_text(
        "raise SystemExit('must not run')\n"
        "from torch import nn\n"
        "class Block(nn.Module):\n"
        "    def forward(self, x): return x\n"
        "class Helper: pass\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, width, depth=2): self.block = Block()\n"
        "    def forward(self, tokens, mask=None): return tokens\n"
    )
    with pytest.raises(UsageError) as caught:
        load_model_file("net.py")
    assert caught.value.message == "net.py has no function 'build_model'; its nn.Module classes: Net, Block"
    assert "    def build_model():\n        return Net(width)\n" in caught.value.hint
    assert "    def example_inputs(batch_size):\n" in caught.value.hint
    assert "the arguments of forward: tokens" in caught.value.hint
    (folder / "empty.py").write_text("")
    with pytest.raises(UsageError, match=r"no nn\.Module class either"):
        load_model_file("empty.py")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def build_model(:\n", "model.py line 1: reading it raised SyntaxError"),
        ("\nimport no_such_package\n", "model.py line 2, in <module>: importing it raised ModuleNotFoundError"),
        ("\n\nraise SystemExit(3)\n", "model.py line 3, in <module>: importing it raised SystemExit: 3"),
        ("def f():\n    return 1 / 0\nf()\n", "model.py line 2, in f: importing it raised ZeroDivisionError"),
    ],
)
def test_what_importing_raises_is_told_with_the_line(folder: Path, text: str, message: str) -> None:
    (folder / "model.py").write_text(text + "build_model = example_inputs = 0\n")
    modules = set(sys.modules)
    with pytest.raises(CaptureError) as caught:
        load_model_file("model.py")
    assert caught.value.message.startswith(message)
    assert "model.py" in caught.value.hint
    assert ('if __name__ == "__main__":' in caught.value.hint) == ("SystemExit" in text)
    assert not [name for name in set(sys.modules) - modules if name.startswith("planner_model")]


def test_names_that_only_running_tells_are_found_or_missed_after_it(folder: Path) -> None:
    (folder / "parts.py").write_text("def build_model(): return 1\ndef example_inputs(batch_size): return ()\n")
    (folder / "model.py").write_text("from parts import *\n")
    assert load_model_file("model.py").build() == 1
    (folder / "parts.py").write_text("build_model = 5\n")
    del sys.modules["parts"]
    with pytest.raises(UsageError, match="no function 'build_model'"):
        load_model_file("model.py")
    del sys.modules["parts"]


def test_inputs_are_positional_or_keyword_arguments() -> None:
    assert split_arguments({"x": 1}) == ((), {"x": 1})
    assert split_arguments((1, {"x": 2})) == ((1, {"x": 2}), {})
    assert split_arguments(((1,), {"x": 2})) == ((1,), {"x": 2})
    with pytest.raises(CaptureError, match="returned int"):
        split_arguments(5)


def test_the_hash_is_of_names_and_shapes() -> None:
    from torch import nn

    assert model_hash(nn.Linear(2, 3)) == model_hash(nn.Linear(2, 3).double())
    hashes = {model_hash(model) for model in (nn.Linear(2, 3), nn.Linear(3, 2), nn.Sequential(nn.Linear(2, 3)))}
    assert len(hashes) == 3


def test_packages_to_import_once_are_read_not_run(folder: Path) -> None:
    (folder / "a.py").write_text("import os\nimport transformers\nfrom transformers import BertModel, X\nboom()\n")
    assert packages_to_preload("a.py") == (
        "transformers",
        "transformers",
        "transformers:BertModel",
        "transformers:X",
    )
    (folder / "b.py").write_text("import timm\nimport transformers\n")
    assert packages_to_preload("b.py") == ("timm", "transformers")
    (folder / "c.py").write_text("import torch\ntorch.library.Library('torchvision', 'DEF')\nimport timm\n")
    assert packages_to_preload("c.py") == ()  # what it declares must stand before the import


# Hugging Face configurations ---------------------------------------------------------------------------------------

GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 20, "n_positions": 16}
VIT = {
    "model_type": "vit",
    "architectures": ["ViTForImageClassification"],
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "image_size": 8,
    "patch_size": 4,
}


def write_config(folder: Path, config: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.filterwarnings("ignore")  # of transformers
@pytest.mark.parametrize(
    ("config", "kind", "inputs"),
    [
        (GPT2, "GPT2LMHeadModel", {"input_ids", "attention_mask", "labels"}),
        (VIT, "ViTForImageClassification", {"pixel_values", "labels"}),
    ],
)
def test_a_configuration_is_a_model_file(folder: Path, config: dict[str, object], kind: str, inputs: set[str]) -> None:
    pytest.importorskip("transformers")
    path = write_config(folder, config)
    for spec in (str(path), str(folder)):
        found = load_model_file(spec)
        model = found.build()
        given = found.example_inputs(3)
        assert type(model).__name__ == kind
        assert set(given) == inputs
        assert {value.shape[0] for value in given.values()} == {3}
        assert model(**given).loss.dim() == 0
    assert packages_to_preload(str(path))[0] == "transformers"


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_a_configuration_that_does_not_do_is_told(folder: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(UsageError, match=r"has no config\.json"):
        load_model_file(str(folder))
    for config, error, words in (
        ([1], UsageError, "no 'model_type'"),
        ({"model_type": "no-such-model"}, CaptureError, "can't read it"),
        ({"model_type": "vit"}, CaptureError, "no class for architectures"),
        ({"model_type": "clip", "architectures": ["CLIPModel"]}, CaptureError, "computes no loss"),
    ):
        path = write_config(folder, config)
        with pytest.raises(error, match=words) as caught:
            load_model_file(str(path))
        assert caught.value.hint


def test_the_path_may_hold_a_colon(folder: Path) -> None:
    (folder / "a:b.py").write_text("")
    assert split_spec("a:b.py") == (folder / "a:b.py", "build_model")
    assert split_spec("a:b.py:make") == (folder / "a:b.py", "make")


RECORDED = """
import sys
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x):
        return self.first(x)

def build_model():
    return Model()

def example_inputs(batch_size):
    return (torch.ones(batch_size, 4),)

"""
EXITING = "class Model(Model):\n    def forward(self, x):\n        sys.exit(0)"
FIXED_ROWS = (
    "class Model(Model):\n    def forward(self, x):\n        return self.first(x) + torch.ones(8)[: len(x), None]"
)
KEYWORDS = "def example_inputs(rows):\n    return {'y': torch.ones(rows, 4)}"
PART_SCRIPTED = "def build_model():\n    return nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))"
SCRIPTED = "def build_model():\n    return torch.jit.script(nn.Sequential(nn.Linear(4, 4)))"


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            "def build_model():\n    sys.exit(0)",
            ("model.py line 21, in build_model", "build_model raised SystemExit: 0"),
        ),
        ("def example_inputs(rows):\n    sys.exit(0)", ("model.py line 21", "example_inputs(2) raised SystemExit: 0")),
        ("def loss_fn(output):\n    sys.exit(0)", ("model.py line 21", "loss_fn raised SystemExit: 0")),
        (
            "def loss_fn(output):\n    return output.mean().item()",
            ("model.py:21: `item` in loss_fn reads the value", "return the loss as the tensor that it is"),
        ),
        (
            "def loss_fn(output):\n    return output[output > 0].mean()",
            ("`__getitem__` in loss_fn reads the value", "`(x * mask).sum() / mask.sum()`"),
        ),
        (
            "class Batch:\n    pass\ndef example_inputs(rows):\n    return (Batch(),)",
            ("example_inputs(2) gives 'x' of type Batch, which is not looked into", "pass the tensors of x as"),
        ),
        (FIXED_ROWS, ("raised in forward with 11 rows in float64: RuntimeError", "must take any number of rows")),
        (KEYWORDS, ("the model raised in forward: TypeError", "run model(**example_inputs(2)) by itself")),
        (EXITING, ("model.py:22", "the model raised in forward: SystemExit: 0")),
        ("def build_model():\n    pass", ("build_model returned NoneType, not an nn.Module",)),
        ("async def build_model():\n    pass", ("build_model returned coroutine, not an nn.Module",)),
        (PART_SCRIPTED, ("1 is a TorchScript module", "build 1 as the Python module")),
        (SCRIPTED, ("build_model returned a TorchScript module", "return the Python model")),
        ("def build_model(size, depth=2):\n    pass", ("build_model needs size,", "defaults")),
        (
            "def build_model():\n    return nn.Linear(4, 4)",
            ("the whole model is one Linear", "nn.Sequential(Linear(...))"),
        ),
        ("def example_inputs(rows):\n    return (torch.ones(5, 4),)", ("(2)", "(3)", "'x' of shape (5, 4)", "ignored")),
        (
            "def example_inputs(rows):\n    return ([torch.ones(4, 4 + row) for row in range(rows)],)",
            ("example_inputs(2) gives 2 tensors, example_inputs(3) 3", "the number of tensors depends"),
        ),
        ("def example_inputs(rows):\n    return (torch.ones(0, 4),)", ("'x' with 0 rows, not 2",)),
        ("def example_inputs(rows):\n    return (torch.ones(3 * rows, 4),)", ("'x' of shape (6, 4)", "(9, 4)")),
        ("def loss_fn(output):\n    return output + torch.ones(7)", ("model.py line 21, in loss_fn", "loss_fn raised")),
        ("def loss_fn(output, target):\n    pass", ("model.py line 20", "loss_fn raised TypeError", "example_target")),
        ("loss_fn = 3", ("loss_fn is of type int, not a function",)),
        ("def loss_fn(output):\n    return output", ("loss_fn returned a tensor of shape (2, 4)", "scalar")),
        ("def loss_fn(output):\n    pass", ("loss_fn returned a NoneType", "scalar")),
    ],
)
def test_functions_that_exit_raise_or_return_the_wrong_thing(folder: Path, change: str, words: tuple[str, ...]) -> None:
    (folder / "model.py").write_text(RECORDED + change)
    with pytest.raises(CaptureError) as told:
        profile_model("model.py", gpu="h100-sxm", dtype="float32", microbatch_sizes=(1,), tp_degrees=(1,))
    text = f"{told.value.message}\n{told.value.hint}"
    assert all(word in text for word in words), text
    assert "unknown line" not in text


def test_rows_may_be_one_more_than_asked_for(folder: Path) -> None:
    (folder / "model.py").write_text(RECORDED + "def example_inputs(rows):\n    return (torch.ones(rows + 1, 4),)")
    assert profile_model("model.py", gpu="h100-sxm", microbatch_sizes=(1,), tp_degrees=(1,)).param_count == 20

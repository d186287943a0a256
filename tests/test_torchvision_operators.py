"""torchvision without its compiled operators: model files that import it work, and nothing else changes."""

import subprocess
import sys
from pathlib import Path

import pytest

# What matters of torchvision: it asks for the operators at import, in this order, whether or not they were loaded.
EXTENSION = """
import torch
LOADED = {loaded}
if LOADED:
    LIBRARY = torch.library.Library("torchvision", "DEF")
    LIBRARY.define("nms(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
    LIBRARY.define("qnms(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
def _has_ops():
    return LOADED
"""
REGISTRATIONS = """
import torch, torchvision.extension
for name in ("torchvision::nms", "torchvision::qnms"):
    torch.library.register_fake(name)(lambda boxes, scores, iou_threshold: scores)
"""
OWN = """
LIBRARY = torch.library.Library("torchvision", "DEF")
LIBRARY.define("nms(Tensor mine, Tensor scores, float iou_threshold) -> Tensor")
"""
MODEL = """
import torch
{own}
import torchvision
def build_model():
    return torch.nn.Linear(3, 3)
def example_inputs(batch_size):
    return (torch.ones(batch_size, 3),)
"""
SCRIPT = """
import sys
from pathlib import Path
from planner.model_file import load_model_file
load_model_file("plain.py")
assert "torch" not in sys.modules and "torchvision" not in sys.modules
load_model_file("model.py")
import torch
print(torch.ops.torchvision.nms.default._schema)
print(sum(type(finder).__name__ == "_BeforeTorchvision" for finder in sys.meta_path))
"""


@pytest.mark.parametrize(
    ("loaded", "own", "first_argument"), [(False, "", "dets"), (False, OWN, "mine"), (True, "", "boxes")]
)
def test_a_model_file_imports_torchvision(tmp_path: Path, loaded: bool, own: str, first_argument: str) -> None:
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("from . import extension\nfrom torchvision import _meta_registrations\n")
    (package / "extension.py").write_text(EXTENSION.format(loaded=loaded))
    (package / "_meta_registrations.py").write_text(REGISTRATIONS)
    (tmp_path / "model.py").write_text(MODEL.format(own=own))
    (tmp_path / "plain.py").write_text("def build_model(): ...\ndef example_inputs(batch_size): ...\n")
    root = str(Path(__file__).resolve().parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path}:{root}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    schema, num_finders = done.stdout.splitlines()
    assert f"Tensor {first_argument}" in schema
    assert num_finders == "1"

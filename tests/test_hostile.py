"""What strangers hand in: a profile can't put code into plan.py, and a broken one is an error that names the key."""

import copy
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planner.arguments import MAX_DEPTH, constant_name
from planner.emitter import emit, write_plan
from planner.emitter.check import check_generated, check_header
from planner.errors import CaptureError, EmitError, FileFormatError, UsageError
from planner.model_profile import ModelProfile, read_profile, write_profile
from planner.names import function_name, identifier, method_name, qualified_name
from planner.profiler import profile_model
from tests.zoo.plans import even_plan

MODEL = Path(__file__).parent / "zoo" / "transformer.py"


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    return profile_model(str(MODEL), gpu="h100-sxm", dtype="float32", microbatch_sizes=(1, 2), tp_degrees=(1, 2))


@pytest.fixture(scope="module")
def good(profile: ModelProfile, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    write_profile(profile, path)
    data: dict[str, Any] = json.loads(path.read_text())
    return data


def read_changed(good: dict[str, Any], change: Callable[[dict[str, Any]], object], path: Path) -> ModelProfile:
    data = copy.deepcopy(good)
    change(data)
    path.write_text(json.dumps(data))
    return read_profile(path)


def node(data: dict[str, Any], kind: str = "function") -> dict[str, Any]:
    """Return the first node of a kind: modules of the model, everything else inside its blocks."""
    nodes = data["program"]["nodes"] if kind == "module" else body(data)["body"]["nodes"]
    found: dict[str, Any] = next(item for item in nodes if item["kind"] == kind)
    return found


def body(data: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(item for item in data["layer_classes"] if item.get("body"))
    return found


BREAK_OUT = '""" + __import__("os").system("id") + """'

CODE: dict[str, Callable[[dict[str, Any]], object]] = {
    "profile name": lambda data: data.update(name=BREAK_OUT),
    "profile name, backslash": lambda data: data.update(name="a\\"),
    "profile name, lines": lambda data: data.update(name="a\nimport os"),
    "layer name": lambda data: data["layers"][0].update(name=BREAK_OUT),
    "module class": lambda data: body(data).update(module_class=BREAK_OUT),
    "keyword": lambda data: node(data).update(kwargs={"dict": [["a=print(1), b", 1]]}),
    "keyword, number": lambda data: node(data).update(kwargs={"dict": [[1, 1]]}),
    "ref": lambda data: node(data).update(args={"tuple": [{"ref": "print(1)"}]}),
    "param": lambda data: node(data).update(args={"tuple": [{"param": "x); print(1"}]}),
    "param, frame": lambda data: node(data).update(args={"tuple": [{"param": "forward.__globals__"}]}),
    "result": lambda data: node(data).update(result={"ref": "x = print(1); y"}),
    "result, frame": lambda data: node(data).update(result={"fields": [["gi_frame", {"ref": "y"}]]}),
    "result, dict": lambda data: node(data).update(result={"dict": [[{"ref": "x"}, {"ref": "y"}]]}),
    "signature": lambda data: body(data).update(signature={"tuple": [{"tuple": ["x=print(1)", {"ref": "x"}]}]}),
    "training": lambda data: node(data).update(args={"tuple": [{"training": [{"a": 1}, 0]}]}),
    "constant": lambda data: node(data).update(args={"tuple": [{"constant": "load"}]}),
    "dtype": lambda data: node(data).update(args={"tuple": [{"dtype": "load"}]}),
    "tensor dtype": lambda data: next(iter(data["program"]["tensors"].values())).update(dtype="load"),
    "float": lambda data: node(data).update(args={"tuple": [{"float": "1_0"}]}),
    "complex": lambda data: node(data).update(args={"tuple": [{"complex": [[], 0]}]}),
    "function": lambda data: node(data).update(target="torch.load"),
    "module": lambda data: node(data, "module").update(target="load_state_dict"),
    "module, own": lambda data: node(data, "module").update(target=""),
    "method": lambda data: node(data, "method").update(target="numpy"),
    "method of a text": lambda data: node(data, "method").update(args={"tuple": ["{0.a}"]}),
    "draw": lambda data: node(data).update(kind="draw", target=":__import__", random=True),
    "draw, no file": lambda data: node(data).update(kind="draw", target="x:os.system", random=True),
    "attribute": lambda data: node(data, "method").update(kind="attribute", target="__class__"),
}


REASONS = "|".join(
    [
        *(
            "is not an identifier",
            "a program may not",
            "is no name",
            "is not the name of",
            "is no number, text or null",
        ),
        *("is no memory format", "dtype 'load' is not known", "none of inf", "is not finite", "its own model"),
        *("the first of them a value", "is not a number"),
    ]
)


@pytest.mark.parametrize("change", CODE.values(), ids=CODE.keys())
def test_code_in_a_profile_is_refused_on_reading(
    good: dict[str, Any], tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    with pytest.raises(FileFormatError) as caught:
        read_changed(good, change, tmp_path / "profile.json")
    assert str(tmp_path / "profile.json") in caught.value.message
    assert re.search(REASONS, caught.value.message), caught.value.message


def deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda data: data["program"]["tensors"].pop(name)


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "args a number": (lambda data: node(data).update(args=3), "args is not a tuple"),
    "kwargs a list": (lambda data: node(data).update(kwargs=[]), "kwargs is not a dict"),
    "batch short": (lambda data: node(data).update(args={"tuple": [{"batch": [1]}]}), "not a list of 2"),
    "batch null": (lambda data: node(data).update(args={"tuple": [{"batch": None}]}), "not a list of 2"),
    "slice long": (lambda data: node(data).update(args={"tuple": [{"slice": [1] * 4}]}), "not a list of 3"),
    "tuple null": (lambda data: node(data).update(args={"tuple": None}), "not a list"),
    "dict of lists": (lambda data: node(data).update(kwargs={"dict": [[[], 1]]}), "no number, text or null"),
    "huge integer": (lambda data: node(data).update(args={"tuple": [10**30]}), "larger than 2^64"),
    "deep": (lambda data: node(data).update(args={"tuple": [deep(MAX_DEPTH + 1)]}), "nested deeper"),
    "shape a number": (lambda data: data["program"]["tensors"]["ids"].update(shape=3), "a shape is a list"),
    "shape of text": (lambda data: data["program"]["tensors"]["ids"].update(shape=["3"]), "not an integer"),
    "signature": (lambda data: body(data).update(signature=[1]), "signature is not a tuple of pairs"),
    "no tensors": (lambda data: data["program"].update(tensors={}), "not in its tensors"),
    "no tensor": (without("ids"), "'ids'"),
    "no parameters": (lambda data: data.update(parameters={}), "not listed"),
    "no nodes": (lambda data: data["program"].update(nodes=[]), "no node makes"),
    "nodes reversed": (lambda data: data["program"]["nodes"].reverse(), "no input or earlier node makes"),
    "output": (lambda data: data["program"].update(output={"ref": "nothing"}), "'nothing'"),
    "edge value": (lambda data: data["edges"][0].update(value="nothing"), "'nothing'"),
    "edge backward": (lambda data: data["edges"][0].update(producer=5), "not forward"),
    "consumers": (lambda data: data["edges"][0].update(producer=0, consumers=[2, 1]), "not ascending"),
    "layer range": (lambda data: data["layers"][0].update(stop=0), "nodes [0, 0)"),
    "layer beyond": (lambda data: data["layers"][-1].update(stop=10**6), "of a program of"),
    "layers overlap": (lambda data: data["layers"][1].update(start=0), "inside"),
    "layer parameter": (lambda data: data["layers"][0].update(parameters=["nothing"]), "'nothing'"),
    "tied": (lambda data: data.update(tied=[["nothing", "nowhere"]]), "'nothing'"),
    "class twice": (lambda data: data["layer_classes"].append(data["layer_classes"][0]), "one name"),
    "rewrite": (
        lambda data: body(data)["shardings"][0].update(rewrites=[{"node": "nothing", "path": [0], "value": 1}]),
        "'nothing'",
    ),
    "input only": (lambda data: data.update(input_only_values=["nothing"]), "'nothing'"),
    "version": (lambda data: data.update(schema_version=0), "schema_version"),
    "version true": (lambda data: data.update(schema_version=True), "schema_version"),
    "time text": (lambda data: data["layer_classes"][0]["costs"][0].update(forward_time_s="1"), "forward_time_s"),
    "time true": (lambda data: data["layer_classes"][0]["costs"][0].update(forward_time_s=True), "forward_time_s"),
    "time 1e300": (lambda data: data["layer_classes"][0]["costs"][0].update(forward_time_s=1e300), "forward_time_s"),
    "bytes": (lambda data: data["layer_classes"][0]["costs"][0].update(param_bytes=10**30), "param_bytes"),
    "digits": (lambda data: data.update(param_count=10**4000), "param_count"),
    "surrogate": (lambda data: data.update(name="\ud800"), "surrogate"),
}


@pytest.mark.parametrize(("change", "words"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_profile_is_an_error_that_says_what_is_wrong(
    good: dict[str, Any], tmp_path: Path, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    with pytest.raises(FileFormatError) as caught:
        read_changed(good, change, tmp_path / "profile.json")
    assert words in caught.value.message
    assert len(caught.value.message) < 1000


def test_the_unchanged_profile_is_read(good: dict[str, Any], profile: ModelProfile, tmp_path: Path) -> None:
    assert read_changed(good, lambda data: None, tmp_path / "profile.json") == profile


@pytest.mark.parametrize(
    "name",
    [
        *("torch.load", "torch.save", "torch.from_file", "torch.PyTorchFileWriter", "torch.import_ir_module"),
        *("torch.set_num_threads", "torch._assert", "torch.jit", "torch.hub", "torch.compile", "torch.fork"),
        *("torch._C._nn._parse_to", "torch._C.import_ir_module", "operator.attrgetter", "operator.call", "os.system"),
        *("operator.methodcaller", "torch.nn.functional.handle_torch_function", "torch.hub.load", "eval", ""),
        *("torch.nn.functional.__loader__", "math.__loader__", "torch.fft.torch", "torch.\uff4coad"),
    ],
)
def test_functions_that_do_more_than_compute_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="may not call"):
        function_name(name)


@pytest.mark.parametrize("name", ["torch.cat", "torch.arange", "operator.and_", "torch._C._nn.gelu", "torch.fft.rfft"])
def test_functions_that_compute_are_fine(name: str) -> None:
    assert function_name(name) == name


def test_names_of_methods_modules_and_constants() -> None:
    assert method_name("__rsub__") == "__rsub__"
    assert method_name("masked_fill_") == "masked_fill_"
    for name in ("__class__", "__reduce_ex__", "_make_subclass", "numpy", "set_", "f_globals", "x y"):
        with pytest.raises(ValueError, match=r"may not call|identifier"):
            method_name(name)
    for name in ("layers.3.mlp", "experts.top-2", "heads.global", ""):
        assert qualified_name(name) == name
    for name in ("a b", 'a"', "a.", "a..b", "a.__dict__", "modules", "a.gi_frame", "a\n", "\uff41"):
        with pytest.raises(ValueError, match="not the name"):
            qualified_name(name)
    assert constant_name("channels_last") == "channels_last"
    with pytest.raises(ValueError, match="no memory format"):
        constant_name("load")
    for name in ("\uff45val", "class", "1"):
        with pytest.raises(ValueError, match="is not an identifier"):
            identifier(name)


@pytest.mark.parametrize(
    "text",
    [
        "import os",
        "print(1)",
        "x = __import__('os')",
        "x = torch.load('a')",
        "x = torch.hub.load('a')",
        "x = torch.load",
        "def f(self, x=print(1)):\n    return x",
        "def f(self, x):\n    return x.__class__",
        "def f(self, x):\n    return x.numpy()",
        "def f(self, x):\n    return x()",
        "def f(self, x):\n    return getattr(x, '__class__')",
        "def f(self, x):\n    return self.forward.__globals__",
        "def f(self, x):\n    return self.modules()",
        "def f(self, torch):\n    return torch.add(1)",
        "def f(self, x):\n    return (lambda: x)()",
        "def f(self, x):\n    return [y for y in x]",
        "def f(self, x, x):\n    return x",
        "def f(self, layers):\n    return layers(self)",
        "def f(self, x):\n    return eval",
        "def f(self, x):\n    with open('a'):\n        return x",
        "@print\ndef f(self, x):\n    return x",
        "class A(print):\n    x = 1",
        "class A(PlanStage):\n    import os",
        "class A(PlanStage, metaclass=print):\n    x = 1",
        "x = ",
    ],
)
def test_the_second_check_refuses_code_that_no_program_asks_for(text: str) -> None:
    with pytest.raises(EmitError) as caught:
        check_generated(text)
    assert caught.value.hint


def test_the_second_check_lets_generated_code_pass() -> None:
    check_generated(
        "class Stage0(PlanStage):\n"
        '    """Text."""\n'
        '    module_names = tuple(f"a.{index}" for index in range(0, 3))\n'
        "    def forward(self, x):\n"
        "        with torch.no_grad():\n"
        "            y = torch.arange(x.size(0), device=self.device, dtype=torch.int64)\n"
        '        z = self.get_submodule("d.a-b")(F.relu(x)) + getattr(self.p, "0").view(-1)\n'
        '        for layer in layers(self, "a", 0, 3):\n'
        "            z = recompute(layer, z)\n"
        "        return Output(loss=z.mT, y=y)\n"
        "STAGES = (Stage0,)\n"
    )


@pytest.mark.parametrize("text", ['"""A."""\nprint(1)', '"""A."""\nPLAN = {"a": print(1)}', "1\nPLAN = {}"])
def test_what_stands_before_the_helpers_is_checked(text: str) -> None:
    with pytest.raises(EmitError):
        check_header(text)


def test_names_that_got_past_reading_are_refused_on_writing(profile: ModelProfile) -> None:
    """Records changed in Python are not validated: the finished text is."""
    block = next(item for item in profile.layer_classes if item.body)
    assert block.body is not None
    nodes = [
        item.model_copy(update={"target": "torch.load"}) if item.kind == "function" else item
        for item in block.body.nodes
    ]
    assert nodes != list(block.body.nodes)
    changed_body = block.body.model_copy(update={"nodes": tuple(nodes)})
    classes = [
        item.model_copy(update={"body": changed_body}) if item is block else item for item in profile.layer_classes
    ]
    changed = profile.model_copy(update={"layer_classes": tuple(classes)})
    with pytest.raises(EmitError, match=r"torch\.load"):
        emit(even_plan(changed, tp_degree=2), changed)
    named = profile.model_copy(update={"name": BREAK_OUT})
    text = emit(even_plan(named), named)
    assert compile(text, "plan.py", "exec").co_consts[0].startswith(BREAK_OUT)


def test_plans_are_written_to_regular_files_alone(profile: ModelProfile, tmp_path: Path) -> None:
    source = emit(even_plan(profile), profile)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (fifo, tmp_path, Path(os.devnull), tmp_path / ("n" * 300)):
        for force in (False, True):
            with pytest.raises(UsageError) as caught:
                write_plan(source, path, force=force)
            assert str(path) in caught.value.message
    link, target = tmp_path / "link.py", tmp_path / "plan.py"
    link.symlink_to(target)
    write_plan(source, link)
    write_plan(source, link)
    assert link.is_symlink()
    assert target.read_text() == source


UNUSUAL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({"global": nn.Linear(8, 8), "a-b": nn.Linear(8, 8)})
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))])

    def forward(self, x):
        x = self.parts["global"](x) * self.scales[0]
        return self.parts["a-b"](x) + self.scales[1]

def build_model():
    return Model()

def example_inputs(batch_size):
    return {"x": torch.randn(batch_size, 8)}

def loss_fn(output):
    return output.mean()
"""


def test_keys_that_are_no_identifiers_and_numbered_parameters(tmp_path: Path) -> None:
    (tmp_path / "unusual.py").write_text(UNUSUAL)
    profile = profile_model(str(tmp_path / "unusual.py"), gpu="h100-sxm", dtype="float32", microbatch_sizes=(1,))
    write_profile(profile, tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == profile
    text = emit(even_plan(profile), profile)
    for expression in (
        'self.get_submodule("parts.global")(',
        'self.get_submodule("parts.a-b")(',
        'getattr(self.scales, "0")',
        'getattr(self.scales, "1")',
    ):
        assert expression in text


def test_a_key_that_no_name_can_hold_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "space.py").write_text(UNUSUAL.replace("a-b", "a b"))
    with pytest.raises(CaptureError) as caught:
        profile_model(str(tmp_path / "space.py"), gpu="h100-sxm", dtype="float32", microbatch_sizes=(1,))
    assert "the model: `parts.a b` can't be part of a program: 'parts.a b' is not the name" in caught.value.message
    assert "pydantic" not in caught.value.message
    assert "\n" not in caught.value.message

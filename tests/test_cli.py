"""The command line: what it prints where, exit codes, and one clear error with a hint for every bad input."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import Done, Run

from planner.arguments import BatchInt, Ref
from planner.cli.inputs import choose_cluster, describe_cluster, device_mismatch, load_profile
from planner.cli.options import parse_counts, parse_duration, parse_pairs
from planner.cli.solve import torchrun_line
from planner.cluster import default_cluster
from planner.errors import UsageError
from planner.local_cluster import local_cluster, machine_memory_bytes, shared_cores
from planner.model_profile import (
    SCHEMA_VERSION,
    Layer,
    LayerClass,
    LayerCost,
    ModelProfile,
    Parameter,
    Provenance,
    write_profile,
)
from planner.plan import Origin, Plan, Stage
from planner.program import Node, Program, Tensor
from planner.runner.verify import ParameterRow, VerifyReport

REPOSITORY = Path(__file__).resolve().parent.parent


def small_profile(**provenance: Any) -> ModelProfile:
    """A profile of one linear layer, as if measured on the CPU."""
    cost = LayerCost(
        microbatch_size=1,
        forward_time_s=1e-3,
        backward_input_time_s=1e-3,
        backward_weight_time_s=1e-3,
        activation_bytes=0,
        saved_input_bytes=16,
        saved_output_bytes=0,
        transient_bytes=16,
        param_bytes=64,
        trainable_param_count=16,
        forward_flops=32,
        source="measured",
    )
    values = {
        "model_path": "model.py",
        "model_hash": "0" * 16,
        "torch_version": "2.13.0",
        "device": "cpu",
        "dtype": "float32",
        "input_shapes": {"x": (1, 4)},
    }
    tensor = Tensor(shape=(BatchInt(1), 4), dtype="float32", requires_grad=True)
    return ModelProfile(
        name="model",
        provenance=Provenance(**(values | provenance)),
        param_count=16,
        trainable_param_count=16,
        forward_flops_per_row=32,
        parameters={"linear.weight": Parameter(shape=(4, 4), dtype="float32", num_bytes=64, trainable=True)},
        layers=(
            Layer(name="linear", layer_class="Linear", module="linear", start=0, stop=1, parameters=("linear.weight",)),
        ),
        layer_classes=(LayerClass(name="Linear", module_class="torch.nn.Linear", costs=(cost,)),),
        program=Program(
            inputs=("x",),
            nodes=(Node(name="y", kind="module", target="linear", args=(Ref("x"),), result=Ref("y")),),
            output=Ref("y"),
            tensors={"x": tensor, "y": tensor},
        ),
    )


def small_plan(num_gpus: int) -> Plan:
    return Plan(
        global_batch_size=num_gpus,
        num_microbatches=1,
        schedule="1f1b",
        data_parallel="replicated",
        optimizer="adamw",
        precision="fp32",
        stages=(Stage(layers=("linear",), dp_degree=num_gpus, microbatch_size=1, gpus=tuple(range(num_gpus))),),
        origin=Origin(
            model_path="",
            model_hash="",
            profile_path="",
            profile_hash="",
            cluster="",
            cluster_hash="",
            torch_version="",
            planner_version="",
        ),
    )


def change_profile(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Write the small profile with a change made to its JSON; NaN is written as Python's json writes it."""
    write_profile(small_profile(), path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    return path


# --- starting -------------------------------------------------------------------------------------------------------

BLOCKED_START = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            raise ImportError(f"{name} is imported at start")
sys.meta_path.insert(0, Block())
from planner.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        ([], 0),
        (["--version"], 0),
        (["profile", "--help"], 0),
        (["solve", "--help"], 0),
        (["explain", "--help"], 0),
        (["compare", "--help"], 0),
        (["compare", "plan.py", "missing.py"], 2),
        (["verify", "--help"], 0),
        (["explain", "missing.py"], 2),
        (["solve", "--gpus", "4"], 2),
    ],
)
def test_starts_without_torch(folder: Path, arguments: list[str], code: int) -> None:
    line = [sys.executable, "-c", BLOCKED_START, *arguments]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert bool(done.stdout) == (code == 0)


def test_help_names_every_command(run: Run) -> None:
    done = run("--help")
    assert done.code == 0
    assert all(command in done.out for command in ("profile", "solve", "explain", "compare", "verify"))


def test_python_dash_m(folder: Path) -> None:
    line = [sys.executable, "-m", "planner", "--version"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("planner ")


# --- usage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["solve"], ["--gpus", "planner solve --help"]),
        (["solve", "--gpus", "0"], ["--gpus 0 is less than 1"]),
        (["solve", "--gpus", "-4"], ["--gpus", "1"]),
        (["solve", "--gpus", "four"], ["--gpus"]),
        (["solve", "--gpus", "4", "--global-batch-size", "0"], ["--global-batch-size 0 is less than 1"]),
        (["solve", "--gpus", "4", "--pin", "tp_degree"], ["--pin 'tp_degree'", "KEY=VALUE"]),
        (["solve", "--gpus", "4", "--exclude", "=2"], ["--exclude '=2'", "KEY=VALUE"]),
        (["solve", "--gpus", "4", "--limit", "pp_degree"], ["--limit 'pp_degree'", "--limit pp_degree=2..8"]),
        (["solve", "--gpus", "4", "--time-limit", "soon"], ["--time-limit", "90s"]),
        (["solve", "--gpus", "4", "--time-limit", "0"], ["--time-limit", "longer than 0 s"]),
        (["solve", "--gpus", "4", "--optimizer", "lion"], ["--optimizer", "adamw"]),
        (["solve", "--gpus", "4", "--colour"], ["--colour"]),
        (["solve", "--gpus", "4"], ["no profile in profiles/", "planner profile MODEL"]),
        (["solve", "--gpus", "4", "--profile", "none.json"], ["profile", "none.json", "does not exist"]),
        (["profile"], ["MODEL"]),
        (["profile", "model.py", "--tp", "1,x"], ["--tp '1,x'", "1,2,4"]),
        (["profile", "model.py", "--microbatch-sizes", "0"], ["--microbatch-sizes '0'"]),
        (["profile", "model.py", "--device", "cpu", "--gpu", "h100-sxm"], ["--device cpu", "--gpu h100-sxm"]),
        (["profile", "model.py", "--device", "tpu"], ["--device"]),
        (["profile", "model.py", "--gpu", "h1000"], ["'h1000'", "'h100-pcie' or 'h100-sxm'"]),
        (["profile", "model.py", "--gpu", "h100-sxn"], ["did you mean 'h100-sxm'?"]),
        (["plan"], ["plan"]),
        (["verify", "plan.py", "--timeout", "x"], ["--timeout"]),
    ],
)
def test_usage_errors(run: Run, folder: Path, arguments: list[str], words: list[str]) -> None:
    run(*arguments).assert_one_error(2, *words)
    assert list(folder.iterdir()) == []


def test_interrupting_is_no_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(path: Path | None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("planner.cli.solve.load_profile", interrupt)
    done = run("solve", "--gpus", "4")
    assert (done.code, done.out, done.err) == (130, "", "interrupted\n")


def test_a_wrong_time_is_told_without_another_example(run: Run) -> None:
    done = run("solve", "--gpus", "4", "--time-limit", "abc")
    assert done.err == "error: --time-limit 'abc' is no time\nhint: write it like --time-limit 90s\n"


def test_a_bug_keeps_its_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path | None) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("planner.cli.solve.load_profile", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        run("solve", "--gpus", "4")


def test_a_reader_that_leaves_is_no_traceback(folder: Path) -> None:
    script = f"{sys.executable} -m planner solve --help | true"
    for _ in range(3):
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False)
        assert done.stderr == ""


# --- options --------------------------------------------------------------------------------------------------------


def test_options_become_values() -> None:
    assert parse_counts("4,1,2,1", "--tp") == (1, 2, 4)
    assert parse_counts(None, "--tp") is None
    assert parse_duration("90", "--timeout") == parse_duration("90s", "--timeout") == 90
    assert parse_duration("500ms", "--timeout") == 0.5
    assert parse_duration(None, "--timeout") is None
    assert parse_pairs(["tp_degree=2", "cuts=a.0,a.4", "stage:a.0=1"], "--pin") == (
        ("tp_degree", "2"),
        ("cuts", "a.0,a.4"),
        ("stage:a.0", "1"),
    )


@pytest.mark.parametrize("text", ["", "1,", "1,,2", "1.5", "-1", "2,0"])
def test_bad_counts(text: str) -> None:
    with pytest.raises(UsageError):
        parse_counts(text, "--tp")


@pytest.mark.parametrize("text", ["", "nan", "inf", "-1", "0s", "5 parsecs"])
def test_bad_durations(text: str) -> None:
    with pytest.raises(UsageError):
        parse_duration(text, "--timeout")


# --- profiles and clusters ------------------------------------------------------------------------------------------


def test_the_newest_profile_is_taken_and_named(folder: Path) -> None:
    for age, name in enumerate(["new", "old"]):
        path = Path("profiles") / f"{name}.json"
        write_profile(small_profile().replace(name=name), path)
        os.utime(path, (1000 - age, 1000 - age))
    file = load_profile(None)
    assert file.profile.name == "new"
    assert file.path == Path("profiles/new.json")
    assert "newest" in file.chosen
    assert load_profile(Path("profiles/old.json")).chosen == ""


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (lambda data: data.update(schema_version=SCHEMA_VERSION + 1), 1, ["newer than", "upgrade planner"]),
        (lambda data: data.pop("schema_version"), 1, ["not a profile", "planner profile"]),
        (lambda data: data.update(param_cuont=1), 1, ["unknown key 'param_cuont'", "did you mean 'param_count'?"]),
        (lambda data: data.update(layers=[]), 1, ["at least one layer"]),
        (lambda data: data["layer_classes"][0].update(costs=[]), 1, ["'Linear'", "no costs"]),
        (lambda data: data["layer_classes"][0]["costs"][0].update(forward_time_s=float("nan")), 1, ["NaN"]),
        (
            lambda data: data["layer_classes"][0]["costs"][0].update(forward_time_s=-1e-3),
            1,
            ["forward_time_s", "-0.001"],
        ),
        (lambda data: data["layer_classes"][0]["costs"][0].update(param_bytes=-1), 1, ["param_bytes", "-1"]),
        (lambda data: data["layer_classes"][0]["costs"][0].pop("param_bytes"), 1, ["param_bytes", "is missing"]),
        (lambda data: data["program"]["nodes"][0].update(target="os; system"), 1, ["os; system"]),
        (
            lambda data: data["program"]["nodes"][0].update(kind="function", target="os.system"),
            1,
            ["may not call 'os.system'"],
        ),
    ],
)
def test_bad_profiles(
    run: Run, folder: Path, change: Callable[[dict[str, Any]], None], code: int, words: list[str]
) -> None:
    path = change_profile(folder / "bad.json", change)
    run("solve", "--gpus", "4", "--profile", str(path)).assert_one_error(code, "bad.json", *words)
    assert list(folder.iterdir()) == [path]


def test_a_profile_cut_short(run: Run, folder: Path) -> None:
    path = change_profile(folder / "bad.json", lambda data: None)
    path.write_text(path.read_text()[:100])
    run("solve", "--gpus", "4", "--profile", str(path)).assert_one_error(1, "not JSON", "bad.json")


def test_bad_clusters(run: Run, folder: Path) -> None:
    change_profile(Path("profiles") / "model.json", lambda data: None)
    good = (
        'memory_reserve = "1GiB"\nnode_groups = [{count = 1, gpus_per_node = 2, gpu = "a100-sxm-80gb"}]\n'
        'intra_node = {bandwidth = "9GB/s", latency = "5us"}\ninter_node = {bandwidth = "9GB/s", latency = "5us"}\n'
    )
    path = folder / "mine.toml"

    def solve(text: str) -> Done:
        path.write_text(text)
        return run("solve", "--gpus", "4", "--cluster", "mine.toml")

    solve(good).assert_one_error(2, "--gpus 4 is more than the 2 GPUs", "raise `count` in mine.toml")
    solve(good.replace("latency", "latenzy")).assert_one_error(1, "intra_node.latenzy", "did you mean 'latency'?")
    solve(good.replace('"9GB/s"', "9")).assert_one_error(1, "bandwidth 9 has no unit", "450GB/s")
    solve(good.replace("a100-sxm-80gb", "a100")).assert_one_error(2, "no gpu is named 'a100'", "a100-sxm-40gb")
    run("solve", "--gpus", "4", "--cluster", "none.toml").assert_one_error(2, "none.toml", "does not exist")
    run("solve", "--gpus", "4", "--cluster", "h100").assert_one_error(2, "no cluster is named 'h100'", "h100-sxm")
    missing = "'node_groups.0.gpu', 'inter_node', 'memory_reserve' are missing"
    text = "\n".join(line for line in good.splitlines() if "inter_node" not in line and "reserve" not in line)
    solve(text.replace(', gpu = "a100-sxm-80gb"', "")).assert_one_error(1, f"mine.toml: {missing}", "add them")
    assert not Path("plan.py").exists()


def test_the_cluster_follows_the_profile() -> None:
    on_cpu = small_profile()
    assert choose_cluster(None, 4, on_cpu) == local_cluster(4)
    for_h100 = small_profile(device_type="cuda", gpu="h100-sxm", dtype="bfloat16")
    on_h100 = small_profile(device_type="cuda", device="NVIDIA H100 80GB HBM3", dtype="bfloat16")
    on_unknown = small_profile(device_type="cuda", device="NVIDIA Abacus")
    assert choose_cluster(None, 16, for_h100) == default_cluster(16, "h100-sxm")
    assert choose_cluster(None, 16, on_h100) == default_cluster(16, "h100-sxm")
    assert choose_cluster("b200", 8, for_h100) == default_cluster(8, "b200")
    assert device_mismatch(for_h100, default_cluster(8, "h100-sxm")) is None
    assert device_mismatch(on_cpu, local_cluster(2)) is None
    assert "h100-sxm" in str(device_mismatch(for_h100, default_cluster(8, "b200")))
    for profile in (on_unknown, small_profile(device_type="cuda", gpu="mine/abacus.toml")):
        with pytest.raises(UsageError) as caught:
            choose_cluster(None, 4, profile)
        assert "bacus" in caught.value.message
        assert "--cluster FILE.toml" in caught.value.hint
    with pytest.raises(UsageError, match="no cluster is named 'abacus'"):
        choose_cluster(None, 4, small_profile(device_type="cuda", gpu="abacus"))


def test_assumptions_are_told() -> None:
    text = describe_cluster(default_cluster(16, "h100-sxm"), assumed=True)
    assert text == (
        "cluster, assumed: h100-sxm x 16 (2 x 8 h100-sxm, 74.5 GiB each, 450 GB/s and 5 us inside a node, "
        "50 GB/s and 10 us between; 3 GiB kept free)"
    )


def test_processes_share_this_machine() -> None:
    cluster = local_cluster(4)
    assert cluster.num_gpus == cluster.gpus_per_node == 4
    assert 0 < cluster.gpu_at(3).memory * 4 <= machine_memory_bytes()
    assert cluster.inter_node == cluster.intra_node
    assert "1000 processes share" in str(shared_cores(local_cluster(1000)))
    assert shared_cores(local_cluster(1)) is None
    assert shared_cores(default_cluster(1000, "h100-sxm")) is None


TWO_NODES = "torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500"


@pytest.mark.parametrize(
    ("num_gpus", "line"),
    [
        (4, "torchrun --nproc-per-node 4 train.py"),
        (8, "torchrun --nproc-per-node 8 train.py"),
        (16, f"{TWO_NODES} --nproc-per-node 8 train.py"),
        (12, f"{TWO_NODES} --nproc-per-node 8 train.py  # --nproc-per-node 4 on node 1"),
    ],
)
def test_how_to_start_training(num_gpus: int, line: str) -> None:
    assert torchrun_line(small_plan(num_gpus), default_cluster(num_gpus, "h100-sxm")) == line


# --- models ---------------------------------------------------------------------------------------------------------

MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)
"""
FUNCTIONS = """
def build_model():
    return Net()

def example_inputs(batch_size):
    return (torch.randn(batch_size, 3, 8),)

def loss_fn(output):
    return output.pow(2).mean()
"""


@pytest.fixture
def model(folder: Path) -> Path:
    """A model file in the working directory."""
    path = folder / "model.py"
    path.write_text(MODEL + FUNCTIONS)
    return path


def test_bad_models(run: Run, model: Path) -> None:
    def profile(text: str, *arguments: str) -> Done:
        model.write_text(text)
        return run("profile", "model.py", "--device", "cpu", *arguments)

    run("profile", "none.py").assert_one_error(2, "none.py", "does not exist")
    run("profile", "model.py", "-o", "model.py").assert_one_error(2, "-o model.py", "a profile is JSON")
    profile(MODEL).assert_one_error(2, "build_model", "def build_model()", "Net", "Block")
    profile(MODEL + FUNCTIONS.replace("example_inputs", "inputs")).assert_one_error(2, "def example_inputs(batch_size")
    profile(MODEL + FUNCTIONS.replace("build_model", "make")).assert_one_error(2, "build_model")
    profile("import nowhere\n" + MODEL + FUNCTIONS).assert_one_error(1, "model.py", "line 1", "nowhere")
    profile("def build_model(:\n").assert_one_error(1, "model.py", "line 1")
    raising = MODEL.replace("return self.head(x)", "raise RuntimeError('not today')")
    profile(raising + FUNCTIONS).assert_one_error(1, "not today", "model.py:22")
    profile(MODEL + FUNCTIONS.replace("3, 8)", "3, 9)")).assert_one_error(1, "in forward", "model.py:11")
    profile(MODEL + FUNCTIONS, "--inputs", "inputs").assert_one_error(2, "inputs")
    run("profile", "model.py", "--gpu", "h100").assert_one_error(2, "'h100'", "h100-sxm")
    assert {path.name for path in model.parent.iterdir()} <= {"model.py", "__pycache__"}


# --- the whole way --------------------------------------------------------------------------------------------------

TINY = """
memory_reserve = "0B"
node_groups = [{count = 1, gpus_per_node = 4, gpu = "tiny"}]
intra_node = {bandwidth = "9GB/s", latency = "5us"}
inter_node = {bandwidth = "9GB/s", latency = "5us"}
[gpus.tiny]
name = "tiny"
memory = "2KiB"
memory_bandwidth = "10GB/s"
peak_flops = {float32 = "1TFLOP/s"}
source = "a test"
"""


@pytest.fixture
def profiled(run: Run, model: Path) -> Path:
    """A working directory with model.py and its profile."""
    assert run("profile", "model.py", "--device", "cpu", "--microbatch-sizes", "1,2", "--tp", "1,2").code == 0
    return model.parent


def test_profile_tells_people_and_scripts(run: Run, model: Path) -> None:
    done = run("profile", "model.py", "--device", "cpu", "--tp", "1", "--microbatch-sizes", "1")
    assert (done.code, done.err.splitlines()[-1]) == (0, "wrote profiles/model.json")
    assert "blocks.1-3" in done.out
    done = run("profile", "model.py", "--gpu", "h100-sxm", "--microbatch-sizes", "2,4", "--json", "-o", "new/here.json")
    assert done.code == 0
    assert Path("new/here.json").exists()
    told = json.loads(done.out)
    assert told["param_count"] == 4 * (8 * 16 + 16 + 16 * 8 + 8) + 8 * 2 + 2
    assert told["forward_flops"] == 2 * 3 * 2 * (4 * 2 * 8 * 16 + 8 * 2)  # 2 rows of 3 positions
    assert (told["num_layers"], told["num_layer_classes"], told["tied"]) == (5, 3, [])  # no gradient enters the first


def test_solve_tells_people_and_scripts(run: Run, profiled: Path) -> None:
    done = run("solve", "--gpus", "4", "--pin", "pp_degree=2")
    assert done.code == 0, done.err
    assert done.out.splitlines()[-1] == "torchrun --nproc-per-node 4 train.py"
    assert "blocks.0" in done.out
    for words in (
        "profiles/model.json",
        "the newest in profiles/",
        "cluster, assumed: cpu x 4",
        "32 samples, adamw, fp32",
    ):
        assert words in done.err
    assert done.err.splitlines()[-1] == "wrote plan.py"
    first = Path("plan.py").read_text()

    done = run("solve", "--gpus", "4", "--pin", "pp_degree=2", "--json", "-o", "other.py")
    assert Path("other.py").read_text() == first  # the same input, the same bytes
    told = json.loads(done.out)
    assert told["status"] == "optimal"
    assert told["gap_fraction"] == 0
    assert told["lower_bound_s"] == told["step_time_s"] > 0
    assert told["pp_degree"] == len(told["stages"]) == 2
    assert [name for stage in told["stages"] for name in stage["layers"]] == [
        *(f"blocks.{i}" for i in range(4)),
        "head",
    ]
    assert sorted(gpu for stage in told["stages"] for gpu in stage["gpus"]) == [0, 1, 2, 3]
    for stage in told["stages"]:
        assert told["num_microbatches"] * stage["microbatch_size"] * stage["dp_degree"] == 32
        assert stage.keys() >= {"layers", "tp_degree", "recompute", "gpus", "time_s", "peak_bytes"}
    assert told.keys() >= {"schedule", "data_parallel", "runners_up"}


def test_idle_gpus_are_told(run: Run, profiled: Path) -> None:
    done = run(
        "solve", "--gpus", "4", "--global-batch-size", "1", "--pin", "tp_degree=1", "--pin", "pp_degree=1", "--json"
    )
    assert done.code == 0, done.err
    assert "warning: the plan uses 1 of 4 GPUs, 3 would be idle: no plan on more is faster" in done.err
    told = json.loads(done.out)
    assert told["num_gpus"] == 1
    assert [stage["gpus"] for stage in told["stages"]] == [[0]]


def test_an_edited_plan_is_kept(run: Run, profiled: Path) -> None:
    assert run("solve", "--gpus", "2").code == 0
    written = Path("plan.py").read_text()
    assert run("solve", "--gpus", "2").code == 0  # its own file is written again
    edited = written.replace("import torch\n", "import torch  # mine\n", 1)
    assert edited != written
    Path("plan.py").write_text(edited)
    run("solve", "--gpus", "2").assert_one_error(2, "plan.py was edited by hand", "--force")
    assert Path("plan.py").read_text() == edited
    assert run("solve", "--gpus", "2", "--force").code == 0
    assert Path("plan.py").read_text() == written
    Path("notes.py").write_text("print('mine')\n")
    for options in ((), ("--force",)):  # a model's own file, say, is nobody's to replace
        run("solve", "--gpus", "2", "-o", "notes.py", *options).assert_one_error(2, "notes.py", "no file that planner")
        assert Path("notes.py").read_text() == "print('mine')\n"


def test_no_plan_is_told_with_repairs(run: Run, profiled: Path) -> None:
    Path("tiny.toml").write_text(TINY)
    done = run("solve", "--gpus", "4", "--cluster", "tiny.toml")
    done.assert_one_error(1, "no plan", "memory", "2 KiB")
    assert "the profile's times are of cpu, the cluster's GPUs are tiny" in done.err
    done = run("solve", "--gpus", "4", "--cluster", "tiny.toml", "--json")
    assert done.code == 1
    told = json.loads(done.out)
    assert told["status"] == "infeasible"
    assert told["conflict"]
    assert "repairs" in told
    run("solve", "--gpus", "64", "--global-batch-size", "1").assert_one_error(1, "no plan")
    assert not Path("plan.py").exists()


@pytest.mark.parametrize(
    ("pin", "words"),
    [
        ("pp_degre=2", ["pp_degre", "did you mean 'pp_degree'?"]),
        ("pp_degree=two", ["pp_degree=two"]),
        ("schedule=1b1f", ["1b1f", "did you mean '1f1b'?"]),
        ("cuts=blocks.9", ["'blocks.9'", "did you mean 'blocks."]),
    ],
)
def test_bad_pins(run: Run, profiled: Path, pin: str, words: list[str]) -> None:
    run("solve", "--gpus", "4", "--pin", pin).assert_one_error(2, *words)
    assert not Path("plan.py").exists()


def test_explain_reads_a_plan_as_data(run: Run, profiled: Path) -> None:
    assert run("solve", "--gpus", "4", "--pin", "pp_degree=2").code == 0
    path = Path("plan.py")
    path.write_text("raise SystemExit('plan.py was run')\n" + path.read_text())
    done = run("explain", "plan.py")
    assert (done.code, done.err) == (0, "")
    assert all(word in done.out for word in ("Bottleneck", "Memory", "optimal", "runners-up", "blocks.0"))
    done = run("explain", "plan.py", "--json")
    assert (done.code, done.err) == (0, "")
    told = json.loads(done.out)
    assert (told["pp_degree"], told["status"], len(told["stages"])) == (2, "optimal", 2)
    path.write_text("PLAN = {'stages': []}\n")
    run("explain", "plan.py").assert_one_error(1, "plan.py", "'global_batch_size', 'num_microbatches'", "are missing")
    path.write_text("PLAN = {'a': open('x')}\n")
    run("explain", "plan.py").assert_one_error(1, "plan.py", "not a literal")
    path.write_text("x = 1\n")
    run("explain", "plan.py").assert_one_error(1, "plan.py", "no PLAN")
    run("explain", "none.py").assert_one_error(2, "none.py", "does not exist")


def test_verify_proves_and_refuses(run: Run, profiled: Path) -> None:
    assert run("solve", "--gpus", "2", "--global-batch-size", "4", "--pin", "pp_degree=2").code == 0
    done = run("verify", "plan.py", "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert told["ok"] is True
    assert told["loss_difference"] <= 1e-9
    assert 0 <= told["max_gradient_difference"] <= 1e-5
    assert told["worst_parameter"].startswith(("blocks.", "head."))
    assert (told["not_proved"], told["notes"]) == ([], [])

    path = Path("plan.py")
    right = path.read_text()
    wrong = right.replace("self.head(", "1.01 * self.head(")
    assert wrong != right
    path.write_text(wrong)
    done = run("verify", "plan.py", "--json")
    assert done.code == 1
    assert json.loads(done.out)["ok"] is False
    path.write_text(right)

    Path("model.py").rename("moved.py")
    run("verify", "plan.py").assert_one_error(2, "model.py", "--model")
    assert run("verify", "plan.py", "--model", "moved.py").code == 0
    run("verify", "none.py").assert_one_error(2, "none.py", "does not exist")


NOTED = (
    MODEL.replace(
        "self.head =", "self.unused = nn.Linear(3, 3)\n        self.dropout = nn.Dropout(0.1)\n        self.head ="
    ).replace("self.head(x)", "self.head(self.dropout(x))")
    + FUNCTIONS
)


@pytest.fixture
def noted(run: Run, model: Path) -> Path:
    """A plan for a model with dropout and with a module that nothing reads."""
    model.write_text(NOTED)
    assert run("profile", "model.py", "--device", "cpu", "--microbatch-sizes", "1,2", "--tp", "1").code == 0
    assert run("solve", "--gpus", "2", "--global-batch-size", "4", "--pin", "pp_degree=2").code == 0
    return Path("plan.py")


def test_verify_tells_each_note_once(run: Run, noted: Path) -> None:
    done = run("verify", "plan.py")
    assert (done.code, done.err) == (0, "")
    for words in (
        "note: dropout was off: with it, losses differ by chance",
        "not proved: dropout",
        "note: 2 parameters without gradient, as in one process: 'unused.bias' and others",
    ):
        assert done.out.count(words) == 1, done.out
    done = run("verify", "plan.py", "--json")
    told = json.loads(done.out)
    assert done.code == 0
    assert (told["ok"], told["not_proved"], len(told["notes"])) == (True, ["dropout"], 2)
    assert [done.err.count(f"note: {note}") for note in told["notes"]] == [1, 1]
    assert done.err.count("not proved: dropout") == 1


def test_profile_tells_each_note_once(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted = small_profile().replace(notes=("a note of the profiler",))
    monkeypatch.setattr("planner.profiler.profile_model", lambda *arguments, **options: noted)
    done = run("profile", "model.py")
    assert (done.out.count("note: a note of the profiler"), done.err.count("note: ")) == (1, 0)
    done = run("profile", "model.py", "--json")
    assert (done.out.count("a note of"), done.err.count("note: a note of the profiler")) == (0, 1)


def test_sigterm_leaves_nothing_behind(run: Run, profiled: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert run("solve", "--gpus", "2", "--global-batch-size", "4", "--pin", "pp_degree=2").code == 0
    Path("model.py").write_text(Path("model.py").read_text() + "\nimport time\ntime.sleep(1000)\n")
    temporary = tmp_path_factory.mktemp("temporary")
    process = subprocess.Popen(
        [sys.executable, "-m", "planner", "verify", "plan.py"],
        env=os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": str(REPOSITORY)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        limit = time.monotonic() + 60
        while not list(temporary.glob("planner-verify-*")) and time.monotonic() < limit:
            time.sleep(0.05)
        assert list(temporary.glob("planner-verify-*"))
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, err) == (143, "ended by SIGTERM\n")
    assert list(temporary.iterdir()) == []


PRINTING = """
import os, sys
import torch
from torch import nn

print("at import")
stdout = sys.stdout

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x):
        print("in forward")
        os.write(1, b"as C code does\\n")
        return self.first(x)

def build_model():
    stdout.write("in build\\n")
    return Model()

def example_inputs(batch_size):
    return (torch.ones(batch_size, 4),)
"""


def test_what_a_model_prints_does_not_reach_stdout(run: Run, folder: Path) -> None:
    (folder / "model.py").write_text(PRINTING)
    done = run("profile", "model.py", "--gpu", "h100-sxm", "--microbatch-sizes", "1", "--tp", "1", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["param_count"] == 20
    assert all(text in done.err for text in ("at import", "in build", "in forward", "as C code does"))


def test_a_model_that_exits_only_when_it_is_run_is_no_success(run: Run, folder: Path) -> None:
    late = PRINTING.replace('print("in forward")', "type(x) is torch.Tensor and sys.exit(0)")
    late = late.replace("class Model", "class Leaf")
    late += "\ndef build_model():\n    return nn.Sequential(Leaf(), nn.Linear(4, 4))\n"
    late = late.replace("return self.first(x)", "return x @ self.weight").replace(
        "self.first = nn.Linear(4, 4)", "self.weight = nn.Parameter(torch.ones(4, 4))"
    )
    (folder / "model.py").write_text(late)
    done = run("profile", "model.py", "--device", "cpu", "--microbatch-sizes", "1", "--tp", "1")
    done.assert_one_error(1, "SystemExit: 0")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (("--gpus", "1000000000"), ("--gpus is 1000000000, more than 1000000",)),
        (("--gpus", str(10**30)), ("--gpus is a number of about 30 digits", "more than 1000000")),
        (("--gpus", "8", "--global-batch-size", str(10**12)), ("--global-batch-size is 1000000000000",)),
        (("--gpus", "9" * 5000), ("--gpus",)),
    ],
)
def test_a_size_beyond_any_cluster_is_a_usage_error(run: Run, line: tuple[str, ...], words: tuple[str, ...]) -> None:
    done = run("solve", *line)
    done.assert_one_error(2, *words)
    assert len(done.err) < 1000


def test_a_list_with_thousands_of_digits_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="more than 9 digits"):
        parse_counts("1," + "9" * 5000, "--tp")


def test_a_plan_with_only_another_loss_names_no_parameter(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    row = ParameterRow(
        name="head.weight", shape=(2,), gradient_difference=0.0, gradient_norm=1.0, step=1, verdict="equal"
    )
    report = VerifyReport(
        ok=False,
        loss_difference=0.01,
        max_gradient_difference=0.0,
        worst_parameter="head.weight",
        rows=(row,),
        num_processes=1,
        plan_summary="pp 1",
        tolerance=1e-5,
    )
    monkeypatch.setattr("planner.runner.verify", lambda *arguments, **options: report)
    done = run("verify", "plan.py", "--json")
    assert done.code == 1
    assert "only the loss differs, by 1.0e-02 (at most 1e-05): every gradient is equal" in done.err
    assert "head.weight" not in done.err

"""plan.py as text: what it says, that it is the same every time, and that edits are not lost."""

import ast
import os
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from planner.arguments import BatchInt
from planner.emitter import emit, write_plan
from planner.emitter.layout import wrap_lines
from planner.errors import EmitError, FileFormatError, UsageError
from planner.model_profile import ModelProfile
from planner.plan import read_plan
from planner.profiler import profile_model
from tests.zoo.plans import even_plan

GOLDEN = Path(__file__).parent / "golden"
MODEL = Path(__file__).parent / "zoo" / "transformer.py"
GENERATED = "# This plan.\n"


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    return profile_model(str(MODEL), gpu="h100-sxm", dtype="float32", microbatch_sizes=(1, 2), tp_degrees=(1, 2))


@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        ("pp1", {}),
        ("pp2_tp2", {"pp_degree": 2, "tp_degree": 2}),
        ("pp2_recompute", {"pp_degree": 2, "recompute": True}),
    ],
)
def test_generated_code_is_the_reviewed_one(profile: ModelProfile, name: str, degrees: dict[str, int]) -> None:
    """`python -m tests.test_emitter` writes the golden files anew, to be reviewed as a diff."""
    source = emit(even_plan(profile, **degrees), profile)  # type: ignore[arg-type]
    generated = source.partition(GENERATED)[2].rpartition("\n# plan hash")[0]
    assert generated == (GOLDEN / f"{name}.py").read_text()


def test_the_same_plan_gives_the_same_bytes_and_reads_back(profile: ModelProfile, folder: Path) -> None:
    plan = even_plan(profile, pp_degree=2)
    source = emit(plan, profile)
    assert source == emit(plan, profile)
    write_plan(source, Path("plan.py"))
    assert read_plan(Path("plan.py")) == plan


def test_the_plan_is_read_without_being_run(folder: Path) -> None:
    Path("plan.py").write_text("raise SystemExit('it was run')\nPLAN = {'plan_version': 1}\n")
    with pytest.raises(FileFormatError, match="are missing"):
        read_plan(Path("plan.py"))


def test_edits_are_not_overwritten_without_force(profile: ModelProfile, folder: Path) -> None:
    source = emit(even_plan(profile), profile)
    path = Path("plan.py")
    write_plan(source, path)
    write_plan(source, path)  # untouched: it may be replaced
    edited = path.read_text().replace("head = self.head", "head = 2 * self.head")
    path.write_text(edited)
    with pytest.raises(UsageError) as caught:
        write_plan(source, path)
    assert "edited by hand" in caught.value.message
    assert "--force" in caught.value.hint
    assert path.read_text() == edited
    write_plan(source, path, force=True)
    assert path.read_text() == source
    path.write_text("x = 1\n")
    with pytest.raises(UsageError, match="no file that planner wrote"):
        write_plan(source, path)


def test_a_plan_for_another_profile_is_refused(profile: ModelProfile) -> None:
    plan = even_plan(profile, pp_degree=2)
    fewer = profile.replace(layers=profile.layers[:-1], edges=())
    with pytest.raises(EmitError) as caught:
        emit(plan, fewer)
    assert "its stages have 'head', which is none of its 5 layers" in caught.value.message


def test_inputs_whose_rows_are_two_dimensions_are_refused(profile: ModelProfile) -> None:
    program = profile.program
    square = program.tensors["ids"].model_copy(update={"shape": (BatchInt(1), BatchInt(1))})
    other = profile.model_copy(
        update={"program": program.model_copy(update={"tensors": program.tensors | {"ids": square}})}
    )
    with pytest.raises(EmitError) as caught:
        emit(even_plan(profile), other)
    assert "'ids' grows with the batch along dimensions 0 and 1" in caught.value.message
    assert "num_microbatches=1" in caught.value.hint
    assert "class Stage0" in emit(even_plan(profile, num_microbatches=1), other)


def test_inputs_say_where_their_rows_are(profile: ModelProfile) -> None:
    program = profile.program
    turned = program.tensors["ids"].model_copy(update={"shape": (4, BatchInt(1))})
    other = profile.model_copy(
        update={
            "program": program.model_copy(update={"tensors": program.tensors | {"ids": turned}}),
            "target_dims": (1, None),
        }
    )
    text = emit(even_plan(profile), other)
    assert 'Value("ids", shape=(4, 2), batch_dim=1)' in text
    assert "TARGET_DIMS = (1, None)" in text


def test_the_code_needs_torch_alone(profile: ModelProfile) -> None:
    """Of the imports of plan.py, every one is torch's or the standard library's."""
    tree = ast.parse(emit(even_plan(profile, tp_degree=2), profile))
    roots = {
        alias.name.partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }
    roots |= {str(node.module).partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert roots <= {"torch", *sys.stdlib_module_names}


def test_a_training_script_runs_where_planner_networkx_and_ortools_are_not_installed(
    profile: ModelProfile, folder: Path
) -> None:
    write_plan(emit(even_plan(profile, num_microbatches=2), profile), Path("plan.py"))
    code = MODEL.parent.joinpath("models.py").read_text().partition("def model_file")[0]
    Path("small_models.py").write_text(code.replace("from planner.model_file import ModelFile\n", ""))
    Path("train.py").write_text(TRAINING_SCRIPT)
    absent = ("planner", "networkx", "ortools", "pydantic", "typer", "rich", "_planner", "__editable__")
    Path("site").mkdir()
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():  # what is installed, without those
        if not entry.name.startswith(absent):
            Path("site", entry.name).symlink_to(entry)
    variables = {"PYTHONPATH": "site", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    with socket.socket() as port:  # free until the script binds it
        port.bind(("127.0.0.1", 0))
        variables["MASTER_PORT"] = str(port.getsockname()[1])
    command = [sys.executable, "-S", "train.py"]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "fell", done.stderr[-2000:]


TRAINING_SCRIPT = """
import importlib.util, torch, plan
from small_models import Transformer
from torch.nn import functional as F

assert not [name for name in ("planner", "networkx", "ortools") if importlib.util.find_spec(name)]
torch.manual_seed(0)
runtime = plan.setup(Transformer, lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten()))
optimizer = torch.optim.AdamW(runtime.parameters(), lr=1e-2, foreach=True)
ids = torch.randint(0, 32, (4, 4))
losses = []
for _ in range(5):
    losses.append(float(runtime.step(ids, ids)))
    runtime.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
print("fell" if losses[-1] < losses[0] else losses)
runtime.close()
"""


def test_long_lines_are_broken_like_a_formatter_does() -> None:
    long = "x = function(" + ", ".join(f"argument_{index}=(1, 2)" for index in range(8)) + ")"
    assert list(wrap_lines([long]))[:2] == ["x = function(", "    argument_0=(1, 2),"]
    assert list(wrap_lines(["short = f(1)"])) == ["short = f(1)"]
    comprehension = f'x = {{f"{"a" * 90}.{{index}}": function for index in range(1, 4)}}'
    assert ast.dump(ast.parse("\n".join(wrap_lines([comprehension])))) == ast.dump(ast.parse(comprehension))
    assert ast.dump(ast.parse("\n".join(wrap_lines([long])))) == ast.dump(ast.parse(long))


def write_golden() -> None:
    found = profile_model(str(MODEL), gpu="h100-sxm", dtype="float32", microbatch_sizes=(1, 2), tp_degrees=(1, 2))
    mark = next(m for m in test_generated_code_is_the_reviewed_one.pytestmark if m.name == "parametrize")  # type: ignore[attr-defined]
    GOLDEN.mkdir(exist_ok=True)
    for name, degrees in mark.args[1]:
        generated = emit(even_plan(found, **degrees), found).partition(GENERATED)[2].rpartition("\n# plan hash")[0]
        (GOLDEN / f"{name}.py").write_text(generated)


if __name__ == "__main__":
    write_golden()

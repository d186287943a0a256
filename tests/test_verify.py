"""`verify`: a right plan passes, every kind of wrong plan is told, and what a machine can't run is a clear error.

The plan here is a hand-written stand-in with the public interface of an emitted one: data-parallel replicas, each a
whole copy of the model, with one deliberate fault where a test asks for one.
"""

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from planner.errors import CaptureError, FileFormatError, PlannerError, UsageError, VerifyError
from planner.plan import Origin, Plan, Stage, greatest_common_rows, read_plan
from planner.report.verify import verify_table
from planner.runner import VerifyReport, verify
from planner.runner.batches import _leave_out
from planner.runner.pool import WorkerPool
from planner.runner.subject import available_bytes, choose_subject, find_model, memory_bytes, plan_summary
from planner.shrink import Shrink

MODEL = """
import torch
from torch import nn
import torch.nn.functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.out = nn.Linear(8, 8)
        nn.init.zeros_(self.out.weight)      # hides the gradients before it, unless weights are perturbed
        self.attention_dropout = 0.5
        self.dropout = nn.Dropout(0.5)

    def forward(self, x, mask):
        h = self.norm(x.float()).to(x.dtype)  # the cast would lose 9 digits
        scores = self.query(h) @ self.key(h).transpose(1, 2) + (1.0 - mask[:, None, :].to(h.dtype)) * -1e4
        weights = F.dropout(scores.softmax(-1), self.attention_dropout, self.training)
        return x + self.dropout(self.out(weights @ self.value(h)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids, attention_mask=None):
        x = F.dropout(self.embedding(input_ids), 0.3, self.training) * self.frozen  # a literal, as emitted code has
        for block in self.blocks:
            x = block(x, attention_mask)
        return self.head(x)

def build_model():
    return Model()

def example_inputs(batch_size):
    ids = torch.randint(0, 11, (batch_size, 6))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

def example_target(batch_size):
    return torch.arange(batch_size * 6).reshape(batch_size, 6) % 11

def loss_fn(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())
"""

PLAN_CODE = """
import os, sys, time
import torch
import torch.distributed as dist

FAULT = {fault!r}
PLAN = {plan!r}

class PlanError(RuntimeError):
    pass

class Runtime:
    def __init__(self, model, loss_fn):
        self.model, self.loss_fn, self.steps = model, loss_fn, 0

    def parameters(self):
        return self.model.parameters()

    def zero_grad(self):
        self.model.zero_grad()

    def step(self, inputs, target):
        self.steps += 1
        rank, ranks = dist.get_rank(), dist.get_world_size()
        if FAULT == "mask ignored":
            inputs = dict(inputs, attention_mask=torch.ones_like(inputs["attention_mask"]))
        if FAULT == "dies" and rank == 1:
            os._exit(3)
        if FAULT == "raises" and rank == 1:
            raise RuntimeError("rank one's own words")
        if FAULT == "refuses":
            raise PlanError(f"input 'x' is wrong\\nhint: give another")
        if FAULT == "hangs" and rank == 1:
            time.sleep(1000)
        size, count = PLAN["stages"][0]["microbatch_size"], PLAN["num_microbatches"]
        total = torch.zeros((), dtype=torch.float64)
        for index in range(count):
            start = (index * ranks + rank) * size
            rows = {{name: value[start:start + size] for name, value in inputs.items()}}
            loss = self.loss_fn(self.model(**rows), target[start:start + size]) / count
            loss.backward()
            total += loss.detach()
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= ranks
        dist.all_reduce(total)
        if FAULT == "loss":
            total += 0.01
        if FAULT == "second step" and self.steps == 2:
            self.model.blocks[1].value.weight.grad[0] *= 1.001
        if FAULT == "not a number":
            total *= float("nan")
            self.model.blocks[0].out.bias.grad *= float("nan")
        if FAULT == "scaled":
            self.model.blocks[0].out.bias.grad *= 1.0001
        if FAULT == "noise where zero":
            self.model.blocks[0].key.bias.grad += 1e-9
        if FAULT == "extra":
            self.model.unused.grad = torch.ones_like(self.model.unused)
        return total / ranks

    def full_parameters(self):
        return self._full(lambda parameter: parameter.detach())

    def full_gradients(self):
        gradients = self._full(lambda parameter: parameter.grad)
        if gradients is not None and FAULT == "missing":
            del gradients["blocks.1.norm.weight"]
        return gradients

    def full_buffers(self):
        return dict(self.model.named_buffers()) if dist.get_rank() == 0 else None

    def clip_grad_norm_(self, max_norm):
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        return 1.1 * norm if FAULT == "clip" else norm

    def _full(self, value):
        if dist.get_rank() != 0:
            return None
        found = {{name: value(parameter) for name, parameter in self.model.named_parameters()}}
        if FAULT == "unused left out":
            del found["unused"]
        return found

def setup(build_model, loss_fn=None, *, device=None, precision=None):
    assert precision == "fp32" and device == "cpu"
    model = build_model()
    assert model.training
    if FAULT == "starts otherwise":
        with torch.no_grad():
            model.blocks[0].norm.bias += 1e-3
    if FAULT == "untied":
        model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())
    return Runtime(model, loss_fn)
"""

Folder = Callable[..., Path]


def model_hash_of(model_path: Path) -> str:
    from planner.model_file import load_model_file, model_hash

    return model_hash(load_model_file(str(model_path)).build())


def make_plan(model_hash: str, *, ranks: int = 2, precision: str = "fp32") -> Plan:
    return Plan(
        global_batch_size=4 * ranks,
        num_microbatches=2,
        schedule="1f1b",
        data_parallel="replicated",
        optimizer="adamw",
        precision=precision,
        stages=(Stage(layers=("all",), dp_degree=ranks, microbatch_size=2, gpus=tuple(range(ranks))),),
        origin=Origin(
            model_path="model.py",
            model_hash=model_hash,
            profile_path="profile.json",
            profile_hash="0",
            cluster="here",
            cluster_hash="0",
            torch_version="2.13.0",
            planner_version="0",
        ),
    )


def plan_source(plan: Plan, fault: str = "") -> str:
    return PLAN_CODE.format(fault=fault, plan=plan.model_dump(mode="json"))


@pytest.fixture(scope="module")
def model_hash(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "model.py"
    path.write_text(MODEL)
    return model_hash_of(path)


@pytest.fixture
def write(tmp_path: Path, model_hash: str) -> Folder:
    """Write a model and a plan with a fault; return the plan's path."""

    def write(fault: str = "", *, ranks: int = 2, precision: str = "fp32") -> Path:
        (tmp_path / "model.py").write_text(MODEL)
        path = tmp_path / "plan.py"
        path.write_text(plan_source(make_plan(model_hash, ranks=ranks, precision=precision), fault))
        return path

    return write


def shown(report: VerifyReport) -> str:
    from rich.console import Console

    console = Console(width=140, file=io.StringIO())
    console.print(verify_table(report))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("gpus", [(1, 0), (0, 7)])
def test_ranks_must_be_in_order_from_0(write: Folder, gpus: tuple[int, ...]) -> None:
    path = write()
    text = path.read_text()
    assert "'gpus': [0, 1]" in text
    path.write_text(text.replace("'gpus': [0, 1]", f"'gpus': {list(gpus)}"))
    with pytest.raises(VerifyError, match=r"not 0 to 1, ascending in each \(stage 0: \[") as told:
        verify(path, timeout_s=120)
    assert str(list(gpus)) in told.value.message


# Right and wrong plans ---------------------------------------------------------------------------------------------


def test_a_right_plan_is_equal_in_every_parameter(write: Folder, pool: WorkerPool) -> None:
    told: list[tuple[str, int, int]] = []
    report = verify(write(precision="bf16-mixed"), timeout_s=120, pool=pool, progress=lambda *step: told.append(step))
    assert report.ok
    assert report.loss_difference < 1e-14
    assert report.max_gradient_difference < 1e-6  # float64 throughout, although the model casts to float32
    assert {row.name for row in report.rows} == {
        "embedding.weight",
        "frozen",
        "unused",
        *(
            f"blocks.{block}.{module}.{kind}"
            for block in range(2)
            for module in ("norm", "query", "key", "value", "out")
            for kind in ("weight", "bias")
        ),
    }
    zero = {row.name for row in report.rows if row.gradient_norm < 1e-12}
    # softmax ignores what a key's bias adds; no other gradient is zero, though out.weight starts as zeros
    assert zero == {"blocks.0.key.bias", "blocks.1.key.bias", "frozen", "unused"}
    assert (report.num_processes, report.not_proved) == (2, ("dropout",))
    assert report.plan_summary == "pp 1 x tp 1 x dp 2 (replicated), 1f1b, 2 microbatches of 2 rows"
    assert any("bf16-mixed" in note for note in report.notes)
    assert told[0][:2] == ("the model", 0)
    assert told[-1] == ("done", 5, 5)
    assert report.notes.count("dropout was off: with it, losses differ by chance") == 1
    text = shown(report)
    assert f"equal to one process: all 23 parameters within 1e-05, the furthest {report.worst_parameter}" in text
    assert text.count("dropout was off") == text.count("not proved: dropout") == 1


def test_a_parameter_that_nothing_reads_may_be_missing(write: Folder, pool: WorkerPool) -> None:
    report = verify(write("unused left out"), timeout_s=120, pool=pool)
    assert report.ok
    assert {row.name: row.verdict for row in report.rows if row.verdict != "equal"} == {
        "frozen": "no gradient",
        "unused": "unused",
    }
    assert report.worst_parameter != "unused"
    assert "1 parameter that nothing reads, not in the plan: 'unused'" in report.notes
    assert "all 23 parameters" in shown(report)


def with_model(path: Path, *changes: tuple[str, str]) -> Path:
    """Write the model beside a plan with changes to its text."""
    text = MODEL
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (path.parent / "model.py").write_text(text)
    return path


OFF = (("Dropout(0.5)", "Dropout(0.0)"), ("attention_dropout = 0.5", "attention_dropout = 0.0"))
LITERAL = ("input_ids), 0.3,", "input_ids), 0.0,")


def test_dropout_is_told_only_where_there_is_some(write: Folder, pool: WorkerPool) -> None:
    report = verify(with_model(write(), *OFF, LITERAL), timeout_s=120, pool=pool)
    assert report.ok
    assert report.not_proved == ()
    assert report.notes == ("2 parameters without gradient, as in one process: 'frozen' and others",)
    literal_only = verify(with_model(write(), *OFF), timeout_s=120, pool=pool)
    assert literal_only.not_proved == ("dropout",)
    never = ("0.3, self.training", "0.3, False")
    assert verify(with_model(write(), *OFF, never), timeout_s=120, pool=pool).not_proved == ()


def test_gradients_beyond_all_training_are_told(write: Folder, pool: WorkerPool) -> None:
    path = with_model(write(), ("target.flatten())", "target.flatten()) * 1e36"))
    with pytest.raises(
        VerifyError, match=r"the gradient of 'embedding.weight' in one process has norm .*e\+3\d, above"
    ):
        verify(path, timeout_s=120, pool=pool)


def test_a_difference_that_is_no_number_is_a_verdict(write: Folder, pool: WorkerPool) -> None:
    report = verify(write("not a number"), timeout_s=120, pool=pool)
    assert not report.ok
    assert "blocks.0.out.bias" in {row.name for row in report.rows if row.verdict == "not finite"}
    assert report.loss_difference == 1e30


def test_buffers_that_every_replica_updates_alone_are_told_as_the_reason(write: Folder, pool: WorkerPool) -> None:
    buffer = "nn.Linear(8, 11, bias=False)\n        self.register_buffer('mean', torch.ones(8))"
    update = "self.mean.mul_(0.5).add_(x.detach().mean((0, 1))); return self.head(x * self.mean)"
    path = with_model(write(), ("nn.Linear(8, 11, bias=False)", buffer), ("return self.head(x)", update), *OFF, LITERAL)
    plan = make_plan(model_hash_of(path.parent / "model.py"))
    path.write_text(plan_source(plan))
    report = verify(path, timeout_s=120, pool=pool)
    assert not report.ok
    assert any(
        "reads buffers that it updates ('mean')" in text and "--pin dp_degree=1" in text for text in report.notes
    )
    path.write_text(plan_source(make_plan(plan.origin.model_hash, ranks=1)))
    report = verify(path, timeout_s=120, pool=pool)
    assert report.ok  # one microbatch after another, as in one process
    assert any("wrote before into 'mean'" in text for text in report.notes)


def test_a_loss_that_sums_over_rows_is_refused(write: Folder, pool: WorkerPool) -> None:
    path = with_model(write(), ("target.flatten())", "target.flatten(), reduction='sum')"))
    with pytest.raises(VerifyError, match=r"loss_fn sums over rows: .* is 4 times the mean over its microbatches of 2"):
        verify(path, timeout_s=120, pool=pool)


def test_a_plan_that_does_not_add_up_to_the_whole_batch_is_told(write: Folder, pool: WorkerPool) -> None:
    path = with_model(write(), ("target.flatten())", "target.flatten(), ignore_index=4)"), *OFF, LITERAL)
    text = (path.parent / "model.py").read_text()
    uneven = "torch.arange(batch_size * 6).clamp(max=batch_size * 2).reshape(batch_size, 6) % 5"
    (path.parent / "model.py").write_text(
        text.replace("torch.arange(batch_size * 6).reshape(batch_size, 6) % 11", uneven)
    )
    report = verify(path, timeout_s=120, pool=pool)
    assert not report.ok  # the plan takes each microbatch's mean for as much, and they count differently
    assert all(row.is_equal for row in report.rows)
    assert report.whole_batch_difference is not None
    assert report.whole_batch_difference > 1e-3
    assert "NOT equal to one process on the whole batch" in shown(report)


@pytest.mark.parametrize(
    ("fault", "parameter", "verdict"),
    [
        ("scaled", "blocks.0.out.bias", "differs"),
        ("second step", "blocks.1.value.weight", "differs"),
        ("missing", "blocks.1.norm.weight", "missing"),
        ("extra", "unused", "unexpected"),
        ("noise where zero", "blocks.0.key.bias", "differs"),
        ("starts otherwise", "blocks.0.norm.bias", "starts otherwise"),
        ("untied", "head.weight", "unexpected"),
        ("mask ignored", None, "differs"),
    ],
)
def test_a_wrong_plan_is_told_with_its_parameter(
    write: Folder, pool: WorkerPool, fault: str, parameter: str | None, verdict: str
) -> None:
    report = verify(write(fault), timeout_s=120, pool=pool)
    assert not report.ok
    wrong = {row.name: row.verdict for row in report.rows if row.verdict != "equal"}
    assert wrong
    if parameter is not None:
        assert wrong[parameter] == verdict
    assert report.worst_parameter == report.rows[0].name in wrong
    assert report.max_gradient_difference > report.tolerance
    assert "NOT equal" in shown(report)


def test_a_wrong_loss_fails_though_every_gradient_is_right(write: Folder, pool: WorkerPool) -> None:
    report = verify(write("loss"), timeout_s=120, pool=pool)
    assert not report.ok
    assert report.loss_difference == pytest.approx(0.005 / 5.74, rel=0.01)  # relative to the loss
    assert all(row.is_equal for row in report.rows)


def test_a_wrong_norm_to_clip_by_fails(write: Folder, pool: WorkerPool) -> None:
    report = verify(write("clip"), timeout_s=120, pool=pool)
    assert not report.ok
    assert report.clip_difference == pytest.approx(0.1)
    assert all(row.is_equal for row in report.rows)
    assert any(note.startswith("clip_grad_norm_ is off") for note in report.notes)


def test_large_losses_are_compared_relative_to_their_size(write: Folder, pool: WorkerPool) -> None:
    report = verify(with_model(write(), ("target.flatten())", "target.flatten()) * 1e12")), timeout_s=120, pool=pool)
    assert report.ok
    assert report.loss_difference < 1e-14


@pytest.mark.parametrize("seeds", ["(1201,)", "(1201, 1202, 1203)"])
def test_other_weights_are_tried_where_all_gradients_are_zero(write: Folder, pool: WorkerPool, seeds: str) -> None:
    path = with_model(
        write(),
        ("    return Model()", "    global SEED\n    SEED = torch.initial_seed()\n    return Model()"),
        ("target.flatten())", f"target.flatten()) * (SEED not in {seeds})"),
    )
    if seeds != "(1201,)":
        with pytest.raises(VerifyError, match="with weights of 3 seeds: there is nothing to compare"):
            verify(path, timeout_s=120, pool=pool)
        return
    report = verify(path, timeout_s=120, pool=pool)
    assert report.ok
    assert any(note.startswith("with weights of 1 seed every gradient") for note in report.notes)


# Ranks that fail ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "timeout_s", "message"),
    [
        ("dies", 120, "rank 1 ended with exit code 3"),
        ("raises", 120, "rank 1 raised RuntimeError: rank one's own words"),
        ("hangs", 8, r"(?s)rank 1 did not answer within .*last seen in.*plan.py.*in step"),
    ],
)
def test_a_rank_that_fails_is_told(write: Folder, pool: WorkerPool, fault: str, timeout_s: float, message: str) -> None:
    with pytest.raises(VerifyError, match=message) as caught:
        verify(write(fault), timeout_s=timeout_s, pool=pool)
    assert caught.value.hint
    if fault == "hangs":
        assert len(caught.value.message.splitlines()) <= 3
        assert "runner/exactness.py" not in caught.value.message


def test_a_plan_that_refuses_is_told_in_its_own_words(write: Folder, pool: WorkerPool) -> None:
    error = failure(write("refuses"), pool)
    assert isinstance(error, VerifyError)
    assert (error.message, error.hint) == ("input 'x' is wrong", "give another")


# What can't be run -------------------------------------------------------------------------------------------------


def failure(path: Path, pool: WorkerPool, **options: str) -> PlannerError:
    with pytest.raises(PlannerError) as caught:
        verify(path, timeout_s=120, pool=pool, **options)  # type: ignore[arg-type]
    assert caught.value.hint
    return caught.value


def test_a_plan_file_is_read_as_data(write: Folder, pool: WorkerPool, tmp_path: Path) -> None:
    assert isinstance(failure(tmp_path / "gone.py", pool), UsageError)
    path = write()
    for text, words in (
        ("x = 1", "no PLAN"),
        ("PLAN = dict(a=1)", "not a literal"),
        ("PLAN = {", "not Python"),
        ("PLAN = {'plan_version': 99}", "plan_version 99 is newer than 1"),
        ("PLAN = {'schedul': '1f1b'}", "'schedul'"),
        ("import os; os._exit(1)\n" + path.read_text().replace("'1f1b'", "'2f2b'"), "schedule"),
    ):
        path.write_text(text)
        error = failure(path, pool)
        assert isinstance(error, FileFormatError)
        assert words in error.message
        assert "plan.py" in error.message


def test_the_model_must_be_there_and_the_same(write: Folder, pool: WorkerPool, tmp_path: Path) -> None:
    path = write()
    (tmp_path / "model.py").rename(tmp_path / "moved.py")
    error = failure(path, pool)
    assert isinstance(error, UsageError)
    assert "'model.py' of plan.py is gone" in error.message
    assert "--model" in error.hint
    assert f"looked in {Path.cwd()}, in {tmp_path}, and in every folder above that" in error.message
    assert verify(path, model=str(tmp_path / "moved.py"), timeout_s=120, pool=pool).ok
    (tmp_path / "moved.py").write_text(MODEL.replace("nn.Embedding(11", "nn.Embedding(12").replace("(8, 11", "(8, 12"))
    assert "has hash" in failure(path, pool, model=str(tmp_path / "moved.py")).message


def test_the_model_is_looked_for_upward_from_the_plan(tmp_path: Path, model_hash: str) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    plan, folder = make_plan(model_hash), tmp_path / "plans" / "here"
    folder.mkdir(parents=True)
    assert find_model(plan, folder / "plan.py", None) == f"{tmp_path / 'model.py'}:build_model"
    (folder / "model.py").write_text(MODEL)
    assert find_model(plan, folder / "plan.py", None) == f"{folder / 'model.py'}:build_model"


def test_a_model_that_fails_is_told_with_its_line(write: Folder, pool: WorkerPool, tmp_path: Path) -> None:
    path = write()
    line = MODEL.splitlines().index("    return Model()") + 1
    (tmp_path / "model.py").write_text(MODEL.replace("return Model()", "return Model(1 / 0)"))
    error = failure(path, pool)
    assert isinstance(error, CaptureError)
    assert (
        error.message
        == f"model.py line {line}, in build_model: build_model() raised ZeroDivisionError: division by zero"
    )
    (tmp_path / "model.py").write_text(MODEL.replace("return self.head(x)", "return self.head(x) * torch.rand(())"))
    report = verify(path, timeout_s=120, pool=pool)
    assert report.ok
    assert "random numbers were matched" in str(report.notes)


# Too large for the machine -----------------------------------------------------------------------------------------


def test_too_many_processes_need_a_twin(write: Folder, pool: WorkerPool, model_hash: str) -> None:
    path = write(ranks=16)
    error = failure(path, pool)
    assert "needs 16 processes, and at most 8 are run" in error.message
    asked: list[int] = []

    def make_twin(plan: Plan, num_processes: int, shrink: Shrink | None) -> tuple[str, tuple[str, ...]]:
        asked.append(num_processes)
        return plan_source(make_plan(model_hash, ranks=2)), ("dp_degree 16 as 2",)

    report = verify(path, timeout_s=120, pool=pool, make_twin=make_twin)
    assert report.ok
    assert asked == [8]
    assert report.num_processes == 2
    assert report.not_proved == (
        "the plan needs 16 processes, and at most 8 are run here: a twin was run",
        "dp_degree 16 as 2",
        "dropout",
    )


def test_too_little_memory_halves_the_twin_until_it_fits(tmp_path: Path, model_hash: str) -> None:
    plan = make_plan(model_hash, ranks=16)
    asked: list[int] = []

    def make_twin(plan: Plan, num_processes: int, shrink: Shrink | None) -> tuple[str, tuple[str, ...]]:
        asked.append(num_processes)
        return plan_source(make_plan(model_hash, ranks=num_processes)), ("less",)

    free = memory_bytes(make_plan(model_hash, ranks=2), 10**6)
    subject = choose_subject(plan, tmp_path / "plan.py", lambda shrink: 10**6, free, make_twin, tmp_path)
    assert asked == [4, 2], "eight processes can't fit whatever the twin"
    assert subject.plan.num_gpus == 2
    with pytest.raises(VerifyError, match="no smaller plan of the same kind fits") as caught:
        choose_subject(plan, tmp_path / "plan.py", lambda shrink: 10**7, free, make_twin, tmp_path)
    assert "are free" in caught.value.message
    assert (
        choose_subject(plan.replace(), tmp_path / "p", lambda shrink: 1, None, make_twin, tmp_path).plan.num_gpus == 8
    )


def test_a_model_too_large_for_memory_is_shrunk(tmp_path: Path, model_hash: str) -> None:
    plan = make_plan(model_hash, ranks=2)
    asked: list[Shrink | None] = []

    def make_twin(plan: Plan, num_processes: int, shrink: Shrink | None) -> tuple[str, tuple[str, ...]]:
        asked.append(shrink)
        return plan_source(make_plan(model_hash, ranks=num_processes)), ("widths",)

    def count(shrink: Shrink | None) -> int:
        return 10**9 if shrink is None or not shrink.narrow else 10**6

    subject = choose_subject(plan, tmp_path / "plan.py", count, 10**9, make_twin, tmp_path)
    assert [shrink.narrow for shrink in asked if shrink] == [True]
    assert subject.shrink == asked[-1]


def test_available_memory_is_told_where_the_system_says() -> None:
    found = available_bytes()
    assert found is None or found > 0


def test_the_one_process_takes_the_rows_that_no_stage_splits(model_hash: str) -> None:
    assert greatest_common_rows(make_plan(model_hash)) == 2


def test_one_of_a_thing_is_told_in_the_singular(model_hash: str) -> None:
    plan = make_plan(model_hash, ranks=1)
    one = plan.replace(global_batch_size=2, num_microbatches=1)
    assert plan_summary(one) == "pp 1 x tp 1 x dp 1, 1f1b, 1 microbatch of 2 rows"


def test_reading_a_plan_gives_what_was_written(write: Folder, model_hash: str) -> None:
    assert read_plan(write()) == make_plan(model_hash)


def test_labels_that_are_left_out_leave_one_of_every_row() -> None:
    generator = torch.Generator().manual_seed(0)
    for dim in (0, 1):
        labels = _leave_out(torch.ones(40, 40, dtype=torch.long)[:, :6].movedim(0, dim), -100, dim, generator)
        counted = (labels.movedim(dim, 0) != -100).sum(1)
        assert counted.min() >= 1
        assert len(set(counted.tolist())) > 3
    per_row = _leave_out(torch.ones(40, dtype=torch.long), -100, 0, generator)
    assert 0 < int((per_row == -100).sum()) < 40

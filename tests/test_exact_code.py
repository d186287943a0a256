"""Kinds of code people write in a forward: each is exact in every layout, or refused with the line that stops it."""

from pathlib import Path

import pytest
import torch

from planner.emitter import emit, write_plan
from planner.errors import CaptureError
from planner.model_profile import ModelProfile
from planner.profiler import profile_model
from planner.runner import verify
from planner.runner.pool import WorkerPool
from tests.zoo.plans import even_plan

ZOO = Path(__file__).parent / "zoo"
TENSOR = {"pp_degree": 2, "tp_degree": 2, "recompute": True}
DATA = {"pp_degree": 2, "dp_degree": 2}
EXACT = {
    "hidden:cache_object": (TENSOR, DATA),
    "hidden:stashed": (TENSOR, DATA),
    "hidden:leaf_stash": (TENSOR,),
    "hidden:lazy_table": (DATA,),
    "hidden:auxiliary_losses": (TENSOR, DATA),
    "hidden:function_in_block": (TENSOR, DATA),
    "hidden:function_in_leaf": (TENSOR,),
    "hidden:checkpointed_blocks": (TENSOR,),
    "hidden:reentrant_blocks": (TENSOR, DATA),
    "hidden:checkpointing_model": (DATA,),
    "hidden:reentrant_model": (TENSOR, DATA),
    "randomness:shared_noise": (TENSOR, DATA),
    "randomness:stochastic_depth": (TENSOR,),
    "randomness:shuffled": (DATA,),
    "randomness:spec_augment": (TENSOR, DATA),
    "randomness:numpy_blocks": (TENSOR, DATA),
    "noisy:denoiser": (DATA, {"pp_degree": 2, "num_microbatches": 8}),
    "recurrent:lstm": (DATA,),
    "recurrent:cells": (DATA,),
    "recurrent:state_between_blocks": (TENSOR,),
    "recurrent:hooked_norm": (DATA,),
    "control:mixture": (TENSOR, DATA),
    "control:sparse_mixture": (DATA, {"tp_degree": 2, "dp_degree": 2, "data_parallel": "sharded"}),
    "control:dense_mixture": (TENSOR,),
    "control:branch_in_block": (TENSOR, DATA),
    "control:unrolled": (TENSOR,),
    "control:encoder_decoder": (TENSOR,),
}


def profiled(model: str) -> ModelProfile:
    """Return the profile of 'file:model' of the zoo."""
    file, name = model.split(":")
    source = (ZOO / f"{file}.py").read_text()
    inputs = f"inputs_{name}" if f"def inputs_{name}(" in source else "inputs"
    return profile_model(
        f"{ZOO / file}.py:build_{name}",
        inputs=inputs,
        gpu="h100-sxm",
        dtype="float32",
        microbatch_sizes=(1, 2),
        tp_degrees=(1, 2),
    )


# The older weight_norm is deprecated, and in use.
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("model", EXACT)
def test_exact(model: str, pool: WorkerPool, tmp_path: Path) -> None:
    profile = profiled(model)
    for layout in EXACT[model]:
        path = tmp_path / f"{'_'.join(layout)}.py"
        write_plan(emit(even_plan(profile, **layout), profile), path)  # type: ignore[arg-type]
        report = verify(path, pool=pool, timeout_s=120)
        assert report.ok, (layout, report.rows[:3])


def test_what_keeps_values_elsewhere_is_opened() -> None:
    names = [layer.name for layer in profiled("hidden:stashed").layers]
    assert names[:4] == ["blocks.0.gate", "blocks.0.mlp", "blocks.1.gate", "blocks.1.mlp"]
    assert [layer.name for layer in profiled("hidden:function_in_block").layers] == [f"blocks.{i}" for i in range(4)]


def line_of(file: str, text: str) -> str:
    """Return 'path:line' of the line of a file of the zoo that holds a text."""
    path = ZOO / f"{file}.py"
    [number] = [index for index, line in enumerate(path.read_text().splitlines(), 1) if text in line]
    return f"{path}:{number}"


def test_a_function_of_ones_own_between_layers_is_refused_with_its_line() -> None:
    with pytest.raises(CaptureError) as caught:
        profiled("hidden:function_between")
    assert line_of("hidden", "x = Straight.apply(block(x))") in caught.value.message
    assert "custom autograd function" in caught.value.message
    assert "a module of its own" in caught.value.hint


def test_dropout_is_reproducible_whole_on_whole_values_and_apart_on_divided_ones(
    pool: WorkerPool, tmp_path: Path
) -> None:
    profile = profiled("randomness:dropout")
    paths = [tmp_path / "once.py", tmp_path / "again.py", tmp_path / "recomputed.py"]
    for path in paths:
        plan = even_plan(profile, tp_degree=2, dp_degree=2, recompute=path.stem == "recomputed", num_microbatches=4)
        write_plan(emit(plan, profile), path)
    ranks = pool.run("tests.zoo.dropout_job:train", paths, 7, num_processes=4, timeout_s=120)
    once, again, recomputed = ranks[0]
    assert once["loss"] == again["loss"] == recomputed["loss"]
    assert once["gradients"].keys() == recomputed["gradients"].keys()
    for name, gradient in once["gradients"].items():
        assert torch.equal(gradient, again["gradients"][name])
        assert torch.equal(gradient, recomputed["gradients"][name]), "what is computed again draws the same"
    first = [rank[0] for rank in ranks]  # ranks 0 and 1 share activations, 2 and 3 are the other replica
    assert first[0]["outer"] == first[1]["outer"], "a whole value has one mask"
    assert first[2]["outer"] == first[3]["outer"]
    assert first[0]["outer"] != first[2]["outer"], "replicas draw apart"
    masks = [mask for rank in first for mask in rank["inner"]]
    assert len({tuple(mask) for mask in masks}) == len(masks) == 16, "each rank drops other parts, in every microbatch"
    [other] = pool.run("tests.zoo.dropout_job:train", paths[:1], 8, num_processes=4, timeout_s=120)[0]
    assert other["loss"] != once["loss"]


def test_a_function_that_draws_with_numpy_is_called_by_the_plan() -> None:
    text = emit(even_plan(profiled("randomness:spec_augment"), pp_degree=2), profiled("randomness:spec_augment"))
    assert 'spans = self.draw_numbers(":spans", (batch, 4), fraction=0.5)' in text
    assert "spans.to(dtype=torch.bool, device=self.device, copy=True)" in text or "device=self.device" in text


def test_only_modules_that_draw_are_seeded() -> None:
    assert profiled("randomness:numpy_blocks").drawing_outside == tuple(f"blocks.{i}" for i in range(4))
    whole = profiled("control:mixture")
    assert whole.called_whole
    assert not whole.drawing_outside


def test_drawn_numbers_that_other_code_looks_at_are_refused_with_the_line() -> None:
    with pytest.raises(CaptureError, match="random numbers of Python or numpy were drawn") as caught:
        profiled("randomness:spans_used_otherwise")
    assert caught.value.message.startswith(line_of("randomness", "# inverted"))


def test_verify_tells_what_it_did_with_random_numbers(pool: WorkerPool, tmp_path: Path) -> None:
    profile = profiled("randomness:shared_noise")
    assert "noise" not in profile.input_only_values, "made anew on every stage it would be other noise on each"
    write_plan(emit(even_plan(profile, pp_degree=2), profile), tmp_path / "plan.py")
    report = verify(tmp_path / "plan.py", pool=pool, timeout_s=120)
    assert report.ok
    assert any("random numbers were matched" in note for note in report.notes)
    assert "random numbers that differ from draw to draw" in report.not_proved


def test_attention_that_drops_nothing_draws_nothing() -> None:
    profile = profiled("control:encoder_decoder")
    drawn = {
        node.target
        for item in profile.layer_classes
        for node in (item.body.nodes if item.body else ())
        if node.random and node.kind == "function"
    }
    assert not drawn, "its dropouts are modules, and it has none in attention"
    assert any(item.draws_apart for layer in profile.layer_classes for item in layer.shardings)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("control:early_exit", "__bool__"),
        ("control:any_in_mask", "__bool__"),
        ("control:until_small", "__bool__"),
        ("control:tensor_index", "__int__"),
        ("control:to_numpy", "numpy"),
        ("control:selected", "__getitem__"),
        ("recurrent:packed", "_pack_padded_sequence"),
    ],
)
def test_code_that_looks_at_values_between_layers_is_refused_with_its_line(model: str, name: str) -> None:
    with pytest.raises(CaptureError) as caught:
        profiled(model)
    file, _, kind = model.partition(":")
    mark = "packed = pack" if kind == "packed" else f"# {kind.title().replace('_', '')}"
    where = line_of(file, mark)
    shown = Path(where.rpartition(":")[0]).read_text().splitlines()[int(where.rpartition(":")[2]) - 1].strip()
    assert caught.value.message.startswith(f"{where}: `{name}` in the model reads the value of a tensor")
    assert caught.value.message.endswith(shown)
    assert "a module that returns the same shapes" in caught.value.hint


def test_a_module_that_looks_at_values_is_called_whole_and_told() -> None:
    profile = profiled("control:mixture")
    assert [layer.name for layer in profile.layers] == ["first", *(f"blocks.{i}" for i in range(4)), "head"]
    [note] = [note for note in profile.notes if "called whole" in note]
    assert note.startswith("blocks.0.experts and 3 more: called whole")
    assert line_of("control", "rows, slot = torch.where(index == number)") in note
    [block] = [item for item in profile.layer_classes if item.module_class == "ExpertBlock"][:1]
    assert all(cost.forward_flops > 0 and cost.forward_time_s > 0 for cost in block.costs)


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        ("return x[x > 0]", "another shape for other data"),
        ("self.kept.append(int(x.sum())); return x * len(self.kept)", ""),
        ("x.add_(1); return x if x.sum() > 0 else -x", "writes into its arguments"),
        ("return x * torch.tensor([1.0]).cuda() if x.sum() > 0 else x", "run by itself it raises"),
    ],
)
def test_what_cannot_be_called_whole_is_refused_with_the_reason(forward: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Odd(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.kept = []\n"
        f"    def forward(self, x):\n        {forward}\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.first, self.odd, self.last = nn.Linear(8, 8), Odd(), nn.Linear(8, 8)\n"
        "    def forward(self, x):\n        x = self.odd(self.first(x))\n"
        "        return self.last(x) * (self.odd.kept[0] if self.odd.kept else 1)\n"
        "def build_model():\n    return Model()\n"
        "def example_inputs(batch_size):\n    return (torch.randn(batch_size, 8),)\n"
    )
    with pytest.raises(CaptureError) as caught:
        profile_model(str(tmp_path / "model.py"), gpu="h100-sxm", dtype="float32", microbatch_sizes=(1,))
    assert f"{tmp_path / 'model.py'}:" in caught.value.message
    assert reason in caught.value.message


@pytest.mark.parametrize(
    ("model", "mark", "attribute"),
    [("memory", "x = x + self.memory", "memory"), ("constant_memory", "# ConstantMemory", "memory"),
     ("counted", "# Counted", "steps")],
)  # fmt: skip
def test_what_one_forward_leaves_for_the_next_is_refused(model: str, mark: str, attribute: str) -> None:
    with pytest.raises(CaptureError) as caught:
        profiled(f"hidden:{model}")
    assert line_of("hidden", mark) in caught.value.message
    assert f"kept from one forward for the next outside of buffers ({attribute})" in caught.value.message
    assert "as a buffer" in caught.value.hint


PRELUDE = """
import random
import torch
from torch import nn

class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        {part}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(2))

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        {model}

def build_model():
    return Model()

def example_inputs(batch_size):
    return (torch.randn(batch_size, 8),)
"""


def written(tmp_path: Path, *, part: str = "return self.linear(x)", model: str = "return x") -> str:
    """Return the path of a model file with these bodies of the forward of its blocks and of its own."""
    (tmp_path / "model.py").write_text(PRELUDE.format(part=part, model=model))
    return str(tmp_path / "model.py")


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("return self.linear(x) * random.random()", "random numbers of Python or numpy"),
        ("return self.linear(x) * torch.from_numpy(__import__('numpy').ones(8, 'float32'))", "aten.lift_fresh"),
        ("return torch.vmap(lambda row: row * row.sum())(self.linear(x))", "fake tensors can't go through"),
        ("y = self.linear(x); return y - torch.autograd.grad(y.sum(), y, create_graph=True)[0]", "may not call 'grad'"),
    ],
)
def test_a_statement_that_no_program_holds_keeps_its_block_whole(statement: str, reason: str, tmp_path: Path) -> None:
    spec = written(tmp_path, part=statement)
    profile = profile_model(spec, gpu="h100-sxm", dtype="float32", microbatch_sizes=(1,), tp_degrees=(1,))
    notes = [note for note in profile.notes if "called whole" in note]
    assert [layer.name for layer in profile.layers] == ["parts.0", "parts.1"]
    assert len(notes) == 1
    assert reason in notes[0]
    assert f"{spec}:12" in notes[0]


@pytest.mark.parametrize(
    ("statement", "reason", "hint"),
    [
        ("return x * random.random()", "random numbers of Python or numpy", "torch.rand"),
        ("return x + torch.zeros(8, device='cuda')", "raised in forward", "device=x.device"),
        ("return x - torch.autograd.grad(x.sum(), self.parts[0].linear.bias)[0]", "may not call 'grad'", "its own"),
    ],
)
def test_such_a_statement_between_layers_is_refused(statement: str, reason: str, hint: str, tmp_path: Path) -> None:
    spec = written(tmp_path, model=statement)
    with pytest.raises(CaptureError) as caught:
        profile_model(spec, gpu="h100-sxm", dtype="float32", microbatch_sizes=(1,), tp_degrees=(1,))
    assert f"{spec}:22" in caught.value.message
    assert reason in caught.value.message
    assert hint in caught.value.hint


def test_a_file_that_needs_a_gpu_when_imported_is_told_what_to_do(tmp_path: Path) -> None:
    spec = written(tmp_path)
    Path(spec).write_text(Path(spec).read_text() + "\nnetwork = Model().cuda()\n")
    with pytest.raises(CaptureError) as caught:
        profile_model(spec, gpu="h100-sxm", dtype="float32", microbatch_sizes=(1,))
    assert "model.py line 30, in <module>: importing it raised" in caught.value.message
    assert '__name__ == "__main__"' in caught.value.hint

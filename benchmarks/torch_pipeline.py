"""What `torch.distributed.pipelining.pipeline()` makes of a model file: gradients beside those of one process.

    python benchmarks/torch_pipeline.py MODEL.py NUM_STAGES

Runs GPipe on gloo processes in float64 (float32 where torch has no float64 kernel) with dropout off, on weights that
were perturbed, as someone would who knows torch's ways: it splits at even places among the model's blocks, or among all
its layers where they are fewer than the stages, and where torch refuses that, at places near them; a model whose later
stages read inputs gets them through the first stage. Prints one JSON object: the worst relative difference of a
gradient and how many parameters got none that have one in one process; or the error that stopped the even split.
"""

import itertools
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline
from torch.utils import _pytree as pytree  # transformers registers its outputs there, as torch.export asks

from planner.model_file import ModelFile, load_model_file, split_arguments
from planner.profiler.blocks import find_blocks
from planner.runner.double import build_exact

torch.set_num_threads(1)  # ranks are forked, and threads of this process would be missing in them: they would hang
NUM_MICROBATCHES, ROWS = 4, 4
LIMIT_S = 120.0  # of the ranks' run: what takes longer hangs
MAX_SPLITS = 5  # places to split at that are tried
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Through(nn.Module):
    """The model, whose inputs are values of the first stage: torch gives later stages none of the model's own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model gives for copies of its inputs."""
        return self.model(*map(_copy, args), **{key: _copy(value) for key, value in kwargs.items()})


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def layers_of(model: nn.Module, given: Arguments) -> tuple[list[str], list[str]]:
    """Return where a model can be split, in the order of a forward: before which blocks, and before which layers.

    A layer is a block, or a module with parameters that holds none and stands in none.
    """
    blocks = find_blocks(model)
    called: list[str] = []

    def visit(module: nn.Module, name: str) -> None:
        holds = any(block.startswith(f"{name}." if name else "") for block in blocks)
        if name and (name in blocks or not holds) and any(True for _ in module.parameters()):
            handles.append(module.register_forward_pre_hook(lambda *_: called.append(name)))
            return
        for child_name, child in module.named_children():
            visit(child, f"{name}.{child_name}" if name else child_name)

    handles: list[Any] = []
    visit(model, "")
    with torch.no_grad():
        model(*given[0], **given[1])
    for handle in handles:
        handle.remove()
    once = [name for name, count in Counter(called).items() if count == 1]
    return [name for name in once if name in blocks], once


def splits(names: list[str], num_stages: int) -> Iterator[tuple[str, ...]]:
    """Yield the first layers of all stages but one: an even division, then those nearest to it."""
    even = [len(names) * index // num_stages for index in range(1, num_stages)]

    def distance(cuts: tuple[int, ...]) -> int:
        return sum(abs(cut - best) for cut, best in zip(cuts, even, strict=True))

    near = [range(max(1, cut - 2), min(len(names), cut + 3)) for cut in even]
    choices = [cuts for cuts in itertools.product(*near) if list(cuts) == sorted(set(cuts))]
    for cuts in sorted(choices, key=distance)[:MAX_SPLITS]:
        yield tuple(names[cut] for cut in cuts)


def inputs_of(file: ModelFile, rows: int, dtype: torch.dtype) -> Arguments:
    """Return inputs in a dtype, every tensor one of its own (labels may be the ids); what is no tensor stays."""

    def cast(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(dtype, copy=True) if value.is_floating_point() else value.clone()

    args, kwargs = split_arguments(file.example_inputs(rows))
    return tuple(map(cast, args)), {key: cast(value) for key, value in kwargs.items()}


def loss_of(file: ModelFile, output: Any, form: pytree.TreeSpec | None = None) -> torch.Tensor:
    """Return the file's loss of an output, or the output's own; the last stage gives the tensors of its `form`."""
    if form is not None:
        output = pytree.tree_unflatten(pytree.tree_leaves(output), form)
    if file.loss_fn is not None:
        return file.loss_fn(output)  # type: ignore[no-any-return]
    return output["loss"] if isinstance(output, dict) else output.loss  # type: ignore[no-any-return]


def one_process(file: ModelFile, model: nn.Module, given: Arguments) -> pytree.TreeSpec:
    """Leave the gradients of the mean loss over all microbatches on the model; returns the form of its output."""
    for index in range(NUM_MICROBATCHES):
        rows = slice(index * ROWS, (index + 1) * ROWS)

        def part(value: Any, rows: slice = rows) -> Any:
            return value[rows] if isinstance(value, torch.Tensor) else value

        output = model(*map(part, given[0]), **{key: part(value) for key, value in given[1].items()})
        (loss_of(file, output) / NUM_MICROBATCHES).backward()  # type: ignore[no-untyped-call]
    return pytree.tree_structure(output)


def run_rank(
    rank: int, file: ModelFile, pipe: Any, given: Arguments, form: pytree.TreeSpec, folder: str, num_stages: int
) -> None:
    """Run one stage, and write its gradients, or when it failed and why, to a file."""
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_stages)
        stage = pipe.build_stage(rank, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, NUM_MICROBATCHES, loss_fn=lambda output, _: loss_of(file, output, form))
        args, kwargs = given
        last = {"target": torch.zeros(NUM_MICROBATCHES * ROWS)} if rank == num_stages - 1 else {}
        taken = {node.name for node in stage.submod.graph.nodes if node.op == "placeholder"}
        mine = {key: value for key, value in kwargs.items() if key in taken}  # labels are for the last stage
        schedule.step(*(args if rank == 0 else ()), **mine, **last, return_outputs=False)  # a scalar can't be joined
        write({name: p.grad for name, p in stage.submod.named_parameters()}, Path(folder) / f"{rank}.pt")
    except BaseException as error:  # noqa: BLE001 - whatever ends a rank, SystemExit too, is what the table is to show
        write((time.monotonic(), first_line(error)), Path(folder) / f"{rank}.pt")
        os._exit(1)


def write(value: Any, path: Path) -> None:
    """Write a file that is whole once it is there: a rank is killed when another has failed."""
    torch.save(value, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)


def first_line(error: BaseException) -> str:
    """Return an error as one line."""
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    lines = [line for line in str(cause).strip().splitlines() if line.strip()]
    return f"{type(cause).__name__}: {lines[0] if lines else ''}"[:160]


def compare(model: nn.Module, found: dict[str, torch.Tensor | None]) -> dict[str, Any]:
    """Return the worst relative difference, over parameters that have a gradient in one process."""
    worst, missing = 0.0, 0
    for name, parameter in model.named_parameters():
        if parameter.grad is None or not bool(parameter.grad.any()):
            continue
        gradient = found.get(name)
        if gradient is None:
            missing += 1
            continue
        worst = max(worst, float((gradient - parameter.grad).norm() / parameter.grad.norm()))
    return {"difference": worst, "missing": missing}


def run_ranks(
    file: ModelFile, pipe: Any, given: Arguments, form: pytree.TreeSpec, num_stages: int
) -> dict[str, torch.Tensor | None] | str:
    """Return the gradients of all stages by name, or the error that stopped the first of them."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(  # type: ignore[no-untyped-call]
            run_rank, (file, pipe, given, form, folder, num_stages), num_stages, join=False, start_method="fork"
        )
        failure = ""
        try:
            until = time.monotonic() + LIMIT_S
            while not context.join(timeout=max(0.0, until - time.monotonic())):
                if time.monotonic() >= until:
                    failure = f"the ranks did not end within {LIMIT_S:.0f} s"
                    break
        except mp.ProcessRaisedException as error:
            failure = first_line(error)
        except mp.ProcessExitedException as error:  # the ranks have written why, unless a signal ended one
            failure = f"a rank died of {signal.Signals(-error.exit_code).name}" if error.exit_code < 0 else str(error)
        for process in context.processes:
            process.kill()
            process.join()
        results = [torch.load(path, weights_only=False) for path in sorted(Path(folder).glob("*.pt"))]
    # the others' lost connections come after what stopped one
    errors = sorted(
        (item for item in results if isinstance(item, tuple)), key=lambda item: ("onnection" in item[1], item)
    )
    if errors or failure:
        return str(errors[0][1]) if errors else failure
    return {name: gradient for gradients in results for name, gradient in gradients.items()}


def attempt(
    file: ModelFile, num_stages: int, names: tuple[str, ...], dtype: torch.dtype, *, through: bool
) -> dict[str, Any]:
    """Return the comparison for a model that is split before the modules `names`, or the error that stopped it."""
    prefix = "model." if through else ""
    model = build(file, dtype)
    spec = {f"{prefix}{name}": SplitPoint.BEGINNING for name in names}
    args, kwargs = inputs_of(file, ROWS, dtype)
    try:
        pipe = pipeline(Through(model) if through else model, args, kwargs, split_spec=spec)
    except Exception as error:  # noqa: BLE001 - export and the splitter raise errors of every class: rows of the table
        return {"error": first_line(error)}
    if pipe.num_stages != num_stages:
        return {"error": f"pipeline() made {pipe.num_stages} stages, not {num_stages}"}
    for index in range(num_stages):  # a stage's parameters are the model's own: it starts without gradients
        for parameter in pipe.get_stage_module(index).parameters():
            parameter.grad = None
    given = inputs_of(file, NUM_MICROBATCHES * ROWS, dtype)
    reference = build(file, dtype)
    form = one_process(file, reference, given)
    found = run_ranks(file, pipe, given, form, num_stages)
    if isinstance(found, str):
        return {"error": found}
    return compare(reference, {name.removeprefix(prefix): gradient for name, gradient in found.items()})


def build(file: ModelFile, dtype: torch.dtype) -> nn.Module:
    """Return the model as `verify` builds it, in a dtype."""
    return build_exact(file)[0].to(dtype)


def runs(call: Callable[[torch.dtype], Any]) -> torch.dtype:
    """Return float64, or float32 where torch has no kernel of the model's for float64."""
    try:
        call(torch.float64)
    except RuntimeError as error:
        if "Double" not in str(error) and "Float64" not in str(error):
            raise
        return torch.float32
    return torch.float64


def measure(spec: str, num_stages: int) -> dict[str, Any]:
    """Return the comparison, or the error that stopped it."""
    file = load_model_file(spec)
    torch.manual_seed(0)
    dtype = runs(lambda dtype: one_process(file, build(file, dtype), inputs_of(file, NUM_MICROBATCHES * ROWS, dtype)))
    blocks, layers = layers_of(build(file, dtype), inputs_of(file, ROWS, dtype))
    choices = [*splits(blocks, num_stages)] if len(blocks) >= num_stages else []
    choices += [cuts for cuts in splits(layers, num_stages) if cuts not in choices]
    if not choices:
        raise ValueError(f"{len(layers)} layers for {num_stages} stages")
    tried: list[dict[str, Any]] = []
    through = False
    for names in choices[:MAX_SPLITS]:
        tried.append(attempt(file, num_stages, names, dtype, through=through))
        if not through and "root arg" in tried[-1].get("error", ""):
            through = True
            tried.append(attempt(file, num_stages, names, dtype, through=True))
        if "error" not in tried[-1]:
            return tried[-1] | {"dtype": str(dtype).removeprefix("torch."), "tried": len(tried)}
    stopped = next((item for item in tried if "root arg" not in item["error"]), tried[0])
    return stopped | {"tried": len(tried)}


if __name__ == "__main__":
    real = sys.stdout
    sys.stdout = sys.stderr  # the exporter prints
    try:
        answer = measure(sys.argv[1], int(sys.argv[2]))
    except Exception as error:  # noqa: BLE001 - the table shows whatever stopped it, and the traceback says where
        traceback.print_exc()
        answer = {"error": first_line(error)}
    print(json.dumps(answer), file=real)

"""What `torch.distributed.pipelining.pipeline()` makes of a model file: gradients beside those of one process.

    python benchmarks/torch_pipeline.py MODEL.py NUM_STAGES

Splits at even places among the model's repeated blocks, runs GPipe on gloo processes in float64 with dropout off, on
weights that were perturbed, and prints one JSON object: the worst relative difference of a gradient and how many
parameters got none that have one in one process; or the error that stopped it.
"""

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

from planner.model_file import ModelFile, load_model_file, split_arguments
from planner.profiler.blocks import find_blocks
from planner.runner.double import build_exact

NUM_MICROBATCHES, ROWS = 4, 4


def splits(model: nn.Module, num_stages: int) -> dict[str, SplitPoint]:
    """Return where to split: before the blocks that divide all blocks evenly, in the model's own order."""
    blocks = find_blocks(model)
    ordered = [name for name, _ in model.named_modules() if name in blocks]
    if len(ordered) < num_stages:
        raise ValueError(f"{len(ordered)} blocks for {num_stages} stages")
    return {ordered[len(ordered) * index // num_stages]: SplitPoint.BEGINNING for index in range(1, num_stages)}


def inputs_of(file: ModelFile, rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return inputs in float64, every tensor one of its own (labels may be the ids); what is no tensor stays."""

    def cast(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.double() if value.is_floating_point() else value.clone()

    args, kwargs = split_arguments(file.example_inputs(rows))
    return tuple(map(cast, args)), {key: cast(value) for key, value in kwargs.items()}


def loss_of(file: ModelFile, output: Any) -> torch.Tensor:
    """Return the file's loss of an output, or the output's own."""
    if file.loss_fn is not None:
        return file.loss_fn(output)  # type: ignore[no-any-return]
    return output["loss"] if isinstance(output, dict) else output.loss  # type: ignore[no-any-return]


def one_process(file: ModelFile, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Leave the gradients of the mean loss over all microbatches on the model."""
    for index in range(NUM_MICROBATCHES):
        rows = slice(index * ROWS, (index + 1) * ROWS)

        def part(value: Any, rows: slice = rows) -> Any:
            return value[rows] if isinstance(value, torch.Tensor) else value

        output = model(*map(part, args), **{key: part(value) for key, value in kwargs.items()})
        (loss_of(file, output) / NUM_MICROBATCHES).backward()  # type: ignore[no-untyped-call]


def run_rank(rank: int, file: ModelFile, pipe: Any, given: Any, folder: str, num_stages: int) -> None:
    """Run one stage, and write its gradients or its error to a file."""
    path = Path(folder) / f"{rank}.pt"
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_stages)
        stage = pipe.build_stage(rank, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, NUM_MICROBATCHES, loss_fn=lambda output, target: loss_of(file, output))
        args, kwargs = given
        last = {"target": torch.zeros(NUM_MICROBATCHES * ROWS)} if rank == num_stages - 1 else {}
        taken = {node.name for node in stage.submod.graph.nodes if node.op == "placeholder"}
        mine = {key: value for key, value in kwargs.items() if key in taken}  # labels are for the last stage
        schedule.step(*(args if rank == 0 else ()), **mine, **last)
        torch.save({name: p.grad for name, p in stage.submod.named_parameters()}, path)
    except BaseException as error:  # noqa: BLE001 - every failure of the alternative is a row of the table
        torch.save(first_line(error), path)
        os._exit(1)


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


def measure(spec: str, num_stages: int) -> dict[str, Any]:
    """Return the comparison, or the error that stopped it."""
    file = load_model_file(spec)
    torch.manual_seed(0)
    model, _ = build_exact(file)
    args, kwargs = inputs_of(file, NUM_MICROBATCHES * ROWS)
    try:
        pipe = pipeline(model, *inputs_of(file, ROWS), split_spec=splits(model, num_stages))
    except Exception as error:  # noqa: BLE001
        return {"error": first_line(error)}
    one_process(file, model, args, kwargs)
    for index in range(num_stages):  # a stage's parameters are the model's own: it starts without gradients
        for parameter in pipe.get_stage_module(index).parameters():
            parameter.grad = None
    reference, _ = build_exact(file)
    one_process(file, reference, args, kwargs)
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(  # type: ignore[no-untyped-call]
            run_rank, (file, pipe, (args, kwargs), folder, num_stages), num_stages, join=False, start_method="fork"
        )
        try:
            while not context.join(timeout=120):
                pass
        except Exception:  # noqa: BLE001 - the ranks have written why
            pass
        for process in context.processes:
            process.kill()
        results = [torch.load(path, weights_only=False) for path in sorted(Path(folder).glob("*.pt"))]
    errors = [item for item in results if isinstance(item, str)]
    errors.sort(key=lambda text: "Connection" in text)  # the others' lost connections come after what stopped one
    if errors or len(results) < num_stages:
        return {"error": errors[0] if errors else "a rank never answered"}
    found: dict[str, torch.Tensor | None] = {}
    for gradients in results:
        found.update(gradients)
    return compare(reference, found)


if __name__ == "__main__":
    real = sys.stdout
    sys.stdout = sys.stderr  # the exporter prints
    try:
        answer = measure(sys.argv[1], int(sys.argv[2]))
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        answer = {"error": first_line(error)}
    print(json.dumps(answer), file=real)

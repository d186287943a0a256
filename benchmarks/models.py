"""Model files by the commands, beside torch's own `pipeline()`: what is captured, and whether every layout is exact.

    python benchmarks/models.py [MODEL.py ...] [--no-alternative] [--full]

For each model: layers, classes, ties, parameters, FLOPs of two rows, seconds and peak memory of `planner profile`; then
for each layout the worst relative difference of a gradient to one process, or why it was refused, and beside it what
`torch.distributed.pipelining.pipeline()` makes of it (it has no tensor parallelism). `--full` profiles at
the real size instead, as full_size.py does. Exit 1 if a plan that was emitted is not exact.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from main_job import DP, PP, TP, planner

MODELS = Path(__file__).parents[1] / "tests" / "models"
BATCH = "16"
CELLS: dict[str, tuple[int, tuple[str, ...]]] = {
    "pp2": (2, (PP, "num_microbatches=4")),
    "pp4": (4, ("pp_degree=4", "num_microbatches=4")),
    "pp2 tp2": (4, (PP, TP, "num_microbatches=4")),
    "pp2 dp2": (4, (PP, DP, "num_microbatches=2")),
}
PIPELINE_CELLS = {"pp2": 2, "pp4": 4}
TOLERANCE = {"float64": 1e-5, "float32": 1e-3}  # of the alternative: DESIGN.md's, and single rounding through a model


def profile(model: Path, path: Path) -> dict[str, Any]:
    """Return what `planner profile --json` prints, with seconds and peak bytes, or its error."""
    where = ["--device", "cpu", "--microbatch-sizes", "2", "--tp", "1,2"]
    command = [sys.executable, "-m", "planner", "profile", str(model), "--json", "-o", str(path), *where]
    start = time.perf_counter()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdout=out, stderr=errors)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        errors.seek(0)
        found = {"seconds": time.perf_counter() - start, "peak_bytes": usage.ru_maxrss * 1024}
        if process.returncode:
            return found | {"error": error_line(errors.read().decode())}
        return found | json.loads(out.read())


def error_line(text: str) -> str:
    """Return the line of a command's output that tells what is wrong, short."""
    lines = [line for line in text.splitlines() if line.startswith("error: ")] or text.strip().splitlines()[-1:]
    return re.sub(r"/\S*/", "", lines[0].removeprefix("error: ").removeprefix("no plan: ")) if lines else "no output"


def cell(profiled: Path, plan: Path, num_gpus: int, pins: tuple[str, ...]) -> tuple[str, bool]:
    """Return the worst gradient difference or the refusal, and whether it is no wrong plan."""
    options = [argument for pin in pins for argument in ("--pin", pin)]
    command = ["solve", "--gpus", str(num_gpus), "--profile", str(profiled), "--global-batch-size", BATCH, *options]
    code, _, errors = planner(*command, "-o", str(plan), "--force", "--json")
    if code:
        return f"refused: {error_line(errors)}", True
    _, out, errors = planner("verify", str(plan), "--json")
    if not out.strip():
        return f"refused: {error_line(errors)}", True
    found = json.loads(out)
    worst = f"{found['max_gradient_difference']:.1e}"
    return (worst, True) if found["ok"] else (f"WRONG {worst} ({found['worst_parameter']})", False)


def alternative(model: Path, num_stages: int) -> str:
    """Return what torch's `pipeline()` gives for so many stages."""
    script = Path(__file__).parent / "torch_pipeline.py"
    command = [sys.executable, str(script), str(model), str(num_stages)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        found = json.loads(done.stdout.strip().splitlines()[-1])
    except (subprocess.TimeoutExpired, IndexError, ValueError) as error:
        return f"failed: {type(error).__name__}"
    if "error" in found:
        return f"failed: {found['error']}"
    dtype = found["dtype"]
    wrong = found["missing"] or not found["difference"] <= TOLERANCE[dtype]
    lost = f", {found['missing']} gradients lost" if found["missing"] else ""
    return f"{'WRONG ' if wrong else ''}{found['difference']:.1e}{lost}{f' in {dtype}' if dtype != 'float64' else ''}"


def run_model(model: Path, folder: Path, *, other: bool) -> int:
    """Print the rows of a model; returns how many plans are wrong."""
    path = folder / f"{model.stem}.json"
    found = profile(model, path)
    cost = f"{found['seconds']:.0f} s, {found['peak_bytes'] / 1e9:.2f} GB"
    wrong = 0
    if "error" in found:
        print(f"{model.stem}: not captured: {found['error']} ({cost})", flush=True)
    else:
        blocks = f"{found['num_layers']} layers of {found['num_layer_classes']} classes"
        numbers = f"{found['param_count']:,} parameters, {found['forward_flops']:.5g} FLOPs of two rows"
        print(f"{model.stem}: {blocks}, {len(found['tied'])} ties, {numbers}; {cost}", flush=True)
        for name, (num_gpus, pins) in CELLS.items():
            text, fine = cell(path, folder / f"{model.stem}.py", num_gpus, pins)
            wrong += not fine
            print(f"  {name:8} {text}", flush=True)
    for name, num_stages in PIPELINE_CELLS.items() if other else ():
        print(f"  {name:8} pipeline(): {alternative(model, num_stages)}", flush=True)
    return wrong


def main() -> int:
    """Return the exit code: 1 if a plan is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--full", action="store_true", help="run full_size.py instead")
    parser.add_argument("--no-alternative", action="store_true", help="leave out torch's pipeline()")
    arguments = parser.parse_args()
    if arguments.full:
        script = Path(__file__).parent / "full_size.py"
        return subprocess.call([sys.executable, str(script), *map(str, arguments.models)])
    models = arguments.models or sorted(MODELS.glob("*.py"))
    with tempfile.TemporaryDirectory() as folder:
        wrong = sum(run_model(model.resolve(), Path(folder), other=not arguments.no_alternative) for model in models)
    print(f"{wrong} wrong plans" if wrong else "no wrong plan")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

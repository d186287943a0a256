"""The main job by its commands, on model files: profile, solve for 2, 4 and 8 GPUs with degrees pinned, verify.

    python benchmarks/main_job.py MODEL.py [MODEL.py ...]

Prints one line per plan: the degrees, the loss difference and the worst relative gradient difference to one process.
Exit 1 if any plan is not exact.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PP, TP, DP = "pp_degree=2", "tp_degree=2", "dp_degree=2"
CELLS: tuple[tuple[int, tuple[str, ...]], ...] = (
    *((gpus, (pin,)) for gpus in (2, 4) for pin in (PP, TP, DP)),
    (4, (PP, TP)),
    (4, (PP, DP)),
    (4, (TP, DP)),
    (8, (PP, TP, DP)),
)


def planner(*arguments: str) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of a planner command."""
    done = subprocess.run([sys.executable, "-m", "planner", *arguments], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def run_model(model: Path, folder: Path) -> int:
    """Run all cells on a model; returns how many are not exact."""
    profile = folder / f"{model.stem}.json"
    start = time.perf_counter()
    code, _, errors = planner("profile", str(model), "--device", "cpu", "-o", str(profile))
    if code:
        print(f"{model.stem}: profile failed: {errors.strip().splitlines()[-2:]}")
        return 1
    print(f"{model.stem}: profiled in {time.perf_counter() - start:.1f} s", flush=True)
    failed = 0
    for gpus, pins in CELLS:
        plan = folder / f"{model.stem}_{gpus}_{'_'.join(pin[:2] for pin in pins)}.py"
        options = [argument for pin in pins for argument in ("--pin", pin)]
        code, out, errors = planner(
            "solve", "--gpus", str(gpus), "--profile", str(profile), *options, "-o", str(plan), "--force", "--json"
        )
        if code:
            print(f"  {gpus} GPUs, {' '.join(pins)}: solve failed: {errors.strip().splitlines()[-2:]}")
            failed += 1
            continue
        solved = json.loads(out)
        stage = solved["stages"][0]
        what = f"pp {solved['pp_degree']} tp {stage['tp_degree']} dp {stage['dp_degree']}, {solved['schedule']}"
        code, out, errors = planner("verify", str(plan), "--json")
        found = json.loads(out) if out.strip() else {"ok": False}
        failed += not found["ok"]
        pinned = " ".join(pins)
        if found["ok"]:
            print(
                f"  {gpus} GPUs, {pinned:36} -> {what:24} {solved['status']:8} loss {found['loss_difference']:.1e}  "
                f"gradients {found['max_gradient_difference']:.1e} ({found['worst_parameter']})",
                flush=True,
            )
        else:
            print(f"  {gpus} GPUs, {pinned} -> {what}: NOT EXACT: {errors.strip().splitlines()[-3:]}", flush=True)
    return failed


def main() -> int:
    """Return the exit code: 1 if a plan is not exact."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        failed = sum(run_model(model, Path(folder)) for model in arguments.models)
    print(f"{failed} of {len(CELLS) * len(arguments.models)} plans not exact")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

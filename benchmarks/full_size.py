"""Profiles models at their real size for a GPU that isn't here, and prints what they are beside what is known of them.

    python benchmarks/full_size.py [--gpu h100-sxm] [MODEL.py ...]        (default: those of tests/models)

Each runs as `planner profile MODEL.py --gpu h100-sxm --json` in a process of its own with MODEL_SIZE=full; the JSON
beside a model has the figures expected. FLOPs are those of the batch that the file there states; where layers are left
out at random (LayerDrop), those of the file are one draw's, and whole layers may be missing in them: they are told.
`user` is the processor's time, which a busy machine lengthens less than the wall's. Exit 1 if a figure is wrong, or a
model takes more than 45 s of the processor (120 s beyond 10^11 parameters) or 3 GB.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
MODELS = REPOSITORY / "tests" / "models"
LIMIT_S, LIMIT_LARGE_S, LARGE_PARAMETERS, LIMIT_BYTES = 45, 120, 10**11, 3 * 10**9
COLUMNS = (
    *("model", "captured", "layers", "classes", "most alike", "ties", "parameters", "expected", "FLOPs", "expected"),
    *("difference", "wall s", "user s", "peak MB", "right"),
)


@dataclass(frozen=True)
class Run:
    """One run of a command: its exit code and output, seconds and peak bytes."""

    code: int
    output: str
    errors: str
    wall_s: float
    user_s: float
    peak_bytes: int


def run(arguments: list[str], environment: dict[str, str]) -> Run:
    """Run a command to its end and return what it took."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        start = time.perf_counter()
        process = subprocess.Popen(arguments, stdout=output, stderr=errors, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        wall_s = time.perf_counter() - start
        output.seek(0)
        errors.seek(0)
        texts = output.read(), errors.read()
    unit = 1 if sys.platform == "darwin" else 1024
    return Run(process.returncode, *texts, wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * unit)


def stated_rows(known: dict[str, Any]) -> int:
    """Return the batch size of the stated input: the first dimension in it."""
    match = re.search(r"\[(\d+)", known["full"]["input"])
    return int(match[1]) if match else 1


def layers_left_out(profile: dict[str, Any], missing: float) -> list[float]:
    """Return the forward FLOPs of a row in the layers that a draw left out of the stated ones; none where none can be.

    The layers that may be left out cost the same here: a whole number of them is missing, or none.
    """
    if not any("left out at random" in note for note in profile.get("notes", ())) or missing <= 0:
        return []
    costs = {item["name"]: item["costs"][0] for item in profile["layer_classes"]}
    common, _ = Counter(layer["layer_class"] for layer in profile["layers"]).most_common(1)[0]
    one = costs[common]["forward_flops"] / costs[common]["microbatch_size"]
    return [one] * round(missing / one)


def row(model: Path, gpu: str) -> tuple[list[str], bool]:
    """Return the cells of a model's row, and whether all of it is right and within the limits."""
    known = json.loads(model.with_suffix(".json").read_text())
    rows = stated_rows(known)
    environment = {**os.environ, "MODEL_SIZE": "full", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        sizes = () if rows == 1 else ("--microbatch-sizes", ",".join(str(rows * factor) for factor in (1, 2, 4)))
        command = [sys.executable, "-m", "planner", "profile", str(model), "--gpu", gpu, *sizes, "--json"]
        done = run([*command, "-o", str(path)], environment)
        if done.code:
            reason = next((line for line in done.errors.splitlines() if line.startswith("error")), "failed")
            return [model.stem, reason], False
        profile = json.loads(path.read_text())
    layers = Counter(layer["layer_class"] for layer in profile["layers"])
    told, full = json.loads(done.output), known["full"]
    left_out = layers_left_out(profile, (told["forward_flops"] - full["fwd_flops"]) / rows)
    expected = full["fwd_flops"] + sum(left_out) * rows
    difference = told["forward_flops"] / expected - 1
    groups = [set(group) for group in told["tied"]]
    ties = len(groups) == full["tied_groups"] and all(any(set(g) <= ours for ours in groups) for g in full["tied"])
    limit_s = LIMIT_LARGE_S if known["param_count"] > LARGE_PARAMETERS else LIMIT_S
    right = (
        told["param_count"] == known["param_count"]
        and abs(difference) <= 1e-3
        and ties
        and done.user_s <= limit_s
        and done.peak_bytes <= LIMIT_BYTES
    )
    cells = [
        *(model.stem, "yes", str(told["num_layers"]), str(told["num_layer_classes"])),
        *(str(layers.most_common(1)[0][1]), f"{len(groups)}{'' if ties else ' (wrong)'}"),
        *(str(told["param_count"]), str(known["param_count"])),
        *(f"{told['forward_flops']:.0f}", str(full["fwd_flops"]) + f" + {len(left_out)} layer" * bool(left_out)),
        f"{difference:+.1e}",
        *(f"{done.wall_s:.1f}", f"{done.user_s:.1f}", f"{done.peak_bytes / 1e6:.0f}", "yes" if right else "NO"),
    ]
    return cells, right


def main() -> int:
    """Print the table; return 1 where something in it is not right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path, metavar="MODEL.py")
    parser.add_argument("--gpu", default="h100-sxm")
    arguments = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    wrong = 0
    for model in arguments.models or sorted(MODELS.glob("*.py")):
        cells, right = row(model, arguments.gpu)
        wrong += not right
        print(f"| {' | '.join(cells)} |", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

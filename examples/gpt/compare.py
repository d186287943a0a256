"""Compare the losses of two runs of train.py, step by step; exit code 1 where they differ or the loss doesn't fall."""

import json
import sys
from pathlib import Path

TOLERANCE = 1e-4


def main(first: str, second: str) -> int:
    by_plan, alone = (json.loads(Path(path).read_text()) for path in (first, second))
    if len(by_plan) != len(alone):
        print(f"{len(by_plan)} steps by the plan, {len(alone)} steps alone: these runs can't be compared")
        return 1
    print("step   by the plan   one process   difference")
    for step, (a, b) in enumerate(zip(by_plan, alone, strict=True), start=1):
        print(f"{step:4d}   {a:11.6f}   {b:11.6f}   {abs(a - b):10.1e}")
    worst = max(abs(a - b) for a, b in zip(by_plan, alone, strict=True))
    equal, falls = worst <= TOLERANCE, by_plan[-1] < by_plan[0]
    print(f"largest difference {worst:.1e}: {'within' if equal else 'MORE THAN'} {TOLERANCE:g}")
    print(f"loss {by_plan[0]:.3f} -> {by_plan[-1]:.3f}: {'falls' if falls else 'DOES NOT FALL'}")
    return 0 if equal and falls else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

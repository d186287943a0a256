"""Step time of an emitted two-stage plan beside hand-written torch.distributed.pipelining code of the same cut.

    python benchmarks/runtime.py [--steps 20]

Two processes, gloo, examples/gpt, 8 microbatches of 4 rows under 1F1B; the two take turns (A B A B ...), so that noise
of the machine falls on both. Prints median and spread of each, and their ratio.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
MODEL = REPOSITORY / "examples" / "gpt" / "model.py"
MICROBATCHES, ROWS = 8, 4


def run_rank(plan_path: Path, steps: int) -> None:
    """Time both on this rank; rank 0 prints."""
    import importlib.util

    import torch
    from torch import distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    def load(name: str, path: Path) -> Any:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    model_file, plan = load("model", MODEL), load("plan", plan_path)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    runtime = plan.setup(model_file.build_model, model_file.loss_fn)
    rank = dist.get_rank()

    class Half(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(list(model.blocks)[3 * rank : 3 * rank + 3])
            names = ("norm", "head") if rank else ("byte_embedding", "position_embedding")
            for name in names:
                setattr(self, name, getattr(model, name))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if rank == 0:
                positions = torch.arange(x.shape[1])
                x = self.byte_embedding(x) + self.position_embedding(positions)
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x)) if rank else x

    torch.manual_seed(0)
    half = Half(model_file.build_model())
    stage = PipelineStage(half, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=model_file.loss_fn)
    tied = half.head.weight if rank else half.byte_embedding.weight
    inputs = model_file.example_inputs(MICROBATCHES * ROWS)[0]
    target = model_file.example_target(MICROBATCHES * ROWS)

    def by_plan() -> float:
        runtime.zero_grad()
        return float(runtime.step(inputs, target))

    def by_hand() -> float:
        half.zero_grad()
        losses: list[torch.Tensor] = []
        schedule.step(*([] if rank else [inputs]), target=target if rank else None, losses=losses if rank else None)
        dist.all_reduce(tied.grad)
        loss = torch.stack(losses).mean() if rank else torch.zeros(())
        dist.all_reduce(loss)
        return float(loss.detach())

    times: dict[str, list[float]] = {"plan": [], "hand-written": []}
    for step in range(steps + 2):
        for name, work in (("plan", by_plan), ("hand-written", by_hand)):
            dist.barrier()
            start = time.perf_counter()
            loss = work()
            dist.barrier()
            if step >= 2:
                times[name].append(time.perf_counter() - start)
            elif rank == 0:
                print(f"{name}: loss {loss:.6f}")
    if rank == 0:
        for name, values in times.items():
            low, middle, high = statistics.quantiles(values, n=4)
            print(f"{name:13} median {middle * 1e3:7.1f} ms   quartiles {low * 1e3:.1f} to {high * 1e3:.1f}")
        ratios = [a / b for a, b in zip(times["plan"], times["hand-written"], strict=True)]
        print(f"plan / hand-written: median of {len(ratios)} pairs {statistics.median(ratios):.3f}")
    dist.barrier()


def main() -> int:
    """Profile, solve with the cut pinned, and start the two processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--plan", type=Path)
    arguments = parser.parse_args()
    if arguments.plan is not None:
        run_rank(arguments.plan, arguments.steps)
        return 0
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "MASTER_ADDR": "127.0.0.1"}
    with tempfile.TemporaryDirectory() as folder, socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        environment["MASTER_PORT"] = str(port.getsockname()[1])
        port.close()
        profile, plan = Path(folder, "profile.json"), Path(folder, "plan.py")
        options = ["--pin", "cuts=blocks.3", "--pin", "schedule=1f1b", "--pin", f"microbatch_size={ROWS}"]
        batch = ["--global-batch-size", str(MICROBATCHES * ROWS)]
        for command in (
            ["profile", str(MODEL), "--device", "cpu", "--microbatch-sizes", "4", "--tp", "1", "-o", str(profile)],
            ["solve", "--gpus", "2", "--profile", str(profile), *batch, *options, "-o", str(plan)],
        ):
            subprocess.run(
                [sys.executable, "-m", "planner", *command], env=environment, check=True, capture_output=True
            )
        again = [sys.executable, __file__, "--plan", str(plan), "--steps", str(arguments.steps)]
        ranks = [
            subprocess.Popen(again, env=environment | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)})
            for rank in range(2)
        ]
        try:
            return max(rank.wait(timeout=300) for rank in ranks)
        finally:
            for rank in ranks:
                rank.kill()


if __name__ == "__main__":
    sys.exit(main())

"""Train the model of model.py on the standard library's own source text, by a plan or in one process.

    torchrun --nproc-per-node 4 examples/gpt/train.py --plan plan.py
    python examples/gpt/train.py --single

Both read the same batches and print the mean loss of every step. `--losses FILE` writes them as JSON too.
"""

import argparse
import importlib
import json
import sys
import sysconfig
import time
from pathlib import Path
from types import ModuleType

import torch
from model import CONTEXT, build_model, loss_fn
from torch import Tensor

SEED = 1


def read_text() -> Tensor:
    """Return the bytes of the standard library's modules, one after another."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batches(num_steps: int, batch_size: int) -> list[tuple[Tensor, Tensor]]:
    """Return the inputs and targets of every step: random places in the text, the target one byte further."""
    text = read_text()
    generator = torch.Generator().manual_seed(SEED)
    starts = torch.randint(0, len(text) - CONTEXT, (num_steps, batch_size, 1), generator=generator)
    windows = text[starts + torch.arange(CONTEXT + 1)].long()
    return [(step[:, :-1], step[:, 1:]) for step in windows]


def train_by_plan(plan: ModuleType, num_steps: int, learning_rate: float) -> list[float]:
    """Return the loss of every step, trained by a plan in the processes that torchrun started."""
    runtime = plan.setup(build_model, loss_fn)
    optimizer = torch.optim.AdamW(runtime.parameters(), lr=learning_rate, foreach=True)
    losses = []
    for step, (inputs, target) in enumerate(batches(num_steps, plan.PLAN["global_batch_size"])):
        started = time.perf_counter()
        loss = runtime.step((inputs,), target)
        runtime.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if torch.distributed.get_rank() == 0:
            show(step, losses[-1], time.perf_counter() - started)
    return losses


def train_alone(num_steps: int, learning_rate: float, batch_size: int) -> list[float]:
    """Return the loss of every step, trained in this process alone."""
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, foreach=True)
    losses = []
    for step, (inputs, target) in enumerate(batches(num_steps, batch_size)):
        started = time.perf_counter()
        loss = loss_fn(model(inputs), target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        show(step, losses[-1], time.perf_counter() - started)
    return losses


def show(step: int, loss: float, seconds: float) -> None:
    print(f"step {step + 1:3d}   loss {loss:.6f}   {seconds:.2f} s", flush=True)


def load_plan(path: Path) -> ModuleType:
    """Return plan.py as a module. A script with its plan.py beside it writes `import plan` instead."""
    sys.path.insert(0, str(path.resolve().parent))
    return importlib.import_module(path.stem)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", type=Path, default=Path("plan.py"))
    parser.add_argument("--single", action="store_true", help="train in one process, without a plan")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=32, help="of one process; a plan says its own")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--losses", type=Path, help="write the losses here, as JSON")
    arguments = parser.parse_args()

    torch.manual_seed(SEED)  # before build_model: every rank starts from what one process starts from
    if arguments.single:
        losses = train_alone(arguments.steps, arguments.learning_rate, arguments.batch_size)
        first = True
    else:
        losses = train_by_plan(load_plan(arguments.plan), arguments.steps, arguments.learning_rate)
        first = torch.distributed.get_rank() == 0
        torch.distributed.destroy_process_group()
    if first and arguments.losses:
        arguments.losses.write_text(json.dumps(losses))


if __name__ == "__main__":
    main()

"""One of the processes that test_runtime*.py keep for many plans: reads a job a line, answers with a line of JSON.

A job names a function below, the number of ranks, and its arguments. The tiny GPT and its plans are written by hand, as
the emitter would write them.
"""

import importlib.util
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from planner.emitter.source import helper_section

VOCABULARY, WIDTH, HEADS, LENGTH, NUM_BLOCKS = 24, 16, 4, 6, 3


class Conv1D(nn.Module):
    """As Hugging Face has it: a linear layer with the weight transposed."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.empty(nx, nf))
        self.bias = nn.Parameter(torch.empty(nf))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.2)
        nn.init.normal_(self.bias, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = Conv1D(3 * WIDTH, WIDTH), Conv1D(WIDTH, WIDTH)
        self.q_norm = nn.LayerNorm(WIDTH // HEADS)

    def forward(self, x: Tensor) -> Tensor:
        rows, length = x.shape[:2]
        q, k, v = (part.view(rows, length, HEADS, -1) for part in self.c_attn(x).split(WIDTH, dim=2))
        q, k, v = self.q_norm(q).transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(rows, length, WIDTH))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.ModuleDict({"up": nn.Linear(WIDTH, 4 * WIDTH), "down": nn.Linear(4 * WIDTH, WIDTH)})
        self.drop, self.gain = nn.Dropout(0.0), nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.gain * self.drop(self.mlp["down"](F.gelu(self.mlp["up"](self.ln_2(x)))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.position = nn.Parameter(torch.empty(LENGTH, WIDTH))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, LENGTH), persistent=False)
        self.h = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.ln_f = nn.LayerNorm(WIDTH)
        nn.init.normal_(self.position, std=0.5)


class GPT(nn.Module):
    """Has what is hard: tied embeddings, a value for two stages, an int, a bool and an in-place write at a cut; blocks
    have a parameter without dimensions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.transformer = Transformer()
        self.previous = nn.Embedding(VOCABULARY, WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        t = self.transformer
        embedded = t.wte(ids) + t.position
        kept, shifted = ids != 0, ids.roll(1, dims=1)
        x = t.h[0](embedded * t.scale[:, None])
        x.mul_(kept[:, :, None])
        x = x + self.previous(shifted) + 0.3 * embedded
        for block in t.h[1:]:
            x = block(x)
        return self.lm_head(t.ln_f(x + 0.1 * embedded))


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


BLOCK = """
def block_forward(self, x):
    rows, length = x.shape[:2]
    h = enter(self.ln_1(x), self.tp_group)
    q, k, v = (part.view(rows, length, HEADS_HERE, 4) for part in self.attn.c_attn(h).split(WIDTH_HERE, dim=2))
    q, k, v = self.attn.q_norm(q).transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + self.attn.c_proj(y.transpose(1, 2).reshape(rows, length, WIDTH_HERE))
    h = enter(self.ln_2(x), self.tp_group)
    return x + self.gain * self.drop(self.mlp.down(F.gelu(self.mlp.up(h))))


BLOCK_TP = TensorParallel(
    forward=block_forward,
    styles={
        "attn.c_attn": Column(dim=1, parts=3),
        "attn.c_proj": Row(dim=0),
        "mlp.up": Column(dim=0),
        "mlp.down": Row(dim=1),
    },
    partial_gradients=("attn.q_norm.weight", "attn.q_norm.bias"),
)
WTE_TP = TensorParallel(styles={"": Vocabulary()})
HEAD_TP = TensorParallel(styles={"": Column(dim=0, gather=True, enters=True)})
"""
EMBED = """
        t = self.transformer
        embedded = t.wte(ids) + t.position
        kept, shifted = ids != 0, ids.roll(1, dims=1)
        x = CALL(t.h.get_submodule("0"), embedded * t.scale[:, None])
"""
MIDDLE = """
        x.mul_(kept[:, :, None])
        x = x + self.previous(shifted) + 0.3 * embedded
"""
MODULES = {
    "transformer.wte": "WTE_TP",
    **{f"transformer.h.{index}": "BLOCK_TP" for index in range(NUM_BLOCKS)},
    "lm_head": "HEAD_TP",
}


def plan_text(
    *,
    pp: int = 1,
    tp: int = 1,
    dp: int = 1,
    schedule: str = "1f1b",
    data_parallel: str = "replicated",
    precision: str = "fp32",
    recompute: bool = False,
    num_microbatches: int = 4,
    microbatch_size: int = 1,
    model_hash: str = "",
) -> str:
    """Return a plan.py for the tiny GPT: what the emitter writes, by hand."""
    size = f"({microbatch_size}, {LENGTH}, {WIDTH})"
    ids = f"({microbatch_size}, {LENGTH})"
    x = f'Value("x", SIDE, shape={size}, requires_grad=True)'
    embedded = f'Value("embedded", SIDE, shape={size}, requires_grad=True)'
    kept = f'Value("kept", SIDE, shape={ids}, dtype=torch.bool)'
    shifted = f'Value("shifted", SIDE, shape={ids}, dtype=torch.int64)'
    loop = "        for layer in layers(self, 'transformer.h', {}, {}):\n            x = CALL(layer, x)\n"
    last = "        return self.lm_head(self.transformer.ln_f(x + 0.1 * embedded))\n"
    first = ["transformer.wte", "transformer.h.0"]
    end = ["transformer.ln_f", "lm_head"]
    # (modules, parameters, inputs, receives by source, sends by target, code)
    stages: list[tuple[list[str], list[str], list[str], list[tuple[str, int]], list[tuple[str, str]], str]]
    position = ["transformer.position", "transformer.scale"]
    if pp == 1:
        modules = [*first, "previous", "transformer.h.1", "transformer.h.2", *end]
        stages = [(modules, position, ["ids"], [], [], EMBED + MIDDLE + loop.format(1, 3) + last)]
    elif pp == 2:
        crossing = [x, embedded, kept, shifted]
        sends = [(value, "targets=(1,)") for value in crossing]
        stages = [
            (first, position, ["ids"], [], sends, EMBED + "        return x, embedded, kept, shifted\n"),
            (
                ["previous", "transformer.h.1", "transformer.h.2", *end],
                [],
                [],
                [(value, 0) for value in crossing],
                [],
                MIDDLE + loop.format(1, 3) + last,
            ),
        ]
    else:
        sends = [(value, "targets=(1,)") for value in (x, kept, shifted)]
        sends.insert(1, (embedded, "targets=(1, 2)"))
        stages = [
            (first, position, ["ids"], [], sends, EMBED + "        return x, embedded, kept, shifted\n"),
            (
                ["previous", "transformer.h.1"],
                [],
                [],
                [(value, 0) for value in (x, embedded, kept, shifted)],
                [(x, "targets=(2,)")],
                MIDDLE + loop.format(1, 2) + "        return (x,)\n",
            ),
            (["transformer.h.2", *end], [], [], [(embedded, 0), (x, 1)], [], loop.format(2, 3) + last),
        ]
    text = BLOCK.replace("HEADS_HERE", str(HEADS // tp)).replace("WIDTH_HERE", str(WIDTH // tp)) if tp > 1 else ""
    for index, (modules, parameters, inputs, receives, sends, code) in enumerate(stages):
        names = [value.split('"')[1] for value, _ in receives]
        received = "".join(f"{value.replace('SIDE', f'source={source}')}, " for value, source in receives)
        sent = "".join(f"{value.replace('SIDE', side)}, " for value, side in sends)
        divided = "".join(f'"{name}": {MODULES[name]}, ' for name in modules if name in MODULES) if tp > 1 else ""
        code = code.replace("CALL(layer, x)", "recompute(layer, x)" if recompute else "layer(x)")
        code = (
            code.replace("CALL(t.h", "recompute(t.h")
            if recompute
            else code.replace('CALL(t.h.get_submodule("0"), ', 't.h.get_submodule("0")(')
        )
        text += f"""

class Stage{index}(PlanStage):
    module_names = {tuple(modules)}
    parameter_names = {tuple(parameters)}
    inputs = {tuple(inputs)}
    receives = ({received})
    sends = ({sent})
    units = {tuple(name for name in modules if ".h." in name)}
    tensor_parallel = {{{divided}}}

    def forward(self, {", ".join([*inputs, *names])}):
{code}
"""
    gpus = tp * dp
    plan = {
        "num_microbatches": num_microbatches,
        "schedule": schedule,
        "data_parallel": data_parallel,
        "precision": precision,
        "stages": [
            {
                "tp_degree": tp,
                "dp_degree": dp,
                "microbatch_size": microbatch_size,
                "gpus": list(range(index * gpus, (index + 1) * gpus)),
                "layers": list(stage[0]),
            }
            for index, stage in enumerate(stages)
        ],
        "origin": {"model_hash": model_hash},
    }
    imports, helpers = helper_section()
    names = ", ".join(f"Stage{index}" for index in range(len(stages)))
    return "\n".join(
        [
            '"""A plan by hand."""',
            *imports,
            f"PLAN = {plan!r}",
            helpers,
            text,
            f"STAGES = ({names},)",
            'TIED = (("lm_head.weight", "transformer.wte.weight"),)',
            f'INPUTS = (Value("ids", shape=({microbatch_size}, {LENGTH}), dtype=torch.int64),)',
            'ARGUMENTS = ("ids",)',
            'CONSTANTS = {"use_cache": False}',
            "TARGET_DIMS = (0,)",
        ]
    )


def import_text(text: str, folder: Path, name: str) -> ModuleType:
    path = folder / f"{name}_{os.getpid()}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    path.unlink()
    return module


def load_plan(folder: Path, **options: Any) -> ModuleType:
    """Return the plan as a module, with the right hash of the tiny GPT unless another is asked for."""
    plan = import_text(plan_text(**options), folder, "plan")
    plan.PLAN["origin"]["model_hash"] = options.get("model_hash") or plan.model_hash(GPT())
    return plan


def build_double() -> nn.Module:
    return GPT().double()


def batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=generator)
    return ids, torch.randint(0, VOCABULARY, (rows, LENGTH), generator=generator)


def relative(found: Tensor, expected: Tensor) -> float:
    difference, norm = (found - expected).norm().item(), expected.norm().item()
    return difference / norm if norm else difference


def train(folder: Path, *, freeze: str = "", **options: Any) -> dict[str, Any]:
    """Return how far two optimizer steps of a plan are from one process's: losses, gradients, norms, parameters.

    Parameters whose names match `freeze` take no gradient.
    """

    def build_double() -> nn.Module:
        model = GPT().double()
        for name, param in model.named_parameters():
            param.requires_grad_(not (freeze and re.match(freeze, name)))
        return model

    plan = load_plan(folder, **options)
    torch.manual_seed(7)
    runtime = plan.setup(build_double, loss_fn)
    optimizer = torch.optim.AdamW(runtime.parameters(), lr=1e-2, foreach=True)
    num_rows = options.get("microbatch_size", 1)
    steps = plan.PLAN["num_microbatches"] * options.get("dp", 1)
    torch.manual_seed(7)
    reference = build_double()
    other = torch.optim.AdamW(reference.parameters(), lr=1e-2, foreach=True)
    result: dict[str, Any] = {"loss": 0.0, "gradient": 0.0, "norm": 0.0, "parameter": 0.0, "worst": ""}
    for step in range(2):
        ids, target = batch(num_rows * steps, step)
        loss = runtime.step({"ids": ids, "use_cache": False}, target)
        expected = 0.0
        for start in range(0, num_rows * steps, num_rows):
            rows = slice(start, start + num_rows)
            one = loss_fn(reference(ids[rows]), target[rows]) / steps
            one.backward()
            expected += one.item()
        result["loss"] = max(result["loss"], abs(loss.item() - expected))
        gradients = runtime.full_gradients()
        if dist.get_rank() == 0:
            wanted = {name: param for name, param in reference.named_parameters() if param.requires_grad}
            names = {"lm_head.weight" if name == "transformer.wte.weight" else name for name in wanted}
            assert set(gradients) == names, set(gradients) ^ names
            for name, param in wanted.items():
                found = gradients["lm_head.weight" if name == "transformer.wte.weight" else name]
                if (difference := relative(found, param.grad)) >= result["gradient"]:
                    result["gradient"], result["worst"] = difference, name
        norm = runtime.clip_grad_norm_(0.05)
        wanted_norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
        result["norm"] = max(result["norm"], abs(norm.item() / wanted_norm.item() - 1))
        ids, target = batch(num_rows * steps, 5 + step)
        evaluated = runtime.evaluate((ids,), target).item()
        with torch.no_grad():
            chunks = range(0, len(ids), num_rows)
            losses = [loss_fn(reference(ids[i : i + num_rows]), target[i : i + num_rows]).item() for i in chunks]
        result["loss"] = max(result["loss"], abs(evaluated - sum(losses) / len(losses)))
        optimizer.step()
        optimizer.zero_grad()
        other.step()
        other.zero_grad()
        assert all(param.grad is None for param in runtime.parameters())
    parameters = runtime.full_parameters()
    if dist.get_rank() == 0:
        for name, param in reference.named_parameters():
            found = parameters["lm_head.weight" if name == "transformer.wte.weight" else name]
            result["parameter"] = max(result["parameter"], relative(found, param.detach()))
    return result


def set_up(folder: Path, **options: Any) -> dict[str, Any]:
    """Return what differs from one process's model after setup, and whether this rank keeps more than its part."""
    plan = load_plan(folder, **options)
    torch.manual_seed(11)
    runtime = plan.setup(build_double, loss_fn)
    after = torch.rand(1).item()
    torch.manual_seed(11)
    model = build_double()
    held = [tensor for part in runtime.modules for tensor in [*part.parameters(), *part.buffers()]]
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in held]
    result: dict[str, Any] = {
        "random_state_is_the_users": after == torch.rand(1).item(),
        "spare_bytes": sum(x.untyped_storage().nbytes() - x.numel() * x.element_size() for x in local),
        "names": sorted(name for name, _ in runtime.named_parameters()),
        "rows": [[rows.start, rows.stop] for rows in runtime.rows],
    }
    for kind in ("parameters", "buffers"):
        found = getattr(runtime, f"full_{kind}")()
        if found is not None:
            wanted = dict(getattr(model, f"named_{kind}")(remove_duplicate=False))
            result[kind] = [name for name, tensor in found.items() if not torch.equal(tensor, wanted[name])]
            result[f"num_{kind}"] = len(found)
    return result


def initialize(module: nn.Module) -> None:
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()
    if isinstance(module, Transformer):
        nn.init.normal_(module.position)
    if isinstance(module, Block):
        nn.init.constant_(module.gain, 0.7)


class Unbuildable(GPT):
    """Fails where its parameters have memory."""

    def __init__(self) -> None:
        super().__init__()
        assert all(param.is_meta for param in self.parameters())


def fill(folder: Path, *, how: str, leave_out: str = "", **options: Any) -> dict[str, Any]:
    """Return checksums of a model that was built without memory and filled, or the error."""
    plan = load_plan(folder, **options)
    torch.manual_seed(3)
    saved = {name: tensor for name, tensor in GPT().state_dict().items() if name != leave_out}
    torch.manual_seed(4)

    def partial(module: nn.Module) -> None:
        initialize(module)
        if leave_out and hasattr(module, "position"):
            module.position[1:3] = float("nan")

    path = folder / f"checkpoint_{os.getpid()}.pt"
    torch.save(saved, path)
    given: dict[str, dict[str, Any]] = {
        "initialize": {"initialize": partial},
        "file": {"checkpoint": path},
        "mapping": {"checkpoint": saved},
        "both": {"checkpoint": saved, "initialize": initialize},
    }
    try:
        runtime = plan.setup(Unbuildable, loss_fn, **given[how])
    except plan.PlanError as error:
        return {"error": str(error)}
    finally:
        path.unlink()
    runtime.step(*batch(4 * options.get("dp", 1), 0))
    found = {**(runtime.full_parameters() or {}), **(runtime.full_buffers() or {})}
    return {
        "sums": {name: tensor.double().sum().item() for name, tensor in found.items()},
        "saved": {name: tensor.double().sum().item() for name, tensor in saved.items()},
        "scale": GPT().transformer.scale.double().sum().item(),
    }


def refuse(folder: Path, *, what: str, **options: Any) -> dict[str, str]:
    """Return the error that something wrong gives."""
    plan = load_plan(folder, **options)
    torch.manual_seed(dist.get_rank() if what == "seeds" else 0)
    ids, target = batch(4, 0)
    try:
        runtime = plan.setup(
            GPT, (lambda *_: torch.tensor(float("nan"), requires_grad=True)) if what == "nan" else loss_fn
        )
        match what:
            case "rows":
                runtime.step(ids[:3], target[:3])
            case "target":
                runtime.step(ids, target[:3])
            case "length":
                runtime.step(ids[:, :4], target[:, :4])
            case "name":
                runtime.step({"id": ids}, target)
            case "extra":
                runtime.step({"ids": ids, "mask": ids}, target)
            case "nan":
                runtime.step(ids, target)
    except plan.PlanError as error:
        return {"error": str(error)}
    return {"error": ""}


def fail_on_one_rank(folder: Path, **options: Any) -> dict[str, str]:
    """Return how each rank ends where the loss function of the last stage raises."""
    os.environ["PLANNER_TIMEOUT_S"] = "8"
    plan = load_plan(folder, **options)
    torch.manual_seed(0)

    def broken(output: Tensor, target: Tensor) -> Tensor:
        raise ArithmeticError("the loss can't be computed")

    runtime = plan.setup(GPT, broken)
    try:
        runtime.step(*batch(4, 0))
    except (ArithmeticError, RuntimeError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        os.environ["PLANNER_TIMEOUT_S"] = "60"
    return {"error": ""}


def count_reductions(folder: Path, **options: Any) -> dict[str, int]:
    """Return how often a step sums gradients over data-parallel ranks, and how many units there are."""
    plan = load_plan(folder, **options)
    torch.manual_seed(0)
    runtime = plan.setup(GPT, loss_fn)
    calls = 0
    original = dist.reduce_scatter_single

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(*args, **kwargs)

    dist.reduce_scatter_single = counting
    try:
        runtime.step(*batch(4 * options["dp"], 0))
    finally:
        dist.reduce_scatter_single = original
    return {"calls": calls, "units": len(runtime.modules[0].units) + 1}


def hang_on_one_rank(folder: Path, **options: Any) -> dict[str, str]:
    """Return how each rank ends where the loss function of the last stage takes longer than the limit."""
    os.environ["PLANNER_TIMEOUT_S"] = "2"
    plan = load_plan(folder, **options)
    torch.manual_seed(0)

    def slow(output: Tensor, target: Tensor) -> Tensor:
        time.sleep(6)
        return loss_fn(output, target)

    try:
        plan.setup(GPT, slow).step(*batch(4, 0))
    except RuntimeError as error:
        return {"error": str(error)}
    finally:
        os.environ["PLANNER_TIMEOUT_S"] = "60"
    return {"error": ""}


def accumulate(folder: Path, **options: Any) -> dict[str, float]:
    """Return how far two steps without zero_grad, and a step of this rank's rows, are from the sum of two steps."""
    plan = load_plan(folder, **options)
    torch.manual_seed(5)
    runtime = plan.setup(build_double, loss_fn)
    num_rows = 4 * options.get("dp", 1)
    steps = []
    for seed in (0, 1):
        runtime.step(*batch(num_rows, seed))
        steps.append(runtime.full_gradients())
        runtime.zero_grad()
    ids, target = batch(num_rows, 0)
    runtime.step(
        torch.cat([ids[rows] for rows in runtime.rows]), torch.cat([target[rows] for rows in runtime.rows]), local=True
    )
    runtime.step(*batch(num_rows, 1))
    both = runtime.full_gradients()
    if both is None:
        return {}
    return {"worst": max(relative(both[name], steps[0][name] + steps[1][name]) for name in both)}


def accumulate_beside_one(folder: Path, *, freeze: str = "", **options: Any) -> dict[str, float]:
    """Return how far gradients of three steps, and parameters after two rounds of them, are from one process's.

    The one process adds up the gradients of the same three batches, each whole. The first round ends with gradients
    set to zero, the second with none left.
    """

    def build() -> nn.Module:
        model = build_double()
        for name, param in model.named_parameters():
            param.requires_grad_(not (freeze and re.match(freeze, name)))
        return model

    plan = load_plan(folder, **options)
    torch.manual_seed(5)
    runtime = plan.setup(build, loss_fn)
    torch.manual_seed(5)
    reference = build()
    optimizer = torch.optim.AdamW(runtime.parameters(), lr=1e-2, weight_decay=0.5, foreach=True)
    other = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.5, foreach=True)
    names = {"transformer.wte.weight": "lm_head.weight"}
    result = {"gradient": 0.0, "parameter": 0.0, "loss": 0.0}
    for round_ in range(2):
        for seed in range(3):
            ids, target = batch(4 * options.get("dp", 1), 10 * round_ + seed)
            loss = runtime.step(ids, target)
            one = loss_fn(reference(ids), target)
            one.backward()
            result["loss"] = max(result["loss"], abs(loss.item() - one.item()))
        gradients = runtime.full_gradients()
        for name, param in reference.named_parameters() if gradients is not None else ():
            found = gradients.get(names.get(name, name))
            assert (found is None) == (param.grad is None), name
            if found is not None:
                result["gradient"] = max(result["gradient"], relative(found, param.grad))
        optimizer.step()
        other.step()
        for each in (runtime, optimizer) if round_ else (optimizer,):
            each.zero_grad(set_to_none=bool(round_))
        other.zero_grad(set_to_none=bool(round_))
        left = [param.grad is None for param in runtime.parameters() if param.requires_grad]
        assert all(left) if round_ else not any(left)
    parameters = runtime.full_parameters()
    for name, param in reference.named_parameters() if parameters is not None else ():
        result["parameter"] = max(result["parameter"], relative(parameters[names.get(name, name)], param.detach()))
    return result


def drop(folder: Path, **options: Any) -> dict[str, Any]:
    """Return the losses of two runs from one seed with dropout, and the next number of the user's random state."""
    plan = load_plan(folder, **options)

    def build() -> nn.Module:
        model = build_double()
        for block in model.transformer.h:
            block.drop.p = 0.5
        return model

    losses = []
    for _ in range(2):
        torch.manual_seed(9)
        runtime = plan.setup(build, loss_fn)
        losses += [runtime.step(*batch(4 * options.get("dp", 1), 0)).item() for _ in range(2)]
        losses.append(runtime.evaluate(*batch(4 * options.get("dp", 1), 0)).item())
    gradients = runtime.full_gradients() or {"": torch.zeros(1)}
    return {
        "losses": losses,
        "rank": dist.get_rank(),
        "training": runtime.modules[0].training,
        "user": torch.rand(1).item(),
        "finite": all(bool(gradient.isfinite().all()) for gradient in gradients.values()),
    }


def mix(folder: Path, **options: Any) -> dict[str, Any]:
    """Return the loss in bf16-mixed beside float32's, and the dtypes of parameters, gradients and values."""
    plan = load_plan(folder, precision="bf16-mixed", **options)
    torch.manual_seed(5)
    runtime = plan.setup(GPT, loss_fn)
    torch.manual_seed(5)
    model = GPT()
    ids, target = batch(4 * options.get("dp", 1), 0)
    loss = runtime.step(ids, target)
    optimizer = torch.optim.AdamW(runtime.parameters(), foreach=True)
    optimizer.step()
    expected = loss_fn(model(ids), target)
    expected.backward()
    gradients = runtime.full_gradients()
    worst = 0.0
    if gradients is not None:
        wanted = {name: param.grad for name, param in model.named_parameters(remove_duplicate=False)}
        numbers = [name for name, gradient in gradients.items() if gradient.dim() == 0]
        worst = max(relative(gradients[name], wanted[name]) for name in gradients if name not in numbers)
        # each is a sum in which terms cancel, so what is rounded is told by all of them together
        together = [torch.stack([given[name] for name in numbers]) for given in (gradients, wanted)]
        worst = max(worst, relative(*together))
    return {
        "loss": loss.item(),
        "expected": expected.item(),
        "worst": worst,
        "dtypes": sorted({str(param.dtype) for param in runtime.parameters()}),
        "stage": str(runtime.modules[0].dtype),
    }


def divide(folder: Path, *, case: str) -> dict[str, Any]:
    """Return how far a layer divided over the ranks is from the whole one: output, input and parameter gradients."""
    plan = load_plan(folder, tp=dist.get_world_size())
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    makers: dict[str, tuple[nn.Module, Any, str]] = {
        "linear column": (nn.Linear(8, 12), plan.Column(gather=True, enters=True), "float"),
        "linear column fused": (nn.Linear(8, 12), plan.Column(parts=3, gather=True, enters=True), "float"),
        "linear column no bias": (nn.Linear(8, 12, bias=False), plan.Column(gather=True, enters=True), "float"),
        "conv1d column fused": (Conv1D(12, 8), plan.Column(dim=1, parts=3, gather=True, enters=True), "float"),
        "linear row": (nn.Linear(8, 12), plan.Row(), "slice"),
        "conv1d row": (Conv1D(12, 8), plan.Row(dim=0), "slice"),
        "vocabulary": (nn.Embedding(12, 8), plan.Vocabulary(), "ids"),
        "vocabulary padded low": (nn.Embedding(12, 8, padding_idx=0), plan.Vocabulary(), "ids"),
        "vocabulary padded high": (nn.Embedding(12, 8, padding_idx=-1), plan.Vocabulary(), "ids"),
        "vocabulary scaled": (ScaledEmbedding(12, 8), plan.Vocabulary(), "ids"),
        "linear uneven": (nn.Linear(8, 7), plan.Column(), "float"),
        "linear column unequal": (nn.Linear(8, 12), plan.Column(parts=(8, 2, 2), gather=True, enters=True), "float"),
        "linear row fused": (nn.Linear(8, 12), plan.Row(parts=2), "slice"),
        "linear row unreduced": (nn.Linear(8, 12), plan.Row(reduce=False), "slice"),
        "embedding column": (nn.Embedding(12, 8), plan.Column(dim=1, gather=True), "ids"),
        "embedding column of rows": (nn.Embedding(12, 8), plan.Column(), "ids"),
        "layer norm row": (nn.LayerNorm(8), plan.Row(), "float"),
        "subclass": (NoisyLinear(8, 12), plan.Column(), "float"),
        "vocabulary renormalised": (nn.Embedding(12, 8, max_norm=1.0), plan.Vocabulary(), "ids"),
    }
    layer, style, kind = makers[case]
    layer.double()
    whole = {name: param.detach().clone() for name, param in layer.named_parameters()}
    x = torch.randint(0, 12, (3, 5)) if kind == "ids" else torch.randn(3, 5, 8, dtype=torch.float64)
    leaf = x.requires_grad_() if kind != "ids" else x
    y = layer(leaf)
    weights = torch.randn_like(y)
    (y * weights).sum().backward()
    wanted = {name: param.grad for name, param in layer.named_parameters()}
    wanted_input = None if kind == "ids" else leaf.grad.clone()
    for name, param in layer.named_parameters():
        param.data, param.grad = whole[name], None
    try:
        plan.parallelize_module(layer, mesh, style)
    except plan.PlanError as error:
        return {"error": str(error)}
    x, rank = x.detach(), mesh.get_local_rank()
    parts = getattr(style, "parts", 1) if kind == "slice" else 1
    leaf = plan._shard(x, -1, parts, rank, mesh.size()).clone().requires_grad_() if kind == "slice" else x.clone()
    if kind == "float":
        leaf.requires_grad_()
    z = layer(leaf) if getattr(style, "reduce", True) else plan.sum_ranks(layer(leaf), mesh.get_group())
    (z * weights).sum().backward()
    result = {"output": relative(z.detach(), y.detach()), "input": 0.0, "params": 0.0}
    if wanted_input is not None:
        part = plan._shard(wanted_input, -1, parts, rank, mesh.size()) if kind == "slice" else wanted_input
        result["input"] = relative(leaf.grad, part)
    for name, param in layer.named_parameters():
        cut = plan._shard_of(layer, name)
        part = wanted[name] if cut is None else plan._shard(wanted[name], *cut, mesh.get_local_rank(), mesh.size())
        result["params"] = max(result["params"], relative(param.grad, part))
    return {**result, "sizes": {key: value for key, value in vars(layer).items() if isinstance(value, int)}}


class ScaledEmbedding(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 3.0


class NoisyLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1.0


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for number, line in enumerate(sys.stdin):
        job = json.loads(line)
        if rank >= job["ranks"]:
            continue
        try:
            store = dist.FileStore(str(folder / f"store{number}"), job["ranks"])
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=job["ranks"], timeout=timedelta(seconds=60)
            )
            function: Callable[..., Any] = globals()[job["function"]]
            answer = {"result": function(folder, **job["arguments"])}
        except Exception:  # noqa: BLE001  the parent reads it
            answer = {"error": traceback.format_exc()}
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

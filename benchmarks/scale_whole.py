"""The whole search on models that take thousands of GPUs, from their configs, beside their published layouts.

    python benchmarks/scale.py whole [--only gpt] [--seconds 20] [--theoretical]

GPT of 1T parameters on 3,072 GPUs: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters
Using Megatron-LM" (2021), table 1: tp 8, pp 64, batch 3,072. Llama 3.1 405B on 16,384 GPUs: Llama team, "The Llama 3
Herd of Models" (2024), table 4: tp 8, pp 16, dp 128, 16M tokens a step. Both are priced here on nodes of 8 H100s, with
rows of 2,048 tokens, the published layouts with even cuts and as little recomputation as fits.
"""

import argparse
import json
import resource
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scale_chain import ORIGIN

from planner.cluster import default_cluster
from planner.errors import PlannerError
from planner.model_profile import ModelProfile
from planner.solver import SolveRequest, solve
from planner.solver.written import complete, read_degrees

GPU = "h100-sxm"


@dataclass(frozen=True)
class Case:
    """A model's config, the cluster and the batch, and its published layout as `compare --degrees` reads it."""

    name: str
    config: dict[str, Any]
    num_gpus: int
    batch: int
    published: str


CASES = (
    Case(
        "gpt-1t",
        {
            "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 25600, "n_head": 160,
            "n_layer": 128, "n_positions": 2048, "n_ctx": 2048, "vocab_size": 51200, "tie_word_embeddings": True,
        },
        3072, 3072, "pp=64,tp=8,dp=6,microbatch_size=1,recompute=fit,cuts=best",
    ),
    Case(
        "llama-405b",
        {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16384,
            "intermediate_size": 53248, "num_attention_heads": 128, "num_hidden_layers": 126,
            "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": False,
        },
        16384, 2048, "pp=16,tp=8,dp=128,microbatch_size=1,recompute=fit,cuts=best",
    ),
)  # fmt: skip


def profile_of(case: Case) -> ModelProfile:
    """Return the profile of a config, computed for the GPU."""
    from planner.profiler import profile_model

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(case.config))
        return profile_model(str(path), gpu=GPU, tp_degrees=(1, 2, 4, 8))


def row(case: Case, seconds: float, *, theoretical: bool) -> str:
    """Return a line of the table."""
    profile = profile_of(case)
    cluster = default_cluster(case.num_gpus, GPU)
    request = SolveRequest(
        num_gpus=case.num_gpus, global_batch_size=case.batch, precision="bf16-mixed", time_limit_s=seconds, top=0,
        theoretical=theoretical,
    )  # fmt: skip
    start, clock = time.process_time(), time.monotonic()
    solution = solve(profile, cluster, request, origin=ORIGIN)
    cpu_s, wall_s = time.process_time() - start, time.monotonic() - clock
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    plan = solution.plan
    assert plan is not None
    assert plan.prediction is not None
    try:
        published = complete(read_degrees(case.published), profile, cluster, request, origin=ORIGIN).prediction
        theirs = "-" if published is None else f"{published.step_time_s:.3f}"
    except PlannerError as error:
        theirs = error.message
    chunks = f" x {plan.num_chunks}" if plan.num_chunks > 1 else ""
    return (
        f"{case.name:11} {case.num_gpus:6} {cpu_s:7.1f} {wall_s:7.1f} {peak:6.2f} {plan.prediction.step_time_s:9.3f}"
        f" {solution.lower_bound_s:9.3f} {100 * solution.gap_fraction:6.2f}% {theirs:>9}"
        f"  pp {plan.pp_degree}{chunks}, tp {plan.tp_degree}, dp {plan.dp_degree}, {plan.schedule}, "
        f"{plan.data_parallel}, {plan.num_microbatches} x {plan.microbatch_size}"
    )


HEADER = "model         GPUs   CPU s  wall s    GiB    step s     bound     gap published  plan"


def run(arguments: argparse.Namespace) -> int:
    """Print the table."""
    print(HEADER, flush=True)
    for case in CASES:
        if arguments.only in case.name:
            print(row(case, arguments.seconds, theoretical=arguments.theoretical), flush=True)
    return 0

"""The chain part of `scale.py`: chains of different layers on many GPUs, the whole search, uniform beside mixed.

A layer has 150M parameters and takes 1.5 ms forward per row on average, each drawn lognormally (`sigma`), with
activations, and tensor parallelism up to 8 whose collectives pass what the layer hands on. GPUs are 80 GiB on nodes of
8 (`cluster.default_cluster`).
"""

import argparse
import random
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass

from planner.arguments import BatchInt, Ref
from planner.cluster import default_cluster
from planner.model_profile import Edge, Layer, LayerClass, LayerCost, ModelProfile, Parameter, Provenance
from planner.plan import Origin
from planner.program import Node, Program, Tensor
from planner.sharding import CollectiveCall, ShardedParameter, Sharding
from planner.solver import Solution, SolveRequest, solve
from planner.solver.differences import degrees, microbatches

GPU = "h100-sxm"
PARAMS, FORWARD_S, ACTIVATION_BYTES, HANDED_BYTES = 150e6, 1.5e-3, 120e6, 16.8e6
ORIGIN = Origin(
    model_path="chain", model_hash="", profile_path="chain", profile_hash="", cluster="", cluster_hash="",
    torch_version="", planner_version="",
)  # fmt: skip


def layer_class(name: str, draw: random.Random, sigma: float, tp_degrees: tuple[int, ...]) -> LayerClass:
    """Return a layer whose time, parameters and activations are drawn."""
    seconds = FORWARD_S * draw.lognormvariate(0, sigma)
    params = int(PARAMS * draw.lognormvariate(0, sigma)) // 8 * 8
    activation = int(ACTIVATION_BYTES * draw.lognormvariate(0, sigma))
    costs, shardings = [], []
    for tp in (1, *tp_degrees):
        sharding = "replicated" if tp == 1 else "split"
        if tp > 1:
            calls = [
                CollectiveCall(kind="all_reduce", bytes_per_row=HANDED_BYTES, phase=p) for p in ("forward", "backward")
            ]
            divided = {"weight": ShardedParameter(dim=0)}
            shardings.append(Sharding(name=sharding, tp_degree=tp, parameters=divided, collectives=tuple(calls)))
        for rows in (1, 8):
            each = seconds * (rows + 0.05) / tp
            costs.append(
                LayerCost(
                    microbatch_size=rows, tp_degree=tp, sharding=sharding, forward_time_s=each,
                    backward_input_time_s=each, backward_weight_time_s=each,
                    activation_bytes=activation * rows // tp, saved_input_bytes=int(HANDED_BYTES * rows),
                    saved_output_bytes=0, transient_bytes=int(HANDED_BYTES * rows), param_bytes=2 * params // tp,
                    trainable_param_count=params // tp, forward_flops=2.0 * params * 2048 * rows / tp,
                    source="computed",
                )
            )  # fmt: skip
    body = Program(inputs=(), nodes=(), output=None, tensors={})
    return LayerClass(name=name, module_class="Layer", body=body, shardings=tuple(shardings), costs=tuple(costs))


def chain_profile(
    num_layers: int, sigma: float, tp_degrees: tuple[int, ...] = (2, 4, 8), seed: int = 0
) -> ModelProfile:
    """Return a chain of layers that are all different."""
    draw = random.Random(seed)
    names = [f"layers.{index}" for index in range(num_layers)]
    classes = [layer_class(f"class{index}", draw, sigma, tp_degrees) for index in range(num_layers)]
    values = [f"v{index}" for index in range(num_layers)]
    counts = [layer.costs[0].trainable_param_count for layer in classes]
    tensor = Tensor(shape=(BatchInt(1), 1), dtype="bfloat16", requires_grad=True)
    return ModelProfile(
        name="chain",
        provenance=Provenance(
            model_path="chain", model_hash="", torch_version="", device="cpu", gpu=GPU, dtype="bfloat16",
            input_shapes={"x": (1, 1)}, tokens_per_row=2048,
        ),
        param_count=sum(counts),
        trainable_param_count=sum(counts),
        forward_flops_per_row=sum(2.0 * count * 2048 for count in counts),
        parameters={
            f"{name}.weight": Parameter(shape=(count,), dtype="bfloat16", num_bytes=2 * count, trainable=True)
            for name, count in zip(names, counts, strict=True)
        },
        tied=(),
        layers=tuple(
            Layer(
                name=name, layer_class=classes[i].name, module=name, start=i, stop=i + 1, parameters=(f"{name}.weight",)
            )
            for i, name in enumerate(names)
        ),
        layer_classes=tuple(classes),
        edges=tuple(
            Edge(value=values[i], producer=i, consumers=(i + 1,), bytes_per_row=HANDED_BYTES, needs_grad=True)
            for i in range(num_layers - 1)
        ),
        program=Program(
            inputs=("x",),
            nodes=tuple(
                Node(
                    name=values[i], kind="module", target=name, args=(Ref(values[i - 1] if i else "x"),),
                    result=Ref(values[i]),
                )
                for i, name in enumerate(names)
            ),
            output=Ref(values[-1]),
            tensors=dict.fromkeys(["x", *values], tensor),
        ),
    )  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """What a search said, and what it took."""

    solution: Solution
    cpu_s: float


def ask(profile: ModelProfile, num_gpus: int, batch: int, seconds: float, *, mixed: bool) -> Answer:
    """Return the answer of the whole search in at most so many seconds."""
    request = SolveRequest(
        num_gpus=num_gpus, global_batch_size=batch, precision="bf16-mixed", time_limit_s=seconds, theoretical=mixed,
        top=1,
    )  # fmt: skip
    start = time.process_time()
    solution = solve(profile, default_cluster(num_gpus, GPU), request, origin=ORIGIN)
    return Answer(solution, time.process_time() - start)


def rows(
    num_layers: int, num_gpus: int, sigma: float, tps: tuple[int, ...], batch: int, seconds: float
) -> Iterator[str]:
    """Yield a line of the table for uniform degrees, then one for degrees by stage."""
    profile = chain_profile(num_layers, sigma, tps)
    for mixed in (False, True):
        answer = ask(profile, num_gpus, batch, seconds, mixed=mixed)
        plan = answer.solution.plan
        assert plan is not None
        assert plan.prediction is not None
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        kind = f"{'1,' + ','.join(map(str, tps)):8} {'mixed' if mixed else 'uniform':8}"
        found = f"{plan.prediction.step_time_s:10.4f} {answer.solution.lower_bound_s:10.4f}"
        yield (
            f"{num_layers:6} {num_gpus:5} {sigma:5} {kind}{answer.cpu_s:7.1f} {peak:6.2f} {found}"
            f" {100 * answer.solution.gap_fraction:6.2f}%  {degrees(plan)}, {plan.schedule}, {microbatches(plan)}"
        )


HEADER = "layers  GPUs sigma tp       degrees   CPU s    GiB     step s      bound     gap  plan"


def run(arguments: argparse.Namespace) -> int:
    """Print the table."""
    print(HEADER, flush=True)
    all_degrees = (2, 4, 8)
    cases = [(arguments.layers, arguments.gpus, sigma, all_degrees) for sigma in arguments.sigma]
    if arguments.growth:
        layers, gpus, sigma = arguments.layers, arguments.gpus, arguments.sigma[0]
        cases += [(layers // share, gpus, sigma, all_degrees) for share in (2, 4, 8)]
        cases += [(layers, gpus // share, sigma, all_degrees) for share in (2, 4, 8)]
        cases += [(layers, gpus, sigma, all_degrees[:count]) for count in (2, 1)]
    for num_layers, num_gpus, sigma, tps in cases:
        for line in rows(num_layers, num_gpus, sigma, tps, arguments.batch, arguments.seconds):
            print(line, flush=True)
    return 0

"""Builders of small profiles, clusters and plans, shared by the tests: exact numbers, or drawn from a seed.

`chain_profile` takes numbers; `random_profile` and `random_cluster` draw them. A profile made here has a program of one
node per layer, so that it reads back from its file as any other.
"""

import random
from collections.abc import Sequence
from itertools import pairwise

from planner.arguments import BatchInt, Ref
from planner.cluster import Cluster, Gpu, Link, NodeGroup
from planner.model_profile import Edge, Layer, LayerClass, LayerCost, ModelProfile, Parameter, Provenance
from planner.plan import (
    DataParallel,
    Optimizer,
    Origin,
    Plan,
    Precision,
    Schedule,
    Stage,
    group_of_stage,
)
from planner.program import Node, Program, Tensor
from planner.sharding import CollectiveCall, ShardedParameter, Sharding

ORIGIN = Origin(
    model_path="model.py",
    model_hash="0" * 16,
    profile_path="profiles/test.json",
    profile_hash="0" * 16,
    cluster="test",
    cluster_hash="0" * 16,
    torch_version="2.13.0",
    planner_version="0.1.0",
)


def layer_cost(
    *,
    rows: int = 1,
    tp_degree: int = 1,
    sharding: str = "replicated",
    forward_s: float = 1.0,
    backward_s: float = 2.0,
    activation: int = 0,
    saved_input: int = 0,
    saved_output: int = 0,
    transient: int = 0,
    params: int = 0,
    frozen: int = 0,
    forward_flops: float = 1.0,
) -> LayerCost:
    """Return a layer's cost; `params` and `frozen` count elements of 4 bytes."""
    return LayerCost(
        microbatch_size=rows,
        tp_degree=tp_degree,
        sharding=sharding,
        forward_time_s=forward_s,
        backward_input_time_s=backward_s / 2,
        backward_weight_time_s=backward_s / 2,
        activation_bytes=activation,
        saved_input_bytes=saved_input,
        saved_output_bytes=saved_output,
        transient_bytes=transient,
        param_bytes=4 * (params + frozen),
        trainable_param_count=params,
        forward_flops=forward_flops,
        source="computed",
    )


def chain_profile(
    classes: Sequence[LayerClass],
    layer_classes: Sequence[str],
    *,
    edge_bytes: Sequence[float] | float = 0.0,
    needs_grad: Sequence[bool] | bool = True,
    tied: Sequence[tuple[int, int]] = (),
    extra_edges: Sequence[Edge] = (),
    dtype: str = "float32",
    tokens_per_row: int = 0,
    name: str = "test",
    names: Sequence[str] | None = None,
    gpu: str | None = None,
) -> ModelProfile:
    """Return the profile of a chain: layer i is of class `layer_classes[i]`, has one parameter and is `names[i]`.

    Without `names` it is called 'layers.i'.

    `edge_bytes` (per row) and `needs_grad` describe the value between layers i and i + 1; `tied` pairs share the
    parameter 'weight'.
    """
    by_name = {layer_class.name: layer_class for layer_class in classes}
    count = len(layer_classes)
    names = [f"layers.{index}" for index in range(count)] if names is None else names
    sizes = [edge_bytes] * (count - 1) if isinstance(edge_bytes, int | float) else list(edge_bytes)
    grads = [needs_grad] * (count - 1) if isinstance(needs_grad, bool) else list(needs_grad)
    first_of = {second: first for first, second in tied}
    parameters: dict[str, Parameter] = {}
    width = 2 if dtype in ("bfloat16", "float16") else 4
    for index, class_name in enumerate(layer_classes):
        cost = next(c for c in by_name[class_name].costs if c.tp_degree == 1)
        elements = cost.trainable_param_count or (cost.param_bytes // width)
        owner = first_of.get(index)
        parameters[f"{names[index]}.weight"] = Parameter(
            shape=(elements,) if owner is None else parameters[f"{names[owner]}.weight"].shape,
            dtype=dtype,
            num_bytes=width * elements,
            trainable=cost.trainable_param_count > 0,
            tied_to=None if owner is None else f"{names[owner]}.weight",
        )
    values = [f"v{index}" for index in range(count)]
    nodes = tuple(
        Node(
            name=values[index],
            kind="module",
            target=names[index],
            args=(Ref(values[index - 1] if index else "x"),),
            result=Ref(values[index]),
        )
        for index in range(count)
    )
    tensor = Tensor(shape=(BatchInt(1), 1), dtype=dtype, requires_grad=True)
    return ModelProfile(
        name=name,
        provenance=Provenance(
            model_path="model.py",
            model_hash="0" * 16,
            torch_version="2.13.0",
            device="cpu",
            gpu=gpu,
            dtype=dtype,
            input_shapes={"x": (1, 1)},
            tokens_per_row=tokens_per_row,
        ),
        param_count=sum(p.num_bytes // width for p in parameters.values() if p.tied_to is None),
        trainable_param_count=sum(
            p.num_bytes // width for p in parameters.values() if p.trainable and p.tied_to is None
        ),
        forward_flops_per_row=sum(by_name[name].costs[0].forward_flops for name in layer_classes),
        parameters=parameters,
        tied=tuple((f"{names[a]}.weight", f"{names[b]}.weight") for a, b in tied),
        layers=tuple(
            Layer(
                name=names[index],
                layer_class=class_name,
                module=names[index],
                start=index,
                stop=index + 1,
                parameters=(f"{names[index]}.weight",),
            )
            for index, class_name in enumerate(layer_classes)
        ),
        layer_classes=tuple(classes),
        edges=(
            *(
                Edge(
                    value=values[index],
                    producer=index,
                    consumers=(index + 1,),
                    bytes_per_row=sizes[index],
                    needs_grad=grads[index],
                )
                for index in range(count - 1)
            ),
            *extra_edges,
        ),
        program=Program(
            inputs=("x",),
            nodes=nodes,
            output=Ref(values[-1]),
            tensors=dict.fromkeys(["x", *values, *(edge.value for edge in extra_edges)], tensor),
        ),
    )


def equal_profile(num_layers: int, **cost: float) -> ModelProfile:
    """Return a chain of equal layers; keywords are those of `layer_cost`."""
    block = LayerClass(name="block", module_class="Block", costs=(layer_cost(**cost),))  # type: ignore[arg-type]
    return chain_profile([block], ["block"] * num_layers)


def timed_profile(forward_s: Sequence[float], backward_s: Sequence[float] | None = None) -> ModelProfile:
    """Return a chain of layers with these seconds per microbatch of one row, and nothing else."""
    backward = list(backward_s) if backward_s is not None else [0.0] * len(forward_s)
    names: dict[tuple[float, float], str] = {}
    for pair in zip(forward_s, backward, strict=True):
        names.setdefault(pair, f"class{len(names)}")
    classes = [
        LayerClass(name=name, module_class="Layer", costs=(layer_cost(forward_s=f, backward_s=b),))
        for (f, b), name in names.items()
    ]
    return chain_profile(classes, [names[pair] for pair in zip(forward_s, backward, strict=True)])


def make_cluster(
    num_gpus: int,
    *,
    gpus_per_node: int | None = None,
    memory: int = 80 * 2**30,
    intra: tuple[float, float] = (1e12, 0.0),
    inter: tuple[float, float] | None = None,
    reserve: int = 0,
    memory_bandwidth: float = 1e15,
    peak_flops: float = 1e12,
) -> Cluster:
    """Return a cluster of one GPU type; links are (bytes per second, seconds). Defaults make everything else free."""
    per_node = gpus_per_node or num_gpus
    groups = [NodeGroup(count=num_gpus // per_node, gpus_per_node=per_node, gpu="test")]
    if rest := num_gpus % per_node:
        groups.append(NodeGroup(count=1, gpus_per_node=rest, gpu="test"))
    inside, outside = intra, inter or intra
    return Cluster(
        name="test",
        node_groups=tuple(groups),
        intra_node=Link(bandwidth=f"{inside[0]!r}B/s", latency=f"{inside[1]!r}s"),  # type: ignore[arg-type]
        inter_node=Link(bandwidth=f"{outside[0]!r}B/s", latency=f"{outside[1]!r}s"),  # type: ignore[arg-type]
        memory_reserve=f"{reserve}B",  # type: ignore[arg-type]
        gpus={
            "test": Gpu(
                name="test",
                memory=f"{memory}B",  # type: ignore[arg-type]
                memory_bandwidth=f"{memory_bandwidth!r}B/s",  # type: ignore[arg-type]
                peak_flops=dict.fromkeys(("float32", "bfloat16"), f"{peak_flops!r}FLOP/s"),  # type: ignore[misc]
                source="a test",
            )
        },
    )


def make_plan(
    profile: ModelProfile,
    cuts: Sequence[int] = (),
    *,
    m: int = 1,
    rows: int = 1,
    tp: int = 1,
    dp: int = 1,
    schedule: Schedule = "1f1b",
    data_parallel: DataParallel = "replicated",
    optimizer: Optimizer = "sgd",
    precision: Precision = "fp32",
    recompute: Sequence[str] = (),
    shardings: dict[str, str] | None = None,
    groups: int | None = None,
) -> Plan:
    """Return the plan with a new stage at every index in `cuts`, on so many device groups: one of each, unless told."""
    names = [layer.name for layer in profile.layers]
    bounds = [0, *cuts, len(names)]
    on = [group_of_stage(schedule, groups or len(cuts) + 1, stage) for stage in range(len(cuts) + 1)]
    return Plan(
        global_batch_size=m * rows * dp,
        num_microbatches=m,
        schedule=schedule,
        data_parallel=data_parallel,
        optimizer=optimizer,
        precision=precision,
        origin=ORIGIN,
        stages=tuple(
            Stage(
                layers=tuple(names[first:stop]),
                tp_degree=tp,
                dp_degree=dp,
                microbatch_size=rows,
                recompute=tuple(name for name in names[first:stop] if name in recompute),
                shardings=shardings or {},
                gpus=tuple(range(on[s] * tp * dp, (on[s] + 1) * tp * dp)),
            )
            for s, (first, stop) in enumerate(pairwise(bounds))
        ),
    )


def random_profile(
    seed: int,
    *,
    num_layers: int,
    num_classes: int = 3,
    tp_degrees: Sequence[int] = (),
    skips: bool = False,
    frozen: bool = False,
) -> ModelProfile:
    """Return a chain with drawn costs at microbatch sizes 1, 2 and 4, drawn shardings, sometimes a tied pair.

    `skips` adds values that jump over layers, `frozen` layers without gradients at the start.
    """
    draw = random.Random(seed)
    classes = [_random_class(draw, f"class{index}", tp_degrees) for index in range(min(num_classes, num_layers))]
    names = [draw.choice(classes).name for _ in range(num_layers)]
    used = [layer_class for layer_class in classes if layer_class.name in names]
    tied: list[tuple[int, int]] = []
    if num_layers >= 2 and draw.random() < 0.5:
        twins = [(a, b) for a in range(num_layers) for b in range(a + 1, num_layers) if names[a] == names[b]]
        tied = [draw.choice(twins)] if twins else []
    edges = []
    if skips and num_layers >= 3:
        producer = draw.randrange(num_layers - 2)
        consumers = sorted(draw.sample(range(producer + 1, num_layers), k=min(2, num_layers - 1 - producer)))
        edges.append(
            Edge(
                value="skip",
                producer=producer,
                consumers=tuple(consumers),
                bytes_per_row=draw.choice([64, 512]),
                needs_grad=draw.random() < 0.7,
            )
        )
    held = draw.randrange(num_layers) if frozen else 0
    return chain_profile(
        used,
        names,
        edge_bytes=[draw.choice([16, 128, 1024]) for _ in range(num_layers - 1)],
        needs_grad=[index >= held for index in range(num_layers - 1)],
        tied=tied,
        extra_edges=edges,
        tokens_per_row=8,
    )


def _random_class(draw: random.Random, name: str, tp_degrees: Sequence[int]) -> LayerClass:
    params = draw.choice([0, 8, 64, 256]) * 8
    base = {
        "forward_s": draw.choice([1, 2, 3, 5]) * draw.uniform(0.8, 1.2),
        "activation": draw.choice([100, 400, 900]),
        "saved_input": draw.choice([0, 16, 128]),
        "saved_output": draw.choice([0, 16, 128]),
        "transient": draw.choice([10, 200]),
    }
    base["backward_s"] = base["forward_s"] * draw.choice([1.5, 2.0])
    fixed = draw.uniform(0, 0.5)
    costs, shardings = [], []
    variants = [("replicated", 1, 1.0)]
    for degree in tp_degrees:
        for variant in range(draw.randrange(3)):
            sharding = f"way{variant}"
            calls = [
                CollectiveCall(kind="all_reduce", bytes_per_row=draw.choice([32, 256]), phase=phase)
                for phase in draw.choice([("forward", "backward"), ("forward",)])
            ]
            divided = {"weight": ShardedParameter(dim=0)} if variant == 0 and params else {}
            shardings.append(
                Sharding(name=sharding, tp_degree=degree, parameters=divided, collectives=tuple(calls))
            )  # fmt: skip
            variants.append((sharding, degree, draw.uniform(1.0, 1.3) / degree))
    for sharding, degree, scale in variants:
        divided_here = any(s.name == sharding and s.tp_degree == degree and s.parameters for s in shardings)
        for rows in (1, 2, 4):
            seconds = scale * (rows + fixed)
            costs.append(
                layer_cost(
                    rows=rows,
                    tp_degree=degree,
                    sharding=sharding,
                    forward_s=base["forward_s"] * seconds,
                    backward_s=base["backward_s"] * seconds,
                    activation=round(base["activation"] * scale * rows),
                    saved_input=int(base["saved_input"] * rows),
                    saved_output=int(base["saved_output"] * rows),
                    transient=round(base["transient"] * scale * rows),
                    params=params // degree if divided_here else params,
                )
            )
    # An opened block must be divided where it can be; embeddings and heads, which are not opened, may stay whole.
    body = Program(inputs=(), nodes=(), output=None, tensors={}) if draw.random() < 0.5 else None
    return LayerClass(name=name, module_class="Layer", body=body, shardings=tuple(shardings), costs=tuple(costs))


def random_cluster(seed: int, num_gpus: int, *, memory: int = 2**40) -> Cluster:
    """Return a cluster with drawn links, nodes of 2 or more GPUs, and a memory that the test chooses."""
    draw = random.Random(seed)
    per_node = draw.choice([size for size in (2, 4, 8) if size <= num_gpus] or [1])
    intra = (draw.choice([100.0, 1000.0, 1e5]), draw.choice([0.0, 0.05]))
    inter = (intra[0] / draw.choice([1, 4]), intra[1] * 2)
    return make_cluster(
        num_gpus,
        gpus_per_node=per_node,
        memory=memory,
        intra=intra,
        inter=inter,
        reserve=draw.choice([0, 100]),
        memory_bandwidth=draw.choice([1e4, 1e6]),
    )

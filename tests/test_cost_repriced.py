"""Plans of drawn degrees, placements, shard groups and GPU types against a second price that shares no code."""

import random

import pytest
from repricing import Repricing
from strategies import ORIGIN, random_cluster, random_profile

from planner import cost
from planner.cluster import Cluster, NodeGroup
from planner.errors import UsageError
from planner.model_profile import LayerCost, ModelProfile
from planner.plan import DATA_PARALLEL_MODES, Plan, Stage

CASES_PER_TEST = 30


def draw_plan(draw: random.Random, profile: ModelProfile, num_gpus: int) -> Plan | None:
    """Return a plan of drawn stages on drawn ranks; None where they need more GPUs than there are."""
    names = [layer.name for layer in profile.layers]
    cuts = sorted(draw.sample(range(1, len(names)), k=draw.randint(1, min(3, len(names) - 1))))
    rows, degrees = draw.choice([(4, (1, 2, 4)), (6, (2, 3, 6)), (3, (1, 3)), (8, (2, 4, 8))])
    m = draw.choice([1, 2, 3, 5])
    ranks = draw.sample(range(num_gpus), k=num_gpus)
    stages = []
    for first, stop in zip([0, *cuts], [*cuts, len(names)], strict=True):
        tp, dp = draw.choice([1, 1, 2, 4]), draw.choice(degrees)
        if tp * dp > len(ranks):
            return None
        gpus, ranks = ranks[: tp * dp], ranks[tp * dp :]
        ways = {c.name: [s.name for s in c.shardings if s.tp_degree == tp] for c in profile.layer_classes}
        stages.append(
            Stage(
                layers=tuple(names[first:stop]),
                tp_degree=tp,
                dp_degree=dp,
                microbatch_size=rows // dp,
                shard_degree=draw.choice([None, *(d for d in range(1, dp + 1) if dp % d == 0)]),
                recompute=tuple(name for name in names[first:stop] if draw.random() < 0.3),
                shardings={name: draw.choice(found) for name, found in ways.items() if found and draw.random() < 0.8},
                gpus=tuple(gpus if draw.random() < 0.5 else sorted(gpus)),
            )
        )
    return Plan(
        global_batch_size=rows * m,
        num_microbatches=m,
        schedule=draw.choice(["1f1b", "gpipe"]),
        data_parallel=draw.choice(DATA_PARALLEL_MODES),
        optimizer=draw.choice(["adamw", "sgd", "sgd-momentum"]),
        precision=draw.choice(["fp32", "bf16-mixed"]),
        stages=tuple(stages),
        origin=ORIGIN,
    )


def with_second_type(draw: random.Random, profile: ModelProfile, cluster: Cluster) -> tuple[ModelProfile, Cluster]:
    """Return the profile with drawn costs on a second GPU type, which the later nodes have."""

    def on_other(found: LayerCost) -> LayerCost:
        scale = draw.uniform(0.5, 3.0)
        names = ("forward_time_s", "backward_input_time_s", "backward_weight_time_s")
        return found.replace(
            **{name: getattr(found, name) * scale for name in names},
            activation_bytes=found.activation_bytes + draw.choice([0, 40]),
        )

    classes = [
        c.model_copy(update={"costs_by_gpu": {"other": tuple(map(on_other, c.costs))}}) for c in profile.layer_classes
    ]
    own = cluster.gpus["test"].model_copy(update={"device_name": profile.provenance.device})
    other = own.model_copy(update={"name": "other", "memory_bandwidth": own.memory_bandwidth / 3, "device_name": ""})
    per_node = cluster.gpus_per_node
    half = cluster.num_gpus // per_node // 2
    groups = (
        NodeGroup(count=half, gpus_per_node=per_node, gpu="test"),
        NodeGroup(count=half, gpus_per_node=per_node, gpu="other"),
    )
    return profile.model_copy(update={"layer_classes": tuple(classes)}), cluster.model_copy(
        update={"gpus": {"test": own, "other": other}, "node_groups": groups}
    )


@pytest.mark.parametrize("block", range(6))
def test_equal_to_a_second_price(block: int) -> None:
    compared, seed = 0, 1000 * block
    differing = 0
    while compared < CASES_PER_TEST:
        seed += 1
        draw = random.Random(seed)
        profile = random_profile(seed, num_layers=draw.randint(2, 6), tp_degrees=(2, 4), skips=draw.random() < 0.5)
        cluster = random_cluster(seed, 32)
        plan = draw_plan(draw, profile, cluster.num_gpus)
        if plan is None:
            continue
        if draw.random() < 0.3:
            profile, cluster = with_second_type(draw, profile, cluster)
        try:
            prediction = cost.evaluate(plan, profile, cluster)
        except UsageError as error:
            if "divides differently" not in error.message:
                raise
            continue
        expected = Repricing(plan, profile, cluster).price()
        assert prediction.step_time_s == pytest.approx(expected.step_s, rel=1e-9), seed
        assert [stage.memory.peak_bytes for stage in prediction.stages] == list(expected.peak_bytes), seed
        compared += 1
        differing += len({(stage.tp_degree, stage.dp_degree) for stage in plan.stages}) > 1
    assert differing > CASES_PER_TEST // 3

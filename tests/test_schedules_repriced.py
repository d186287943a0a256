"""Plans of every schedule, of drawn cuts, degrees and placements, against a second price that shares no code."""

import random

import pytest
from repricing_groups import GroupRepricing
from strategies import ORIGIN, random_cluster, random_profile

from planner import cost
from planner.errors import UsageError
from planner.model_profile import ModelProfile
from planner.plan import DATA_PARALLEL_MODES, FEWEST_CHUNKS, SCHEDULES, Plan, Schedule, Stage, group_of_stage

CASES_PER_SCHEDULE = 30


def draw_plan(draw: random.Random, schedule: Schedule, profile: ModelProfile, num_gpus: int) -> Plan | None:
    """Return a plan of drawn stages on drawn ranks; None where they need more layers or GPUs than there are."""
    names = [layer.name for layer in profile.layers]
    chunks = FEWEST_CHUNKS[schedule] + (draw.randint(0, 1) if schedule in ("interleaved-1f1b", "zero-bubble") else 0)
    most = max(1, len(names) // chunks)
    groups = draw.randint(min(2, most), most)
    if groups * chunks > len(names):
        return None
    cuts = sorted(draw.sample(range(1, len(names)), k=groups * chunks - 1))
    rows, degrees = draw.choice([(4, (1, 2, 4)), (6, (2, 3, 6))])
    m = draw.choice([1, 2, 3, 5, 6])
    ranks = draw.sample(range(num_gpus), k=num_gpus)
    places = []
    for _ in range(groups):
        tp, dp = draw.choice([1, 1, 2]), draw.choice(degrees)
        gpus, ranks = tuple(ranks[: tp * dp]), ranks[tp * dp :]
        if len(gpus) < tp * dp:
            return None
        shards = draw.choice([None, *(d for d in range(1, dp + 1) if dp % d == 0)])
        ways = {c.name: [s.name for s in c.shardings if s.tp_degree == tp] for c in profile.layer_classes}
        shardings = {name: draw.choice(found) for name, found in ways.items() if found and draw.random() < 0.8}
        places.append({"tp_degree": tp, "dp_degree": dp, "gpus": gpus, "shard_degree": shards, "shardings": shardings})
    stages = []
    for index, (first, stop) in enumerate(zip([0, *cuts], [*cuts, len(names)], strict=True)):
        place = places[group_of_stage(schedule, groups, index)]
        stages.append(
            Stage(
                layers=tuple(names[first:stop]),
                microbatch_size=rows // place["dp_degree"],  # type: ignore[operator]
                recompute=tuple(name for name in names[first:stop] if draw.random() < 0.3),
                **place,  # type: ignore[arg-type]
            )
        )
    return Plan(
        global_batch_size=rows * m,
        num_microbatches=m,
        schedule=schedule,
        data_parallel=draw.choice(DATA_PARALLEL_MODES),
        optimizer=draw.choice(["adamw", "sgd", "sgd-momentum"]),
        precision=draw.choice(["fp32", "bf16-mixed"]),
        stages=tuple(stages),
        origin=ORIGIN,
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_equal_to_a_second_price(schedule: Schedule) -> None:
    compared = seed = 0
    several = 0
    while compared < CASES_PER_SCHEDULE:
        seed += 1
        draw = random.Random(f"{schedule} {seed}")
        profile = random_profile(seed, num_layers=draw.randint(3, 9), tp_degrees=(2,), skips=draw.random() < 0.5)
        cluster = random_cluster(seed, 32)
        plan = draw_plan(draw, schedule, profile, cluster.num_gpus)
        if plan is None:
            continue
        try:
            prediction = cost.evaluate(plan, profile, cluster)
        except UsageError as error:
            if "divides differently" not in error.message:
                raise
            continue
        expected = GroupRepricing(plan, profile, cluster).price()
        assert prediction.step_time_s == pytest.approx(expected.step_s, rel=1e-9), seed
        assert [stage.memory.peak_bytes for stage in prediction.stages] == list(expected.peak_bytes), seed
        compared += 1
        several += plan.pp_degree > 1
    assert several > CASES_PER_SCHEDULE // 3

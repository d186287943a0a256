"""Prices of plans of equal stages, as they were before stages could differ: `UPDATE_GOLDEN=1` writes them anew."""

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from strategies import make_plan, random_cluster, random_profile

from planner.cost import Pricer
from planner.errors import UsageError
from planner.plan import DATA_PARALLEL_MODES, Plan
from planner.prediction import Prediction

PRICES = Path(__file__).parent / "golden" / "prices.json"
NUM_CASES = 60


def price(seed: int) -> list[Any] | None:
    """Return the numbers of a drawn plan; None where it divides a shared parameter in two ways."""
    draw = random.Random(seed)
    num_layers, num_gpus = draw.randint(2, 6), 8
    profile = random_profile(
        seed, num_layers=num_layers, tp_degrees=(2, 4), skips=draw.random() < 0.4, frozen=draw.random() < 0.2
    )
    pp = draw.choice([pp for pp in (1, 2, 4) if pp <= num_layers])
    tp = draw.choice([tp for tp in (1, 2, 4) if pp * tp <= num_gpus])
    dp = draw.choice([dp for dp in (1, 2, 4, 8) if pp * tp * dp <= num_gpus])
    ways = {c.name: [s.name for s in c.shardings if s.tp_degree == tp] for c in profile.layer_classes}
    plan = make_plan(
        profile,
        sorted(draw.sample(range(1, num_layers), k=pp - 1)),
        m=draw.choice([1, 4, 6]),
        rows=draw.choice([1, 2, 3]),
        tp=tp,
        dp=dp,
        schedule=draw.choice(["1f1b", "gpipe"]),
        data_parallel=draw.choice(DATA_PARALLEL_MODES),
        optimizer=draw.choice(["adamw", "sgd"]),
        precision=draw.choice(["fp32", "bf16-mixed"]),
        recompute=[layer.name for layer in profile.layers if draw.random() < 0.3],
        shardings={name: draw.choice(names) for name, names in ways.items() if names},
    )
    try:
        return _numbers(plan, Pricer(profile, random_cluster(seed, num_gpus)).evaluate(plan))
    except UsageError:
        return None


def _numbers(plan: Plan, prediction: Prediction) -> list[Any]:
    stages = [
        [
            stage.forward_time_s,
            stage.backward_time_s,
            stage.send_time_s,
            stage.data_parallel_time_s,
            stage.optimizer_time_s,
            stage.busy_time_s,
            stage.param_count,
            *stage.memory.model_dump().values(),
        ]
        for stage in prediction.stages
    ]
    degrees = f"pp {plan.pp_degree} tp {plan.tp_degree} dp {plan.dp_degree} {plan.data_parallel}"
    return [degrees, prediction.step_time_s, prediction.bubble_fraction, prediction.exposed_comm_time_s, stages]


def test_prices_of_equal_stages_are_what_they_were() -> None:
    found = [priced for seed in range(NUM_CASES) if (priced := price(seed)) is not None]
    if os.environ.get("UPDATE_GOLDEN"):
        lines = ",\n".join(json.dumps(priced) for priced in found)
        PRICES.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    expected = json.loads(PRICES.read_text(encoding="utf-8"))
    assert [priced[0] for priced in found] == [priced[0] for priced in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours[1:4] == pytest.approx(theirs[1:4], rel=1e-12), ours[0]
        for stage, other in zip(ours[4], theirs[4], strict=True):
            assert stage == pytest.approx(other, rel=1e-12), ours[0]

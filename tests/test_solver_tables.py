"""The solver's tables against the price of plans: shard groups, and GPUs of several types."""

import random

import pytest
from strategies import random_cluster, random_profile
from test_cost_degrees import mixed_plan
from test_cost_repriced import with_second_type

from planner.cost import Pricer
from planner.cost.states import StateRules, memory_bytes_per_s
from planner.solver.tables import Crossing, LayerTable, StateTable


@pytest.mark.parametrize("seed", range(24))
def test_tables_of_one_stage_are_its_price(seed: int) -> None:
    draw = random.Random(f"tables {seed}")
    profile = random_profile(seed, num_layers=draw.randint(1, 4), tp_degrees=(2,))
    profile, cluster = with_second_type(draw, profile, random_cluster(seed, 16))
    pricer = Pricer(profile, cluster)
    tp, dp, m = draw.choice([1, 2]), draw.choice([1, 2, 4]), draw.choice([1, 3])
    shards = draw.choice([d for d in (1, 2, 4) if dp % d == 0])
    ways = {c.name: [s.name for s in c.shardings if s.tp_degree == tp] for c in profile.layer_classes}
    gpus = tuple(sorted(draw.sample(range(16), k=tp * dp)))
    stage = {
        "layers": len(profile.layers),
        "tp_degree": tp,
        "dp_degree": dp,
        "shard_degree": shards,
        "gpus": gpus,
        "shardings": {name: draw.choice(found) for name, found in ways.items() if found},
    }
    plan = mixed_plan(profile, [stage], m=m, batch=m * dp, optimizer="adamw")
    prediction = pricer.evaluate(plan)
    found = plan.stages[0]
    types = tuple(pricer.places.count_types(gpus))
    table = LayerTable.of(
        pricer,
        Crossing.of(pricer, found.microbatch_size),
        found.microbatch_size,
        tp,
        dict(found.shardings),
        pricer.tensor_route(gpus, tp),
        [(False, True)] * len(profile.layers),
        types,
    )
    states = StateTable.of(
        table,
        StateRules("adamw", "fp32", "replicated", dp, shards),
        min((cluster.gpus[name] for name in types), key=memory_bytes_per_s),
        tp,
        pricer.data_routes(gpus, tp, shards),
        cluster.memory_reserve,
    )
    a, b = 0, len(profile.layers)
    busy_s = m * (table.forward_sum[b] + table.backward_sum[b])
    assert states.ready_s[a, b] + busy_s + states.tail_s[a, b] == pytest.approx(prediction.step_time_s, rel=1e-12)
    held = states.fixed_bytes[a, b] + table.kept_all[a, b] + table.transient[a, b]
    assert held == prediction.peak_bytes

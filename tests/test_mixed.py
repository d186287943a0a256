"""Plans whose stages differ in degrees, sharding and shards of states: the solver against every such plan, priced."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise, product

import pytest
from oracle import all_shardings, fastest, priced_plans, subsets
from strategies import ORIGIN, chain_profile, equal_profile, layer_cost, make_cluster, random_cluster, random_profile

from planner.model_profile import LayerClass, LayerCost, ModelProfile
from planner.plan import EMITTED_SCHEDULES, SCHEDULES, DataParallel, Plan, Schedule, Stage
from planner.runnable import unrunnable
from planner.solver import Solution, SolveRequest, solve

MAX_PLANS = 3000


@dataclass(frozen=True)
class Case:
    profile: ModelProfile
    num_gpus: int
    global_batch_size: int
    recompute: bool


def draw_case(seed: int) -> Case:
    draw = random.Random(f"mixed {seed}")
    num_layers = draw.randint(2, 4)
    profile = random_profile(
        seed,
        num_layers=num_layers,
        num_classes=draw.choice([1, 2, 4]),
        tp_degrees=(2,) if draw.random() < 0.5 else (),
        skips=draw.random() < 0.3,
        frozen=draw.random() < 0.2,
    )
    return Case(profile, draw.choice([2, 3, 4]), draw.choice([2, 4]), num_layers < 3 and draw.random() < 0.5)


def ways(case: Case, m: int) -> list[tuple[int, int, int, dict[str, str]]]:
    """Return (tp_degree, dp_degree, shard_degree, shardings) of any stage."""
    found = []
    for tp, dp in product(range(1, case.num_gpus + 1), repeat=2):
        if tp * dp <= case.num_gpus and case.global_batch_size % (m * dp) == 0:
            found += [(tp, dp, n, s) for n in sorted({1, dp}) for s in all_shardings(case.profile, tp)]
    return found


def mixed_plans(case: Case) -> Iterator[Plan]:
    """Yield every plan of consecutive stages, each run in its own way, on all GPUs or fewer."""
    names = [layer.name for layer in case.profile.layers]
    remades = subsets(names) if case.recompute else [()]
    for m in (m for m in range(1, case.global_batch_size + 1) if case.global_batch_size % m == 0):
        for stages in range(1, len(names) + 1):
            schedules: tuple[Schedule, ...] = ("1f1b", "gpipe") if m >= stages else ("gpipe",)
            for chosen in product(ways(case, m), repeat=stages):
                if sum(tp * dp for tp, dp, _, _ in chosen) > case.num_gpus:
                    continue
                for cuts in combinations(range(1, len(names)), stages - 1):
                    for schedule, remade in product(schedules, remades):
                        yield build(case, m, schedule, [0, *cuts, len(names)], chosen, remade)


def build(
    case: Case,
    m: int,
    schedule: Schedule,
    bounds: list[int],
    chosen: tuple[tuple[int, int, int, dict[str, str]], ...],
    remade: tuple[str, ...],
) -> Plan:
    names = [layer.name for layer in case.profile.layers]
    stages, first = [], 0
    mode: DataParallel = "replicated"
    for (a, b), (tp, dp, shards, shardings) in zip(pairwise(bounds), chosen, strict=True):
        stages.append(
            Stage(
                layers=tuple(names[a:b]),
                tp_degree=tp,
                dp_degree=dp,
                microbatch_size=case.global_batch_size // m // dp,
                recompute=tuple(name for name in names[a:b] if name in remade),
                shardings=shardings,
                gpus=tuple(range(first, first + tp * dp)),
                shard_degree=shards,
            )
        )
        first += tp * dp
    return Plan(
        global_batch_size=case.global_batch_size,
        num_microbatches=m,
        schedule=schedule,
        data_parallel=mode,
        optimizer="adamw",
        precision="fp32",
        stages=tuple(stages),
        origin=ORIGIN,
    )


def check(seed: int) -> tuple[float, float] | None:
    """Compare one case at a drawn memory; return the best step time with and without different stages."""
    case = draw_case(seed)
    plans = []
    for plan in mixed_plans(case):
        plans.append(plan)
        if len(plans) > MAX_PLANS:
            return None
    draw = random.Random(seed)
    roomy = random_cluster(seed, case.num_gpus)
    priced = priced_plans(case.profile, roomy, iter(plans))
    least, most = min(peak for _, peak in priced), max(peak for _, peak in priced)
    memory = draw.choice([most, least, least + int((most - least) * draw.random() ** 2)])
    cluster = random_cluster(seed, case.num_gpus, memory=memory)
    request = SolveRequest(
        num_gpus=case.num_gpus,
        global_batch_size=case.global_batch_size,
        pins=() if case.recompute else (("recompute", "none"),),
        exclusions=tuple(("schedule", schedule) for schedule in SCHEDULES if schedule not in EMITTED_SCHEDULES),
        top=1,
        theoretical=True,
    )
    solution = solve(case.profile, cluster, request, origin=ORIGIN)
    best = fastest(priced, memory)
    assert solution.plan is not None
    assert solution.plan.prediction is not None
    assert solution.plan.prediction.step_time_s <= best * (1 + 1e-9), seed
    assert (solution.status, solution.gap_fraction) == ("optimal", 0.0), seed
    assert solution.plan.prediction.peak_bytes <= memory
    return solution.plan.prediction.step_time_s, best


@pytest.mark.parametrize("block", range(4))
def test_no_plan_of_different_stages_is_faster(block: int) -> None:
    compared, same, seed = 0, 0, 10_000 * block
    while compared < 15:
        found = check(seed)
        seed += 1
        if found is not None:
            compared += 1
            same += found[0] == pytest.approx(found[1], rel=1e-9)
    assert same > 5


def uneven_profile() -> ModelProfile:
    """Return a chain of a heavy layer and a light one: the heavy one wants more GPUs."""
    classes = [
        LayerClass(name=name, module_class="Layer", costs=tuple(cost(rows, seconds) for rows in (1, 2)))
        for name, seconds in (("heavy", 2.0), ("light", 1.0))
    ]
    return chain_profile(classes, ["heavy", "light"])


def cost(rows: int, seconds: float) -> LayerCost:
    return layer_cost(rows=rows, forward_s=seconds * rows, backward_s=2 * seconds * rows, frozen=1000)


def ask(profile: ModelProfile, num_gpus: int, *, theoretical: bool, memory: int = 2**40) -> Solution:
    request = SolveRequest(num_gpus=num_gpus, global_batch_size=16, theoretical=theoretical, top=1)
    return solve(profile, make_cluster(num_gpus, memory=memory), request, origin=ORIGIN)


def test_a_heavy_layer_gets_more_gpus_where_both_fit_on_none() -> None:
    memory = 9_000  # one layer with its working copy, or two without
    plan, uniform = (ask(uneven_profile(), 3, theoretical=t, memory=memory).plan for t in (True, False))
    assert plan is not None
    assert uniform is not None
    assert [(stage.layers, stage.dp_degree) for stage in plan.stages] == [(("layers.0",), 2), (("layers.1",), 1)]
    assert [stage.gpus for stage in plan.stages] == [(0, 1), (2,)]
    assert (uniform.pp_degree, uniform.dp_degree) == (2, 1)
    assert plan.prediction is not None
    assert uniform.prediction is not None
    assert plan.prediction.step_time_s < 0.8 * uniform.prediction.step_time_s
    assert unrunnable(plan) is not None


def test_where_equal_stages_are_as_fast_they_are_chosen() -> None:
    solution = ask(equal_profile(4), 4, theoretical=True)
    assert solution.status == "optimal"
    assert solution.plan is not None
    assert unrunnable(solution.plan) is None
    assert len({(stage.tp_degree, stage.dp_degree) for stage in solution.plan.stages}) == 1


def test_pins_hold_for_every_stage() -> None:
    profile = uneven_profile()
    request = SolveRequest(
        num_gpus=3, global_batch_size=16, theoretical=True, pins=(("dp_degree", "1"), ("cuts", "layers.1"))
    )
    plan = solve(profile, make_cluster(3), request, origin=ORIGIN).plan
    assert plan is not None
    assert [stage.dp_degree for stage in plan.stages] == [1, 1]
    assert plan.stages[1].layers == ("layers.1",)

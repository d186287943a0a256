"""Models with branches: the best plan of all orders of their layers, against every plan of every order."""

import itertools
import random

import pytest
from oracle import all_plans, fastest, priced_plans
from strategies import ORIGIN, chain_profile, layer_cost, make_cluster, random_cluster, random_profile

from planner.cost import evaluate, timeline
from planner.model_profile import Edge, LayerClass, ModelProfile
from planner.orders import is_order, layer_successors, profile_in_order
from planner.solver import SolveRequest, graph_search, orders, solve


def with_edges(profile: ModelProfile, pairs: list[tuple[int, int]], sizes: list[float]) -> ModelProfile:
    """Return a profile whose layers read one another so, in place of the chain."""
    edges = tuple(
        Edge(value=f"v{a}", producer=a, consumers=(b,), bytes_per_row=size, needs_grad=True)
        for (a, b), size in zip(pairs, sizes, strict=True)
    )
    return profile.model_copy(update={"edges": edges})


def branching(seed: int, num_layers: int) -> ModelProfile:
    """Return layers with drawn costs, each read by a later one, the last by none."""
    draw = random.Random(seed)
    profile = random_profile(seed, num_layers=num_layers, num_classes=3)
    pairs = {(a, draw.randint(a + 1, num_layers - 1)) for a in range(num_layers - 1)}
    pairs |= {(a, b) for a, b in itertools.combinations(range(num_layers), 2) if draw.random() < 0.15}
    return with_edges(profile, sorted(pairs), [draw.choice([16, 128, 1024]) for _ in pairs])


def towers(depth: int, *, edge_bytes: float = 0.0) -> ModelProfile:
    """Return two towers of equal layers recorded in turn, and a head that reads both."""
    block = LayerClass(name="block", module_class="Block", costs=(layer_cost(forward_s=1.0, backward_s=2.0),))
    count = 2 * depth + 1
    profile = chain_profile([block], ["block"] * count)
    pairs = [(a, min(a + 2, count - 1)) for a in range(count - 1)]
    return with_edges(profile, pairs, [edge_bytes] * len(pairs))


def all_orders(profile: ModelProfile) -> list[tuple[int, ...]]:
    successors = layer_successors(profile)
    return [order for order in itertools.permutations(range(len(profile.layers))) if is_order(successors, order)]


def request(num_gpus: int, batch: int, *pins: tuple[str, str]) -> SolveRequest:
    return SolveRequest(num_gpus=num_gpus, global_batch_size=batch, pins=pins, top=0)


@pytest.mark.parametrize("seed", range(30))
def test_best_of_all_plans_in_all_orders(seed: int) -> None:
    draw = random.Random(seed)
    profile, num_gpus = branching(seed, draw.randint(3, 5)), draw.choice([2, 3, 4])
    pp = min(num_gpus, 3)
    num_gpus, batch = pp * (num_gpus // pp), draw.choice([4, 6])
    roomy = random_cluster(seed, num_gpus)
    recompute = draw.random() < 0.3
    plans = [
        plan
        for order in all_orders(profile)
        for plan in all_plans(profile_in_order(profile, order), num_gpus, batch, pp_degrees={pp}, recompute=recompute)
    ]
    if len(plans) > 6000:
        pytest.skip("too many plans to enumerate")
    priced = priced_plans(profile, roomy, iter(plans))
    peaks = sorted({peak for _, peak in priced})
    pins = [("pp_degree", str(pp)), *([] if recompute else [("recompute", "none")])]
    for memory in (peaks[-1], peaks[len(peaks) // 2], peaks[0] - 1):
        cluster = random_cluster(seed, num_gpus, memory=memory)
        solution = solve(profile, cluster, request(num_gpus, batch, *pins), origin=ORIGIN)
        least = fastest(priced, memory)
        if least == float("inf"):
            assert solution.status == "infeasible"
            continue
        assert solution.plan is not None
        assert solution.plan.prediction == evaluate(solution.plan, profile, cluster)
        assert solution.plan.prediction.step_time_s == pytest.approx(least, rel=1e-9)
        assert solution.plan.prediction.peak_bytes <= memory
        assert solution.status == "optimal"


@pytest.mark.parametrize("seed", range(30))
def test_bound_holds_in_all_orders_where_these_are_too_many(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "MOST_ORDERS", 1)
    draw = random.Random(seed)
    profile, num_gpus, batch = branching(seed, draw.randint(3, 5)), draw.choice([2, 3]), draw.choice([4, 6])
    cluster = random_cluster(seed, num_gpus)
    plans = (
        plan
        for order in all_orders(profile)
        for plan in all_plans(profile_in_order(profile, order), num_gpus, batch, pp_degrees={num_gpus}, recompute=False)
    )
    least = fastest(priced_plans(profile, cluster, plans), 2**40)
    solution = solve(
        profile, cluster, request(num_gpus, batch, ("pp_degree", str(num_gpus)), ("recompute", "none")), origin=ORIGIN
    )
    assert solution.plan is not None
    assert solution.plan.prediction is not None
    assert solution.lower_bound_s <= least * (1 + 1e-9) <= solution.plan.prediction.step_time_s * (1 + 2e-9)


def test_towers_stand_on_devices_of_their_own_and_run_at_once() -> None:
    """Blocks 1 s forward, 2 s backward: three stages, each tower one, and the head waits for both together."""
    profile, cluster = towers(3), make_cluster(3)
    solution = solve(profile, cluster, request(3, 2, ("pp_degree", "3"), ("microbatch_size", "1")), origin=ORIGIN)
    assert solution.status == "optimal"
    assert solution.plan is not None
    assert [len(stage.layers) for stage in solution.plan.stages] == [3, 3, 1]
    assert solution.plan.stages[0].layers in (
        ("layers.0", "layers.2", "layers.4"),
        ("layers.1", "layers.3", "layers.5"),
    )
    starts = {
        event.stage: event.start_s
        for event in timeline(solution.plan, profile, cluster)
        if event.kind == "F" and event.microbatch == 0
    }
    assert starts == {0: 0.0, 1: 0.0, 2: 3.0}
    recorded = solve(
        profile, cluster,
        request(3, 2, ("pp_degree", "3"), ("microbatch_size", "1"), ("cuts", "layers.2,layers.5")), origin=ORIGIN,
    )  # fmt: skip
    assert recorded.plan is not None
    assert [stage.layers for stage in recorded.plan.stages] == [
        ("layers.0", "layers.1"), ("layers.2", "layers.3", "layers.4"), ("layers.5", "layers.6"),
    ]  # fmt: skip


def test_runners_up_have_the_order_of_the_best_plan() -> None:
    """The runner-up by schedule is the best plan of the other schedule, whose towers run at once too."""
    pins = (("pp_degree", "3"), ("microbatch_size", "1"))
    asked = SolveRequest(num_gpus=3, global_batch_size=3, pins=pins, top=1)
    solution = solve(towers(3), make_cluster(3), asked, origin=ORIGIN)
    assert solution.plan is not None
    other = SolveRequest(
        num_gpus=3, global_batch_size=3, pins=pins, exclusions=(("schedule", solution.plan.schedule),), top=0
    )
    best = solve(towers(3), make_cluster(3), other, origin=ORIGIN).plan
    assert best is not None
    assert best.prediction is not None
    assert [found.schedule for found in solution.runners_up] == [best.schedule]
    assert solution.runners_up[0].step_time_s == pytest.approx(best.prediction.step_time_s)


def test_many_orders_are_searched_in_part_and_the_gap_says_so() -> None:
    profile, cluster = towers(6), make_cluster(3)
    solution = solve(profile, cluster, request(3, 6, ("pp_degree", "3")), origin=ORIGIN)
    again = solve(profile, cluster, request(3, 6, ("pp_degree", "3")), origin=ORIGIN)
    assert solution == again
    assert solution.plan is not None
    assert solution.plan.prediction is not None
    assert solution.lower_bound_s <= solution.plan.prediction.step_time_s
    assert list(solution.plan.layers) != [layer.name for layer in profile.layers]


def test_chain_has_no_other_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(graph_search, "space_in_order")
    profile = random_profile(1, num_layers=4)
    assert solve(profile, make_cluster(2), request(2, 4), origin=ORIGIN).status == "optimal"

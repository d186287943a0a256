"""Where there is no plan: who is at fault, and changes that were solved again, each with its best plan."""

from dataclasses import replace

import pytest
from strategies import ORIGIN, equal_profile, make_cluster, random_profile

from planner.cluster import Cluster
from planner.model_profile import ModelProfile
from planner.solver import Repair, Solution, SolveRequest, solve

Pair = tuple[str, str]


def ask(profile: ModelProfile, cluster: Cluster, batch: int, *pins: Pair, **options: object) -> Solution:
    request = SolveRequest(num_gpus=cluster.num_gpus, global_batch_size=batch, optimizer="sgd", pins=pins, top=0)
    return solve(profile, cluster, replace(request, **options), origin=ORIGIN)  # type: ignore[arg-type]


def repair_of(solution: Solution, start: str) -> Repair:
    [found] = [repair for repair in solution.repairs if repair.description.startswith(start)]
    return found


def best_s(solution: Solution) -> float:
    assert solution.plan is not None
    assert solution.plan.prediction is not None
    assert solution.status == "optimal"
    return solution.plan.prediction.step_time_s


def test_repairs_show_the_best_plan_and_what_it_does_instead() -> None:
    profile, cluster = equal_profile(4, activation=1000), make_cluster(2, memory=3500)
    pins = (("pp_degree", "2"), ("recompute", "none"), ("microbatch_size", "2"), ("schedule", "1f1b"))
    solution = ask(profile, cluster, 8, *pins)
    assert solution.conflict is not None
    assert solution.conflict.constraint == "memory"
    assert set(solution.conflict.between) >= {"--pin recompute=none", "--pin microbatch_size=2"}
    assert "in conflict with one another: " in str(solution.conflict)
    for pin in pins:
        free = tuple(other for other in pins if other != pin)
        alone = ask(profile, cluster, 8, *free)
        start = f"leave out --pin {pin[0]}={pin[1]}"
        if alone.plan is None:
            assert not any(repair.description == start for repair in solution.repairs)
            continue
        repair = repair_of(solution, start)
        assert repair.step_time_s == best_s(alone)
        assert repair.gap_fraction == 0
        if pin[0] == "recompute":
            remade = [name for stage in alone.plan.stages for name in stage.recompute]
            assert repair.instead.startswith(f"recomputes {remade[0]}")
        else:
            assert repair.instead == f"has {pin[0]} {getattr(alone.plan, pin[0])}"
        assert str(repair) == (
            f"{start}: the best plan then takes {repair.step_time_s:.3g} s per step ({repair.summary}), "
            f"which {repair.instead}"
        )


def test_constraints_that_each_forbid_a_plan_are_left_out_together() -> None:
    profile, cluster = equal_profile(4, activation=1000), make_cluster(1, memory=2500)
    solution = ask(profile, cluster, 1, ("recompute", "none"), limits=(("recompute", "0%"),))
    assert [repair.description for repair in solution.repairs][:1] == [
        "leave out --pin recompute=none and --limit recompute=0%"
    ]
    solution = ask(profile, make_cluster(1), 1, limits=(("memory", "3500B"), ("recompute", "10%")))
    assert solution.conflict is not None
    assert solution.conflict.constraint == "recompute"
    assert "--limit recompute=10% leaves no plan within 3.42 KiB" in solution.conflict.message
    assert solution.conflict.between == ("--limit memory=3500B", "--limit recompute=10%")
    assert repair_of(solution, "leave out --limit memory").step_time_s == best_s(ask(profile, make_cluster(1), 1))
    assert repair_of(solution, "leave out --limit recompute").instead.startswith("recomputes layers.0")


def test_constraints_that_are_not_at_fault_are_not_blamed() -> None:
    solution = ask(equal_profile(4, params=1000), make_cluster(2, memory=100), 4, ("schedule", "1f1b"))
    assert solution.conflict is not None
    assert solution.conflict.between == ()
    assert not any("leave out" in repair.description for repair in solution.repairs)


@pytest.mark.parametrize("seed", range(6))
def test_the_least_number_of_gpus_is_found_by_solving(seed: int) -> None:
    profile = random_profile(seed, num_layers=6, num_classes=1)
    full = ask(profile, make_cluster(1, memory=1), 12)
    assert full.conflict is not None
    assert full.conflict.least_peak_bytes is not None
    memory = int(full.conflict.least_peak_bytes * 0.6)

    def fits(num_gpus: int) -> bool:
        return ask(profile, make_cluster(num_gpus, memory=memory), 12, ("num_gpus", str(num_gpus))).plan is not None

    solution = solve(
        profile,
        make_cluster(1, memory=memory),
        SolveRequest(num_gpus=1, global_batch_size=12, optimizer="sgd", top=0),
        origin=ORIGIN,
        enlarge=lambda count: make_cluster(count, memory=memory),
    )
    least = next((count for count in range(2, 10) if fits(count)), None)
    found = [r for r in solution.repairs if r.description.startswith("--gpus")]
    if least is None:
        assert all(int(repair.description.removeprefix("--gpus ")) > 9 for repair in found)
        return
    assert [repair.description for repair in found] == [f"--gpus {least}"]
    for repair in found:
        assert repair.step_time_s == best_s(ask(profile, make_cluster(least, memory=memory), 12))


def test_many_gpus_are_counted_in_nodes() -> None:
    profile, memory = equal_profile(64, params=1000), 20_000
    cluster = make_cluster(16, gpus_per_node=4, memory=memory)
    solution = ask(profile, cluster, 64, ("dp_degree", "1"))
    assert solution.conflict is not None
    assert solution.conflict.constraint == "memory"
    found = repair_of(solution, "--gpus")
    assert found.description == "--gpus 32"  # two layers of 8 kB on each

"""Limits, layers that stay together and patterns of layer names: kept by every plan, compared with brute force."""

import random
from collections.abc import Callable

import pytest
from oracle import all_plans
from strategies import ORIGIN, chain_profile, equal_profile, layer_cost, make_cluster, random_cluster, random_profile

from planner import cost
from planner.errors import UsageError
from planner.model_profile import LayerClass, ModelProfile
from planner.plan import Plan
from planner.solver import Solution, SolveRequest, solve

Pair = tuple[str, str]


def ask(
    profile: ModelProfile,
    num_gpus: int,
    batch: int,
    *,
    pins: tuple[Pair, ...] = (),
    exclusions: tuple[Pair, ...] = (),
    limits: tuple[Pair, ...] = (),
    memory: int = 80 * 2**30,
) -> Solution:
    request = SolveRequest(
        num_gpus=num_gpus, global_batch_size=batch, pins=pins, exclusions=exclusions, limits=limits, top=0
    )  # fmt: skip
    return solve(profile, make_cluster(num_gpus, memory=memory, intra=(1000.0, 0.01)), request, origin=ORIGIN)


def planned(solution: Solution) -> Plan:
    assert solution.plan is not None, solution.conflict
    return solution.plan


def within(key: str, text: str) -> Callable[[Plan], bool]:
    """Return whether a plan keeps a limit, by its own numbers alone."""
    least, _, most = text.partition("..")

    def holds(plan: Plan) -> bool:
        assert plan.prediction is not None
        if key == "memory":
            return plan.prediction.peak_bytes <= int(text.removesuffix("B"))
        if key == "recompute":
            share = float(text.removesuffix("%")) / 100
            stages = plan.prediction.stages
            return all(stage.recompute_time_s <= share * stage.forward_time_s * (1 + 1e-6) for stage in stages)
        value = getattr(plan, key)
        return bool((not least or value >= int(least)) and (not most or value <= int(most)))

    return holds


@pytest.mark.parametrize("seed", range(24))
def test_the_best_plan_within_limits_is_found(seed: int) -> None:
    draw = random.Random(seed)
    num_layers, num_gpus, batch = draw.randint(2, 4), draw.choice([2, 4]), draw.choice([4, 6])
    profile = random_profile(seed, num_layers=num_layers, num_classes=draw.choice([1, 3]), skips=seed % 4 == 0)
    roomy = random_cluster(seed, num_gpus)
    together = sorted(draw.sample(range(num_layers), 2))
    names = [layer.name for layer in profile.layers]
    apart = draw.random() < 0.3
    counts = range(1, num_gpus + 1)
    plans = [
        plan.replace(prediction=cost.evaluate(plan, profile, roomy))
        for count in counts
        for plan in all_plans(profile, count, batch)
    ]
    peaks = sorted(plan.prediction.peak_bytes for plan in plans if plan.prediction is not None)
    drawn = [
        ("pp_degree", draw.choice(["2..", "..2", "2..3"])),
        ("num_microbatches", draw.choice(["2..", "..3"])),
        ("microbatch_size", draw.choice(["..2", "2..3"])),
        ("dp_degree", draw.choice(["..2", "2.."])),
        ("memory", f"{peaks[len(peaks) // draw.choice([2, 3, 20])]}B"),
        ("recompute", draw.choice(["0%", "20%", "50%", "100%"])),
    ]
    limits = tuple(draw.sample(drawn, draw.choice([1, 2, 2])))
    if seed % 2:
        limits += (("num_gpus", draw.choice(["1..", "2..", "..2"])),)
    pair = ("together", ",".join(names[index] for index in together))
    use = draw.random() < 0.5

    def same_stage(plan: Plan) -> bool:
        return any({names[index] for index in together} <= set(stage.layers) for stage in plan.stages)

    checks = [within(key, text) for key, text in limits]
    if use:
        checks.append((lambda plan: not same_stage(plan)) if apart else same_stage)
    fitting = [plan for plan in plans if all(check(plan) for check in checks)]
    request = SolveRequest(
        num_gpus=num_gpus,
        global_batch_size=batch,
        pins=(pair,) if use and not apart else (),
        exclusions=(pair,) if use and apart else (),
        limits=limits,
        top=0,
    )
    found = solve(profile, roomy, request, origin=ORIGIN)
    if not fitting:
        assert found.status == "infeasible"
        assert found.conflict is not None
        return
    plan = planned(found)
    assert found.status == "optimal"
    assert all(check(plan) for check in checks)
    assert plan.prediction is not None
    best = min(plan.prediction.step_time_s for plan in fitting if plan.prediction is not None)
    assert plan.prediction.step_time_s <= best * (1 + 1e-9)
    if plan.layers == tuple(names):  # another order of branches may be faster
        assert plan.prediction.step_time_s == pytest.approx(best, rel=1e-9)


def test_gpus_that_are_used_can_be_pinned() -> None:
    profile = equal_profile(4)
    assert planned(ask(profile, 8, 12, pins=(("num_gpus", "6"),))).num_gpus == 6
    assert planned(ask(profile, 8, 12, exclusions=(("num_gpus", "8"),))).num_gpus in (6, 4)
    assert planned(ask(profile, 8, 16, limits=(("num_gpus", "..4"),))).num_gpus == 4
    conflict = ask(profile, 8, 16, pins=(("num_gpus", "9"),)).conflict
    assert str(conflict) == "gpus: no number of GPUs from 1 to 8 is left, under --pin num_gpus=9"


def test_layers_of_a_module_stay_together() -> None:
    blocks = [f"{part}.{index}" for part in ("encoder", "decoder") for index in range(3)]
    block = LayerClass(name="block", module_class="Block", costs=(layer_cost(),))
    profile = chain_profile([block], ["block"] * 6, names=blocks)
    pins = (("pp_degree", "2"), ("schedule", "1f1b"))
    for text in ("decoder", "decoder.*", "decoder.0,decoder.2"):
        plan = planned(ask(profile, 2, 4, pins=(*pins, ("together", text), ("together", "encoder.0,encoder.1"))))
        assert plan.stages[1].layers[-3:] == ("decoder.0", "decoder.1", "decoder.2")
    plan = planned(ask(profile, 2, 4, pins=(*pins, ("together", "encoder.1,decoder.1"))))
    assert [len(stage.layers) for stage in plan.stages] in ([1, 5], [5, 1])
    plan = planned(ask(profile, 2, 4, pins=pins, exclusions=(("together", "decoder.1,decoder.2"),)))
    assert plan.stages[1].layers == ("decoder.2",)
    plan = planned(ask(profile, 2, 4, pins=pins, exclusions=(("cuts", "*coder.[12]"),)))
    assert plan.stages[1].layers[0] == "decoder.0"
    solution = ask(profile, 3, 3, pins=(("pp_degree", "3"), ("together", "encoder"), ("together", "decoder")))
    assert solution.conflict is not None
    assert "--pin together=encoder, --pin together=decoder" in solution.conflict.message


def test_patterns_name_recomputed_layers() -> None:
    profile = equal_profile(12)
    plan = planned(ask(profile, 1, 1, pins=(("recompute", "layers.1?,layers.0"),)))
    assert plan.stages[0].recompute == ("layers.0", "layers.10", "layers.11")
    assert planned(ask(profile, 1, 1, pins=(("recompute", "layers"),))).stages[0].recompute == plan.layers


def test_memory_that_is_limited_is_named() -> None:
    profile = equal_profile(4, activation=1000)
    plan = planned(ask(profile, 1, 1, limits=(("memory", "3500B"),)))
    assert plan.stages[0].recompute == ("layers.0", "layers.1")
    assert plan.prediction is not None
    assert plan.prediction.peak_bytes <= 3500
    conflict = ask(profile, 1, 1, limits=(("memory", "2500B"), ("recompute", "0%"))).conflict
    assert conflict is not None
    assert (conflict.constraint, conflict.between[1:]) == ("recompute", ("--limit recompute=0%",))


@pytest.mark.parametrize(
    ("limit", "words", "hint"),
    [
        (("pp_degree", "4"), "one number, no range", "--pin pp_degree=4"),
        (("pp_degree", "8..2"), "holds no count", "pp_degree=2..8"),
        (("pp_degree", ".."), "no range of counts", "pp_degree=2..8"),
        (("pp_degree", "two..4"), "no range of counts", "pp_degree=2..8"),
        (("pp_degree", "0..0"), "holds no count", "pp_degree=2..8"),
        (("tp_degree", "9" * 50 + ".."), "no range of counts", "tp_degree=2..8"),
        (("memory", "40GiB.."), "only the most can be limited", "memory=70GiB"),
        (("memory", "..70"), "has no unit", "memory=70GiB"),
        (("memory", "0B"), "leaves no memory", "memory=70GiB"),
        (("recompute", "0.25"), "no share from 0% to 100%", "recompute=25%"),
        (("recompute", "120%"), "no share from 0% to 100%", "recompute=25%"),
        (("schedule", "..2"), "nothing of that name has a range", "pp_degree, tp_degree"),
    ],
)
def test_a_limit_that_is_none_is_a_usage_error(limit: Pair, words: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        ask(equal_profile(4), 2, 4, limits=(limit,))
    assert words in caught.value.message
    assert hint in caught.value.hint


def test_a_limit_is_given_once() -> None:
    with pytest.raises(UsageError, match=r"--limit dp_degree is given twice, as \.\.2 and 2\.\."):
        ask(equal_profile(4), 2, 4, limits=(("dp_degree", "..2"), ("dp_degree", "2..")))


@pytest.mark.parametrize(
    ("pin", "words", "hint"),
    [
        (("together", "layers.1"), "names one layer", "two layers or more"),
        (("together", "layer.*"), "no layer of 'test' matches 'layer.*'", "layers."),
        (("recompute", "block.*"), "matches 'block.*'", "known: "),
        (("cuts", "layers.*"), "'layers.0', the first layer", "a later stage"),
    ],
)
def test_a_pattern_without_layers_is_a_usage_error(pin: Pair, words: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        ask(equal_profile(4), 2, 4, pins=(pin,))
    assert words in caught.value.message
    assert hint in caught.value.hint

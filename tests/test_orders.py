"""Plans whose stages are no neighbours in the recorded order: the same prices by name, and code that is exact."""

import itertools
from pathlib import Path

import pytest
from strategies import make_cluster

from planner.cost import evaluate
from planner.emitter import emit, write_plan
from planner.errors import UsageError
from planner.model_profile import ModelProfile
from planner.orders import is_order, layer_successors, profile_in_order
from planner.plan import Plan, read_plan
from planner.profiler import profile_model
from planner.runner import verify
from planner.runner.pool import WorkerPool
from tests.zoo.plans import even_plan

ZOO = Path(__file__).parent / "zoo" / "branches.py"


def profiled(name: str) -> ModelProfile:
    return profile_model(
        f"{ZOO}:build_{name}",
        inputs=f"inputs_{name}",
        gpu="h100-sxm",
        dtype="float32",
        microbatch_sizes=(1, 2),
        tp_degrees=(1, 2),
    )


@pytest.fixture(scope="module")
def towers() -> ModelProfile:
    return profiled("towers")


def orders(profile: ModelProfile) -> list[tuple[int, ...]]:
    """Return every order that is allowed."""
    successors = layer_successors(profile)
    return [order for order in itertools.permutations(range(len(profile.layers))) if is_order(successors, order)]


def named(profile: ModelProfile, names: list[str]) -> list[int]:
    known = [layer.name for layer in profile.layers]
    return [known.index(name) for name in names]


ONE_AFTER_THE_OTHER = ["left_in", "left.0", "left.1", "right_in", "right.0", "right.1", "head"]


def test_towers_have_the_orders_that_keep_each_tower(towers: ModelProfile) -> None:
    assert [layer.name for layer in towers.layers][:4] == ["left_in", "right_in", "left.0", "right.0"]
    found = orders(towers)
    assert tuple(range(len(towers.layers))) in found
    assert tuple(named(towers, ONE_AFTER_THE_OTHER)) in found
    for order in found:
        place = {towers.layers[layer].name: position for position, layer in enumerate(order)}
        assert place["left_in"] < place["left.0"] < place["left.1"] < place["head"] == 6
        assert place["right_in"] < place["right.0"] < place["right.1"]


def test_profile_in_any_order_is_a_profile(towers: ModelProfile) -> None:
    for order in orders(towers):
        other = profile_in_order(towers, order)
        ModelProfile.model_validate(dict(other))  # refuses values that are read before they are made
        assert sorted(node.name for node in other.program.nodes) == sorted(n.name for n in towers.program.nodes)


def test_price_of_a_plan_in_another_order(towers: ModelProfile) -> None:
    """One stage has every layer, whatever the order: all but what is kept between neighbours is the same."""
    cluster = make_cluster(2)
    order = orders(towers)[-1]
    recorded = evaluate(even_plan(towers), towers, cluster)
    other = evaluate(even_plan(profile_in_order(towers, order)), towers, cluster)
    assert other.step_time_s == pytest.approx(recorded.step_time_s, rel=1e-12)
    assert other.stages[0].memory.param_bytes == recorded.stages[0].memory.param_bytes
    two = evaluate(even_plan(profile_in_order(towers, order), pp_degree=2), towers, cluster)
    assert two == evaluate(
        even_plan(profile_in_order(towers, order), pp_degree=2), profile_in_order(towers, order), cluster
    )


def test_plan_in_a_wrong_order_is_refused(towers: ModelProfile) -> None:
    plan = even_plan(towers)
    names = list(plan.stages[0].layers)
    names[0], names[2] = names[2], names[0]
    wrong = plan.model_copy(update={"stages": (plan.stages[0].model_copy(update={"layers": tuple(names)}),)})
    with pytest.raises(UsageError) as caught:
        evaluate(wrong, towers, make_cluster(1))
    assert "comes next in the model" in caught.value.message


def check_exact(plan: Plan, profile: ModelProfile, path: Path, pool: WorkerPool) -> None:
    text = emit(plan, profile)
    recorded = [layer.name for layer in profile.layers]
    first = plan.stages[0].layers
    assert (f"{first[0]} ... {first[-1]}" in text) == (len(first) > 1 and list(first) == recorded[: len(first)])
    write_plan(text, path)
    assert [stage.layers for stage in read_plan(path).stages] == [stage.layers for stage in plan.stages]
    report = verify(path, pool=pool, timeout_s=120)
    assert report.ok, report.rows[:3]


@pytest.mark.parametrize(
    "layout", [{"pp_degree": 3}, {"pp_degree": 2, "tp_degree": 2, "recompute": True}], ids=["pp 3", "pp 2 tp 2"]
)
def test_towers_one_after_the_other_are_exact(
    towers: ModelProfile, pool: WorkerPool, tmp_path: Path, layout: dict[str, int]
) -> None:
    order = named(towers, ONE_AFTER_THE_OTHER)
    check_exact(even_plan(profile_in_order(towers, order), **layout), towers, tmp_path / "plan.py", pool)  # type: ignore[arg-type]


def test_towers_on_devices_of_their_own_are_exact(towers: ModelProfile, pool: WorkerPool, tmp_path: Path) -> None:
    """Neither tower's stage sends to the other's: both do to the last stage."""
    plan = even_plan(profile_in_order(towers, named(towers, ONE_AFTER_THE_OTHER)), pp_degree=3)
    names = ONE_AFTER_THE_OTHER
    parts = [names[:3], names[3:6], names[6:]]
    stages = [stage.model_copy(update={"layers": tuple(part)}) for stage, part in zip(plan.stages, parts, strict=True)]
    check_exact(plan.model_copy(update={"stages": tuple(stages)}), towers, tmp_path / "plan.py", pool)


def test_branches_that_join_are_exact(pool: WorkerPool, tmp_path: Path) -> None:
    profile = profiled("shortcut")
    others = orders(profile)[1:]
    assert len(others) == 2  # side before, between or after the two of deep
    for number, order in enumerate(others):
        plan = even_plan(profile_in_order(profile, order), pp_degree=3)
        check_exact(plan, profile, tmp_path / f"plan{number}.py", pool)

"""Every kind of block, divided in every way that is kept for it: what the ways are, and that each is exact."""

from pathlib import Path

import pytest

from planner.emitter import emit, write_plan
from planner.model_profile import ModelProfile
from planner.profiler import profile_model
from planner.runner import verify
from planner.runner.pool import WorkerPool
from planner.sharding import Sharding
from tests.zoo.division import BLOCKS
from tests.zoo.plans import even_plan

ZOO = Path(__file__).parent / "zoo" / "division.py"
DEGREES = (2, 4)


@pytest.fixture(scope="module", params=BLOCKS)
def profile(request: pytest.FixtureRequest) -> ModelProfile:
    return profile_model(
        f"{ZOO}:build_{request.param}",
        inputs="inputs",
        gpu="h100-sxm",
        dtype="float64",
        microbatch_sizes=(2,),
        tp_degrees=(1, *DEGREES),
    )


def candidates(profile: ModelProfile, degree: int) -> dict[str, Sharding]:
    """Return the shardings of a model's blocks by name."""
    found = [item for item in profile.layer_classes if item.name in ("Sequential", "Parallel")]
    return {s.name: s for item in found for s in item.shardings if s.tp_degree == degree}


def all_reduces(sharding: Sharding) -> dict[str, float]:
    """Return how many all-reduces of a block's output a sharding communicates, forward and backward."""
    weights = {"all_reduce": 1.0, "all_gather": 0.5, "reduce_scatter": 0.5}
    unit = 4 * 16 * 8
    return {
        phase: sum(weights[c.kind] * c.bytes_per_row / unit for c in sharding.collectives if c.phase == phase)
        for phase in ("forward", "backward")
    }


def test_every_candidate_is_exact(profile: ModelProfile, pool: WorkerPool, tmp_path: Path) -> None:
    names = [name for degree in DEGREES for name in candidates(profile, degree)]
    assert "tensor" in names
    layouts = [(name, {"pp_degree": 2, "tp_degree": 2}) for name in candidates(profile, 2)]
    layouts += [("tensor", {"tp_degree": 4})] if "tensor" in candidates(profile, 4) else []
    for name, layout in layouts:
        path = tmp_path / f"{name}_{len(layout)}.py"
        plan = even_plan(profile, **layout, sharding=name, num_microbatches=2)
        write_plan(emit(plan, profile), path)
        report = verify(path, pool=pool, timeout_s=120)
        assert report.ok, (name, layout, report.rows[:3])


@pytest.mark.parametrize("kind", ["in_place", "shared", "both_forms", "two_ways", "rows"])
def test_awkward_blocks_are_exact(kind: str, pool: WorkerPool, tmp_path: Path) -> None:
    profile = profile_model(
        f"{ZOO.with_name('awkward.py')}:build_{kind}",
        inputs="inputs",
        gpu="h100-sxm",
        dtype="float32",
        microbatch_sizes=(2,),
        tp_degrees=(1, 2),
    )
    path = tmp_path / "plan.py"
    write_plan(emit(even_plan(profile, tp_degree=2, num_microbatches=2), profile), path)
    report = verify(path, pool=pool, timeout_s=120)
    assert report.ok, report.rows[:3]


def profile_products(way: str) -> ModelProfile:
    return profile_model(
        f"{ZOO.with_name('products.py')}:build_{way}",
        inputs="inputs",
        gpu="h100-sxm",
        dtype="float32",
        microbatch_sizes=(2,),
        tp_degrees=(1, 2),
    )


@pytest.mark.parametrize("way", ["added", "cast", "scaled", "multiplied"])
def test_linear_layers_with_a_forward_of_their_own_are_divided(way: str, pool: WorkerPool, tmp_path: Path) -> None:
    profile = profile_products(way)
    for block in profile.layer_classes:
        found = block.sharding("tensor", 2)
        assert found is not None
        dims = {name: part.dim for name, part in found.parameters.items()}
        assert dims == {"up.weight": 0, "up.bias": 0, "down.weight": 1}
    path = tmp_path / "plan.py"
    write_plan(emit(even_plan(profile, tp_degree=2, num_microbatches=2), profile), path)
    report = verify(path, pool=pool, timeout_s=120)
    assert report.ok, report.rows[:3]


def test_linear_layers_with_a_forward_of_their_own_say_why_they_stay_whole() -> None:
    block = profile_products("odd").layer_classes[0]
    assert not block.shardings
    [whole] = block.whole
    assert whole.reason == (
        "no division of up, down over 2 was found that computes the same; up: dimension 15 does not divide by 2"
    )


@pytest.mark.parametrize(("kind", "style"), [("scaled", {"": "vocabulary"}), ("placed", None)])
def test_an_embedding_that_only_scales_its_rows_is_divided(
    kind: str, style: dict[str, str] | None, pool: WorkerPool, tmp_path: Path
) -> None:
    profile = profile_model(
        f"{ZOO}:build_{kind}",
        inputs="inputs",
        gpu="h100-sxm",
        dtype="float64",
        microbatch_sizes=(2,),
        tp_degrees=(1, 2),
    )
    [embedding] = [item for item in profile.layer_classes if item.name == kind.title()]
    assert [dict(sharding.styles) for sharding in embedding.shardings] == ([style] if style else [])
    for layout in ({"tp_degree": 2}, {"pp_degree": 2, "tp_degree": 2}):
        path = tmp_path / f"{kind}{len(layout)}.py"
        write_plan(emit(even_plan(profile, **layout), profile), path)
        assert verify(path, pool=pool, timeout_s=120).ok


def test_a_block_reduces_once_for_each_part_or_once_in_all(profile: ModelProfile) -> None:
    found = candidates(profile, 2)
    parallel = any(item.name == "Parallel" for item in profile.layer_classes)
    mlp_of_two = {"mlp.up", "mlp.wide"} <= set(found["tensor"].parameters)
    wanted = 1.0 if parallel else 3.0 if mlp_of_two else 2.0
    assert all_reduces(found["tensor"]) == {"forward": wanted, "backward": wanted}
    if "tensor_sequence" in found:
        assert all_reduces(found["tensor_sequence"]) == {"forward": wanted, "backward": wanted}
        kinds = {move.kind for move in found["tensor_sequence"].moves}
        assert {"scatter_sum", "gather_entered"} <= kinds
        assert found["tensor_sequence"].parameters == found["tensor"].parameters
    for name, sharding in found.items():
        if name not in ("tensor", "tensor_sequence"):
            assert all_reduces(sharding)["forward"] <= wanted * 2 / 3
            assert set(sharding.parameters) < set(found["tensor"].parameters)


def test_every_parameter_is_divided_or_says_why_not(profile: ModelProfile) -> None:
    for degree in DEGREES:
        for sharding in candidates(profile, degree).values():
            block = {n.removeprefix("blocks.0.") for n in profile.parameters if n.startswith("blocks.0.")}
            assert block == set(sharding.parameters) | set(sharding.replicated)
            assert not set(sharding.parameters) & set(sharding.replicated)
            assert all(sharding.replicated.values())

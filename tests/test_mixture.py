"""Mixtures of experts: grouped products in any dtype, values kept beside results, numbers that follow the batch."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from planner.arguments import BatchFloat, decode, encode, leaves
from planner.emitter import emit, write_plan
from planner.model_profile import ModelProfile
from planner.profiler import profile_model
from planner.profiler.flops import count_flops
from planner.profiler.torch_internals import FakeTensorMode
from planner.runner import verify
from planner.runner.grouped import grouped_product
from planner.runner.pool import WorkerPool
from tests.zoo.plans import even_plan

MODEL = Path(__file__).parent / "zoo" / "mixture.py"
STOPS = torch.tensor([2, 2, 7], dtype=torch.int32)  # an empty group, and a row beyond the last
PRODUCTS = {
    "rows": ((8, 4), (3, 4, 12), STOPS, (8, 12)),
    "columns": ((3, 8, 4), (4, 8), STOPS, (8, 8)),
    "pairs": ((8, 8), (8, 4), STOPS, (3, 8, 4)),
    "whole": ((3, 8, 4), (3, 4, 12), None, (3, 8, 12)),
}


@pytest.mark.parametrize("form", PRODUCTS)
def test_a_grouped_product_is_what_torch_computes(form: str) -> None:
    left_shape, right_shape, stops, shape = PRODUCTS[form]
    left, right = torch.randn(left_shape), torch.randn(right_shape)
    theirs, ours = F.grouped_mm(left, right, offs=stops), grouped_product(left, right, stops)
    assert ours.shape == theirs.shape == shape
    defined = {"rows": (slice(7),), "columns": (slice(None), slice(7))}.get(form, (slice(None),))
    torch.testing.assert_close(ours[defined], theirs[defined])
    for dtype in (torch.float32, torch.float64, torch.float16):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = F.grouped_mm(*(mode.from_tensor(item.to(dtype)) for item in (left, right)), offs=stops)
        assert (tuple(fake.shape), fake.dtype) == (shape, dtype)


def test_a_grouped_products_flops_are_those_of_its_groups() -> None:
    counts = {
        form: count_flops(
            torch.ops.aten._grouped_mm.default,
            (torch.empty(left, device="meta"), torch.empty(right, device="meta")),
            {},
            None,
        )
        for form, (left, right, *_) in PRODUCTS.items()
    }
    assert counts == {
        "rows": 2 * 8 * 4 * 12,
        "columns": 2 * 8 * 4 * 8,
        "pairs": 2 * 8 * 8 * 4,
        "whole": 2 * 3 * 8 * 4 * 12,
    }


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    return profile_model(str(MODEL), gpu="h100-sxm", dtype="float32", microbatch_sizes=(1, 2), tp_degrees=(1, 2))


def test_floats_follow_the_batch(profile: ModelProfile) -> None:
    found = {leaf for node in profile.program.nodes for leaf in leaves(node.args) if isinstance(leaf, BatchFloat)}
    assert found == {BatchFloat(12.0), BatchFloat(1.0, -1)}, "4 tokens in 3 blocks; the inverse of the rows"
    assert BatchFloat(12.0).at(5) == 60.0
    assert BatchFloat(1.0, -1).at(5) == 0.2
    assert all(decode(encode(leaf)) == leaf for leaf in found)


def test_blocks_that_keep_values_aside_are_opened(profile: ModelProfile) -> None:
    names = [layer.name for layer in profile.layers]
    assert {"blocks.0.router", "blocks.0.experts", "blocks.2.experts"} <= set(names)


@pytest.mark.parametrize(
    "layout", [{"pp_degree": 4}, {"pp_degree": 2, "tp_degree": 2}, {"pp_degree": 2, "dp_degree": 2}]
)
def test_exact(profile: ModelProfile, pool: WorkerPool, tmp_path: Path, layout: dict[str, int]) -> None:
    path = tmp_path / "plan.py"
    write_plan(emit(even_plan(profile, microbatch_size=3, **layout), profile), path)  # type: ignore[arg-type]
    report = verify(path, pool=pool, timeout_s=120)
    assert report.ok, report.rows[:3]

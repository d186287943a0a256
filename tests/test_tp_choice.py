"""Which way to divide a layer the solver takes: it depends on the links, and on memory."""

from pathlib import Path

import pytest
from strategies import ORIGIN, make_cluster

from planner.model_profile import LayerClass, ModelProfile, read_profile
from planner.plan import Plan
from planner.report import plan_json
from planner.report.plan_tables import sharding_lines
from planner.solver import SolveRequest, solve

PROFILE = Path(__file__).parent.parent / "profiles" / "gpt-h100-sxm.json"


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    return read_profile(PROFILE)


def block(profile: ModelProfile) -> LayerClass:
    return next(item for item in profile.layer_classes if item.name == "Block")


def planned(profile: ModelProfile, bandwidth: float, latency: float = 0.0, memory: int = 80 * 2**30) -> Plan:
    cluster = make_cluster(2, intra=(bandwidth, latency), memory=memory)
    pins = (("tp_degree", "2"), ("microbatch_size", "4"))
    request = SolveRequest(num_gpus=2, global_batch_size=16, precision="bf16-mixed", pins=pins)
    solution = solve(profile, cluster, request, origin=ORIGIN)
    assert solution.plan is not None, solution.conflict
    return solution.plan


def test_the_profile_keeps_distinct_candidates_with_their_bytes(profile: ModelProfile) -> None:
    for degree in (2, 4, 8):
        found = [s for s in block(profile).shardings if s.tp_degree == degree]
        assert [s.name for s in found] == ["tensor", "tensor_mlp", "tensor_sequence"][: len(found)]
        assert len(found) >= 2
        total = {s.name: sum(call.bytes_per_row for call in s.collectives) for s in found}
        assert total["tensor_mlp"] == total["tensor"] / 2
        for sharding in found:
            assert any(c.sharding == sharding.name and c.tp_degree == degree for c in block(profile).costs)


def test_slow_links_take_the_way_with_fewer_bytes_and_fast_ones_divide_all(profile: ModelProfile) -> None:
    slow, fast = planned(profile, 1e8), planned(profile, 1e13)
    assert slow.stages[0].shardings["Block"] == "tensor_mlp"
    assert fast.stages[0].shardings["Block"] in ("tensor", "tensor_sequence")


def test_the_way_is_told_to_people_and_scripts(profile: ModelProfile) -> None:
    plan = planned(profile, 1e8)
    [line] = sharding_lines(plan)
    assert line.startswith("divided on stage 0: ")
    assert "Block as tensor_mlp" in line
    assert plan_json(plan)["stages"][0]["shardings"]["Block"] == "tensor_mlp"

"""Writes in place at cuts: exact, or refused where another layer would miss what was written."""

from pathlib import Path

import pytest

from planner.emitter import emit, write_plan
from planner.errors import CaptureError, EmitError, UsageError
from planner.model_profile import ModelProfile
from planner.profiler import profile_model
from planner.runner import verify
from planner.runner.pool import WorkerPool
from planner.solver import SolveRequest, solve
from tests.strategies import ORIGIN, make_cluster
from tests.zoo.plans import even_plan

ZOO = Path(__file__).parent / "zoo" / "in_place.py"


def profiled(name: str) -> ModelProfile:
    return profile_model(
        f"{ZOO}:{name}", inputs="inputs", gpu="h100-sxm", dtype="float32", microbatch_sizes=(1, 2), tp_degrees=(1,)
    )


@pytest.mark.parametrize("name", ["Rectified", "Scaled", "OfInput", "Between", "Added"])
def test_exact_at_every_cut(name: str, pool: WorkerPool, folder: Path) -> None:
    profile = profiled(name)
    layouts = [{"pp_degree": len(profile.layers)}, {"pp_degree": 2, "dp_degree": 2, "schedule": "gpipe"}]
    for layout in layouts:
        write_plan(emit(even_plan(profile, **layout), profile), folder / "plan.py", force=True)  # type: ignore[arg-type]
        report = verify(folder / "plan.py", pool=pool, timeout_s=120)
        assert report.ok, (layout, report.rows[:3])


def test_a_value_goes_on_from_the_layer_that_changed_it() -> None:
    profile = profiled("Scaled")
    edges = {(edge.value, edge.producer, edge.consumers) for edge in profile.edges}
    assert ("first", 0, (1,)) in edges
    assert ("first", 1, (3,)) in edges  # scaled by the first block, and not as it was


def test_an_input_that_is_written_is_copied_for_the_model() -> None:
    profile = profiled("OfInput")
    text = emit(even_plan(profile, pp_degree=2), profile)
    assert 'Value("x", shape=(2, 4), written=True)' in text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("InputReadAgain", "`act` writes in place, and input 'x' is read after that in another layer"),
        ("OtherView", "`mul_` writes in place, and another view of the same tensor is read after that"),
    ],
)
def test_what_another_layer_would_miss_is_refused(name: str, words: str) -> None:
    with pytest.raises(CaptureError) as caught:
        profiled(name)
    assert words in caught.value.message
    assert "x.clone()" in caught.value.hint


def test_a_layer_that_writes_over_its_input_is_not_recomputed() -> None:
    profile = profiled("Rectified")
    with pytest.raises(EmitError, match=r"'blocks\.0' writes over its own input in place"):
        emit(even_plan(profile, recompute=True), profile)

    def answer(value: str) -> tuple[str, ...]:
        request = SolveRequest(num_gpus=1, global_batch_size=4, pins=(("recompute", value),))
        plan = solve(profile, make_cluster(1), request, origin=ORIGIN).plan
        assert plan is not None
        return plan.stages[0].recompute

    assert answer("all") == ("first",)
    with pytest.raises(UsageError, match=r"layer 'blocks\.1', which writes over its own input"):
        answer("first,blocks.1")

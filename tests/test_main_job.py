"""The main job on real models: profile, solve with degrees pinned, emit, and run exactly as one process does."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from planner.emitter import emit, write_plan
from planner.model_profile import ModelProfile
from planner.plan import Plan
from planner.profiler import profile_model
from planner.runner import verify
from planner.runner.pool import WorkerPool
from tests.zoo.solved import solution_of

pytest.importorskip("transformers", reason="the models are of transformers")

MODELS = Path(__file__).parent / "models"
NAMES = ("hf_gpt2", "hf_llama3_8b", "hf_vit")
CELLS = (
    (2, {"pp_degree": 2}),
    (2, {"tp_degree": 2}),
    (2, {"dp_degree": 2}),
    (4, {"pp_degree": 2}),
    (4, {"tp_degree": 2}),
    (4, {"dp_degree": 2}),
    (4, {"pp_degree": 2, "tp_degree": 2}),
    (4, {"pp_degree": 2, "dp_degree": 2}),
    (4, {"tp_degree": 2, "dp_degree": 2}),
    (8, {"pp_degree": 2, "tp_degree": 2, "dp_degree": 2}),
    (4, {"pp_degree": 2, "tp_degree": 2, "recompute": "all"}),
    (4, {"pp_degree": 2, "dp_degree": 2, "data_parallel": "sharded", "schedule": "gpipe"}),
)


def solved(profile: ModelProfile, num_gpus: int, pins: dict[str, object], batch: int) -> Plan:
    solution = solution_of(profile, num_gpus, pins, batch)
    assert solution.plan is not None, solution.conflict
    assert solution.status == "optimal"
    return solution.plan


@pytest.fixture(scope="module", params=NAMES)
def profile(request: pytest.FixtureRequest) -> ModelProfile:
    path = str(MODELS / f"{request.param}.py")
    return profile_model(path, device="cpu", microbatch_sizes=(1, 2), tp_degrees=(1, 2))


@pytest.mark.parametrize(("num_gpus", "pins"), CELLS, ids=lambda value: str(value).replace("_degree", ""))
def test_exact(profile: ModelProfile, pool: WorkerPool, tmp_path: Path, num_gpus: int, pins: dict[str, object]) -> None:
    plan = solved(profile, num_gpus, {"num_microbatches": 4, **pins}, batch=16)
    for key, value in pins.items():
        assert key == "recompute" or getattr(plan, key) == value
    if plan.tp_degree > 1:
        blocks = {item.name for item in profile.layer_classes if item.body is not None}
        assert blocks & {name for stage in plan.stages for name in stage.shardings}, "blocks are divided, not repeated"
    path = tmp_path / "plan.py"
    write_plan(emit(plan, profile), path)
    report = verify(path, pool=pool, timeout_s=200)
    assert report.ok, report.rows[:3]
    assert report.max_gradient_difference <= 1e-8
    assert set(report.not_proved) <= {"dropout"}


@pytest.fixture(scope="module")
def full_llama() -> Iterator[ModelProfile]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODEL_SIZE", "full")
        yield profile_model(str(MODELS / "hf_llama3_8b.py"), gpu="h100-sxm")


def counted_bytes(profile: ModelProfile, plan: Plan, index: int) -> int:
    """Return the bytes of a stage's GPU by hand: states by parameter counts, activations by the layers' costs."""
    stage = plan.stages[index]
    layers = {layer.name: layer for layer in profile.layers}
    elements = activations = logits = 0
    in_flight = min(plan.num_microbatches, plan.pp_degree - index) if plan.schedule == "1f1b" else plan.num_microbatches
    for name in stage.layers:
        layer_class = next(c for c in profile.layer_classes if c.name == layers[name].layer_class)
        sharding = stage.shardings.get(layer_class.name, "replicated")
        tp_degree = 1 if sharding == "replicated" else stage.tp_degree
        costs = [c for c in layer_class.costs if c.sharding == sharding and c.tp_degree == tp_degree]
        cost = max(costs, key=lambda c: c.microbatch_size)
        scale = stage.microbatch_size / cost.microbatch_size
        elements += cost.trainable_param_count
        kept = cost.saved_input_bytes if name in stage.recompute else cost.activation_bytes + cost.saved_input_bytes
        activations += round(kept * scale)
        logits = max(logits, round(cost.transient_bytes * scale))
    shards = stage.dp_degree if plan.data_parallel == "sharded" else 1
    states = elements * 2 + elements * 4 + elements * (4 + 8) // shards  # bf16 copy, fp32 gradients; master, Adam
    return states + in_flight * activations + logits


@pytest.mark.parametrize("pins", [{}, {"pp_degree": 4}, {"tp_degree": 8}, {"pp_degree": 2, "tp_degree": 4}])
def test_llama_8b_fits_sixteen_gpus_of_80_gb(full_llama: ModelProfile, pins: dict[str, object]) -> None:
    plan = solved(full_llama, 16, pins, batch=128)
    assert plan.prediction is not None
    for index in range(plan.pp_degree):
        counted = counted_bytes(full_llama, plan, index)
        predicted = plan.prediction.stages[index].memory.peak_bytes
        assert counted <= 80e9, f"stage {index} holds {counted / 1e9:.1f} GB"
        assert predicted <= 80e9
        assert counted <= 1.1 * predicted, "what is predicted covers what is counted"


def test_a_plan_too_large_for_the_machine_is_proved_on_a_twin(
    full_llama: ModelProfile, pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from functools import partial

    from planner.cli.verify import make_plan_twin

    monkeypatch.setenv("MODEL_SIZE", "full")
    plan = solved(full_llama, 16, {"pp_degree": 4, "tp_degree": 2}, batch=128)
    path = tmp_path / "plan.py"
    write_plan(emit(plan, full_llama), path)
    with WorkerPool() as fresh:  # its processes see the environment of now
        report = verify(path, pool=fresh, timeout_s=250, make_twin=partial(make_plan_twin, None, path))
    assert report.ok
    assert report.num_processes == 8
    assert any("pp_degree 4" in text for text in report.not_proved)
    assert any("28 layers" in text for text in report.not_proved)
    assert any("widths" in text for text in report.not_proved)

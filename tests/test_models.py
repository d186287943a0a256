"""The hand models: structure as expected, and every layout exact or refused for a reason that is listed here."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from planner.emitter import emit, write_plan
from planner.errors import PlannerError
from planner.model_profile import ModelProfile
from planner.profiler import profile_model
from planner.runner import VerifyReport, verify
from planner.runner.pool import WorkerPool
from tests.zoo.solved import solution_of

if find_spec("transformers") is None or find_spec("timm") is None:
    pytest.skip("the models are of transformers and timm", allow_module_level=True)

MODELS = Path(__file__).parent / "models"
NAMES = tuple(sorted(path.stem for path in MODELS.glob("*.py")))
BATCH = 16
CELLS: dict[str, tuple[int, dict[str, object]]] = {
    "pp2": (2, {"pp_degree": 2, "num_microbatches": 4}),
    "pp4": (4, {"pp_degree": 4, "num_microbatches": 4}),
    "pp2 tp2": (4, {"pp_degree": 2, "tp_degree": 2, "num_microbatches": 4}),
    "pp2 dp2": (4, {"pp_degree": 2, "dp_degree": 2, "num_microbatches": 2}),
}
# What may be refused, and with which words; every other cell is exact.
CONVOLUTIONS = "no layer of '{}' can be divided over tp_degree 2"  # divided convolutions are not known to the rules
REFUSALS = {
    ("timm_resnet50", "pp2 tp2"): CONVOLUTIONS,
    ("timm_efficientnet_b0", "pp2 tp2"): CONVOLUTIONS,
}
MAIN_JOB = ("hf_gpt2", "hf_llama3_8b", "hf_vit")  # test_main_job runs their other layouts


def attention(rows: int, queries: int, keys: int, width: int) -> int:
    """Return the FLOPs of an attention's two matrix products."""
    return 4 * rows * queries * keys * width


# The files' counts of the tiny models leave out what torch counts nothing for: attention by the CPU's own kernel, and
# grouped products of experts (rows x chosen experts x the three matrices of each).
UNCOUNTED = {
    "hf_bart": 2 * (attention(2, 10, 10, 32) + attention(2, 6, 6, 32) + attention(2, 6, 10, 32)),
    "hf_deepseek_v3": 2 * (2 * 16 * 2) * 3 * (2 * 32 * 16),
    "hf_llama3_8b": 4 * attention(2, 16, 16, 32),
    "hf_mixtral": 2 * ((2 * 16 * 2) * 3 * (2 * 32 * 64) + attention(2, 16, 16, 32)),
    "hf_vit": 3 * attention(2, 17, 17, 32),
}


@pytest.fixture(scope="module", params=NAMES)
def profile(request: pytest.FixtureRequest) -> ModelProfile:
    return profile_model(str(MODELS / f"{request.param}.py"), device="cpu", microbatch_sizes=(2,), tp_degrees=(1, 2))


def test_structure(profile: ModelProfile) -> None:
    expected: dict[str, Any] = json.loads((MODELS / f"{profile.name}.json").read_text())
    tiny = expected["tiny"]
    assert profile.param_count == expected["tiny_param_count"]
    assert profile.trainable_param_count == tiny["trainable"]
    ties = {frozenset(group) for group in profile.tied}
    assert len(ties) == tiny["tied_groups"]
    assert {frozenset(group) for group in tiny["tied"]} <= ties
    if profile.name != "hf_clip":  # its file counts three rows, and a product of the rows with the rows
        assert 2 * profile.forward_flops_per_row == tiny["fwd_flops"] + UNCOUNTED.get(profile.name, 0)
    families = [layer.module.rpartition(".")[0] for layer in profile.layers]
    assert max(families.count(family) for family in families) >= 2, "blocks are layers of their own"


@pytest.mark.parametrize("num_gpus", [2, 4])
def test_solves_freely(profile: ModelProfile, num_gpus: int) -> None:
    solution = solution_of(profile, num_gpus, {}, BATCH)
    assert solution.plan is not None
    assert solution.status == "optimal"
    compile(emit(solution.plan, profile), "plan.py", "exec")


def run(
    profile: ModelProfile, pool: WorkerPool, path: Path, num_gpus: int, pins: dict[str, object]
) -> tuple[VerifyReport | None, str]:
    """Return the report of a plan, or why there is none."""
    try:
        solution = solution_of(profile, num_gpus, pins, BATCH)
        if solution.plan is None:
            return None, solution.conflict.message if solution.conflict else "no conflict is told"
        write_plan(emit(solution.plan, profile), path)
        report = verify(path, pool=pool, timeout_s=250)
    except PlannerError as error:
        return None, error.message
    for key, value in pins.items():
        assert getattr(solution.plan, key) == value
    return report, ""


@pytest.mark.parametrize("cell", CELLS)
def test_exact_or_refused(profile: ModelProfile, pool: WorkerPool, tmp_path: Path, cell: str) -> None:
    if profile.name in MAIN_JOB and cell != "pp4":
        pytest.skip("test_main_job runs it")
    report, reason = run(profile, pool, tmp_path / "plan.py", *CELLS[cell])
    permitted = REFUSALS.get((profile.name, cell))
    if permitted is None:
        assert report is not None, f"refused, though not permitted: {reason}"
        assert report.ok, report.rows[:3]
    else:
        assert report is None, "a refusal that is permitted does not happen: take it out of the list"
        assert permitted.format(profile.name) in reason

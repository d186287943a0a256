"""The solver against brute force on 550 random problems, all priced by `cost.evaluate`.

Four families, because enumeration grows fast: every decision free on few layers; recomputation of every subset of
layers; cuts of up to 8 layers with up to 16 microbatches and stages; and fewer microbatches than stages. Links, memory,
ties, skips and frozen layers are drawn.
"""

import random
from dataclasses import dataclass

import pytest
from oracle import all_plans, fastest, priced_plans
from strategies import ORIGIN, random_cluster, random_profile

from planner.cluster import Cluster
from planner.model_profile import ModelProfile
from planner.solver import Solution, SolveRequest, solve

CASES_PER_TEST = 25
MAX_PLANS = 800


@dataclass(frozen=True)
class Case:
    profile: ModelProfile
    num_gpus: int
    global_batch_size: int
    pp_degree: int | None
    recompute: bool
    num_microbatches: int | None = None

    def request(self) -> SolveRequest:
        pins = [] if self.recompute else [("recompute", "none")]
        if self.pp_degree is not None:
            pins.append(("pp_degree", str(self.pp_degree)))
        if self.num_microbatches is not None:
            pins.append(("num_microbatches", str(self.num_microbatches)))
        return SolveRequest(
            num_gpus=self.num_gpus, global_batch_size=self.global_batch_size, pins=tuple(pins), top=1
        )  # fmt: skip


def draw_case(family: str, seed: int) -> Case:
    draw = random.Random(f"{family} {seed}")
    layers, gpus, batches = {
        "free": ((2, 3), (2, 4), (2, 4)),
        "recompute": ((3, 5), (1, 2, 3), (2, 4)),
        "cuts": ((5, 8), (2, 3, 4, 5, 6, 8), (4, 6, 8, 12, 16)),
        "few": ((4, 8), (3, 4, 6, 8), (4, 8, 12)),
    }[family]
    num_layers, num_gpus = draw.randint(*layers), draw.choice(gpus)
    profile = random_profile(
        seed,
        num_layers=num_layers,
        num_classes=draw.choice([2, 3, 8]),
        tp_degrees=(2,) if family == "free" else (),
        skips=draw.random() < 0.3,
        frozen=draw.random() < 0.2,
    )
    stages = [pp for pp in range(1, num_layers + 1) if num_gpus % pp == 0]
    global_batch_size = draw.choice(batches)
    pinned = family in ("cuts", "few")
    few = [m for m in range(1, stages[-1]) if global_batch_size % m == 0] or [1]
    return Case(
        profile=profile,
        num_gpus=num_gpus,
        global_batch_size=global_batch_size,
        pp_degree=stages[-1] if pinned else None,
        recompute=not pinned,
        num_microbatches=draw.choice(few) if family == "few" else None,
    )


def check(case: Case, seed: int) -> tuple[Solution, Cluster] | None:
    """Compare one case with brute force at a drawn memory; None where it has too many plans to enumerate."""
    draw = random.Random(seed)
    roomy = random_cluster(seed, case.num_gpus)
    pp_degrees = None if case.pp_degree is None else {case.pp_degree}
    plans = list(
        all_plans(
            case.profile,
            case.num_gpus,
            case.global_batch_size,
            pp_degrees=pp_degrees,
            num_microbatches=case.num_microbatches,
            recompute=case.recompute,
            fewer=True,
        )
    )
    if not 0 < len(plans) <= MAX_PLANS:
        return None
    priced = priced_plans(case.profile, roomy, iter(plans))
    least, most = min(peak for _, peak in priced), max(peak for _, peak in priced)
    memory = draw.choice([most, least, least - 1, least + int((most - least) * draw.random() ** 2)])
    cluster = random_cluster(seed, case.num_gpus, memory=memory)
    solution = solve(case.profile, cluster, case.request(), origin=ORIGIN)
    best = fastest(priced, memory)
    if solution.plan is None:
        assert best == float("inf")
        assert solution.conflict is not None
        assert solution.conflict.constraint == "memory"
        assert solution.conflict.least_peak_bytes == least
    else:
        assert solution.plan.prediction is not None
        assert solution.plan.prediction.step_time_s == pytest.approx(best, rel=1e-9)
        assert solution.plan.prediction.peak_bytes <= memory
        assert (solution.status, solution.gap_fraction) == ("optimal", 0.0)
        names = [name for stage in solution.plan.stages for name in stage.layers]
        assert names == [layer.name for layer in case.profile.layers]
    return solution, cluster


@pytest.mark.parametrize(
    ("family", "block"),
    [
        *(("free", block) for block in range(6)),
        *(("recompute", block) for block in range(7)),
        *(("cuts", block) for block in range(7)),
        *(("few", block) for block in range(2)),
    ],
)
def test_equal_to_brute_force(family: str, block: int) -> None:
    """25 cases each, 550 together: seeds whose problem is too large to enumerate are passed over."""
    compared, seed = 0, 10_000 * block
    while compared < CASES_PER_TEST:
        compared += check(draw_case(family, seed), seed) is not None
        seed += 1

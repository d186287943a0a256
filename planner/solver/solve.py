"""`solve`: the fastest plan within memory, with its proof; or why there is none."""

from planner.arguments import dtype_bytes
from planner.cluster import Cluster
from planner.cost.evaluate import Pricer
from planner.cost.states import WORKING_BYTES
from planner.errors import PlannerError, UsageError
from planner.model_profile import ModelProfile
from planner.plan import Origin, SolverReport
from planner.solver.infeasible import find_conflict, find_repairs
from planner.solver.limits import read_limits
from planner.solver.problems import Problems
from planner.solver.request import COUNTS, SolveRequest, described, read_pins
from planner.solver.runners_up import runners_up
from planner.solver.search import Progress, search
from planner.solver.solution import Solution
from planner.solver.space import Space

GAP_OF_OPTIMAL = 1e-9


def _silent(label: str, done: int, total: int) -> None:
    """Show no progress."""


def solve(
    profile: ModelProfile,
    cluster: Cluster,
    request: SolveRequest,
    *,
    origin: Origin,
    progress: Progress = _silent,
) -> Solution:
    """Return the fastest plan for the request, priced by `cost.evaluate`, with a proven lower bound and runners-up.

    Status is 'optimal' where the bound is the plan's own time, 'feasible' where the time limit (or Ctrl-C) ended the
    search, and 'infeasible' with the conflict and verified repairs where no plan exists. UsageError where the request
    does not fit the profile or the cluster.
    """
    space = _space(profile, cluster, request)
    outcome = search(space, origin, progress, request.time_limit_s)
    best = outcome.incumbent.best
    if best is None:
        if outcome.lower_bound_s < float("inf"):
            raise PlannerError(
                "the search was ended before any plan was found, and before it was shown that there is none",
                hint="give it more time: a longer --time-limit, or none",
            )
        conflict = find_conflict(space, Problems(space, origin))

        def resolve(changed: Cluster, request: SolveRequest) -> float | None:
            space = _space(profile, changed, request)
            found = search(space, origin, _silent, request.time_limit_s, any_plan=True).incumbent
            return None if found.best is None else found.step_time_s

        return Solution(
            status="infeasible", plan=None, conflict=conflict, repairs=find_repairs(space, conflict, resolve)
        )
    step_s = outcome.incumbent.step_time_s
    gap = max(0.0, (step_s - outcome.lower_bound_s) / outcome.lower_bound_s) if outcome.lower_bound_s else 0.0
    optimal = gap <= GAP_OF_OPTIMAL
    report = SolverReport(
        status="optimal" if optimal else "feasible",
        lower_bound_s=step_s if optimal else outcome.lower_bound_s,
        gap_fraction=0.0 if optimal else gap,
        num_priced=outcome.incumbent.num_priced,
    )
    others = runners_up(outcome, request.top)
    return Solution(
        status=report.status,
        plan=best.model_copy(update={"solver": report, "runners_up": others}),
        lower_bound_s=report.lower_bound_s,
        gap_fraction=report.gap_fraction,
        num_priced=report.num_priced,
        num_nodes=outcome.num_nodes,
        runners_up=others,
    )


def _space(profile: ModelProfile, cluster: Cluster, request: SolveRequest) -> Space:
    """Return the constraints; UsageError where request, profile and cluster don't fit together."""
    if request.num_gpus > cluster.num_gpus:
        raise UsageError(
            f"{request.num_gpus} GPUs are asked for, the cluster {cluster.name!r} has {cluster.num_gpus}",
            hint=f"ask for at most {cluster.num_gpus}, or give a larger cluster",
        )
    types = dict.fromkeys(cluster.gpu_at(rank).name for rank in range(request.num_gpus))
    if len(types) > 1:
        raise UsageError(
            f"the cluster {cluster.name!r} mixes {' and '.join(types)}; the profile has times for one GPU type",
            hint="give a cluster of one GPU type",
        )
    width = dtype_bytes(profile.provenance.dtype)
    if width != WORKING_BYTES[request.precision]:
        raise UsageError(
            f"precision {request.precision} computes with {WORKING_BYTES[request.precision]} bytes per number, the "
            f"profile {profile.name!r} was made in {profile.provenance.dtype} with {width}",
            hint=f"profile again with --dtype {'float32' if request.precision == 'fp32' else 'bfloat16'}",
        )
    pins = read_pins(request.pins, profile, "--pin")
    exclusions = read_pins(request.exclusions, profile, "--exclude")
    limits = read_limits(request.limits, COUNTS)
    space = Space(Pricer(profile, _limited(cluster, limits.memory_bytes)), request, pins, exclusions, limits)
    for layer, choices in zip(profile.layers, space.recompute_choices, strict=True):
        if not choices:
            given = [described(found) for found in request.constraints if found[1] == "recompute"]
            raise UsageError(
                f"{' and '.join(given)} contradict each other: layer {layer.name!r} may be neither kept nor recomputed",
                hint="leave out one of them",
            )
    return space


def _limited(cluster: Cluster, memory_bytes: int | None) -> Cluster:
    """Return the cluster with GPUs of at most so much memory."""
    if memory_bytes is None:
        return cluster
    gpus = {
        name: gpu.model_copy(update={"memory": min(gpu.memory, memory_bytes)}) for name, gpu in cluster.gpus.items()
    }
    return cluster.model_copy(update={"gpus": gpus})

"""`solve`: the fastest plan within memory, with its proof; or why there is none."""

import time
from dataclasses import replace

from planner.cluster import Cluster
from planner.errors import PlannerError
from planner.model_profile import ModelProfile
from planner.plan import Asked, Origin, SolverReport
from planner.solver.find import Found, find, make_space, silent
from planner.solver.graph_search import find_in_other_orders
from planner.solver.infeasible import find_conflict
from planner.solver.orders import space_of_plan
from planner.solver.repairs import MAX_NODES, Enlarge, Repairs
from planner.solver.request import SolveRequest
from planner.solver.runners_up import runners_up
from planner.solver.search import Progress
from planner.solver.solution import Solution

REPAIRS_LIMIT_S = 60.0  # no more are looked for then


def solve(
    profile: ModelProfile,
    cluster: Cluster,
    request: SolveRequest,
    *,
    origin: Origin,
    progress: Progress = silent,
    enlarge: Enlarge | None = None,
) -> Solution:
    """Return the fastest plan for the request, priced by `cost.evaluate`, with a proven lower bound and runners-up.

    Status is 'optimal' where the bound is the plan's own time, 'feasible' where the time limit (or Ctrl-C) ended the
    search, and 'infeasible' with the conflict and verified repairs where no plan exists; `enlarge` gives the cluster of
    another number of GPUs for these. UsageError where the request does not fit the profile or the cluster.
    """
    started = time.monotonic()

    def left_s() -> float | None:
        limit_s = request.time_limit_s
        return None if limit_s is None else max(0.0, started + limit_s - time.monotonic())

    space = make_space(profile, cluster, request)
    found = find(space, origin, progress=progress, time_limit_s=request.time_limit_s)
    found = find_in_other_orders(space, origin, found, progress=progress, time_limit_s=left_s())
    outcome = found.outcome
    best = outcome.incumbent.best
    if best is None:
        if outcome.lower_bound_s < float("inf"):
            raise PlannerError(
                "the search was ended before any plan was found, and before it was shown that there is none",
                hint="give it more time: a longer --time-limit, or none",
            )
        conflict = find_conflict(space, origin)

        repairing, limit_s = time.monotonic(), REPAIRS_LIMIT_S
        if request.time_limit_s is not None:
            limit_s = min(limit_s, left_s() or 0.0)

        def resolve(changed: Cluster, request: SolveRequest, any_plan: bool) -> Found:
            progress("repairs", 0, 0)
            return find(
                make_space(profile, changed, request),
                origin,
                time_limit_s=max(0.0, repairing + limit_s - time.monotonic()),
                max_nodes=MAX_NODES,
                any_plan=any_plan,
            )

        repairs = Repairs(request, cluster, conflict, resolve, enlarge)
        conflict = replace(conflict, between=repairs.between())
        return Solution(status="infeasible", plan=None, conflict=conflict, repairs=repairs.found())
    optimal = found.gap_fraction == 0.0
    report = SolverReport(
        status="optimal" if optimal else "feasible",
        lower_bound_s=outcome.incumbent.step_time_s if optimal else outcome.lower_bound_s,
        gap_fraction=found.gap_fraction,
        num_priced=outcome.incumbent.num_priced,
        asked=Asked(
            num_gpus=request.num_gpus,
            pins=request.pins,
            exclusions=request.exclusions,
            limits=request.limits,
            theoretical=request.theoretical,
        ),
    )
    others = runners_up(
        space_of_plan(space, best), origin, found, request.top, progress=progress, time_limit_s=left_s()
    )
    return Solution(
        status=report.status,
        plan=best.model_copy(update={"solver": report, "runners_up": others}),
        lower_bound_s=report.lower_bound_s,
        gap_fraction=report.gap_fraction,
        num_priced=report.num_priced,
        num_nodes=outcome.num_nodes,
        runners_up=others,
    )

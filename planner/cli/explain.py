"""`planner explain PLAN`: why this plan."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli.inputs import describe_cluster, describe_profile
from planner.cli.options import parse_duration, parse_share
from planner.cli.output import progress_bar, say, write_json, write_table
from planner.cli.plan_inputs import cluster_of, profile_of
from planner.errors import UsageError

if TYPE_CHECKING:
    from planner.plan import Plan
    from planner.solver.sensitivity import Sensitivity


def explain(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.py that `planner solve` wrote; it is not run.")],
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="Solve again for the memory and bandwidth where it stays the best.")
    ] = False,
    profile: Annotated[Path | None, typer.Option(metavar="FILE", help="For --sensitivity (the plan's).")] = None,
    cluster: Annotated[str | None, typer.Option(metavar="NAME", help="For --sensitivity (the plan's).")] = None,
    time_limit: Annotated[
        str | None, typer.Option(metavar="TIME", help="For --sensitivity: end after this time with what is found.")
    ] = None,
    within: Annotated[
        str, typer.Option(metavar="SHARE", help="For --sensitivity: as good as the best is what is this near to it.")
    ] = "0%",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Explain a plan: its stages, the bottleneck, memory by owner, and why the others lost."""
    from planner.plan import read_plan
    from planner.report import explain as explanation
    from planner.report import plan_json, sensitivity_json, sensitivity_table

    given = {"--profile": profile, "--cluster": cluster, "--time-limit": time_limit, "--within": within != "0%"}
    if not sensitivity and (option := next((name for name, value in given.items() if value), None)):
        raise UsageError(f"{option} is for --sensitivity, which is not asked for", hint="add --sensitivity")
    limit_s = parse_duration(time_limit, "--time-limit")
    share = parse_share(within, "--within")
    found = read_plan(plan)
    ranges = _sensitivity(plan.name, found, profile, cluster, limit_s, share) if sensitivity else None
    if as_json:
        write_json(plan_json(found) | ({} if ranges is None else {"sensitivity": sensitivity_json(ranges)}))
    else:
        write_table(*explanation(found))
        if ranges is not None:
            write_table(sensitivity_table(found, ranges))


def _sensitivity(
    name: str, plan: "Plan", profile: Path | None, cluster: str | None, limit_s: float | None, within_fraction: float
) -> "Sensitivity":
    from planner.plan import Asked
    from planner.solver import SolveRequest
    from planner.solver.differences import num_gpus
    from planner.solver.sensitivity import sensitivity

    end = None if limit_s is None else time.monotonic() + limit_s
    asked = (plan.solver.asked if plan.solver else None) or Asked(num_gpus=num_gpus(plan))
    file = profile_of([(name, plan)], profile)
    say(describe_profile(file))
    chosen = cluster_of([(name, plan)], cluster, asked.num_gpus, file.profile)
    say(describe_cluster(chosen, assumed=False))
    request = SolveRequest(
        num_gpus=asked.num_gpus,
        global_batch_size=plan.global_batch_size,
        optimizer=plan.optimizer,
        precision=plan.precision,
        pins=asked.pins,
        exclusions=asked.exclusions,
        limits=asked.limits,
        theoretical=asked.theoretical,
    )
    with progress_bar("sensitivity") as progress:
        return sensitivity(
            plan,
            file.profile,
            chosen,
            request,
            within_fraction=within_fraction,
            progress=progress,
            left_s=lambda: None if end is None else end - time.monotonic(),
        )

"""`planner solve --gpus N`: the best plan, to plan.py."""

import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli.inputs import (
    SAMPLES_PER_GPU,
    choose_cluster,
    choose_precision,
    cluster_path,
    describe_cluster,
    describe_profile,
    device_mismatch,
    load_profile,
    local_processes,
    plan_origin,
)
from planner.cli.options import parse_duration, parse_pairs
from planner.cli.output import progress_bar, say, write_json, write_line, write_table
from planner.errors import UsageError
from planner.local_cluster import shared_cores
from planner.plan import Optimizer, Precision
from planner.units import counted

if TYPE_CHECKING:
    from planner.cluster import Cluster
    from planner.model_profile import ModelProfile
    from planner.plan import Plan
    from planner.solver import Solution, SolveRequest
    from planner.solver.pareto import Front

NO_PLAN = 1
MANY_GPUS, MANY_GPUS_LIMIT_S = 16384, 60.0  # more are searched for this long, unless told otherwise


def solve(
    gpus: Annotated[int, typer.Option("--gpus", metavar="N", help="How many GPUs to plan for.")],
    profile: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="The profile (the newest in profiles/); one for each GPU type. Repeatable."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="h100-sxm or another shipped name, or a .toml (the profile's GPUs)."),
    ] = None,
    global_batch_size: Annotated[
        int | None, typer.Option(metavar="N", help=f"Samples per step ({SAMPLES_PER_GPU} per GPU).")
    ] = None,
    optimizer: Annotated[Optimizer, typer.Option(help="Whose states to count.")] = "adamw",
    precision: Annotated[
        Precision | None, typer.Option(help="How to compute (bf16-mixed for a bfloat16 profile, else fp32).")
    ] = None,
    pin: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Fix a part of the plan: tp_degree=2, together=encoder.*. Repeatable."),
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Rule out: schedule=gpipe. Repeatable.")
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=RANGE",
            help="Bound a count, memory or recomputation: pp_degree=2..8, memory=70GiB, recompute=25%. Repeatable.",
        ),
    ] = None,
    top: Annotated[int, typer.Option(metavar="N", min=0, help="How many runner-ups to show.")] = 3,
    time_limit: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Stop searching after this time, with the gap told (60s above 16384 GPUs)."),
    ] = None,
    pareto: Annotated[
        bool, typer.Option("--pareto", help="Show, too, what less memory or fewer GPUs cost: the Pareto front.")
    ] = False,
    theoretical: Annotated[bool, typer.Option("--theoretical", help="Allow plans that can't be emitted yet.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a plan that was edited by hand.")] = False,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="Write the plan here.")] = Path(
        "plan.py"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Solve for the fastest plan within memory, and write it as plain PyTorch code."""
    for option, count in (("--gpus", gpus), ("--global-batch-size", global_batch_size)):
        if count is not None and count < 1:
            raise UsageError(f"{option} {count} is less than 1", hint="give a positive number")
    from planner.emitter import check_overwrite
    from planner.solver.request import MAX_GLOBAL_BATCH_SIZE, MAX_NUM_GPUS, check_size

    pins, exclusions = parse_pairs(pin or [], "--pin"), parse_pairs(exclude or [], "--exclude")
    limits = parse_pairs(limit or [], "--limit", "pp_degree=2..8")
    time_limit_s = parse_duration(time_limit, "--time-limit")
    if time_limit_s is None and gpus > MANY_GPUS:
        time_limit_s = MANY_GPUS_LIMIT_S
    batch = global_batch_size or SAMPLES_PER_GPU * gpus
    check_size("--gpus", gpus, MAX_NUM_GPUS)
    check_size("--global-batch-size", batch, MAX_GLOBAL_BATCH_SIZE)
    check_overwrite(output, force=force)  # before the search, not after
    file = load_profile(profile)
    say(describe_profile(file))
    chosen = choose_cluster(cluster, gpus, file.profile)
    say(describe_cluster(chosen, assumed=cluster is None))
    for warning in (device_mismatch(file.profile, chosen), shared_cores(chosen)):
        if warning:
            say(f"warning: {warning}")
    precision = precision or choose_precision(file.profile)
    say(f"step: {batch} samples, {optimizer}, {precision}")

    from planner.solver import SolveRequest
    from planner.solver import solve as search

    request = SolveRequest(
        num_gpus=gpus,
        global_batch_size=batch,
        optimizer=optimizer,
        precision=precision,
        pins=pins,
        exclusions=exclusions,
        limits=limits,
        top=top,
        time_limit_s=time_limit_s,
        theoretical=theoretical,
    )
    end = None if time_limit_s is None else time.monotonic() + time_limit_s
    larger = None if cluster_path(cluster) else lambda count: choose_cluster(cluster, count, file.profile)
    origin = plan_origin(file, chosen, cluster)
    with progress_bar("solve") as progress:

        def find(asked: SolveRequest) -> "Solution":
            return search(file.profile, chosen, asked, origin=origin, progress=progress, enlarge=larger)

        # Processes of this machine stand in for GPUs: people start as many as they ask for to see a plan work.
        stand_in = local_processes(cluster, file.profile) and not any(key == "num_gpus" for key, _ in (*pins, *limits))
        solution = find(replace(request, pins=(*pins, ("num_gpus", str(gpus))))) if stand_in else find(request)
        if stand_in and solution.plan is None:
            solution = find(request)
    from planner.report import pareto_json, pareto_table, plan_table, solution_json

    if solution.plan is None:
        if as_json:
            write_json(solution_json(solution))
        say(f"error: no plan: {solution.conflict}")
        for repair in solution.repairs or (
            "lift a --pin, --exclude or --limit, or change --gpus, --global-batch-size, --cluster",
        ):
            say(f"hint: {repair}")
        raise typer.Exit(NO_PLAN)
    from planner.emitter import emit, write_plan
    from planner.model_profile import NO_LOSS, coupling_notes
    from planner.runnable import unrunnable

    imported_from = file.profile.provenance.imported_from
    decided = any(key == "num_gpus" for key, _ in (*pins, *exclusions, *limits))
    if (idle := gpus - solution.plan.num_gpus) and not decided:
        why = "is faster" if solution.status == "optimal" else "was found to be faster"
        say(
            f"warning: the plan uses {solution.plan.num_gpus} of {counted(gpus, 'GPU')}, {idle} would be idle: no plan "
            f"on more {why} (--pin num_gpus={gpus} uses all)"
        )
    problem = unrunnable(solution.plan)
    if not imported_from and not problem:
        write_plan(emit(solution.plan, file.profile), output, force=force)
    if not as_json:
        write_table(plan_table(solution.plan))
        if not imported_from and not problem:
            write_line(torchrun_line(solution.plan, chosen))
    front = _front(solution, file.profile, chosen, request, end) if pareto else None
    if as_json:
        write_json(solution_json(solution) | ({} if front is None else {"pareto": pareto_json(front, chosen)}))
    elif front is not None:
        write_table(pareto_table(front, chosen))
    if imported_from:
        say(f"note: the profile was imported from {imported_from} and has no model: no {output.name} is written")
        return
    if problem:
        say(f"note: the runtime of emitted plans can't run this one yet, so no {output.name} is written: it {problem}")
        return
    is_known = file.profile.loss_is_known
    if solution.plan.num_microbatches * solution.plan.dp_degree > 1:
        for note in (*coupling_notes(file.profile.loss, is_known=is_known), *(() if is_known else (NO_LOSS,))):
            say(f"note: {note}")
    say(f"wrote {output}")


def _front(
    solution: "Solution", profile: "ModelProfile", cluster: "Cluster", request: "SolveRequest", end: float | None
) -> "Front":
    from planner.solver.pareto import pareto

    assert solution.plan is not None
    with progress_bar("pareto") as progress:
        return pareto(
            solution.plan,
            profile,
            cluster,
            request,
            gap_fraction=solution.gap_fraction,
            progress=progress,
            left_s=lambda: None if end is None else end - time.monotonic(),
        )


def torchrun_line(plan: "Plan", cluster: "Cluster") -> str:
    """Return the command that starts training by this plan: on every node, where there are several."""
    from planner.report.text import rank_ranges

    counts = list(Counter(cluster.node_at(rank) for rank in range(plan.num_gpus)).values())
    nodes = f" --nnodes {len(counts)} --rdzv-backend c10d --rdzv-endpoint HOST:29500" if len(counts) > 1 else ""
    others = [
        f"--nproc-per-node {count} on node {rank_ranges([node for node, found in enumerate(counts) if found == count])}"
        for count in dict.fromkeys(counts)
        if count != counts[0]
    ]
    uneven = f"  # {', '.join(others)}" if others else ""
    return f"torchrun{nodes} --nproc-per-node {counts[0]} train.py{uneven}"

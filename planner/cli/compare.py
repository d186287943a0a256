"""`planner compare A B`: plans, and degrees written by hand, priced side by side."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli.inputs import (
    SAMPLES_PER_GPU,
    ProfileFile,
    choose_precision,
    describe_cluster,
    describe_profile,
    device_mismatch,
    plan_origin,
)
from planner.cli.output import progress_bar, say, write_json, write_table
from planner.cli.plan_inputs import cluster_of, profile_of
from planner.errors import PlannerError, UsageError
from planner.units import counted

if TYPE_CHECKING:
    from planner.cost import Pricer
    from planner.plan import Plan
    from planner.solver.request import SolveRequest


def compare(
    plans: Annotated[
        list[Path] | None, typer.Argument(metavar="PLAN...", help="Files with PLAN = {...}; none is run.")
    ] = None,
    degrees: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Degrees by hand: pp=4,tp=2,dp=2,m=8,schedule=1f1b. Also rows=, chunks=, data=sharded, cuts= "
            "or best (even), recompute=LAYERS, all or fit (none). Repeatable.",
        ),
    ] = None,
    profile: Annotated[Path | None, typer.Option(metavar="FILE", help="Price on this profile (the plans').")] = None,
    cluster: Annotated[str | None, typer.Option(metavar="NAME", help="Price on this cluster (the plans').")] = None,
    gpus: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="GPUs that --degrees fill (as many as the first plan uses).")
    ] = None,
    global_batch_size: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Samples per step, where no plan is given (8 per GPU).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Compare plans, or hand-written degrees, side by side: how much slower each is, and why."""
    from planner.cost import Pricer
    from planner.hand_written import read_written_plan
    from planner.report import comparison_json, comparison_table
    from planner.solver.differences import num_gpus
    from planner.solver.written import complete, read_degrees, written_gpus

    files, texts = plans or [], degrees or []
    if len(files) + len(texts) < 2:
        raise UsageError(
            "nothing to compare with: give two plans, or a plan and --degrees",
            hint="write it like planner compare plan.py --degrees pp=4,tp=2,dp=2",
        )
    written = [read_degrees(text) for text in texts]
    named: list[tuple[str, Plan]] = []
    for path in files:
        named.append((_name(path, files), read_written_plan(path, named[0][1] if named else None)))
    _check_steps(named, global_batch_size)
    file = profile_of(named, profile)
    say(describe_profile(file))
    filled = gpus or (num_gpus(named[0][1]) if named else 0)
    if not filled and any("dp_degree" not in one.pins for one in written):
        raise UsageError(
            "--degrees without dp= fill the GPUs, and none are given", hint="write dp= too, or give --gpus"
        )
    ranks = [rank for _, plan in named for stage in plan.stages for rank in stage.gpus]
    needed = max([written_gpus(one, filled) for one in written] + [rank + 1 for rank in ranks])
    chosen = cluster_of(named, cluster, needed, file.profile)
    say(describe_cluster(chosen, assumed=cluster is None and not named))
    if warning := device_mismatch(file.profile, chosen):
        say(f"warning: {warning}")
    step = _step(named[0][1] if named else None, file, filled or needed, global_batch_size)
    say(f"step: {counted(step.global_batch_size, 'sample')}, {step.optimizer}, {step.precision}")
    origin = plan_origin(file, chosen, cluster)
    with progress_bar("compare") as progress:
        for index, one in enumerate(written):
            progress(one.text, index, len(written))
            named.append((one.text, complete(one, file.profile, chosen, step, origin=origin)))
    pricer = Pricer(file.profile, chosen)
    priced = [(name, _priced(name, plan, pricer)) for name, plan in named]
    if as_json:
        write_json(comparison_json(priced, chosen))
    else:
        write_table(*comparison_table(priced, chosen))


def _name(path: Path, files: list[Path]) -> str:
    """Return what a plan is called: its file, with folders where two have the same name."""
    return path.name if [other.name for other in files].count(path.name) == 1 else str(path)


def _check_steps(named: "list[tuple[str, Plan]]", global_batch_size: int | None) -> None:
    """Raise UsageError where plans take steps that don't compare."""
    if not named:
        return
    first, one = named[0]
    if global_batch_size not in (None, one.global_batch_size):
        raise UsageError(
            f"--global-batch-size {global_batch_size} is not the {one.global_batch_size} samples per step of {first}",
            hint="leave it out",
        )
    for name, other in named[1:]:
        for key in ("global_batch_size", "optimizer", "precision"):
            if getattr(other, key) != getattr(one, key):
                option = key.replace("_", "-")
                raise UsageError(
                    f"{first} has {key} {getattr(one, key)}, {name} {getattr(other, key)}: their steps don't compare",
                    hint=f"solve one of them again with --{option} of the other",
                )


def _step(plan: "Plan | None", file: ProfileFile, gpus: int, global_batch_size: int | None) -> "SolveRequest":
    """Return the step to price, of a plan or of the options, and the GPUs that degrees fill."""
    from planner.solver import SolveRequest

    if plan is None:
        batch = global_batch_size or SAMPLES_PER_GPU * gpus
        return SolveRequest(num_gpus=gpus, global_batch_size=batch, precision=choose_precision(file.profile))
    return SolveRequest(
        num_gpus=gpus,
        global_batch_size=plan.global_batch_size,
        optimizer=plan.optimizer,
        precision=plan.precision,
    )


def _priced(name: str, plan: "Plan", pricer: "Pricer") -> "Plan":
    """Return a plan with its price; the error of one that can't be priced names it."""
    try:
        return plan.model_copy(update={"prediction": pricer.evaluate(plan)})
    except PlannerError as error:
        raise type(error)(f"{name}: {error.message}", hint=error.hint) from None

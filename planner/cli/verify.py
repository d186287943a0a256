"""`planner verify PLAN`: that an emitted plan computes what one process computes."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli.options import parse_duration
from planner.cli.output import progress_bar, say, user_code, write_json, write_table

if TYPE_CHECKING:
    from planner.plan import Plan
    from planner.shrink import Shrink

FAILED = 1
TWIN_GPU = "h100-sxm"  # a twin is profiled for its structure only: any type will do


def verify(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.py that `planner solve` wrote; it is run.")],
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The model's file, where the path in PLAN is gone.")
    ] = None,
    timeout: Annotated[str, typer.Option(metavar="TIME", help="End with an error after this time.")] = "600s",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Verify a plan: run it on CPU processes, and compare loss and every gradient with one process."""
    seconds = parse_duration(timeout, "--timeout")
    assert seconds is not None  # the option has a default
    from planner.runner import verify as run

    with progress_bar("verify") as progress:
        make_twin = partial(make_plan_twin, model, plan)
        report = run(plan, model=model, timeout_s=seconds, progress=progress, make_twin=make_twin)
    if as_json:
        write_json(
            {
                "ok": report.ok,
                "loss_difference": report.loss_difference,
                "max_gradient_difference": report.max_gradient_difference,
                "worst_parameter": report.worst_parameter,
                "whole_batch_difference": report.whole_batch_difference,
                "clip_difference": report.clip_difference,
                "buffer_difference": report.buffer_difference,
                "not_proved": list(report.not_proved),
                "notes": list(report.notes),
            }
        )
        for text in report.notes:
            say(f"note: {text}")
        for text in report.not_proved:
            say(f"not proved: {text}")
    else:
        from planner.report import verify_table

        write_table(verify_table(report))
    if not report.ok:
        wrong = [row.name for row in report.rows if not row.is_equal]
        if wrong:
            what = f"worst: {report.worst_parameter}"
        elif report.loss_difference > report.tolerance:
            what = (
                f"only the loss differs, by {report.loss_difference:.1e} (at most {report.tolerance:g}): every gradient"
            )
            what += " is equal"
        elif max(report.clip_difference, report.buffer_difference) > report.tolerance:
            what = "every gradient is equal, and what is noted above is not"
        else:
            what = f"its microbatches don't add up to the whole batch, by {report.whole_batch_difference or 0.0:.1e}"
        say(f"error: {plan} does not compute what one process computes; {what}")
        raise typer.Exit(FAILED)


def make_plan_twin(
    model: str | None, plan_path: Path, plan: "Plan", num_processes: int, shrink: "Shrink | None"
) -> tuple[str, tuple[str, ...]] | None:
    """Return the source of a small plan of the same kind, from a profile of its model, and what it leaves open."""
    from planner.emitter import make_twin
    from planner.profiler import profile_model
    from planner.runner.subject import find_model
    from planner.tp_rules import parse_rules

    say("the plan is too large for this machine: making a smaller twin")
    spec = find_model(plan, plan_path, model)
    with user_code(spec):
        profile = profile_model(
            spec,
            gpu=TWIN_GPU,
            dtype="float32",
            inputs=plan.origin.inputs_function,
            microbatch_sizes=(1,),
            tp_degrees=(1, 2),
            tp_rules=parse_rules(plan.origin.tp_rules),
            shrink=shrink,
        )
    source, left = make_twin(plan, profile, num_processes)
    if shrink is not None and shrink.narrow:
        left = (*left, "the model's own widths, vocabulary and sequence length: a narrow version was run")
    return source, left

"""`planner verify PLAN`: that an emitted plan computes what one process computes."""

from pathlib import Path
from typing import Annotated

import typer

from planner.cli.options import parse_duration
from planner.cli.output import progress_bar, say, write_json, write_table

FAILED = 1


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
        report = run(plan, model=model, timeout_s=seconds, progress=progress)
    if as_json:
        write_json(
            {
                "ok": report.ok,
                "loss_difference": report.loss_difference,
                "max_gradient_difference": report.max_gradient_difference,
                "worst_parameter": report.worst_parameter,
                "not_proved": list(report.not_proved),
            }
        )
    else:
        from planner.report.verify import verify_table

        write_table(verify_table(report))
    for text in report.notes:
        say(f"note: {text}")
    for text in report.not_proved:
        say(f"not proved: {text}")
    if not report.ok:
        say(f"error: {plan} does not compute what one process computes; worst: {report.worst_parameter}")
        raise typer.Exit(FAILED)

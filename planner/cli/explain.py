"""`planner explain PLAN`: why this plan."""

from pathlib import Path
from typing import Annotated

import typer

from planner.cli.output import write_json, write_table


def explain(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.py that `planner solve` wrote; it is not run.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Explain a plan: its stages, the bottleneck, memory by owner, and why the others lost."""
    from planner.plan import read_plan
    from planner.report import explain as explanation
    from planner.report import plan_json

    found = read_plan(plan)
    if as_json:
        write_json(plan_json(found))
    else:
        write_table(*explanation(found))

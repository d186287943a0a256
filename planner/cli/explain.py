"""`planner explain PLAN`: why this plan."""

from pathlib import Path
from typing import Annotated

import typer

from planner.cli.output import write_table


def explain(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.py that `planner solve` wrote; it is not run.")],
) -> None:
    """Explain a plan: its stages, the bottleneck, memory by owner, and why the others lost."""
    from planner.plan import read_plan
    from planner.report import explain as explanation

    write_table(*explanation(read_plan(plan)))

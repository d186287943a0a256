"""The table of `planner verify`: the parameters that differ most from one process."""

from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from planner.units import counted

if TYPE_CHECKING:
    from planner.runner.verify import VerifyReport

SHOWN_ROWS = 10


def verify_table(report: "VerifyReport", *, num_rows: int = SHOWN_ROWS) -> Group:
    """Return what was found as text and a table: every parameter that is not equal, and the worst of the others."""
    wrong = [row for row in report.rows if not row.is_equal]
    shown = report.rows[: max(num_rows, len(wrong))]
    title = f"gradients beside one process's: the {len(shown)} of {len(report.rows)} parameters that differ most"
    table = Table(box=box.SIMPLE, title=title, title_justify="left")
    table.add_column("parameter")
    table.add_column("shape")
    table.add_column("relative difference", justify="right")
    table.add_column("norm", justify="right")
    table.add_column("step", justify="right")
    table.add_column("verdict")
    for row in shown:
        table.add_row(
            row.name,
            " x ".join(str(size) for size in row.shape) or "-",
            f"{row.gradient_difference:.1e}",
            f"{row.gradient_norm:.2e}",
            str(row.step) if row.step else "setup",
            row.verdict,
            style=None if row.is_equal else "bold red",
        )
    whole = report.whole_batch_difference
    if not wrong:
        worst = report.rows[0]
        verdict = (
            f"equal to one process: all {counted(len(report.rows), 'parameter')} within {report.tolerance:g}, the "
            f"furthest {worst.name} with {worst.gradient_difference:.1e}"
        )
    else:
        verdict = f"NOT equal to one process: {len(wrong)} of {len(report.rows)} parameters differ"
    if whole is not None and whole > report.tolerance and not report.coupled:
        verdict += (
            f"\nNOT equal to one process on the whole batch: it differs by {whole:.1e}, and nothing that was recorded "
            "of the model explains why microbatches would change the loss"
        )
    elif whole is not None and whole <= report.tolerance:
        verdict += f"; equal to one process on the whole batch within {whole:.1e}"
    processes = counted(report.num_processes, "process", "processes")
    lines = [
        f"{report.plan_summary}, on {processes}, two optimizer steps in float64",
        f"{verdict}; the loss differs by {report.loss_difference:.1e}",
        *(f"note: {note}" for note in report.notes),
        *(f"not proved: {text}" for text in report.not_proved),
    ]
    return Group(table, *(Text(line) for line in lines))

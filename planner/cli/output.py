"""What a command writes: data on stdout, everything else on stderr."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

from planner.errors import CaptureError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

Progress = Callable[[str, int, int], None]  # what is done now, how many are done, how many there are

PIPED_WIDTH = 140  # columns of a table that no terminal shows: enough that no cell is cut


def say(text: str) -> None:
    """Write a line to stderr."""
    sys.stderr.write(f"{text}\n")


def write_line(text: str) -> None:
    """Write a line to stdout, never wrapped."""
    sys.stdout.write(f"{text}\n")


def write_json(data: Any) -> None:
    """Write one JSON object to stdout."""
    sys.stdout.write(json.dumps(data, indent=2, allow_nan=False) + "\n")


def write_table(*renderables: "RenderableType") -> None:
    """Write tables and text to stdout, in colour only where a terminal shows them."""
    console = _console(sys.stdout.isatty())
    for renderable in renderables:
        console.print(renderable)


def _console(terminal: bool) -> "Console":
    from rich.console import Console

    width = None if terminal or "COLUMNS" in os.environ else PIPED_WIDTH
    return Console(width=width, highlight=False)


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send to stderr what is written to stdout inside, also by C code: stdout is for data, not for a user's prints."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # closed: only Python's own stream is left to redirect
        with redirect_stdout(sys.stderr):
            yield
        return
    stream = sys.stdout  # their code may have kept it by another name
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        stream.flush()
        os.dup2(kept, 1)
        os.close(kept)


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Run code of the user's inside: its prints go to stderr, and an exit of its own is an error."""
    try:
        with stdout_to_stderr():
            yield
    except SystemExit as error:
        raise CaptureError(
            f"{what}: its code ended the program by SystemExit: {error.code}",
            hint="take sys.exit() out of what the model's file runs",
        ) from error


@contextmanager
def progress_bar(title: str) -> Iterator[Progress]:
    """Yield a function that moves a progress bar on stderr; without a terminal nothing is shown."""
    if not sys.stderr.isatty():
        yield lambda label, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda label, done, total: bar.update(
            task, description=f"{title}: {label}", completed=done, total=total or None
        )

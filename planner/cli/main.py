"""The command `planner`: its subcommands, and how errors are told.

Data goes to stdout, everything else to stderr. Exit code 0: done; 1: no plan, or failed; 2: usage; 130: interrupted;
143: ended by SIGTERM.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, NoReturn

import typer

from planner import __version__
from planner.cli.compare import compare
from planner.cli.ending import adopt_orphans, end
from planner.cli.explain import explain
from planner.cli.import_ import import_
from planner.cli.output import say
from planner.cli.profile import profile
from planner.cli.solve import solve
from planner.cli.verify import verify
from planner.errors import PlannerError

INTERRUPTED = 130
MAX_SHOWN = 400  # characters of a usage error, which quotes the arguments
TERMINATED = 128 + signal.SIGTERM

app = typer.Typer(
    name="planner",
    help="Plan how to train a PyTorch model on many GPUs: profile, solve, verify, train.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(profile)
app.command()(solve)
app.command()(explain)
app.command()(compare)
app.command()(verify)
app.command("import")(import_)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """Plan how to train a PyTorch model on many GPUs: profile, solve, verify, train."""
    if version:
        sys.stdout.write(f"planner {__version__}\n")
        raise typer.Exit
    if context.invoked_subcommand is None:
        sys.stdout.write(context.get_help() + "\n")


class _Terminated(BaseException):
    """SIGTERM came: raised so that files and processes are cleaned up on the way out."""


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Make the first SIGTERM raise _Terminated inside; a second one, while cleaning up, is ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return

    owner = os.getpid()

    def terminate(number: int, frame: object) -> None:
        if os.getpid() != owner:  # a process that the model's code forked: nothing in it is ours to clean up
            os._exit(TERMINATED)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise _Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


def run() -> NoReturn:
    """Run the command line in a process of its own, and end it with all that a model's code started."""
    adopt_orphans()
    code = 1
    try:
        code = main()
    except Exception:  # noqa: BLE001 - a bug: told as Python does
        sys.excepthook(*sys.exc_info())
    end(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; a bug keeps its traceback."""
    try:
        with _sigterm_raises():
            code = app(args=arguments, prog_name="planner", standalone_mode=False)
        sys.stdout.flush()
    except PlannerError as error:
        _tell(error.message, error.hint)
        return error.exit_code
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "planner"
        message = error.format_message().rstrip(".")
        if len(message) > MAX_SHOWN:
            message = f"{message[: MAX_SHOWN // 2]} ... {message[-MAX_SHOWN // 2 :]}"
        _tell(message, f"see `{command} --help`")
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except _Terminated:
        say("ended by SIGTERM")
        return TERMINATED
    except BrokenPipeError:  # the reader of stdout has gone, as in `planner ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    if code == INTERRUPTED:
        say("interrupted")
    return int(code or 0)


def _tell(message: str, hint: str) -> None:
    say(f"error: {message}")
    if hint:
        say(f"hint: {hint}")

"""Which rank failed first, and what to tell about it.

When one rank fails the others fail too, a moment later, because their peer is gone, or wait for it until they are
ended. What people need is the first cause, so failures that only follow from another are told in one line each.
"""

import linecache
import re
import signal
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from planner import errors
from planner.errors import PlannerError, VerifyError

# what gloo, NCCL and torch's store say when a peer is gone or does not answer
_FOLLOWS_FROM_A_PEER = re.compile(
    r"closed by peer|reset by peer|NCCL|TCPStore|recvValue|Broken pipe|Socket closed|process group .*abort"
)
# what the ranks of a plan raise when another could not set up its part: that one tells why
_FOLLOWS_IN_A_PLAN = re.compile(r"rank \d+ could not be set up: ")
_PLAN_ERROR = "PlanError"  # the class of an emitted plan's own errors, which say all there is to say
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')
_ROOTS = (Path(__file__).resolve().parents[1], Path(sysconfig.get_path("stdlib")))  # planner's own code, Python's
MAX_FRAMES = 12
MAX_LINE = 200


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How one rank failed; `time_s` is on the monotonic clock of the machine.

    `follows`: only because a peer is gone; `silent`: it did not answer; `complete`: the summary says all there is.
    """

    rank: int
    time_s: float
    summary: str
    details: str = ""
    hint: str = ""
    follows: bool = False
    silent: bool = False
    error_class: str = ""
    complete: bool = False


def raised(rank: int, time_s: float, kind: str, message: str, hint: str, details: str, error_class: str) -> Failure:
    """Return the failure of a rank whose code raised; `error_class` names a PlannerError to raise again as it is."""
    complete = bool(error_class) or kind == _PLAN_ERROR
    in_a_plan = kind == _PLAN_ERROR and _FOLLOWS_IN_A_PLAN.match(message)
    return Failure(
        rank=rank,
        time_s=time_s,
        summary=message if complete else f"rank {rank} raised {kind}: {message}",
        details="" if complete else details,
        hint=hint,
        follows=not error_class and bool(in_a_plan or _FOLLOWS_FROM_A_PEER.search(message)),
        error_class=error_class,
        complete=complete,
    )


def died(rank: int, time_s: float, exit_code: int, log: str) -> Failure:
    """Return the failure of a rank whose process ended without an answer; `exit_code` is negative for a signal."""
    lines = [line for line in log.strip().splitlines() if not line.startswith("Extension modules:")]
    tail = "\n".join(lines[-MAX_FRAMES * 2 :]).rstrip()
    if exit_code >= 0:
        summary = f"rank {rank} ended with exit code {exit_code} before it was done"
        return Failure(
            rank=rank, time_s=time_s, summary=summary, details=tail, hint="look for os._exit or a crash in the model"
        )
    number = -exit_code
    names = {member.value: member.name for member in signal.Signals}
    hint = "look at the last lines that it wrote, above" if tail else "look for what sent the signal"
    if number == signal.SIGKILL:
        hint = "the system kills processes when memory runs out: check free memory, or use fewer processes"
    return Failure(
        rank=rank,
        time_s=time_s,
        summary=f"rank {rank} was killed by signal {number} ({names.get(number, 'unknown')})",
        details=tail,
        hint=hint,
        follows=number == signal.SIGABRT and bool(_FOLLOWS_FROM_A_PEER.search(log)),  # gloo and NCCL may abort
    )


def silent(rank: int, time_s: float, timeout_s: float, stack: str) -> Failure:
    """Return the failure of a rank that did not answer in time; `stack` is faulthandler's text, or empty."""
    where = f"last seen in {own_frame(stack)}" if stack else "it shows no stack: it is stopped, or not yet started"
    return Failure(
        rank=rank,
        time_s=time_s,
        summary=f"rank {rank} did not answer within {timeout_s:g} s",
        details=where,
        hint="allow more time if the machine is slow; otherwise look at what it waits for there",
        follows=is_waiting(stack),
        silent=True,
    )


def first_cause(failures: Sequence[Failure]) -> Failure:
    """Return the failure the others follow from: the earliest of its own, else a silent rank, else the earliest."""

    def order(failure: Failure) -> tuple[int, float, int]:
        if failure.silent:
            return (2 if failure.follows else 1, failure.time_s, failure.rank)
        return (3 if failure.follows else 0, failure.time_s, failure.rank)

    return min(failures, key=order)


def failure_error(failures: Sequence[Failure]) -> PlannerError:
    """Return the error to raise for the failures of a job: the first cause in full, the others in a line each."""
    cause = first_cause(failures)
    others = sorted((failure for failure in failures if failure is not cause), key=lambda failure: failure.rank)
    alike = [failure.rank for failure in others if _without_rank(failure) == _without_rank(cause)]
    lost = [failure.rank for failure in others if failure.follows and not failure.silent and failure.rank not in alike]
    lines = [
        f"  also: {_shortened(failure.summary.splitlines()[0])}"
        for failure in others
        if failure.rank not in alike and failure.rank not in lost
    ]
    if alike:
        lines.insert(0, f"  also: the same on {_ranks(alike)}")
    if lost:
        lines.append(f"  also: {_ranks(lost)} lost a peer")
    message = "\n".join(part for part in (cause.summary, cause.details.rstrip(), *lines) if part)
    error_class = getattr(errors, cause.error_class) if cause.error_class else VerifyError
    error: PlannerError = error_class(cause.summary if cause.complete else message, hint=cause.hint)
    return error


def _without_rank(failure: Failure) -> str:
    return failure.summary.removeprefix(f"rank {failure.rank} ")


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(str(rank) for rank in ranks)}"


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_LINE else f"{text[:MAX_LINE]}..."


def main_thread(stack: str) -> str:
    """Return the innermost frames of the main thread in a dump of faulthandler, which lists that thread last."""
    sections = re.split(r"(?m)^(?=(?:Current thread|Thread) 0x)", stack)
    lines = [line for line in sections[-1].splitlines() if _FRAME.search(line)]
    return "\n".join(lines[:MAX_FRAMES])


def own_frame(stack: str) -> str:
    """Return the innermost frame that is of a plan or of a model, not of Python, a library or planner; else the first.

    'File "plan.py", line 12 in step'; '(no frame)' where the stack has none.
    """
    frames = list(_FRAME.finditer(stack))
    own = [frame for frame in frames if not _is_installed(frame["file"])]
    return (own or frames)[0][0] if frames else "(no frame)"


def _is_installed(file: str) -> bool:
    path = Path(file)
    return file.startswith("<") or "site-packages" in path.parts or any(path.is_relative_to(root) for root in _ROOTS)


def is_waiting(stack: str) -> bool:
    """Return whether the innermost frame of a stack waits for another rank rather than computing or sleeping."""
    frame = _FRAME.search(stack)
    if frame is None:
        return False
    line = linecache.getline(frame["file"], int(frame["line"]))
    return "torch/distributed" in frame["file"] or ".wait(" in line or "dist." in line

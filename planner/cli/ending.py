"""Ends the command for good: threads and processes that a model's file started as it was imported end with it."""

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

from planner.cli.output import say
from planner.units import counted

_PR_SET_CHILD_SUBREAPER = 36  # <sys/prctl.h>
_GRACE_S = 1.0  # how long processes may take to end by themselves when asked to
_KEEPER = b"multiprocessing.resource_tracker"  # frees what the others shared, and ends by itself when this process does


def adopt_orphans() -> None:
    """Have Linux give this process what its children leave behind, so that it can be ended too."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end(code: int) -> NoReturn:
    """End this process with an exit code, whatever still runs in it or was started by it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # its reader has gone, or it is closed
            continue
    threads = [
        thread
        for thread in threading.enumerate()
        if thread is not threading.main_thread() and not thread.daemon and thread.is_alive()
    ]
    processes = _descendants(os.getpid())
    if not threads and not processes:
        sys.exit(code)  # the usual way, with what is registered to run at the end
    try:
        say(f"note: ended {_shown(len(threads), len(processes))} that the model's code had left running")
        sys.stderr.flush()
    except (OSError, ValueError):
        pass
    _end_processes(processes)
    os._exit(code)  # the usual way waits for threads


def _shown(threads: int, processes: int) -> str:
    parts = [counted(threads, "thread")] if threads else []
    parts += [counted(processes, "process", "processes")] if processes else []
    return " and ".join(parts)


def _end_processes(pids: list[int]) -> None:
    """Ask processes to end, then kill those that don't."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in pids:
            try:
                os.kill(pid, number)
            except (ProcessLookupError, PermissionError):
                continue
        limit = time.monotonic() + _GRACE_S
        while pids and time.monotonic() < limit:
            time.sleep(0.01)
            pids = _descendants(os.getpid())
        if not pids:
            return


def _descendants(pid: int) -> list[int]:
    """Return the running processes below a process, as Linux lists them; none elsewhere."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if fields[0] in "ZX" or _KEEPER in (folder / "cmdline").read_bytes():
                continue
        except (OSError, IndexError):  # it has ended
            continue
        children.setdefault(int(fields[1]), []).append(int(folder.name))
    found, behind = [], [pid]
    while behind:
        below = children.get(behind.pop(), [])
        found += below
        behind += below
    return found

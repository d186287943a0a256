"""The template process: imports torch once, then forks the ranks of every job from itself.

Starting python with torch costs seconds per process; a fork costs hundredths of a second and shares the memory. The
template never runs a user's code and starts no threads, so forking from it is safe, and every job gets fresh processes.
It is told what to do over one socket and ends, with everything it forked, when the other end closes.
"""

import gc
import importlib
import json
import os
import signal
import sys
import time
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any

from planner.runner.rank import run_rank
from planner.torchvision_operators import declare_missing_operators

_IMPORTS = (
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.utils.checkpoint",
    "torch.optim",
    "torch._dynamo",  # what the first step of any optimizer imports
)
_POLL_S = 0.02  # how soon an exit is noticed
_REAP_S = 5.0  # a killed process that is not gone by then is stuck in the kernel


def main(descriptor: int) -> None:
    """Serve requests on the socket until it closes; then end every process forked here."""
    import socket
    from multiprocessing.reduction import recvfds

    control, parent_socket = Connection(descriptor), socket.socket(fileno=os.dup(descriptor))
    children: set[int] = set()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        declare_missing_operators()
        _preload(_IMPORTS)
        _tell(control, "ready", os.getpid())
        while True:
            if connection.wait([control], timeout=_POLL_S if children else None):
                request = json.loads(control.recv_bytes())
                if request["do"] == "fork":
                    descriptors = recvfds(parent_socket, 3 * request["num_processes"])
                    pids = _fork(descriptors, [control.fileno(), parent_socket.fileno()])
                    children.update(pids)
                    _tell(control, "forked", pids)
                elif request["do"] == "kill":
                    _kill(control, children)
                    _tell(control, "killed", [])
                elif request["do"] == "show stacks":
                    for pid in children:
                        os.kill(pid, signal.SIGUSR1)
                    _tell(control, "asked for stacks", [])
                elif request["do"] == "preload":
                    _preload(request["names"])
                    _tell(control, "preloaded", [])
            _reap(control, children)
    except (EOFError, ConnectionError):
        _kill(None, children)


def _preload(names: tuple[str, ...] | list[str]) -> None:
    """Import installed packages, and the attributes of those that import lazily ('package:Class')."""
    for name in names:
        module, _, attribute = name.partition(":")
        try:
            imported = importlib.import_module(module)
            if attribute:
                getattr(imported, attribute, None)
        except Exception:  # noqa: BLE001 - the rank that needs it meets the error where it can be told
            continue
    gc.collect()
    gc.freeze()  # a collection in a rank would copy the shared pages


def _fork(descriptors: list[int], inherited: list[int]) -> list[int]:
    """Return the process ids of new ranks; each takes three descriptors: socket, log and exchange."""
    parent, pids = os.getpid(), []
    for rank in range(len(descriptors) // 3):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                mine = descriptors[3 * rank : 3 * rank + 3]
                for descriptor in (*inherited, *descriptors):
                    if descriptor not in mine:
                        os.close(descriptor)
                code = run_rank(Connection(mine[0]), mine[1], mine[2], rank, parent)
            finally:
                os._exit(code)  # no clean-up of the template's objects, no waiting for threads of gloo
        pids.append(pid)
    for descriptor in descriptors:
        os.close(descriptor)
    return pids


def _kill(control: Connection | None, children: set[int]) -> None:
    """End every child and what it started; bounded."""
    for pid in children:
        _kill_group(pid)
    limit = time.monotonic() + _REAP_S
    while children and time.monotonic() < limit:
        _reap(control, children)
        time.sleep(0.002)
    children.clear()


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # the group exists once the child has made it
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def _reap(control: Connection | None, children: set[int]) -> None:
    """Tell the exit codes of children that ended (negative for a signal) and end what they started."""
    for pid in list(children):
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            continue
        _kill_group(pid)  # before the id is free for others
        _, status = os.waitpid(pid, 0)
        children.discard(pid)
        if control is not None:
            _tell(control, "exited", [pid, os.waitstatus_to_exitcode(status)])


def _tell(control: Connection, kind: str, value: Any) -> None:
    control.send_bytes(json.dumps([kind, value]).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]))

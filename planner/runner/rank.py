"""What a forked process does: join the others, run one function, answer, and end.

It runs in a process of its own (see `planner.runner.template`) that ends with the job, so nothing that a model or a
plan leaves behind reaches the next job.
"""

import ctypes
import datetime
import faulthandler
import importlib
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from planner.errors import PlannerError

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
MAX_TEXT = 20_000  # characters of a message: well within what a socket takes at once


@dataclass(frozen=True, kw_only=True)
class Job:
    """A function to run on every rank, by name, with pickled arguments."""

    module: str
    function: str
    arguments: bytes
    num_processes: int
    timeout_s: float
    process_group: bool
    search_path: tuple[str, ...]
    folder: str
    environment: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """What the function of a job gets first: its rank, of how many, and `report(text)` to tell of progress."""

    rank: int
    num_processes: int
    report: Callable[[str], None]


def run_rank(connection: Connection, log: int, exchange: int, rank: int, parent: int) -> int:
    """Run the job in the file `exchange` and put its result there; return the exit code of the process.

    Output goes to the file descriptor `log`; SIGUSR1 writes the stacks of all threads there.
    """
    _end_with_parent(parent)
    os.setpgid(0, 0)  # so that what the job starts can be ended with it
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(file=log, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
    try:
        with os.fdopen(exchange, "r+b") as file:
            file.seek(0)
            job: Job = pickle.load(file)
            _settle(job, rank)
            store = _join(connection, rank, job) if job.process_group else None  # kept: rank 0 serves it
            result = _call(job, connection, rank)
            # pickled plainly: torch's own reductions would share memory with a process about to end
            file.seek(0)
            pickle.dump(result, file)
            file.truncate()
        _send(connection, "result", None)
    except BaseException as error:  # noqa: BLE001 - SystemExit in a model is a failure like any other
        _send(connection, "error", _describe(error))
        return 1
    connection.recv_bytes()  # until every rank has answered: they may still need the store
    if store is not None:
        _leave()
    return 0


def _settle(job: Job, rank: int) -> None:
    """Take over the owner's environment, module search path and folder."""
    environment = job.environment | _rank_environment(rank, job.num_processes)
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:  # a host name that resolves to no address of this machine would stop gloo
        environment.setdefault("GLOO_SOCKET_IFNAME", loopback)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = job.search_path
    os.chdir(job.folder)


def _call(job: Job, connection: Connection, rank: int) -> Any:
    context = RankContext(
        rank=rank,
        num_processes=job.num_processes,
        report=lambda text: _send(connection, "progress", text[:MAX_TEXT]),
    )
    module = importlib.import_module(job.module)
    return getattr(module, job.function)(context, *pickle.loads(job.arguments))


def _end_with_parent(parent: int) -> None:
    """Have Linux end this process when its parent ends; elsewhere the template, which sees it, does."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def _rank_environment(rank: int, num_processes: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def _join(connection: Connection, rank: int, job: Job) -> Any:
    """Return the store of the job's process group once joined; rank 0 picks a free port, the parent passes it on."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore, TCPStore  # where torch.distributed has them from

    # gloo must not give up first: the pool's own limit tells where every rank was
    timeout = datetime.timedelta(seconds=job.timeout_s + 60)
    address, others = "127.0.0.1", job.num_processes
    if rank == 0:
        store = TCPStore(address, 0, others, is_master=True, timeout=timeout, wait_for_workers=False)
        _send(connection, "port", store.port)
    port = int(connection.recv_bytes())
    if rank != 0:
        store = TCPStore(address, port, others, is_master=False, timeout=timeout)
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group(
        "gloo", store=PrefixStore("job", store), rank=rank, world_size=job.num_processes, timeout=timeout
    )
    return store


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _send(connection: Connection, kind: str, value: Any) -> None:
    connection.send_bytes(pickle.dumps((kind, value)))


def _describe(error: BaseException) -> dict[str, Any]:
    traceback_ = error.__traceback__
    shown = traceback_.tb_next if traceback_ is not None and traceback_.tb_next is not None else traceback_
    planner_error = isinstance(error, PlannerError)
    # the errors of an emitted plan carry their hint as a last line
    message, _, hint = (str(error) or "(no message)")[:MAX_TEXT].partition("\nhint: ")
    if isinstance(error, PlannerError):
        hint = error.hint
    if type(error).__name__ == "PlanError":
        hint = hint or "the plan or what it was given is wrong: solve again, or undo the last edit of plan.py"
    return {
        "time_s": time.monotonic(),
        "kind": type(error).__name__,
        "message": message,
        "hint": hint or "the rank's traceback is above",
        "details": "".join(traceback.format_exception(type(error), error, shown))[-MAX_TEXT:],
        "error_class": type(error).__name__ if planner_error else "",
    }

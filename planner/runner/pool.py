"""A pool of processes for multi-process runs under gloo, on this machine.

    with WorkerPool() as pool:
        results = pool.run(function, argument, num_processes=4, timeout_s=60)

`function(context, argument)` must be importable by name; it runs once per rank, in a fresh process that is joined to a
fresh process group. Torch is imported once for all jobs, by the template (see `planner.runner.template`). A rank that
dies, raises or hangs ends the job in bounded time with that rank's error; no process outlives the pool or its owner.
"""

import json
import math
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.reduction import sendfds
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from planner.errors import VerifyError
from planner.runner.failures import Failure, died, failure_error, main_thread, raised, silent
from planner.runner.rank import Job

MAX_PROCESSES = 8
START_TIMEOUT_S = 300.0  # importing torch from a cold disk on a busy machine
GRACE_S = 3.0  # how long the other ranks may take to tell their side after the first failure
STACK_S = 1.0  # how long a rank may take to write its stack
END_S = 10.0  # how long killed processes may take to be gone


@dataclass(kw_only=True)
class _Rank:
    """One process of a running job. Its files have no name, so nothing is left behind.

    `exchange` holds the job, then its result: a channel carries short messages only, so that reading one never waits
    for a process that stopped in the middle of it.
    """

    rank: int
    pid: int
    channel: Connection
    log: IO[bytes]
    exchange: IO[bytes]
    answered: bool = False
    exit_code: int | None = None
    closed_s: float | None = None
    failure: Failure | None = None

    def close(self) -> None:
        """Close the channel and the files."""
        self.channel.close()
        self.log.close()
        self.exchange.close()

    def log_text(self, start: int = 0) -> str:
        """Return what the rank wrote from an offset on, 1 MB of it at most."""
        size = os.fstat(self.log.fileno()).st_size
        start = max(start, size - 1_000_000)
        return os.pread(self.log.fileno(), size - start, start).decode(errors="replace")


@dataclass(kw_only=True)
class _Running:
    """The ranks of a job and when it must be over."""

    timeout_s: float
    deadline_s: float = math.inf
    ranks: list[_Rank] = field(default_factory=list)
    on_progress: Callable[[int, str], None] | None
    ended: bool = False


class WorkerPool:
    """Runs functions on up to `max_processes` processes; starts its template at the first job."""

    def __init__(self, max_processes: int = MAX_PROCESSES) -> None:
        self.max_processes = max_processes
        self._template: subprocess.Popen[bytes] | None = None
        self._control: Connection | None = None
        self._socket: socket.socket | None = None
        self._preloaded: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(
        self,
        function: Callable[..., Any] | str,
        *arguments: Any,
        num_processes: int = 1,
        timeout_s: float = 60.0,
        process_group: bool = True,
        preload: Sequence[str] = (),
        on_progress: Callable[[int, str], None] | None = None,
    ) -> list[Any]:
        """Return what `function(context, *arguments)` returned on each rank, by rank.

        A function may be named as 'module:function', which does not import it here. The result and the arguments are
        pickled. `preload` names installed packages (or 'package:Class') to import once for all ranks and later jobs. A
        PlannerError of a rank is raised as it is, any other failure as VerifyError.
        """
        if not 1 <= num_processes <= self.max_processes:
            raise VerifyError(
                f"{num_processes} processes asked of a pool of {self.max_processes}", hint="use fewer processes"
            )
        name = function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}"
        module, _, attribute = name.partition(":")
        if module == "__main__" or not attribute.isidentifier():
            raise ValueError(f"{attribute} of {module} can't be found by another process")
        job = Job(
            module=module,
            function=attribute,
            arguments=pickle.dumps(arguments),
            num_processes=num_processes,
            timeout_s=timeout_s,
            process_group=process_group,
            search_path=tuple(str(Path(path).absolute()) for path in sys.path),
            folder=str(Path.cwd()),
            environment=dict(os.environ),
        )
        running = _Running(timeout_s=timeout_s, on_progress=on_progress)
        try:
            self._start(preload)
            running.deadline_s = time.monotonic() + timeout_s
            running.ranks = self._fork(job)
            self._wait(running)
            self._let_go(running)
            return [pickle.loads(_content(rank.exchange)) for rank in running.ranks]
        except BaseException:
            if not running.ended:  # Ctrl-C, for one: the conversation with the template is cut short
                self.close()
            raise
        finally:
            for rank in running.ranks:
                rank.close()

    def close(self) -> None:
        """End every process of the pool; the next job would start it anew."""
        template, self._template = self._template, None
        if self._control is not None:
            self._control.close()
        if self._socket is not None:
            self._socket.close()
        self._control = self._socket = None
        self._preloaded = set()
        if template is not None:
            try:  # it sees the socket close, ends what it forked, and ends
                template.wait(END_S)
            except subprocess.TimeoutExpired:
                template.kill()  # Linux then ends its ranks
                template.wait()

    def _start(self, preload: Sequence[str]) -> None:
        if self._template is not None and self._template.poll() is not None:
            self.close()
        if self._template is None:
            ours, theirs = socket.socketpair()
            package_root = str(Path(__file__).resolve().parents[2])
            search_path = [package_root, *(path for path in sys.path if path and path != package_root)]
            environment = os.environ | {
                "PYTHONPATH": os.pathsep.join(search_path),
                "OMP_NUM_THREADS": "1",
                "MKL_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",  # a process that touched CUDA can't be forked
            }
            with theirs:
                self._template = subprocess.Popen(
                    [sys.executable, "-P", "-m", "planner.runner.template", str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C goes to the owner, which ends the pool in order
                )
            self._socket, self._control = ours, Connection(os.dup(ours.fileno()))
            self._receive("ready", START_TIMEOUT_S)
        missing = [name for name in preload if name not in self._preloaded]
        if missing:
            self._ask({"do": "preload", "names": missing})
            self._receive("preloaded", START_TIMEOUT_S)
            self._preloaded.update(missing)

    def _ask(self, request: dict[str, Any]) -> None:
        assert self._control is not None
        try:
            self._control.send_bytes(json.dumps(request).encode())
        except OSError:
            raise self._template_gone() from None

    def _receive(self, kind: str, timeout_s: float, ranks: Sequence[_Rank] = ()) -> Any:
        """Return the template's next message of a kind; exits that it tells on the way are kept on their ranks."""
        assert self._control is not None
        limit = time.monotonic() + timeout_s
        while self._control.poll(max(0.0, limit - time.monotonic())):
            try:
                told, value = json.loads(self._control.recv_bytes())
            except (EOFError, ConnectionError):
                raise self._template_gone() from None
            if told == "exited":
                _note_exit(ranks, value)
            if told == kind:
                return value
        self.close()
        raise VerifyError(
            f"the process that the ranks are forked from did not answer within {timeout_s:g} s",
            hint="check that memory is free",
        )

    def _template_gone(self) -> VerifyError:
        template = self._template
        self.close()
        code = template.returncode if template is not None else None
        return VerifyError(
            f"the process that the ranks are forked from ended (exit code {code})",
            hint="check that `import torch` works and that memory is free",
        )

    def _fork(self, job: Job) -> list[_Rank]:
        """Return the ranks of a job, started."""
        assert self._socket is not None
        numbers = range(job.num_processes)
        pairs = [socket.socketpair() for _ in numbers]
        logs, exchanges = ([_unnamed_file() for _ in numbers] for _ in range(2))
        message = pickle.dumps(job)
        for exchange in exchanges:
            exchange.write(message)
            exchange.flush()
        try:
            self._ask({"do": "fork", "num_processes": job.num_processes})
            given = [file.fileno() for rank in numbers for file in (pairs[rank][1], logs[rank], exchanges[rank])]
            sendfds(self._socket, given)
            pids = self._receive("forked", END_S * job.num_processes)
            channels = [Connection(os.dup(ours.fileno())) for ours, _ in pairs]
        finally:
            for ours, theirs in pairs:
                ours.close()
                theirs.close()
        return [
            _Rank(rank=rank, pid=pids[rank], channel=channels[rank], log=logs[rank], exchange=exchanges[rank])
            for rank in numbers
        ]

    def _wait(self, running: _Running) -> None:
        """Wait until every rank has answered; at a failure, until the others had time to tell theirs, then raise."""
        assert self._control is not None
        while open_ranks := [rank for rank in running.ranks if not rank.answered and rank.failure is None]:
            failed = [rank.failure for rank in running.ranks if rank.failure is not None]
            limit = running.deadline_s
            if failed:
                limit = min(limit, min(failure.time_s for failure in failed) + GRACE_S)
            if time.monotonic() >= limit:
                self._ask_for_stacks(open_ranks, running)
                break
            channels = {rank.channel: rank for rank in open_ranks if rank.closed_s is None}
            ready = connection.wait([self._control, *channels], timeout=max(0.0, limit - time.monotonic()))
            for channel in ready:
                if channel is self._control:
                    self._receive("exited", END_S, running.ranks)
                else:
                    _hear(channels[channel], running)  # type: ignore[index]
        if failures := [rank.failure for rank in running.ranks if rank.failure is not None]:
            self._end(running)
            raise failure_error(failures)

    def _ask_for_stacks(self, ranks: Sequence[_Rank], running: _Running) -> None:
        """Mark ranks as silent, with where they were last seen."""
        now = time.monotonic()
        starts = {rank.rank: os.fstat(rank.log.fileno()).st_size for rank in ranks}
        self._ask({"do": "show stacks"})
        self._receive("asked for stacks", END_S, running.ranks)
        limit, texts = now + STACK_S, dict.fromkeys(starts, "")
        while time.monotonic() < limit and not all(texts.values()):
            time.sleep(0.05)
            texts = {rank.rank: main_thread(rank.log_text(starts[rank.rank])) for rank in ranks}
        for rank in ranks:
            rank.failure = silent(rank.rank, now, running.timeout_s, texts[rank.rank])

    def _let_go(self, running: _Running) -> None:
        """Let every rank go, now that all have answered."""
        assert self._control is not None
        _send_all(running.ranks, b"done")
        limit = time.monotonic() + GRACE_S
        while any(rank.exit_code is None for rank in running.ranks) and time.monotonic() < limit:
            if self._control.poll(max(0.0, limit - time.monotonic())):
                self._receive("exited", END_S, running.ranks)
        self._end(running)

    def _end(self, running: _Running) -> None:
        """Kill what is left of a job."""
        if any(rank.exit_code is None for rank in running.ranks):
            self._ask({"do": "kill"})
            self._receive("killed", END_S, running.ranks)
        running.ended = True


def _unnamed_file() -> IO[bytes]:
    return tempfile.TemporaryFile()


def _content(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


def _send_all(ranks: Sequence[_Rank], message: bytes) -> None:
    for rank in ranks:
        try:
            rank.channel.send_bytes(message)
        except OSError:  # it is gone: told by its exit code
            continue


def _note_exit(ranks: Sequence[_Rank], told: list[int]) -> None:
    pid, exit_code = told
    for rank in ranks:
        if rank.pid == pid:
            rank.exit_code = exit_code
            if not rank.answered and rank.failure is None and not rank.channel.closed and not _has_message(rank):
                when = rank.closed_s if rank.closed_s is not None else time.monotonic()
                rank.failure = died(rank.rank, when, exit_code, rank.log_text())


def _has_message(rank: _Rank) -> bool:
    """Return whether the rank said something that is not read yet; a closed end counts as nothing."""
    if rank.closed_s is not None:
        return False
    with socket.socket(fileno=os.dup(rank.channel.fileno())) as peek:
        peek.setblocking(False)
        try:
            return bool(peek.recv(1, socket.MSG_PEEK))
        except OSError:
            return False


def _hear(rank: _Rank, running: _Running) -> None:
    """Take one message of a rank."""
    try:
        kind, value = pickle.loads(rank.channel.recv_bytes())
    except (EOFError, OSError):
        rank.closed_s = time.monotonic()
        if rank.exit_code is not None:
            rank.failure = died(rank.rank, rank.closed_s, rank.exit_code, rank.log_text())
        return
    if kind == "port":
        _send_all(running.ranks, str(value).encode())
    elif kind == "progress":
        if running.on_progress is not None:
            running.on_progress(rank.rank, value)
    elif kind == "result":
        rank.answered = True
    else:
        rank.failure = raised(rank.rank, **value)

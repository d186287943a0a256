"""The pool of processes: results by rank, every way in which a rank can fail, and no orphans."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from planner.errors import CaptureError, VerifyError
from planner.runner.failures import died, failure_error, first_cause, main_thread, own_frame, raised, silent
from planner.runner.pool import WorkerPool
from planner.runner.rank import RankContext

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(max_processes=4) as pool:
        yield pool


# What the ranks run ------------------------------------------------------------------------------------------------


def add_ranks(context: RankContext, start: int) -> tuple[int, int, int]:
    import torch
    import torch.distributed as dist

    value = torch.tensor(start + context.rank)
    dist.all_reduce(value)
    context.report(f"added {context.rank}")
    return int(value), dist.get_world_size(), os.getpid()


def without_group(context: RankContext) -> tuple[bool, str, int]:
    import torch
    import torch.distributed as dist

    print("this line must not reach the owner's output")
    return dist.is_initialized(), os.environ["RANK"], torch.get_num_threads()


def make_tensor(context: RankContext, size: int) -> object:
    import torch

    return torch.full((size,), float(context.rank))


def leave_traces(context: RankContext) -> bool:
    import torch

    clean = torch.get_default_dtype() == torch.float32 and not hasattr(sys, "trace_of_a_job")
    torch.set_default_dtype(torch.float64)
    sys.trace_of_a_job = True  # type: ignore[attr-defined]
    return clean


def fail(context: RankContext, how: str, culprit: int) -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(1))
    if context.rank == culprit:
        if how == "raise":
            raise KeyError("the culprit's own words")
        if how == "planner error":
            raise CaptureError("a message of ours", hint="a hint of ours")
        if how == "exit":
            os._exit(7)
        if how == "sys.exit":
            sys.exit(5)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if how == "hang":
            sleep_for_ever()
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "child":
            subprocess.Popen(["sleep", "1000"])
            sleep_for_ever()
    dist.all_reduce(torch.zeros(1))


def sleep_for_ever() -> None:
    while True:
        time.sleep(1000)


def fail_everywhere(context: RankContext) -> None:
    raise CaptureError("the same on every rank", hint="one hint")


# Results -----------------------------------------------------------------------------------------------------------


def test_runs_jobs_of_several_sizes_one_after_another(pool: WorkerPool) -> None:
    told: list[tuple[int, str]] = []
    for size, start in ((3, 10), (1, 5), (2, 0)):
        results = pool.run(
            add_ranks, start, num_processes=size, timeout_s=60, on_progress=lambda rank, text: told.append((rank, text))
        )
        assert [result[:2] for result in results] == [(size * start + sum(range(size)), size)] * size
        assert len({result[2] for result in results}) == size
    assert sorted(told) == sorted((rank, f"added {rank}") for size in (3, 1, 2) for rank in range(size))


def test_without_a_process_group_and_with_quiet_output(pool: WorkerPool, capfd: pytest.CaptureFixture[str]) -> None:
    assert pool.run(without_group, num_processes=2, process_group=False) == [(False, "0", 1), (False, "1", 1)]
    assert "must not reach" not in "".join(capfd.readouterr())


def test_results_larger_than_a_socket_takes(pool: WorkerPool) -> None:
    results = pool.run(make_tensor, 500_000, num_processes=2, process_group=False)
    assert [float(result.sum()) for result in results] == [0.0, 500_000.0]


def test_a_job_sees_nothing_of_the_one_before(pool: WorkerPool) -> None:
    assert [pool.run(leave_traces, num_processes=2) for _ in range(2)] == [[True, True]] * 2


def test_refuses_what_it_cannot_run(pool: WorkerPool) -> None:
    with pytest.raises(VerifyError, match="5 processes asked of a pool of 4"):
        pool.run(add_ranks, 1, num_processes=5)
    with pytest.raises(ValueError, match="can't be found by another process"):
        pool.run(lambda context: None)


def test_the_template_starts_no_threads(pool: WorkerPool) -> None:
    pool.run(without_group, num_processes=1, preload=("json:JSONDecoder", "no_such_package"))
    assert pool._template is not None
    tasks = Path(f"/proc/{pool._template.pid}/task")
    if not tasks.exists():
        pytest.skip("this system has no /proc")
    assert len(list(tasks.iterdir())) == 1  # a fork of a process with threads may hang


# Failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("raise", 'rank 1 raised KeyError: "the culprit\'s own words"'),
        ("exit", "rank 1 ended with exit code 7"),
        ("sys.exit", "rank 1 raised SystemExit: 5"),
        ("kill", r"rank 1 was killed by signal 9 \(SIGKILL\)"),
        ("segfault", r"(?s)rank 1 was killed by signal 11 \(SIGSEGV\).*in fail"),
    ],
)
def test_tells_of_the_rank_that_failed_first(pool: WorkerPool, how: str, expected: str) -> None:
    with pytest.raises(VerifyError, match=expected) as caught:
        pool.run(fail, how, 1, num_processes=3, timeout_s=60)
    assert caught.value.hint
    if how == "raise":
        assert 'raise KeyError("the culprit\'s own words")' in caught.value.message  # the line of its traceback
    assert pool.run(add_ranks, 1, num_processes=2, timeout_s=60)[0][0] == 3  # the pool goes on


@pytest.mark.parametrize("how", ["hang", "child"])
def test_tells_where_a_rank_hangs(pool: WorkerPool, how: str) -> None:
    with pytest.raises(
        VerifyError, match=r"(?s)rank 2 did not answer within 2 s\nlast seen in File.*in sleep_for_ever"
    ):
        pool.run(fail, how, 2, num_processes=3, timeout_s=2)
    assert children_of(pool) == []


def test_a_stopped_rank_has_no_stack_and_goes_too(pool: WorkerPool) -> None:
    with pytest.raises(VerifyError, match=r"rank 0 did not answer within 2 s\nit shows no stack"):
        pool.run(fail, "stop", 0, num_processes=2, timeout_s=2)
    assert children_of(pool) == []


def test_our_own_errors_keep_their_class_and_hint(pool: WorkerPool) -> None:
    with pytest.raises(CaptureError) as caught:
        pool.run(fail, "planner error", 1, num_processes=2, timeout_s=60)
    assert (caught.value.message, caught.value.hint) == ("a message of ours", "a hint of ours")
    with pytest.raises(CaptureError) as caught:
        pool.run(fail_everywhere, num_processes=3, timeout_s=60)
    assert caught.value.message == "the same on every rank"


def test_the_pool_starts_anew_after_its_template_is_gone(pool: WorkerPool) -> None:
    assert pool._template is not None
    pool._template.kill()
    pool._template.wait()
    assert pool.run(add_ranks, 1, num_processes=2, timeout_s=60)[0][0] == 3


# Nothing stays -----------------------------------------------------------------------------------------------------

OWNER = """
    import signal, sys
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
    sys.path.insert(0, {tests!r})
    import test_runner_pool
    from planner.runner.pool import WorkerPool
    with WorkerPool() as pool:
        def show(rank, text):
            print(text, flush=True)
        pool.run(test_runner_pool.tell_process_ids, num_processes=2, timeout_s=100, on_progress=show)
"""


def tell_process_ids(context: RankContext) -> None:
    context.report(f"{os.getpid()} {os.getppid()}")
    sleep_for_ever()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_its_owner(number: signal.Signals) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(OWNER).format(tests=str(HERE))],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=HERE.parent,
    )
    try:
        assert owner.stdout is not None
        lines = [owner.stdout.readline() for _ in range(2)]
        processes = {int(word) for line in lines for word in line.split()}
        assert len(processes) == 3  # two ranks and the template
        owner.send_signal(number)
        assert owner.wait(30) != 0
        limit = time.monotonic() + 30
        while any(is_running(process) for process in processes) and time.monotonic() < limit:
            time.sleep(0.05)
        assert [process for process in processes if is_running(process)] == []
    finally:
        owner.kill()
        owner.wait()
        if owner.stdout is not None:
            owner.stdout.close()


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
        state = Path(f"/proc/{process}/stat")
        return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def children_of(pool: WorkerPool) -> list[str]:
    """Return the command of each process in the session of the pool's template, which is its own process's session."""
    assert pool._template is not None
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == pool._template.pid and int(folder.name) != pool._template.pid and fields[0] != "Z":
                found.append((folder / "cmdline").read_text().replace("\0", " "))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


# Which failure is told ---------------------------------------------------------------------------------------------


def test_a_lost_peer_is_never_the_first_cause() -> None:
    lost = raised(0, 1.0, "RuntimeError", "[gloo/transport/tcp/pair.cc:547] Connection closed by peer", "", "", "")
    own = raised(1, 2.0, "ValueError", "bad", "", "", "")
    dead = died(2, 3.0, -9, "")
    aborted = died(3, 0.5, -6, "terminate called: Connection reset by peer")
    mismatch = died(5, 0.7, -6, "gloo::EnforceNotMet: Received data size doesn't match expected size")
    asleep = silent(4, 9.0, 5.0, '  File "model.py", line 3 in forward')
    assert first_cause([lost, own, dead, aborted, asleep]) is own
    assert first_cause([lost, dead, aborted, asleep]) is dead
    assert first_cause([lost, aborted, asleep]) is asleep
    assert first_cause([lost, aborted]) is aborted
    assert first_cause([lost, aborted, mismatch]) is mismatch


def test_the_other_ranks_are_told_in_a_line_each() -> None:
    own = [raised(rank, 1.0 + rank, "ValueError", "bad", "", f"traceback {rank}\n", "") for rank in (0, 2)]
    lost = [raised(rank, 0.5, "RuntimeError", "gloo/x: Connection closed by peer", "", "", "") for rank in (1, 3)]
    other = raised(4, 9.0, "KeyError", "y" * 500, "", "", "")
    lines = failure_error([*lost, *own, other]).message.splitlines()
    assert lines[:3] == ["rank 0 raised ValueError: bad", "traceback 0", "  also: the same on rank 2"]
    assert lines[3].startswith("  also: rank 4 raised KeyError: yyy")
    assert lines[4] == "  also: ranks 1, 3 lost a peer"
    assert len(lines) == 5
    assert max(map(len, lines)) < 250


def test_an_error_of_a_plan_is_told_in_its_own_words() -> None:
    words = "rank 0 could not be set up: RuntimeError: boom"
    plans = [raised(rank, 1.0, "PlanError", words, "", "a traceback", "") for rank in (1, 2)]
    own = raised(0, 2.0, "RuntimeError", "boom", "", "its traceback", "")
    assert first_cause([*plans, own]) is own, "the others only say that it failed"
    refusing = [raised(rank, 1.0, "PlanError", "input 'x' is wrong", "give y", "a traceback", "") for rank in (0, 1)]
    error = failure_error(refusing)
    assert (error.message, error.hint) == ("input 'x' is wrong", "give y")


def test_the_frame_shown_is_of_a_plan_or_a_model() -> None:
    inner, outer = (
        f'  File "{os.__file__}", line 5 in wait',
        f'  File "{main_thread.__code__.co_filename}", line 1 in a',
    )
    library = '  File "site-packages/torch/x.py", line 9 in y'
    plan = '  File "plan.py", line 7 in step'
    assert own_frame(f"{inner}\n{library}\n{plan}\n{outer}") == plan.strip()
    assert own_frame(f"{library}\n{outer}") == library.strip()
    assert own_frame("") == "(no frame)"


def test_the_stack_of_the_main_thread_is_the_last_of_a_dump() -> None:
    dump = (
        'Thread 0x01 (most recent call first):\n  File "a.py", line 1 in other\n\n'
        'Current thread 0x02 (most recent call first):\n  File "b.py", line 2 in inner\n'
        '  File "b.py", line 9 in outer\n'
    )
    assert main_thread(dump) == '  File "b.py", line 2 in inner\n  File "b.py", line 9 in outer'

"""The helper section of emitted plans, run by several processes beside one: losses, gradients, setup, errors."""

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NUM_PROCESSES = 8
LIMIT_S = 120.0  # a job that takes longer is stuck


class Workers:
    """Processes that run one job after another; torch is imported once in each."""

    def __init__(self, folder: Path) -> None:
        root = Path(__file__).parent.parent
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root), "PLANNER_TIMEOUT_S": "60"}
        command = [sys.executable, str(Path(__file__).with_name("runtime_worker.py")), str(folder)]
        self.logs = [(folder / f"log{rank}").open("w+") for rank in range(NUM_PROCESSES)]
        self.processes = [
            subprocess.Popen(
                [*command, str(rank)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
            )
            for rank, log in enumerate(self.logs)
        ]

    def run(self, function: str, num_ranks: int, **arguments: Any) -> list[dict[str, Any]]:
        """Return every rank's result of a function of runtime_worker.py."""
        job = json.dumps({"function": function, "ranks": num_ranks, "arguments": arguments}).encode() + b"\n"
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(job)
            process.stdin.flush()
        answers = [json.loads(self.read(rank)) for rank in range(num_ranks)]
        errors = [f"rank {rank}: {answer['error']}" for rank, answer in enumerate(answers) if "error" in answer]
        assert not errors, "\n".join(errors)
        return [answer["result"] for answer in answers]

    def read(self, rank: int) -> bytes:
        stream = self.processes[rank].stdout
        assert stream is not None
        line, deadline = b"", time.monotonic() + LIMIT_S
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                part = os.read(stream.fileno(), 1 << 16) if ready else b""
                if not part:
                    self.close()
                    log = Path(self.logs[rank].name).read_text()[-2000:]
                    pytest.fail(f"rank {rank} {'died' if ready else f'gave no answer in {LIMIT_S} s'}\n{log}")
                line += part
        return line

    def close(self) -> None:
        for process, log in zip(self.processes, self.logs, strict=True):
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None and not stream.closed:
                    stream.close()
            log.close()


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    pool = Workers(tmp_path_factory.mktemp("runtime"))
    yield pool
    pool.close()


CELLS = [
    (1, {}),
    (1, {"recompute": True, "microbatch_size": 2}),
    (2, {"pp": 2}),
    (2, {"pp": 2, "schedule": "gpipe", "recompute": True, "microbatch_size": 2}),
    (2, {"pp": 2, "num_microbatches": 1}),
    (2, {"tp": 2}),
    (2, {"tp": 2, "recompute": True}),
    (2, {"dp": 2}),
    (2, {"dp": 2, "data_parallel": "sharded"}),
    (2, {"dp": 2, "data_parallel": "sharded", "recompute": True}),
    (3, {"pp": 3}),
    (3, {"pp": 3, "schedule": "gpipe"}),
    (4, {"pp": 2, "tp": 2}),
    (4, {"pp": 2, "dp": 2}),
    (4, {"pp": 2, "dp": 2, "data_parallel": "sharded", "recompute": True}),
    (4, {"tp": 2, "dp": 2}),
    (4, {"tp": 2, "dp": 2, "data_parallel": "sharded"}),
    (6, {"pp": 3, "tp": 2, "recompute": True}),
    (3, {"pp": 3, "freeze": "transformer.wte|transformer.position|transformer.h.0"}),
    (
        4,
        {
            "pp": 2,
            "dp": 2,
            "data_parallel": "sharded",
            "freeze": "transformer.wte|transformer.position|transformer.h.0",
        },
    ),
    (4, {"tp": 2, "dp": 2, "freeze": ".*q_norm|.*bias|transformer.ln_f"}),
    (8, {"pp": 2, "tp": 2, "dp": 2}),
    (8, {"pp": 2, "tp": 2, "dp": 2, "data_parallel": "sharded", "schedule": "gpipe", "recompute": True}),
]


@pytest.mark.parametrize(("num_ranks", "options"), CELLS, ids=lambda value: str(value))
def test_two_steps_equal_one_process(workers: Workers, num_ranks: int, options: dict[str, Any]) -> None:
    results = workers.run("train", num_ranks, **options)
    for rank, result in enumerate(results):
        assert result["loss"] <= 1e-12, (rank, result)
        assert result["norm"] <= 1e-12, (rank, result)
    assert results[0]["gradient"] <= 1e-10, results[0]
    assert results[0]["parameter"] <= 1e-9, results[0]  # AdamW divides by gradients near 0


@pytest.mark.parametrize(
    "options", [{"pp": 2, "tp": 2}, {"pp": 2, "dp": 2, "data_parallel": "sharded"}, {"tp": 2, "dp": 2}], ids=str
)
def test_setup_leaves_what_one_process_has(workers: Workers, options: dict[str, Any]) -> None:
    results = workers.run("set_up", 4, **options)
    assert results[0]["parameters"] == []
    assert results[0]["buffers"] == []
    assert results[0]["num_parameters"] == 50
    assert results[0]["num_buffers"] == 1
    for result in results:
        assert result["random_state_is_the_users"]
        assert result["spare_bytes"] == 0
    read = {tuple(rows) for result in results for rows in result["rows"]}
    assert read == {(row, row + 1) for row in range(4 * options.get("dp", 1))}
    if options.get("pp", 1) == 2:
        assert not any(name.startswith(("transformer.h.1", "lm_head")) for name in results[0]["names"])


def test_numbers_of_initialize_do_not_depend_on_the_plan(workers: Workers) -> None:
    one = workers.run("fill", 1, how="initialize")[0]
    for num_ranks, options in ((4, {"pp": 2, "tp": 2}), (4, {"pp": 2, "dp": 2, "data_parallel": "sharded"})):
        many = workers.run("fill", num_ranks, how="initialize", **options)[0]
        assert many["sums"] == pytest.approx(one["sums"], rel=1e-9)
    assert one["sums"]["transformer.scale"] == one["scale"]  # a buffer that no checkpoint and no function writes


@pytest.mark.parametrize("how", ["file", "mapping"])
@pytest.mark.parametrize("options", [{"pp": 2}, {"tp": 2}, {"dp": 2, "data_parallel": "sharded"}], ids=str)
def test_checkpoint_fills_every_plan(workers: Workers, how: str, options: dict[str, Any]) -> None:
    result = workers.run("fill", 2, how=how, **options)[0]
    assert result["sums"].pop("transformer.scale") == result["scale"]
    saved = result["saved"]
    assert saved.pop("transformer.wte.weight") == saved["lm_head.weight"]
    assert result["sums"] == pytest.approx(saved, rel=1e-9)


def test_a_value_that_nobody_wrote_is_named_on_every_rank(workers: Workers) -> None:
    missing = {"leave_out": "transformer.position"}
    for how, problem in (("file", "is not in the checkpoint"), ("initialize", "has 32 values nobody wrote")):
        for result in workers.run("fill", 2, how=how, pp=2, **missing):
            assert "'transformer.position', shape (6, 16)" in result["error"]
            assert problem in result["error"]
            assert "hint: let `initialize` write it" in result["error"]
    filled = workers.run("fill", 2, how="both", pp=2, **missing)[0]
    assert filled["sums"]["previous.weight"] == pytest.approx(filled["saved"]["previous.weight"])
    assert "transformer.position" in filled["sums"]


REFUSED = {
    "seeds": "rank 1 has another random state than rank 0",
    "rows": "input 'ids' has 3 rows, and a step of this plan takes 4 (num_microbatches 4 x microbatch_size 1",
    "target": "the target has 3 rows, and a step of this plan takes 4",
    "length": "input 'ids' has shape (4, 4), and this plan was made for (4, 6)",
    "name": "input 'ids' is missing",
    "extra": "input 'mask' is not one that this plan's model was profiled with",
    "nan": "the loss of microbatch 0 is nan",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_wrong_is_said_on_every_rank(workers: Workers, what: str) -> None:
    for result in workers.run("refuse", 2, what=what, pp=2):
        assert REFUSED[what] in result["error"]
        assert "\nhint: " in result["error"]


def test_another_model_is_refused(workers: Workers) -> None:
    for result in workers.run("refuse", 2, what="", pp=2, model_hash="0123456789abcdef"):
        assert "and this plan was made for 0123456789abcdef" in result["error"]
        assert "hint: profile and solve again" in result["error"]


def test_another_number_of_processes_is_refused(workers: Workers) -> None:
    for result in workers.run("refuse", 3, what="", pp=2):
        assert "this plan uses 2 processes (tp 1 x dp 1 + tp 1 x dp 1), and 3 run" in result["error"]
        assert "hint: torchrun --nproc-per-node 2" in result["error"]


def test_a_rank_that_fails_ends_the_others(workers: Workers) -> None:
    first, last = workers.run("fail_on_one_rank", 2, pp=2)
    assert last["error"] == "ArithmeticError: the loss can't be computed"
    assert first["error"].startswith("RuntimeError")


def test_a_rank_that_hangs_ends_the_others(workers: Workers) -> None:
    first, _ = workers.run("hang_on_one_rank", 2, pp=2)
    assert "imed out" in first["error"]


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [(8, {"pp": 2, "tp": 2, "dp": 2}), (4, {"pp": 2, "dp": 2, "data_parallel": "sharded"})],
    ids=lambda value: str(value),
)
def test_gradients_add_up_over_steps(workers: Workers, num_ranks: int, options: dict[str, Any]) -> None:
    assert workers.run("accumulate", num_ranks, **options)[0]["worst"] <= 1e-12


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (2, {"pp": 2}),
        (2, {"dp": 2}),
        (4, {"tp": 2, "dp": 2, "freeze": ".*q_norm|.*bias|transformer.ln_f"}),
        (4, {"pp": 2, "dp": 2, "data_parallel": "sharded", "freeze": "transformer.position|transformer.h.0"}),
    ],
    ids=lambda value: str(value),
)
def test_accumulated_gradients_equal_one_process(workers: Workers, num_ranks: int, options: dict[str, Any]) -> None:
    result = workers.run("accumulate_beside_one", num_ranks, **options)[0]
    assert result["loss"] <= 1e-12, result
    assert result["gradient"] <= 1e-10, result
    assert result["parameter"] <= 1e-9, result


def test_gradients_are_averaged_once_a_step(workers: Workers) -> None:
    for result in workers.run("count_reductions", 4, pp=2, dp=2, data_parallel="sharded"):
        assert result["calls"] == result["units"]


def test_dropout_is_drawn_from_states_of_the_plan(workers: Workers) -> None:
    results = workers.run("drop", 4, pp=2, tp=2, recompute=True)
    for result in results:
        assert result["losses"][:3] == result["losses"][3:] == results[0]["losses"][:3]
        assert len(set(result["losses"][:3])) == 3  # each step drops others, and evaluation none
        assert result["user"] == results[0]["user"]
        assert result["training"]
        assert result["finite"]


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [(1, {}), (2, {"pp": 2}), (4, {"pp": 2, "dp": 2, "data_parallel": "sharded"}), (4, {"tp": 2, "dp": 2})],
    ids=lambda value: str(value),
)
def test_mixed_precision_keeps_float32_parameters(workers: Workers, num_ranks: int, options: dict[str, Any]) -> None:
    results = workers.run("mix", num_ranks, **options)
    for result in results:
        assert result["dtypes"] == ["torch.float32"]
        assert result["stage"] == "torch.bfloat16"
        assert result["loss"] != result["expected"]
        assert result["loss"] == pytest.approx(result["expected"], rel=1e-2)
    assert results[0]["worst"] < 0.1  # bfloat16 has 8 bits; a lost or doubled gradient would be 1


DIVIDED = {
    "linear column": {"out_features": 6},
    "linear column fused": {"out_features": 6},
    "linear column no bias": {"out_features": 6},
    "conv1d column fused": {"nf": 6, "nx": 8},
    "linear row": {"in_features": 4},
    "conv1d row": {"nf": 12, "nx": 4},
    "linear column unequal": {"out_features": 6},
    "linear row fused": {"in_features": 4},
    "linear row unreduced": {"in_features": 4},
    "embedding column": {"embedding_dim": 4},
    "vocabulary": {"num_embeddings": 6},
    "vocabulary padded low": {"num_embeddings": 6},
    "vocabulary padded high": {"num_embeddings": 6},
    "vocabulary scaled": {"num_embeddings": 6},
}


@pytest.mark.parametrize("case", DIVIDED)
def test_divided_layer_equals_the_whole_one(workers: Workers, case: str) -> None:
    for result in workers.run("divide", 2, case=case):
        assert result["output"] <= 1e-14
        assert result["input"] <= 1e-14
        assert result["params"] <= 1e-14
        assert DIVIDED[case].items() <= result["sizes"].items()


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("linear uneven", "dimension 0 of (7, 8) (Linear.weight, 1 parts) can't be divided over 2 ranks"),
        ("embedding column of rows", "Embedding can't be divided by columns along dimension 0"),
        ("layer norm row", "LayerNorm can't be divided"),
        ("subclass", "NoisyLinear can't be divided"),
        ("vocabulary renormalised", "an embedding with max_norm"),
    ],
)
def test_what_can_not_be_divided_is_refused(workers: Workers, case: str, message: str) -> None:
    for result in workers.run("divide", 2, case=case):
        assert message in result["error"]

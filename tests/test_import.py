"""`planner import`: other planners' files as profiles, which can be solved and for which no code is written."""

import json
from pathlib import Path
from typing import Any

import pytest

from planner.cli.main import main
from planner.model_profile import read_profile


def node(key: str, kind: str, forward: str, backward: str, activation: str, parameters: str) -> str:
    times = f"forward_compute_time={forward}, backward_compute_time={backward}"
    return f"{key} -- {kind} -- {times}, activation_size={activation}, parameter_size={parameters}\n"


PIPEDREAM = (
    node("node1", "Input0", "0.000", "0.000", "0.0", "0.000")
    + node("node2", "Conv2d(3, 8)", "2.0", "4.0", "4000.0", "800.0")
    + node("node3", "ReLU(inplace)", "1.0", "1.0", "[1000.0; 3000.0]", "0.0")
    + node("node4", "Linear(8, 8)", "3.0", "5.0", "400.0", "1600.0")
    + node("node5", "__getitem__(0)", "0.0", "0.0", "0.0", "0.0")
    + "\tnode1 -- node2\n\tnode2 -- node3\n\tnode3 -- node4\n\tnode2 -- node4\n\tnode4 -- node5\n"
)


def config(time: float, size: float, a: float) -> dict[str, Any]:
    return {
        "id": "x",
        "timePerSample": time,
        "parameterSize": size,
        "memoryUsageA": a,
        "memoryUsageB": 0.0,
        "syncTimeFw": {},
        "syncTimeBw": {},
    }


PIPER = {
    "maxDevices": 4,
    "maxMemoryPerDevice": 1e9,
    "bandwidth": 1e9,
    "mbsInBatch": 8,
    "nodes": [
        {
            "id": node,
            "name": "Layer",
            "TMPCs": {"1": [config(0.3, 800.0, 100.0), config(0.4, 800.0, 10.0)], "2": [config(0.2, 400.0, 50.0)]},
        }
        for node in (7, 8)
    ],
    "edges": [{"sourceId": 7, "destId": 8, "communicationCost": 64.0}],
}


def operator(node: int, colour: int, ms: float, *, backward: bool) -> dict[str, Any]:
    return {
        "id": node,
        "name": f"op{node}",
        "supportedOnFpga": True,
        "cpuLatency": ms * 10,
        "fpgaLatency": ms,
        "isBackwardNode": backward,
        "colorClass": colour,
        "size": 128.0,
    }


WORKLOAD = {
    "maxFPGAs": 2,
    "maxCPUs": 1,
    "maxSizePerFPGA": 1e9,
    "nodes": [
        operator(0, 0, 2.0, backward=False),
        operator(1, 1, 3.0, backward=False),
        operator(2, 1, 6.0, backward=True),
        operator(3, 0, 4.0, backward=True),
    ],
    "edges": [{"sourceId": a, "destId": b, "cost": 0.5, "size": 256.0} for a, b in ((0, 1), (1, 2), (2, 3))],
}


def imported(folder: Path, name: str, content: object, *options: str) -> Any:
    """Return the profile that importing a file gives."""
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    assert main(["import", name, "-o", "profile.json", *options]) == 0
    return read_profile(folder / "profile.json")


def test_a_graph_of_pipedream(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = imported(folder, "graph.txt", PIPEDREAM, "--rows", "4")
    assert [layer.name for layer in profile.layers] == ["node2", "node3", "node4"]
    assert [item.module_class for item in profile.layer_classes] == ["Conv2d(3, 8)", "ReLU(inplace)", "Linear(8, 8)"]
    assert profile.param_count == 200 + 400
    cost = profile.layer_class(0).costs[0]
    assert (cost.microbatch_size, cost.forward_time_s, cost.backward_time_s) == (4, 0.002, 0.004)
    assert {(e.producer, e.consumers, e.bytes_per_row) for e in profile.edges} == {
        (0, (1, 2), 1000.0),
        (1, (2,), 1000.0),
    }
    assert profile.provenance.imported_from == "pipedream"
    capsys.readouterr()
    solved = ["solve", "--gpus", "2", "--profile", "profile.json", "--global-batch-size", "16", "--cluster", "h100-sxm"]
    assert main([*solved, "--pin", "pp_degree=2", "--json"]) == 0
    out, told = capsys.readouterr()
    plan = json.loads(out)
    assert [stage["layers"] for stage in plan["stages"]] == [["node2", "node3"], ["node4"]]
    assert "was imported from pipedream and has no model: no plan.py is written" in told
    assert not (folder / "plan.py").exists()


def test_a_problem_of_piper(folder: Path) -> None:
    profile = imported(folder, "model.json", PIPER)
    assert [layer.name for layer in profile.layers] == ["Layer", "Layer_2"]
    costs = {cost.tp_degree: cost for cost in profile.layer_class(0).costs}
    assert costs[1].forward_time_s == pytest.approx(0.1), "what recomputing adds"
    assert costs[1].backward_time_s == pytest.approx(0.2)
    assert costs[2].forward_time_s == pytest.approx(0.2 / 3)
    assert costs[2].sharding == "tensor"
    assert profile.edges[0].bytes_per_row == 64.0


def test_a_workload_of_dnn_partitioning(folder: Path) -> None:
    profile = imported(folder, "workload.json", WORKLOAD)
    assert [layer.name for layer in profile.layers] == ["op0", "op1"]
    found = [profile.layer_class(i).costs[0] for i in (0, 1)]
    assert [(c.forward_time_s, c.backward_time_s) for c in found] == [(0.002, 0.004), (0.003, 0.006)]
    assert [(edge.producer, edge.consumers) for edge in profile.edges] == [(0, (1,))]


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("hello", (), "is no file of a planner that is known"),
        ("{}", (), "is no file of a planner that is known"),
        (PIPEDREAM.replace("=2.0", "=x"), (), "graph.txt:2: a value of node2 is no number"),
        (PIPEDREAM + "\tnode4 -- node2\n", (), "the graph has a cycle"),
        (PIPEDREAM + "\tnode9 -- node2\n", (), "names node9, which is no node of the file"),
        (json.dumps(PIPER | {"edges": [{"sourceId": 1}]}), (), "is no input of Piper"),
        (json.dumps(WORKLOAD | {"nodes": [{}]}), (), "is no workload of dnn-partitioning"),
        (PIPEDREAM, ("--rows", "0"), "--rows 0 is less than 1"),
        (PIPEDREAM, ("--gpu", "abacus"), "no gpu is named 'abacus'"),
    ],
)
def test_other_files_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], content: str, options: tuple[str, ...], message: str
) -> None:
    (folder / "graph.txt").write_text(content)
    assert main(["import", "graph.txt", *options]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert "hint: " in told
    assert not (folder / "profiles").exists()


def test_no_code_is_written_for_an_imported_profile(folder: Path) -> None:
    from planner.emitter import emit
    from planner.errors import EmitError
    from tests.zoo.plans import even_plan

    profile = imported(folder, "graph.txt", PIPEDREAM, "--gpu", "h100-sxm")
    with pytest.raises(EmitError, match="imported from pipedream: there is no model"):
        emit(even_plan(profile, pp_degree=2), profile)

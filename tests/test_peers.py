"""Other planners' objectives: our plans against every plan there is, on small random graphs, and theirs."""

import csv
import importlib.util
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.peers.dnn_partitioning import Workload, read_workload, solve_workload
from planner.peers.knapsack import cheapest_cover
from planner.peers.pipedream import (
    PipeDreamGraph,
    PipeDreamNode,
    PipeDreamSettings,
    PipeDreamStage,
    read_graph,
    solve_pipedream,
)
from planner.peers.piper import PiperConfig, PiperProblem, PiperStage
from planner.peers.piper_search import solve_piper
from planner.peers.torchgpipe import balance
from planner.solver.core.lattice import TooManyStatesError, down_sets

HERE = Path(__file__).resolve().parent
PEERS = HERE.parents[1] / "shared" / "peers"


def _prices() -> ModuleType:
    spec = importlib.util.spec_from_file_location("peer_prices", HERE.parent / "benchmarks" / "peer_prices.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PRICES = _prices()


@st.composite
def graphs(draw: st.DrawFn, most: int = 5) -> list[list[int]]:
    """Draw the successors of the nodes of a graph without cycles."""
    count = draw(st.integers(1, most))
    return [[j for j in range(i + 1, count) if draw(st.integers(0, 2)) == 0] for i in range(count)]


def closed_sets(successors: list[list[int]]) -> list[frozenset[int]]:
    """Return the down-sets of a graph, by trying all sets."""
    nodes = range(len(successors))
    everything = [
        frozenset(chosen) for size in range(len(successors) + 1) for chosen in itertools.combinations(nodes, size)
    ]
    edges = [(i, j) for i in nodes for j in successors[i]]
    return [chosen for chosen in everything if all(i in chosen for i, j in edges if j in chosen)]


def chains(successors: list[list[int]], most: int) -> Iterator[list[frozenset[int]]]:
    """Yield every division of a graph into at most `most` parts that only wait for earlier ones."""
    closed = closed_sets(successors)
    whole = frozenset(range(len(successors)))

    def from_here(done: frozenset[int], parts: list[frozenset[int]]) -> Iterator[list[frozenset[int]]]:
        if done == whole:
            yield parts
        elif len(parts) < most:
            for larger in closed:
                if done < larger:
                    yield from from_here(larger, [*parts, larger - done])

    yield from from_here(frozenset(), [])


def least(prices: Iterator[float]) -> float:
    """Return the least of prices; infinity where there is none."""
    return min(prices, default=math.inf)


@given(graphs(6))
def test_down_sets_are_all_closed_sets(successors: list[list[int]]) -> None:
    lattice = down_sets(successors, limit=100)
    found = [frozenset(node for node, inside in enumerate(row) if inside) for row in lattice.members.tolist()]
    assert len(set(found)) == len(found)
    assert set(found) == set(closed_sets(successors))
    for i, one in enumerate(found):
        for j, other in enumerate(found):
            assert bool(lattice.inside[i, j]) == (one < other)


def test_down_sets_have_a_limit() -> None:
    with pytest.raises(TooManyStatesError, match="more than 10 down-sets"):
        down_sets([[]] * 5, limit=10)
    with pytest.raises(ValueError, match="cycle"):
        down_sets([[1], [0]], limit=10)


numbers = st.integers(0, 9).map(float)


@st.composite
def pipedream_problems(draw: st.DrawFn) -> tuple[PipeDreamGraph, PipeDreamSettings]:
    """Draw a graph and settings of one or two levels."""
    successors = draw(graphs(4))
    nodes = tuple(
        PipeDreamNode(f"n{i}", "Layer", draw(numbers), draw(numbers), draw(numbers), draw(numbers))
        for i in range(len(successors))
    )
    machines = draw(st.sampled_from([(1,), (2,), (3,), (4,), (2, 2)]))
    settings = PipeDreamSettings(
        num_machines=machines,
        bandwidths=tuple(draw(st.sampled_from([0.5, 3.0])) for _ in machines),
        boundaries_cost=draw(st.booleans()),
        straight=len(machines) == 1 and draw(st.booleans()),
        fewer_machines=draw(st.booleans()),
        memory_bytes=draw(st.sampled_from([math.inf, 20.0])),
    )
    return PipeDreamGraph(nodes, tuple(map(tuple, successors))), settings


def pipedream_plans(
    graph: PipeDreamGraph, settings: PipeDreamSettings, level: int, nodes: frozenset[int]
) -> Iterator[tuple[PipeDreamStage, ...]]:
    """Yield every plan of some nodes on one level."""
    count, listed = settings.num_machines[level], sorted(nodes)
    place = {node: position for position, node in enumerate(listed)}
    inside = [[place[j] for j in graph.successors[node] if j in place] for node in listed]
    for parts in chains(inside, count):
        own = [frozenset(listed[position] for position in part) for part in parts]
        for replicas in itertools.product(range(1, 2 if settings.straight else count + 1), repeat=len(own)):
            if sum(replicas) > count:
                continue
            below = [[()] if level == 0 else list(pipedream_plans(graph, settings, level - 1, part)) for part in own]
            for inner in itertools.product(*below):
                yield tuple(map(PipeDreamStage, own, replicas, inner))


def priced(price: object, *arguments: object) -> float:
    """Return a plan's price; infinity where it is none."""
    try:
        return float(price(*arguments))  # type: ignore[operator]
    except ValueError:
        return math.inf


@given(pipedream_problems())
def test_pipedreams_objective_is_solved_exactly(problem: tuple[PipeDreamGraph, PipeDreamSettings]) -> None:
    graph, settings = problem
    top = len(settings.num_machines) - 1
    plans = pipedream_plans(graph, settings, top, frozenset(range(len(graph.nodes))))
    best = least(priced(PRICES.pipedream_price, graph, settings, plan) for plan in plans)
    found = solve_pipedream(graph, settings)
    assert found.bottleneck_s == pytest.approx(best, rel=1e-12)
    if found.stages:
        assert PRICES.pipedream_price(graph, settings, found.stages) == pytest.approx(best, rel=1e-12)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Draw a workload whose backward nodes mirror some of its forward nodes; the others have colours of their own."""
    successors = draw(graphs(4))
    count = len(successors)
    mirrored = [draw(st.booleans()) for _ in range(count)]
    backward = [node for node in range(count) if mirrored[node]]
    edges = [(i, j) for i in range(count) for j in successors[i]]
    place = {node: count + position for position, node in enumerate(backward)}
    edges += [(place[j], place[i]) for i, j in edges if i in place and j in place]
    total = count + len(backward)
    supported = [draw(st.integers(0, 5)) > 0 for _ in range(total)]
    return Workload(
        names=tuple(map(str, range(total))),
        cpu_ms=tuple(draw(numbers) * 5 for _ in range(total)),
        accelerator_ms=tuple(draw(numbers) if supported[node] else math.inf for node in range(total)),
        sizes=tuple(draw(numbers) for _ in range(total)),
        moving_ms=tuple(draw(numbers) / 2 for _ in range(total)),
        colours=(*range(count), *backward),
        is_backward=(False,) * count + (True,) * len(backward),
        edges=tuple(edges),
        edge_sizes=(1.0,) * len(edges),
        num_accelerators=draw(st.integers(1, 3)),
        num_cpus=draw(st.integers(0, 1)),
        accelerator_bytes=draw(st.sampled_from([15.0, 1e9])),
    )


@given(workloads())
def test_dnn_partitionings_objective_is_solved_exactly(workload: Workload) -> None:
    count = sum(not backward for backward in workload.is_backward)
    forward = [[j for i, j in workload.edges if i == node and j < count] for node in range(count)]
    mates = {node: [n for n, colour in enumerate(workload.colours) if colour == node] for node in range(count)}

    def plans() -> Iterator[list[tuple[str, frozenset[int]]]]:
        for parts in chains(forward, workload.num_accelerators + workload.num_cpus):
            whole = [frozenset(other for node in part for other in mates[node]) for part in parts]
            for kinds in itertools.product(("accelerator", "cpu"), repeat=len(parts)):
                yield list(zip(kinds, whole, strict=True))

    best = least(priced(PRICES.workload_price, workload, plan) for plan in plans())
    found = solve_workload(workload)
    assert found.max_load_ms == pytest.approx(best, rel=1e-12)
    if found.devices:
        assert PRICES.workload_price(workload, found.devices) == pytest.approx(best, rel=1e-12)


@st.composite
def piper_problems(draw: st.DrawFn) -> PiperProblem:
    """Draw a problem with two tensor-parallel degrees and recomputation."""
    successors = draw(graphs(3))
    nodes = range(len(successors))
    degrees = draw(st.sampled_from([(1,), (1, 2)]))

    def configs(degree: int) -> tuple[PiperConfig, ...]:
        time, size, a, b = (draw(numbers) for _ in range(4))
        kept = PiperConfig(1.0 + time / degree, size / degree, a, b)
        return (
            kept,
            PiperConfig(kept.time + draw(numbers), kept.parameter_bytes, a * draw(st.sampled_from([0, 0.5])), b),
        )

    edges = tuple((i, j, draw(numbers)) for i in nodes for j in successors[i])
    return PiperProblem(
        names=tuple(map(str, nodes)),
        configs=tuple({degree: configs(degree) for degree in degrees} for _ in nodes),
        edges=edges,
        incoming=tuple({t: {i: draw(numbers) for i, j, _ in edges if j == node} for t in degrees} for node in nodes),
        outgoing=tuple({t: {j: draw(numbers) for i, j, _ in edges if i == node} for t in degrees} for node in nodes),
        num_devices=draw(st.integers(1, 4)),
        memory_bytes=draw(st.sampled_from([15.0, 30.0, 1e9])),
        bandwidth=draw(st.sampled_from([2.0, 100.0])),
        num_microbatches=draw(st.sampled_from([2, 4, 6])),
    )


@given(piper_problems())
def test_pipers_objective_is_solved_exactly(problem: PiperProblem) -> None:
    count = len(problem.configs)
    successors = [[j for i, j, _ in problem.edges if i == node] for node in range(count)]

    def plans() -> Iterator[list[PiperStage]]:
        for parts in chains(successors, problem.num_devices):
            ways = []
            for part in parts:
                nodes = tuple(sorted(part))
                chosen = [c for size in range(len(nodes) + 1) for c in itertools.combinations(nodes, size)]
                degrees = itertools.product(range(1, problem.num_devices + 1), problem.configs[0])
                ways.append([PiperStage(nodes, d, t, c) for (d, t), c in itertools.product(degrees, chosen)])
            yield from map(list, itertools.product(*ways))

    best = least(priced(PRICES.piper_price, problem, plan) for plan in plans())
    found = solve_piper(problem)
    assert found.bottleneck == pytest.approx(best, rel=1e-9)
    assert found.lower_bound == pytest.approx(best, rel=1e-9)
    if found.stages:
        assert PRICES.piper_price(problem, found.stages) == pytest.approx(best, rel=1e-9)


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=7), st.integers(1, 40))
def test_the_cheapest_cover_is_found(items: list[tuple[float, float]], excess: int) -> None:
    freed, cost = [item[0] for item in items], [item[1] for item in items]
    if sum(freed) < excess:
        return
    chosen, paid = cheapest_cover(freed, cost, float(excess))
    subsets = (c for size in range(len(items) + 1) for c in itertools.combinations(range(len(items)), size))
    assert paid == min(sum(cost[i] for i in c) for c in subsets if sum(freed[i] for i in c) >= excess)
    assert sum(freed[i] for i in chosen) >= excess
    assert sum(cost[i] for i in chosen) == paid


@given(st.lists(st.integers(0, 30), min_size=1, max_size=9), st.data())
def test_a_list_is_balanced_exactly(costs: list[int], data: st.DataObject) -> None:
    blocks = data.draw(st.integers(1, len(costs)))
    sizes = balance(costs, blocks)
    assert len(sizes) == blocks
    assert all(sizes)
    assert sum(sizes) == len(costs)

    def largest(ends: tuple[int, ...]) -> int:
        return max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *ends, len(costs))))

    ends = tuple(itertools.accumulate(sizes))[:-1]
    assert largest(ends) == min(map(largest, itertools.combinations(range(1, len(costs)), blocks - 1)))


@pytest.mark.parametrize("peer", ["pipedream", "dnn-partitioning"])
def test_what_their_tools_found_is_found(peer: str) -> None:
    """The whole table is `benchmarks/peers.py`."""
    if not PEERS.is_dir():
        pytest.skip(f"{PEERS} is not there")
    with (PEERS / "baselines.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["peer"] == peer]
    if peer == "pipedream":
        for row in rows:
            if row["settings"] == "b=1e+09;comm;" and row["instance"] != "gnmt" and "x" not in row["devices"]:
                graph = read_graph(PEERS / peer / "profiles" / row["instance"] / "graph.txt")
                found = solve_pipedream(graph, PipeDreamSettings((int(row["devices"]),), (1e9,)))
                assert found.bottleneck_s == pytest.approx(float(row["objective_value"]), rel=1e-9)
    else:
        for row in rows:
            if "mode=dp" in row["settings"] and "bert_l-3" not in row["instance"]:
                workload = read_workload(PEERS / peer / "throughput-inputs" / f"{row['instance']}.json")
                workload = replace(workload, accelerator_bytes=17185374208.0)
                assert solve_workload(workload).max_load_ms == pytest.approx(float(row["objective_value"]), rel=1e-9)

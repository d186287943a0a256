"""Graphs cut into stages: the best of all assignments of small random graphs, proved, and never less than claimed."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.solver.core.lattice import TooManyStatesError, down_sets
from planner.solver.core.loads import Tensor, TensorLoads
from planner.solver.core.partition import Partition, best_partition


@st.composite
def graphs(draw: st.DrawFn, most: int = 7) -> TensorLoads:
    """Draw a graph of nodes with times and tensors, some with several readers, some nodes for nothing."""
    count = draw(st.integers(1, most))
    after = [[j for j in range(i + 1, count) if draw(st.integers(0, 2)) == 0] for i in range(count)]
    times = draw(st.lists(st.sampled_from([0.0, 1.0, 1.5, 2.0, 3.25, 10.0]), min_size=count, max_size=count))
    tensors = []
    for maker, readers in enumerate(after):
        if readers and draw(st.booleans()):  # one tensor for all its readers
            tensors.append(Tensor(maker, frozenset(readers), draw(st.sampled_from([0.0, 0.3, 1.0, 4.0]))))
        else:
            tensors += [Tensor(maker, frozenset({reader}), draw(st.sampled_from([0.1, 1.0]))) for reader in readers]
    shuffled = draw(st.permutations(range(count)))  # nodes are in no topological order
    return TensorLoads(
        tuple(times[shuffled.index(node)] for node in range(count)),
        tuple(tuple(shuffled[j] for j in after[shuffled.index(node)]) for node in range(count)),
        tuple(Tensor(shuffled[t.maker], frozenset(shuffled[r] for r in t.readers), t.cost) for t in tensors),
    )


def load(graph: TensorLoads, nodes: set[int]) -> float:
    """Return what a stage costs: its nodes, and each tensor that it makes for others, or reads of others."""
    total = sum(graph.node_times[node] for node in nodes)
    for tensor in graph.tensors:
        gives = tensor.maker in nodes and any(reader not in nodes for reader in tensor.readers)
        takes = tensor.maker not in nodes and any(reader in nodes for reader in tensor.readers)
        total += tensor.cost if gives or takes else 0.0
    return total


def least_load(graph: TensorLoads, num_stages: int) -> float:
    """Return the least largest load of all assignments of nodes to stages that go forward only."""
    found = float("inf")
    for stages in itertools.product(range(num_stages), repeat=len(graph.node_times)):
        if all(stages[a] <= stages[b] for a, after in enumerate(graph.successors) for b in after):
            parts = [{node for node, at in enumerate(stages) if at == s} for s in range(num_stages)]
            found = min(found, max(load(graph, part) for part in parts))
    return found


def check(graph: TensorLoads, num_stages: int, found: Partition) -> None:
    """Check that a partition is one, and costs what it says."""
    stage_of = {node: s for s, stage in enumerate(found.stages) for node in stage}
    assert sorted(node for stage in found.stages for node in stage) == list(range(len(graph.node_times)))
    assert all(found.stages)
    assert len(found.stages) <= num_stages
    assert all(stage_of[a] <= stage_of[b] for a, after in enumerate(graph.successors) for b in after)
    assert max(load(graph, set(stage)) for stage in found.stages) == pytest.approx(found.bottleneck, rel=1e-12)


@given(graphs(), st.integers(1, 4))
def test_best_of_all_assignments(graph: TensorLoads, num_stages: int) -> None:
    found = best_partition(graph, num_stages)
    check(graph, num_stages, found)
    assert found.bottleneck == pytest.approx(least_load(graph, num_stages), rel=1e-9)
    assert found.gap_fraction == 0


@settings(max_examples=40)
@given(graphs(), st.integers(1, 4))
def test_bound_holds_where_down_sets_are_too_many(graph: TensorLoads, num_stages: int) -> None:
    found = best_partition(graph, num_stages, most_states=0, rounds=4)
    check(graph, num_stages, found)
    least = least_load(graph, num_stages)
    assert found.lower_bound <= least * (1 + 1e-9)
    assert found.bottleneck >= least * (1 - 1e-9)


def large(seed: int, width: int = 4, count: int = 60) -> TensorLoads:
    """Return branches that read one another now and then."""
    chance = np.random.default_rng(seed)
    after: list[list[int]] = [[] for _ in range(count)]
    for node in range(width, count):
        for before in {node - width, int(chance.integers(max(0, node - 2 * width), node))}:
            after[before].append(node)
    times = tuple(float(t) for t in chance.integers(500, 1600, count))
    tensors = tuple(Tensor(node, frozenset(readers), 150.0) for node, readers in enumerate(after) if readers)
    return TensorLoads(times, tuple(map(tuple, after)), tensors)


def test_search_in_parts_comes_near_what_is_proved() -> None:
    for seed in range(3):
        graph = large(seed)
        best = best_partition(graph, 6)
        near = best_partition(graph, 6, most_states=0, rounds=12)
        assert best.gap_fraction == 0
        assert best.bottleneck <= near.bottleneck * (1 + 1e-9) <= best.bottleneck * 1.02


def test_same_graph_same_partition() -> None:
    graph = large(7)
    assert best_partition(graph, 5) == best_partition(graph, 5)
    again = [best_partition(graph, 5, most_states=0, rounds=6) for _ in range(2)]
    assert again[0] == again[1]


def test_ended_search_gives_what_it_has() -> None:
    graph = large(1)
    found = best_partition(graph, 6, time_limit_s=0.0)
    check(graph, 6, found)
    assert found.lower_bound <= best_partition(graph, 6).bottleneck <= found.bottleneck


def test_enumeration_stops_at_its_limit() -> None:
    with pytest.raises(TooManyStatesError):
        down_sets([[] for _ in range(30)], limit=1000)


def test_equal_branches_without_communication() -> None:
    graph = TensorLoads((1.0,) * 12, ((),) * 12, ())
    found = best_partition(graph, 5)
    assert found.bottleneck == 3.0
    assert found.gap_fraction == 0

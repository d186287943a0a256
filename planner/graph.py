"""The layers as a graph (networkx): what crosses a cut, what is shared, and whether the parts fit together."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from planner.model_profile import ModelProfile

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True, slots=True)
class SharedStorage:
    """A parameter or buffer that several layers read: one memory, one gradient."""

    name: str
    layers: tuple[int, ...]
    trainable: bool
    num_elements: int
    names: tuple[tuple[int, str], ...]
    """(layer, the name under which that layer reads it)"""


def layer_graph(profile: ModelProfile) -> "nx.DiGraph[int]":
    """Return the layers as nodes 0.. (`name`, `layer_class`); edges carry `values` and `needs_grad`.

    It has no cycles: a profile refuses values that are read before they are made.
    """
    import networkx as nx

    graph: nx.DiGraph[int] = nx.DiGraph()
    for index, layer in enumerate(profile.layers):
        graph.add_node(index, name=layer.name, layer_class=layer.layer_class)
    for edge in profile.edges:
        for consumer in edge.consumers:
            found = graph.get_edge_data(edge.producer, consumer)
            if found is None:
                graph.add_edge(edge.producer, consumer, values=(edge.value,), needs_grad=edge.needs_grad)
            else:
                found["values"] += (edge.value,)
                found["needs_grad"] = found["needs_grad"] or edge.needs_grad
    return graph


def is_chained(profile: ModelProfile) -> bool:
    """Return whether each layer reads what the one before it makes, and sends a gradient back; others may too."""
    links = {(edge.producer, consumer) for edge in profile.edges if edge.needs_grad for consumer in edge.consumers}
    return all((layer, layer + 1) in links for layer in range(len(profile.layers) - 1))


def spine(graph: "nx.DiGraph[int]", weights: Iterable[float], *, gradients: bool) -> tuple[int, ...]:
    """Return the heaviest path through the layers: each waits for the one before it (`gradients`: in backward).

    `weights` are seconds per layer. A chain's spine is the whole chain.
    """
    import networkx as nx

    seconds = list(weights)
    best: dict[int, tuple[float, int]] = {}
    for node in nx.lexicographical_topological_sort(graph):
        options = [
            (best[before][0], best[before][1], before)
            for before in graph.predecessors(node)
            if graph[before][node]["needs_grad"] or not gradients
        ]
        longest = max(options, default=(0.0, 0, -1))
        best[node] = (longest[0] + seconds[node], longest[1] + 1)
        graph.nodes[node]["before"] = longest[2]
    node = max(best, key=lambda candidate: (best[candidate], candidate))
    path = [node]
    while (node := graph.nodes[node]["before"]) >= 0:
        path.append(node)
    return tuple(reversed(path))


def shared_updates(profile: ModelProfile) -> dict[int, SharedStorage]:
    """Return the cuts that no plan can make, each by its first layer's index, with the buffer that forbids it.

    A buffer that forward updates has one owner: the stage that has all layers that read it.
    """
    updated = set(profile.updated_buffers)
    return {
        cut: shared
        for shared in shared_storages(profile)
        if shared.name in updated
        for cut in range(shared.layers[0] + 1, shared.layers[-1] + 1)
    }


def cut_bytes(profile: ModelProfile, cut: int, rows: int) -> int:
    """Return the bytes of all values that cross the cut before layer `cut`, for a microbatch of `rows`."""
    return sum(edge.num_bytes(rows) for edge in profile.crossing_edges(cut))


def shared_storages(profile: ModelProfile) -> tuple[SharedStorage, ...]:
    """Return the parameters and buffers that more than one layer reads, tied names as one."""
    first_of = {name: parameter.tied_to or name for name, parameter in profile.parameters.items()}
    for group in profile.tied:
        first = min(group, key=lambda name: (first_of.get(name, name) != name, group.index(name)))
        first_of |= {name: first_of.get(first, first) for name in group}
    readers: dict[str, dict[int, str]] = {}
    for index, layer in enumerate(profile.layers):
        for name in layer.parameters:
            if name in first_of:
                readers.setdefault(first_of[name], {}).setdefault(index, name)
    shared = []
    for first, by_layer in readers.items():
        if len(by_layer) > 1:
            parameter = profile.parameters[first]
            elements = 1
            for size in parameter.shape:
                elements *= size
            shared.append(
                SharedStorage(
                    name=first,
                    layers=tuple(sorted(by_layer)),
                    trainable=parameter.trainable and not parameter.buffer,
                    num_elements=elements,
                    names=tuple(sorted(by_layer.items())),
                )
            )
    return tuple(shared)

"""Other orders of a model's layers: stages need not be neighbours in the order in which a forward was recorded.

A chain of down-sets of the layers, each inside the next, divides a model into stages that only wait for earlier ones;
it is cut from some order in which no layer comes before what it needs. A profile in such an order is a profile: the
program's calls move with their layers, and everything that is priced or written from neighbouring layers stays as it
is. What layers need is more than what they read:

    values     a layer comes after those that make what it reads
    in place   a layer that writes in place keeps its side of all that read what it or an ancestor of it made
    buffers    layers that read a buffer which forward updates keep their order, and so do layers that draw with
               Python's or numpy's generators
    last       the last layer stays the last: the model's output and the loss are computed with it
"""

from collections.abc import Sequence
from itertools import pairwise

from planner.graph import shared_storages
from planner.model_profile import ModelProfile
from planner.program import Node


def layer_successors(profile: ModelProfile) -> tuple[tuple[int, ...], ...]:
    """Return for every layer those that must come after it; see the module's docstring."""
    count = len(profile.layers)
    pairs = {(edge.producer, consumer) for edge in profile.edges for consumer in edge.consumers}
    pairs |= {(layer, count - 1) for layer in range(count - 1)}
    nodes = [profile.program.nodes[layer.start : layer.stop] for layer in profile.layers]
    derived = _derived(profile)
    if any(_writes(node) for position, node in enumerate(profile.program.nodes) if position in derived):
        pairs |= {(layer, layer + 1) for layer in range(count - 1)}  # what all stages make anew must not change
    pairs |= {
        pair
        for layer, own in enumerate(nodes)
        if any(_writes(node) for node in own)
        for pair in _beside_writer(profile, layer)
    }
    updated = set(profile.updated_buffers)
    for shared in shared_storages(profile):
        if shared.name in updated:
            pairs |= set(pairwise(shared.layers))
    outside = tuple(profile.drawing_outside)
    drawing = [layer for layer, own in enumerate(nodes) if any(_draws(node, outside) for node in own)]
    pairs |= set(pairwise(drawing))
    return tuple(tuple(sorted(after for before, after in pairs if before == layer)) for layer in range(count))


def _writes(node: Node) -> bool:
    return node.in_place or bool(node.written) or node.kind == "setitem"


def _draws(node: Node, outside: tuple[str, ...]) -> bool:
    calls = node.kind == "module" and any(name == node.target or name.startswith(f"{node.target}.") for name in outside)
    return node.kind == "draw" or calls


def _beside_writer(profile: ModelProfile, writer: int) -> set[tuple[int, int]]:
    """Return in which order a layer that writes in place, and those that may see what it writes, are recorded.

    What it writes may be a part of any value that led to it.
    """
    ancestors = {writer}
    for edge in sorted(profile.edges, key=lambda edge: -edge.producer):
        if ancestors.intersection(edge.consumers):
            ancestors.add(edge.producer)
    near = set(ancestors)
    for edge in profile.edges:
        if edge.producer in ancestors:
            near.update(edge.consumers)
    return {(min(layer, writer), max(layer, writer)) for layer in near if layer != writer}


def _derived(profile: ModelProfile) -> set[int]:
    """Return the positions of nodes that make what follows from the inputs alone, which every stage makes anew."""
    made_anew = {*profile.input_only_values, *profile.program.inputs}
    return {
        position
        for position, node in enumerate(profile.program.nodes)
        if (writes := list(node.writes())) and all(name in made_anew for name in writes)
    }


def is_order(successors: Sequence[Sequence[int]], order: Sequence[int]) -> bool:
    """Return whether an order of all layers has each before those that must come after it."""
    place = {layer: position for position, layer in enumerate(order)}
    if sorted(order) != list(range(len(successors))):
        return False
    return all(place[layer] < place[other] for layer, after in enumerate(successors) for other in after)


def profile_in_order(profile: ModelProfile, order: Sequence[int]) -> ModelProfile:
    """Return the profile with its layers in an order for which `is_order` holds; what inputs alone give comes first."""
    if list(order) == list(range(len(profile.layers))):
        return profile
    derived = _derived(profile)
    nodes = [node for position, node in enumerate(profile.program.nodes) if position in derived]
    layers, start = [], 0
    for index in order:
        layer = profile.layers[index]
        nodes += [profile.program.nodes[at] for at in range(layer.start, layer.stop) if at not in derived]
        layers.append(layer.model_copy(update={"start": start, "stop": len(nodes)}))
        start = len(nodes)
    place = {layer: position for position, layer in enumerate(order)}
    edges = [
        edge.model_copy(
            update={
                "producer": place[edge.producer],
                "consumers": tuple(sorted(place[consumer] for consumer in edge.consumers)),
            }
        )
        for edge in profile.edges
    ]
    program = profile.program.model_copy(update={"nodes": tuple(nodes)})
    return profile.model_copy(update={"layers": tuple(layers), "edges": tuple(edges), "program": program})


def profile_of_plan(profile: ModelProfile, names: Sequence[str]) -> ModelProfile:
    """Return the profile in the order of a plan's layers; the profile itself where they are no order of its own."""
    recorded = [layer.name for layer in profile.layers]
    if list(names) == recorded or sorted(names) != sorted(recorded):
        return profile
    index_of = {name: index for index, name in enumerate(recorded)}
    order = [index_of[name] for name in names]
    return profile_in_order(profile, order) if is_order(layer_successors(profile), order) else profile

"""Orders of the layers of a model with branches, from which stages can be cut that the recorded order does not have.

Every chain of down-sets of the layers is cut from one of their orders. They are listed where they are few. Where they
are many, those are that likely have good cuts: branch after branch, branches in turn, the longest way first, and for
each number of stages an order whose stages take equal times (`core.partition`).
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from planner.cost.communication import Route
from planner.cost.layers import REPLICATED
from planner.orders import layer_successors
from planner.plan import Plan
from planner.solver.core.loads import Tensor, TensorLoads
from planner.solver.core.partition import best_partition
from planner.solver.request import Pins
from planner.solver.space import Space

MOST_ORDERS = 64  # that are searched, where there are more
_MOST_STAGES = 16
_MOST_STATES, _ROUNDS = 20_000, 8  # of the search for stages of equal times

Order = tuple[int, ...]


def orders_of(space: Space) -> tuple[list[Order], bool]:
    """Return orders of the layers but for the recorded one, and whether these are all others.

    There are none where the layers are a chain, or where people fixed cuts, which are told by the recorded order.
    """
    given = (space.pins, space.exclusions)
    if any(pins.cuts or pins.stages or pins.together for pins in given):
        return [], True
    successors = layer_successors(space.pricer.profile)
    recorded = tuple(range(len(successors)))
    found: list[Order] = []
    for order in _all_orders(successors):
        if len(found) > MOST_ORDERS:
            break
        found.append(order)
    else:
        return [order for order in found if order != recorded], True
    likely = dict.fromkeys(_likely_orders(space, successors))
    return [order for order in likely if order != recorded][:MOST_ORDERS], False


def _all_orders(successors: Sequence[Sequence[int]]) -> Iterator[Order]:
    """Yield every order, the recorded one first."""
    waits = [0] * len(successors)
    for after in successors:
        for other in after:
            waits[other] += 1
    order: list[int] = []
    taken = [False] * len(successors)

    def from_here() -> Iterator[Order]:
        if len(order) == len(successors):
            yield tuple(order)
        for layer in range(len(successors)):
            if taken[layer] or waits[layer]:
                continue
            taken[layer] = True
            order.append(layer)
            for other in successors[layer]:
                waits[other] -= 1
            yield from from_here()
            for other in successors[layer]:
                waits[other] += 1
            order.pop()
            taken[layer] = False

    yield from from_here()


def _likely_orders(space: Space, successors: Sequence[Sequence[int]]) -> Iterator[Order]:
    """Yield orders that likely have good cuts, the likeliest first."""
    count = len(successors)
    longest = [0] * count
    for layer in reversed(range(count)):
        longest[layer] = 1 + max((longest[other] for other in successors[layer]), default=0)
    depth = [0] * count
    for layer, after in enumerate(successors):
        for other in after:
            depth[other] = max(depth[other], depth[layer] + 1)
    yield _ordered(successors, lambda layer, ready_since: (-ready_since,))
    yield _ordered(successors, lambda layer, ready_since: (-ready_since, -layer))
    yield _ordered(successors, lambda layer, ready_since: (depth[layer], layer))
    yield _ordered(successors, lambda layer, ready_since: (-longest[layer], layer))
    yield _ordered(successors, lambda layer, ready_since: (longest[layer], layer))
    for num_stages in range(2, min(count, _MOST_STAGES) + 1):
        if any(pp == num_stages for pp, _, _ in space.degrees()):
            yield _even_order(space, successors, num_stages)
    chance = random.Random(0)
    for _ in range(MOST_ORDERS):
        weights = [chance.random() for _ in range(count)]
        yield _ordered(successors, _by(weights))


def _by(weights: Sequence[float]) -> Callable[[int, int], tuple[float, ...]]:
    return lambda layer, ready_since: (weights[layer],)


def _ordered(successors: Sequence[Sequence[int]], key: Callable[[int, int], tuple[float, ...]]) -> Order:
    """Return the order that takes the layer of the least key of those that may come next.

    The key is of the layer and of when it was first free to come.
    """
    waits = [0] * len(successors)
    for after in successors:
        for other in after:
            waits[other] += 1
    ready = {layer: 0 for layer in range(len(successors)) if not waits[layer]}
    order: list[int] = []
    while ready:
        layer = min(ready, key=lambda item: (*key(item, ready[item]), item))
        del ready[layer]
        order.append(layer)
        for other in successors[layer]:
            waits[other] -= 1
            if not waits[other]:
                ready[other] = len(order)
    return tuple(order)


def _even_order(space: Space, successors: Sequence[Sequence[int]], num_stages: int) -> Order:
    """Return an order from which stages of the least largest time can be cut, what they send included."""
    pricer = space.pricer
    profile, rows = pricer.profile, pricer.profile.least_rows
    route = Route(float("inf"), 0.0)
    numbers = [pricer.numbers(layer.layer_class, rows, 1, REPLICATED, route) for layer in profile.layers]
    bandwidth = pricer.cluster.intra_node.bandwidth
    tensors = [
        Tensor(edge.producer, frozenset(edge.consumers), edge.num_bytes(rows) / bandwidth) for edge in profile.edges
    ]
    times = tuple(layer.forward_s + layer.backward_s for layer in numbers)
    graph = TensorLoads(times, tuple(map(tuple, successors)), tuple(tensors))
    found = best_partition(graph, num_stages, most_states=_MOST_STATES, rounds=_ROUNDS)
    return tuple(layer for stage in found.stages for layer in sorted(stage))


def space_in_order(space: Space, order: Order) -> Space:
    """Return the same constraints on the profile in another order."""
    profile = space.pricer.profile
    place = {layer: position for position, layer in enumerate(order)}
    names = [profile.layers[layer].name for layer in order]
    pricer = space.pricer.in_order(names)

    def moved(pins: Pins) -> Pins:
        return replace(pins, recomputed=frozenset(place[layer] for layer in pins.recomputed))

    return replace(space, pricer=pricer, pins=moved(space.pins), exclusions=moved(space.exclusions))


def space_in_order_of(space: Space, plan: Plan) -> Space:
    """Return the same constraints on the profile in the order of a plan's layers."""
    recorded = [layer.name for layer in space.pricer.profile.layers]
    if list(plan.layers) == recorded:
        return space
    place = {name: index for index, name in enumerate(recorded)}
    return space_in_order(space, tuple(place[name] for name in plan.layers))


def space_of_plan(space: Space, plan: Plan) -> Space:
    """Return the same constraints on the profile in the order of a plan's layers."""
    recorded = [layer.name for layer in space.pricer.profile.layers]
    names = [name for stage in plan.stages for name in stage.layers]
    return space if names == recorded else space_in_order(space, tuple(recorded.index(name) for name in names))

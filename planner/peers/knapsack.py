"""The cheapest items that free enough: bounds for many rows at once, and the exact choice for one."""

from collections.abc import Sequence

import numpy as np

from planner.solver.core.lattice import Floats

_MAX_NODES = 200_000


def _ratio_order(freed: Floats, cost: Floats) -> list[int]:
    return sorted(
        range(len(freed)), key=lambda item: (cost[item] / freed[item] if freed[item] > 0 else np.inf, -freed[item])
    )


def greedy_cover(freed: Floats, cost: Floats, inside: Floats, excess: Floats) -> tuple[Floats, Floats]:
    """Return, for each row of items `inside`, what freeing its excess costs at least, and by a greedy choice."""
    order = _ratio_order(freed, cost)
    taken = inside[:, order]
    sums, costs = np.cumsum(taken * freed[order], axis=1), np.cumsum(taken * cost[order], axis=1)
    last = (sums < excess[:, None] * (1 - 1e-15)).sum(axis=1).clip(max=len(order) - 1)
    index = np.arange(len(inside))
    before = np.where(last > 0, sums[index, last - 1], 0.0)
    paid = np.where(last > 0, costs[index, last - 1], 0.0)
    missing = excess - before
    item_freed, item_cost = freed[order][last], cost[order][last]
    at_least = paid + item_cost * np.clip(missing / np.where(item_freed > 0, item_freed, 1.0), 0.0, 1.0)
    later = (
        (np.arange(len(order))[None, :] >= last[:, None]) & (taken > 0) & (freed[order][None, :] >= missing[:, None])
    )
    cheapest = np.where(later, cost[order][None, :], np.inf).min(axis=1)
    return at_least, paid + np.minimum(cheapest, item_cost)


def cheapest_cover(freed: Sequence[float], cost: Sequence[float], excess: float) -> tuple[list[int], float]:
    """Return the items that free at least `excess` at the least cost, and that cost: by branch and bound."""
    if excess <= 0:
        return [], 0.0
    order = [item for item in _ratio_order(np.array(freed), np.array(cost)) if freed[item] > 0]
    best: tuple[float, list[int]] = (sum(cost[item] for item in order), list(order))
    stack: list[tuple[int, float, float, list[int]]] = [(0, excess, 0.0, [])]
    visited = 0
    while stack and visited < _MAX_NODES:
        visited += 1
        position, missing, paid, chosen = stack.pop()
        if missing <= 0:
            if paid < best[0]:
                best = paid, chosen
            continue
        bound, left = paid, missing
        for item in order[position:]:
            if freed[item] >= left:
                bound += cost[item] * left / freed[item]
                left = 0.0
                break
            bound += cost[item]
            left -= freed[item]
        if left > 0 or bound >= best[0] * (1 - 1e-12):
            continue
        item = order[position]
        # of equal items, the first are taken
        following = position + 1
        while following < len(order) and (freed[order[following]], cost[order[following]]) == (freed[item], cost[item]):
            following += 1
        stack.append((following, missing, paid, chosen))
        stack.append((position + 1, missing - freed[item], paid + cost[item], [*chosen, item]))
    return best[1], best[0]

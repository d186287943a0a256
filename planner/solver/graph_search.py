"""The search beyond the recorded order: models with branches have other orders, and other cuts with them.

The space is that of `search`, in other orders of the layers (`planner.orders`), so that stages are any chain of
down-sets. The search starts from the best plan of the recorded order.

Where orders are few all are searched, and the bound is proven for them all. Where they are many, layers inside a stage
stay as recorded: the likely orders are searched first, then those of the chains of down-sets whose bound (10) of
`graph_bound` is less than the best plan's step, until none is left, which is the proof, or for so many orders. The
bound is then the least (10) of what is left. That no plan fits is told of the orders searched first.

Where people fixed cuts, stages of layers or layers together, the recorded order is the only one.
"""

import time
from itertools import pairwise

from planner.plan import Origin
from planner.solver.core.lattice import TooManyStatesError
from planner.solver.differences import step_time_s
from planner.solver.find import Found, find, silent
from planner.solver.graph_bound import GraphBound
from planner.solver.incumbent import TOLERANCE
from planner.solver.orders import Order, orders_of, space_in_order
from planner.solver.search import Progress
from planner.solver.settings import settings_with_bounds
from planner.solver.space import Space

MAX_NODES = 300  # of the search of one order, where not all orders are searched
MOST_CHAINS = 96  # whose orders are searched besides


def find_in_other_orders(
    space: Space, origin: Origin, found: Found, *, progress: Progress = silent, time_limit_s: float | None = None
) -> Found:
    """Return the best plan of any order, `found` being that of the recorded one, with a bound for all orders."""
    orders, are_all = orders_of(space)
    if not orders:
        return found
    deadline = None if time_limit_s is None else time.monotonic() + time_limit_s
    search = _Search(space, origin, found, progress, deadline, None if are_all else MAX_NODES)
    done = not found.outcome.was_ended and all(search.of(order) for order in orders)
    if not (are_all and done) and not (done and search.best is None):
        search.lower_s = search.prove(goes_on=done)
    found.outcome.incumbent.best, found.outcome.lower_bound_s = search.best, search.lower_s
    return Found(search.best, search.lower_s, found.outcome)


class _Search:
    """The best plan so far, and the orders that were searched."""

    def __init__(
        self,
        space: Space,
        origin: Origin,
        found: Found,
        progress: Progress,
        deadline: float | None,
        max_nodes: int | None,
    ) -> None:
        self._space, self._origin, self._outcome = space, origin, found.outcome
        self._progress, self._deadline, self._max_nodes = progress, deadline, max_nodes
        self.best, self.lower_s = found.plan, found.lower_bound_s
        self._left_s = float("inf")  # a bound of what was left
        recorded = tuple(range(len(space.pricer.profile.layers)))
        self._searched: list[Order] = [] if found.outcome.was_ended else [recorded]

    @property
    def _step_s(self) -> float:
        return float("inf") if self.best is None else step_time_s(self.best)

    def of(self, order: Order) -> bool:
        """Search an order; return False where there is no time left, or people want no more."""
        left_s = None if self._deadline is None else self._deadline - time.monotonic()
        if left_s is not None and left_s <= 0:
            return False
        label = f"order {len(self._searched) + 1}"
        other = find(
            space_in_order(self._space, order),
            self._origin,
            progress=lambda _, done, total: self._progress(label, done, total),
            time_limit_s=left_s,
            to_beat_s=self._step_s,
            max_nodes=self._max_nodes,
        )
        self._outcome.incumbent.num_priced += other.outcome.incumbent.num_priced
        self._outcome.num_nodes += other.outcome.num_nodes
        self.best = other.plan or self.best
        self.lower_s = min(self.lower_s, other.lower_bound_s)
        if not other.outcome.was_ended:
            self._searched.append(order)
        return not other.outcome.was_ended or other.outcome.num_nodes > (self._max_nodes or float("inf"))

    def prove(self, *, goes_on: bool) -> float:
        """Return a lower bound of every plan; search the orders of chains that it leaves, if the search `goes_on`."""
        settings, self._left_s = settings_with_bounds(self._space, self._origin)
        try:
            graph = GraphBound(self._space, self._origin)
        except TooManyStatesError:
            graph = None
        num_chains = 0
        for bound, setting in settings:
            if bound >= self._limit_s():
                break
            if graph is None or not graph.bounds(setting):
                self._left_s = bound
                continue
            for chain_bound, chain in graph.chains(setting, self._limit_s):
                stages = [sorted(graph.layers(b) - graph.layers(a)) for a, b in pairwise(chain)]
                if stages and self._is_searched(stages):
                    continue
                num_chains += 1
                goes_on = goes_on and bool(stages) and num_chains <= MOST_CHAINS
                goes_on = goes_on and self.of(tuple(layer for stage in stages for layer in stage))
                if not goes_on or not self._is_searched(stages):
                    self._left_s = min(self._left_s, max(bound, chain_bound))
        return min(self._left_s, self._step_s)

    def _limit_s(self) -> float:
        """Return below which step time a plan would change the answer."""
        return min(self._left_s, self._step_s) * (1 - TOLERANCE)

    def _is_searched(self, stages: list[list[int]]) -> bool:
        """Return whether an order that was searched has these stages, each as it is."""
        for order in self._searched:
            first = 0
            for stage in stages:
                if list(order[first : first + len(stage)]) != stage:
                    break
                first += len(stage)
            else:
                return True
        return False

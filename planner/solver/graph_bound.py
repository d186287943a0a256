"""A lower bound of the step of every plan whose stages are a chain of down-sets of the layers, whatever their order.

Stage S of down-sets I and J, S = J - I, at position s with p of m microbatches in flight takes, by (1) to (4) of
`problem` with paths through the graph in place of the spine,

    head   the longest path of forwards through I to a layer that S reads
    D      the longest path of forwards from a reader of S to the last layer, and of backwards from there to a reader
    after  the longest path of backwards from a layer that S reads to where it ends, or what S does once a step

    (10)  step time >= max over s of (1) of the stage at position s

for every chain of down-sets. Messages, memory and recomputation only make steps longer.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from planner.model_profile import ModelProfile
from planner.orders import layer_successors
from planner.plan import Origin
from planner.solver.core.lattice import Lattice, down_sets
from planner.solver.problem import Setting
from planner.solver.problems import Problems
from planner.solver.space import Space
from planner.solver.tables import Floats

MOST_STATES = 400
MOST_STEPS = 20_000  # of the enumeration of one setting's chains
_SCHEDULES = ("1f1b", "gpipe")


class GraphBound:
    """(10) for settings; keeps what depends on the layers' seconds alone. TooManyStatesError beyond `MOST_STATES`."""

    def __init__(self, space: Space, origin: Origin) -> None:
        profile = space.pricer.profile
        self._problems = Problems(space, origin)
        self._lattice: Lattice = down_sets(layer_successors(profile), limit=MOST_STATES)
        self._edges = _edges(profile)
        self._paths: dict[tuple[bytes, bytes], tuple[Floats, Floats, Floats]] = {}

    def bounds(self, setting: Setting) -> bool:
        """Return whether (10) is known for a setting: (1) is for some schedules."""
        return setting.schedule in _SCHEDULES

    def layers(self, state: int) -> frozenset[int]:
        """Return the layers of a down-set."""
        return frozenset(np.flatnonzero(self._lattice.members[state]).tolist())

    def chains(self, setting: Setting, limit: Callable[[], float]) -> Iterator[tuple[float, tuple[int, ...]]]:
        """Yield (bound, down-sets) of every chain whose bound is below a limit that may fall, likely ones first.

        After so many steps what is left comes as one: its least bound, and no down-sets.
        """
        stations = self._stations(setting)
        rest = [np.full(self._lattice.num_states, np.inf) for _ in range(len(stations) + 1)]
        rest[-1][-1] = 0.0  # the least bound of what follows a down-set
        for s in reversed(range(len(stations))):
            rest[s] = np.maximum(stations[s], rest[s + 1][None, :]).min(axis=1)
        waiting: list[tuple[float, tuple[int, ...]]] = [(float(rest[0][0]), (0,))]
        for _ in range(MOST_STEPS):
            if not waiting:
                return
            bound, chain = waiting.pop()
            if bound >= limit():
                continue
            s = len(chain) - 1
            if s == len(stations):
                yield bound, chain
                continue
            ways = np.maximum(np.maximum(bound, stations[s][chain[-1]]), rest[s + 1])
            below = np.flatnonzero(ways < limit())
            order = below[np.argsort(-ways[below], kind="stable")]
            waiting.extend((float(ways[state]), (*chain, int(state))) for state in order)
        left = min((bound for bound, _ in waiting), default=np.inf)
        if left < limit():
            yield left, ()

    def _stations(self, setting: Setting) -> list[Floats]:
        """Return (1) of the stage between every two down-sets, for every position."""
        problem = self._problems.of(setting)
        tables = [position.layers for position in problem.positions]
        forward = np.min([table.forward for table in tables], axis=0)
        backward = np.min([table.backward for table in tables], axis=0)
        head, trip, after = self._paths_of(forward, backward)
        ahead, behind = (self._between(seconds) for seconds in (forward, backward))
        m, layers, found = setting.num_microbatches, np.arange(len(forward)), []
        for position in problem.positions:
            p = position.in_flight
            tail = self._largest(position.states.tail_s[layers, layers + 1])
            if setting.schedule == "gpipe":
                within = m * ahead + trip + m * behind
            elif p == m:
                within = np.maximum(np.maximum(p * ahead, ahead + trip) + p * behind, p * ahead + trip + behind)
            else:
                start, end = np.maximum(p * ahead, ahead + trip), np.maximum(p * behind, behind + trip)
                within = start + (m - p) * (ahead + behind) + end
            bound = (head + within + np.maximum(after, tail)) * (1 - 1e-12)  # sums are in another order than in `cost`
            found.append(np.where(self._lattice.inside, bound, np.inf))
        return found

    def _between(self, seconds: Floats) -> Floats:
        sums = self._lattice.sums(seconds)
        return np.asarray(sums[None, :] - sums[:, None])

    def _largest(self, values: Floats) -> Floats:
        """Return the largest of the values of layers in J and not in I, for every pair."""
        members, count = self._lattice.members, self._lattice.num_states
        found = np.zeros((count, count))
        for layer, value in enumerate(values):
            if value > 0:
                np.maximum(found, value * (~members[:, layer])[:, None] * members[:, layer][None, :], out=found)
        return found

    def _paths_of(self, forward: Floats, backward: Floats) -> tuple[Floats, Floats, Floats]:
        """Return head, D and after of every pair of down-sets."""
        key = (forward.tobytes(), backward.tobytes())
        if key in self._paths:
            return self._paths[key]
        members, count, last = self._lattice.members, self._lattice.num_states, len(forward) - 1
        to_here, back_from_here = forward.copy(), backward.copy()
        for u, v, needs_grad in self._edges:  # ascending by u: all paths to u are known
            to_here[v] = max(to_here[v], to_here[u] + forward[v])
            if needs_grad:
                back_from_here[v] = max(back_from_here[v], back_from_here[u] + backward[v])
        to_end, from_end = np.full(last + 1, -np.inf), np.full(last + 1, -np.inf)
        to_end[last], from_end[last] = forward[last], backward[last]
        for u, v, needs_grad in sorted(self._edges, key=lambda edge: (-edge[0], edge[1])):
            to_end[u] = max(to_end[u], forward[u] + to_end[v])
            if needs_grad:
                from_end[u] = max(from_end[u], backward[u] + from_end[v])
        head, after, there, back = (np.zeros((count, count)) for _ in range(4))
        back -= np.inf
        there -= np.inf
        for u, v, needs_grad in self._edges:
            enters = (members[:, u] & ~members[:, v])[:, None] & members[:, v][None, :]
            leaves = (~members[:, u])[:, None] & (members[:, u] & ~members[:, v])[None, :]
            np.maximum(head, np.where(enters, to_here[u], 0.0), out=head)
            np.maximum(there, np.where(leaves, to_end[v], -np.inf), out=there)
            if needs_grad:
                np.maximum(after, np.where(enters, back_from_here[u], 0.0), out=after)
                np.maximum(back, np.where(leaves, from_end[v], -np.inf), out=back)
        trip = np.maximum(there + back, 0.0)  # no round trip that is sure: none counts
        self._paths[key] = (head, trip, after)
        return self._paths[key]


def _edges(profile: ModelProfile) -> Sequence[tuple[int, int, bool]]:
    """Return (maker, reader, whether a gradient comes back) of the layers, ascending."""
    found: dict[tuple[int, int], bool] = {}
    for edge in profile.edges:
        for consumer in edge.consumers:
            pair = (edge.producer, consumer)
            found[pair] = found.get(pair, False) or edge.needs_grad
    return [(u, v, needs_grad) for (u, v), needs_grad in sorted(found.items())]

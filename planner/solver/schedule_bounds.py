"""Lower bounds of a step under any schedule, from what one device group does or from the shares of all work alone.

In a step every action waits for the one before it in its group's list; and where stages are a chain, each sending to
the next and getting a gradient back, F for F of the stage before, B and I for the same of the stage behind. (Where they
aren't, the whole list of a group, the first of its paths, is the only one that counts.) So the actions on any path of
such waits take no longer than the step, and

    (8)  step time >= seconds of the actions on a path

whatever else happens: messages, recomputation and preparing only make it longer. A path of group g is a part of g's own
list, before it what the part's first action waits for, after it what waits for the part's last action:

    starts    at the first F of a chunk:          F of the first microbatch in all stages before that one
              at the first B or I of a chunk:     F of the first microbatch in all stages, B or I in the stages behind
    ends      at the last F of a chunk:           F of the last microbatch in the stages behind, B or I in all stages
              at the last B or I of a chunk:      B or I of the last microbatch in the stages before
              at the end of the list:             nothing

A start at the first F of the first chunk and the end of the list make the station bound that everybody knows: head +
m * own + tail. The others tell what a group waits for while it has nothing to do: the first backward for its round trip
through the groups behind, the last backwards for theirs. The stages that a path passes on its way to a chunk, between
two and from the last one are the gaps: one before the first chunk, one after each.

Paths of all groups together bound the step wherever the cuts are. Stage s takes c_s seconds per microbatch, of which
its F, I and W take shares that sum to 1, each at least the given one. With weights w of paths that sum to 1,

    (9)  step time >= sum over paths of w * (8) = sum over s of c_s * sum over paths of w * (actions in s times shares)
                   >= K * sum of c_s,    K the least over s, and over the shares that stage s may have, of that sum

where the least is at a corner: all that is left of the shares goes to one kind of action. Any weights make a valid K; a
linear program chooses them. What a start at the first B or I of the last chunk waits for may also come through the
list of another group, up to its first F of that chunk; and after the last F of the first chunk the path may go on
through the list of a later group, from its last F of that chunk. With these K is what equal stages attain under
zero-bubble with at most two chunks, where every group has weights of its own.

No K reaches m / p + (p - 1) / (p * chunks), the time of equal stages under interleaved 1F1B: cuts with less in the last
stages and more before them are faster than equal ones. For GPipe paths may change groups between the forwards and the
backwards, and go through the slowest stage of each: the sum of F and m - 1 times the longest, then the same of B, so
that K = (m + p - 1) / p, which equal stages attain.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from planner.plan import SPLIT_SCHEDULES, Schedule
from planner.schedule import Action, group_actions, stages_of_group
from planner.solver.tables import Bools, Floats

Ints = NDArray[np.int64]
_MOST_ROWS = 600  # of the linear program: weights of each kind of path, at as many groups as that leaves


@dataclass(frozen=True, slots=True)
class GroupPaths:
    """Paths through one group: how often each passes what. P paths, c chunks.

    `own` counts F, I and W of every chunk (P x c x 3; a whole backward is one I and one W), `forward_gaps` and
    `backward_gaps` the passes through the gaps (P x (c + 1)). `opens` marks the paths that begin with the group's
    first action, `closes` those that end with its last one. The first path is the group's whole list.

    `warmed` marks the paths that start at the first backward of the last chunk, `cooling` those that end at the last F
    of the first chunk. `warm_up` and `cool_down` count, of every chunk (c x 3), the actions of the list up to the first
    F of the last chunk, and from the last F of the first chunk on: for paths through other groups.
    """

    own: Ints
    forward_gaps: Ints
    backward_gaps: Ints
    opens: Bools
    closes: Bools
    warmed: Bools
    cooling: Bools
    warm_up: Ints
    cool_down: Ints

    def bound(
        self,
        own_s: Floats,
        forward_gaps_s: Floats,
        backward_gaps_s: Floats,
        *,
        ready_s: Floats | float = 0.0,
        tail_s: Floats | float = 0.0,
        start_tail_s: Floats | float = 0.0,
    ) -> Floats:
        """Return the largest (8) of N candidates for the group; every argument may be a lower bound of what it names.

        `own_s` are the seconds of F, I and W of every chunk (N x c x 3); the gaps' are those of F, and of B or I, in
        the stages between, messages included (N x (c + 1)). `ready_s` is when the group starts at the earliest,
        `tail_s` what it does after its list, `start_tail_s` what the first group does after its.
        """
        count = len(own_s)
        inside = own_s.reshape(count, -1) @ self.own.reshape(len(self.own), -1).T.astype(np.float64)
        head = np.outer(forward_gaps_s[:, 0], self.forward_gaps[:, 0])
        between = forward_gaps_s[:, 1:] @ self.forward_gaps[:, 1:].T + backward_gaps_s @ self.backward_gaps.T
        ready = np.broadcast_to(np.asarray(ready_s, dtype=np.float64), (count,))[:, None]
        # The first action waits for both; a path that passes the first gap at any other time is not held up by it.
        head = np.where(self.opens[None, :], np.maximum(head, ready), head)
        after = np.where(self.closes[None, :], _column(tail_s, count), _column(start_tail_s, count))
        return np.asarray((head + inside + between + after).max(axis=1))


def _column(value: Floats | float, count: int) -> Floats:
    return np.broadcast_to(np.asarray(value, dtype=np.float64), (count,))[:, None]


Kind = Literal["F", "B"]
End = tuple[Kind, int] | None
"""(F, or B for either kind of backward, chunk); None for the end of the list"""


@lru_cache(maxsize=16)
def schedule_paths(
    schedule: Schedule, num_groups: int, num_microbatches: int, num_chunks: int = 1
) -> tuple[GroupPaths, ...]:
    """Return the paths of every group, in the same order in each; ValueError as `group_actions` raises it.

    Where a path would end before it starts, that of the whole list stands in its place.
    """
    return tuple(
        _group_paths(actions, stages_of_group(schedule, num_groups, num_chunks, group))
        for group, actions in enumerate(group_actions(schedule, num_groups, num_microbatches, num_chunks))
    )


def _group_paths(actions: tuple[Action, ...], stages: tuple[int, ...]) -> GroupPaths:
    chunks = {stage: chunk for chunk, stage in enumerate(stages)}
    c, length = len(stages), len(actions)
    done = np.zeros((length + 1, c, 3), dtype=np.int64)
    first: dict[tuple[Kind, int], int] = {}
    last: dict[tuple[Kind, int], int] = {}
    columns = {"F": slice(0, 1), "B": slice(1, 3), "I": slice(1, 2), "W": slice(2, 3)}
    for index, action in enumerate(actions):
        chunk = chunks[action.stage]
        done[index + 1, chunk, columns[action.kind]] = 1
        if action.kind != "W":
            kind: Kind = "F" if action.kind == "F" else "B"
            first.setdefault((kind, chunk), index)
            last[kind, chunk] = index
    np.cumsum(done, axis=0, out=done)
    backward = slice(1, 3) if actions[-1].kind == "B" else slice(1, 2)
    own, forward, back, marks = [], [], [], []
    for (kind, chunk), end in _ends(c):
        counts = np.zeros((c, 3), dtype=np.int64)
        forward_gaps, backward_gaps = np.zeros((2, c + 1), dtype=np.int64)
        stop = length - 1 if end is None else last[end]
        if stop < first[kind, chunk]:
            kind, chunk, stop, end = "F", 0, length - 1, None
        begin = first[kind, chunk]
        counts += done[stop + 1] - done[begin]
        if kind == "F":
            forward_gaps[: chunk + 1] += 1
            counts[:chunk, 0] += 1
        else:
            forward_gaps += 1
            counts[:, 0] += 1
            backward_gaps[chunk + 1 :] += 1
            counts[chunk + 1 :, backward] += 1
        if end is not None and end[0] == "F":
            forward_gaps[end[1] + 1 :] += 1
            counts[end[1] + 1 :, 0] += 1
            backward_gaps += 1
            counts[:, backward] += 1
        elif end is not None:
            backward_gaps[: end[1] + 1] += 1
            counts[: end[1], backward] += 1
        own.append(counts)
        forward.append(forward_gaps)
        back.append(backward_gaps)
        start = (kind, chunk)
        marks.append((start == ("F", 0), end is None, start == ("B", c - 1), end == ("F", 0)))
    opens, closes, warmed, cooling = np.array(marks).T
    return GroupPaths(
        own=np.array(own), forward_gaps=np.array(forward), backward_gaps=np.array(back), opens=opens, closes=closes,
        warmed=warmed, cooling=cooling, warm_up=done[first["F", c - 1] + 1], cool_down=done[-1] - done[last["F", 0]],
    )  # fmt: skip


def _ends(num_chunks: int) -> Iterator[tuple[tuple[Kind, int], End]]:
    """Yield the starts and ends of paths, that of the whole list first."""
    kinds: tuple[Kind, Kind] = ("F", "B")
    starts = [(kind, chunk) for kind in kinds for chunk in range(num_chunks)]
    for start in starts:
        yield start, None
        for end in starts:
            yield start, end


@lru_cache(maxsize=4096)
def schedule_factor(
    schedule: Schedule, num_groups: int, num_microbatches: int, num_chunks: int, shares: tuple[float, float, float]
) -> float:
    """Return K of (9): a step takes at least K times what one microbatch takes in all stages, wherever the cuts are.

    `shares` are what F, the gradient of inputs and that of weights each take of any stage's time at least: the least
    shares of any layer will do, and so does 0. Those of a whole backward count together.
    """
    if min(shares) < 0 or sum(shares) > 1 + 1e-9:
        raise ValueError(f"shares {shares} are no parts of one whole")
    if schedule == "gpipe":
        return (num_microbatches + num_groups - 1) / num_groups
    rest = max(0.0, 1.0 - sum(shares))
    corners = np.unique(np.array(shares) + rest * np.eye(3), axis=0)
    seconds = mean_seconds(schedule, num_groups, num_microbatches, num_chunks, corners)
    seconds = np.unique(seconds.round(12), axis=1)  # a microbatch's share of 1e-12 is nothing to a bound
    weights = _best_weights(seconds)
    return float((weights @ seconds).min()) * (1 - 1e-12)


def mean_seconds(schedule: Schedule, p: int, m: int, num_chunks: int, corners: Floats) -> Floats:
    """Return (8) of means over groups of paths of one kind, per second of each stage with each corner's shares.

    The means are weighted by hats: 1 at one group, falling to 0 at the next one that has a hat; all have where few are.
    """
    paths = schedule_paths(schedule, p, m, num_chunks)
    ends = list(_ends(num_chunks))
    warmed = [start == ("B", num_chunks - 1) for start, _ in ends]
    cooling = [end == ("F", 0) for _, end in ends]
    kinds = [  # (path, what comes before it, what after it)
        (index, before, after)
        for index in range(len(ends))
        for before in (0, 1, 2)[: 3 if warmed[index] else 1]
        for after in (0, 1, 2)[: 3 if cooling[index] else 1]
    ]
    chosen = [index for index, _, _ in kinds]
    knots = np.unique(np.linspace(0, p - 1, min(p, max(5, _MOST_ROWS // len(kinds)))).round())
    hats = np.array([np.interp(np.arange(p), knots, row) for row in np.eye(len(knots))])
    hats /= hats.sum(axis=1, keepdims=True)
    found = np.zeros((len(knots), len(kinds), num_chunks * p, len(corners)))
    through = _Detours(schedule, paths)
    for group, own in enumerate(paths):
        counts = through.counts(group)[chosen]
        before, after = through.before, through.after(group)
        for row, (index, early, late) in enumerate(kinds):
            if early and own.warmed[index]:
                counts[row] += before[early - 1]
            if late and own.cooling[index]:
                counts[row] += after[late - 1]
        found += hats[:, group, None, None, None] * (counts @ corners.T)[None]
    return found.reshape(len(knots) * len(kinds), -1)


class _Detours:
    """Paths as counts of F, I and W in every stage (n x 3), and what changes in them on a way through other lists.

    The other group is each one in the mean, or the last one.
    """

    def __init__(self, schedule: Schedule, paths: tuple[GroupPaths, ...]) -> None:
        self.paths = paths
        num_groups, num_chunks = len(paths), paths[0].own.shape[1]
        self.num_stages = num_groups * num_chunks
        self.stages = [stages_of_group(schedule, num_groups, num_chunks, group) for group in range(num_groups)]
        self.backward = [1] if schedule in SPLIT_SCHEDULES else [1, 2]
        warm_ups = []
        for stages, own in zip(self.stages, paths, strict=True):
            change = np.zeros((self.num_stages, 3))
            change[stages[0] : stages[-1] + 1, 0] = -1.0  # F from its first stage to its last is in its list
            change[list(stages)] += own.warm_up
            warm_ups.append(change)
        self.before = (np.mean(warm_ups, axis=0), warm_ups[-1])

    def counts(self, group: int) -> Floats:
        """Return the counts of a group's paths."""
        own, stages = self.paths[group], list(self.stages[group])
        gap = np.searchsorted(stages, np.arange(self.num_stages), side="left")
        counts = np.zeros((len(own.own), self.num_stages, 3))
        counts[:, :, 0] = own.forward_gaps[:, gap]
        counts[:, :, self.backward] = own.backward_gaps[:, gap][:, :, None]
        counts[:, stages] = own.own
        return counts

    def after(self, group: int) -> tuple[Floats, Floats]:
        """Return the changes of a group's paths that go on, after its last F of the first chunk, in a later group."""
        changes = []
        for later in range(group + 1, len(self.paths)):
            change = np.zeros((self.num_stages, 3))
            change[self.stages[later][0] :, 0] = -1.0
            change[:, self.backward] -= 1.0
            change[list(self.stages[later])] += self.paths[later].cool_down
            changes.append(change)
        if not changes:
            none = np.zeros((self.num_stages, 3))
            return none, none
        return np.mean(changes, axis=0), changes[-1]


def _best_weights(seconds: Floats) -> Floats:
    """Return weights of the rows, summing to 1, that make the least column's sum as large as they can."""
    from ortools.linear_solver import pywraplp

    solver = pywraplp.Solver.CreateSolver("GLOP")
    least = solver.NumVar(0.0, solver.infinity(), "")
    weights = [solver.NumVar(0.0, 1.0, "") for _ in seconds]
    solver.Add(sum(weights) == 1.0)
    for column in seconds.T.tolist():
        constraint = solver.Constraint(0.0, solver.infinity())
        constraint.SetCoefficient(least, -1.0)
        for weight, value in zip(weights, column, strict=True):
            constraint.SetCoefficient(weight, value)
    solver.Maximize(least)
    found = np.full(len(seconds), 1.0 / len(seconds))
    if solver.Solve() == pywraplp.Solver.OPTIMAL:  # else any weights will do
        found = np.maximum([weight.solution_value() for weight in weights], 0.0)
    return np.asarray(found / found.sum())

"""Schedules that are not straight, whose device groups have several stages or whose backwards are split: their bounds.

With p groups, c_l the seconds of layer l per microbatch, and tail_l what it adds to what its group does after its list
(gradients summed, optimizer), every group g with its layers L_g takes, whatever the order,

    (11)  step time >= head(g) + sum over l in L_g of (m * c_l + tail_l)      head(g) = F of the first g stages

where each stage has a layer at least, so that head(g) is at least the g smallest F. A step time U then leaves group g
room for (U - head(g)) / (m * c + tail) layers of a class, rounded down; where the groups together have no room for all
layers of the most laborious class, or for all layers' work, U is refuted. Activations are recomputed where groups hold
too much: with w(g) microbatches held of every chunk at some time (`held_of_all`), M bytes beside the states, a_l the
bytes that layer l keeps and r_l the seconds in which it is made again,

    (12)  seconds of recomputation >= (sum of a_l - sum over g of M(g) / w(g)) / max of a_l / r_l

over all groups, which adds to the work of (6). And (9) of `schedule_bounds` holds, which takes longest to work out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from planner.plan import Schedule
from planner.solver.incumbent import Incumbent
from planner.solver.looped import Looped
from planner.solver.problem import Setting
from planner.solver.problems import Problems
from planner.solver.schedule_bounds import schedule_factor
from planner.solver.tables import Floats, LayerTable

if TYPE_CHECKING:
    from planner.solver.settings import OpenDegrees

MOST_FACTOR_STAGES = 16  # more, and the factor of (9) takes longer than it saves
PRECISION = 1e-4
SHARE_STEP = 0.02  # shares are rounded down to this, so that settings with nearly the same have the same factor


@dataclass(slots=True)
class OpenLoops:
    """The schedules that are not straight, of given degrees and microbatches."""

    bound: float
    degrees: "OpenDegrees"
    schedules: Sequence[tuple[Schedule, int]]

    @property
    def label(self) -> str:
        """What progress shows."""
        return f"{self.degrees.label}, {self.degrees.pp_degree} groups"

    def advance(self, incumbent: Incumbent, tolerance: float) -> "list[OpenSchedule]":
        """Return each schedule, with a bound over all ways to shard and place it."""
        incumbent.budget.spend()
        found = [setting for _, setting in self.degrees.settings(incumbent, self.schedules[:1])]
        if not found:
            return []
        work = Work(incumbent.problems, found)
        return [
            OpenSchedule(bound, work, self.degrees, schedule, chunks)
            for schedule, chunks in self.schedules
            if (bound := max(self.bound, work.bound(schedule, chunks))) < float("inf")
        ]


@dataclass(slots=True)
class OpenSchedule:
    """One schedule of given degrees and microbatches."""

    bound: float
    work: "Work"
    degrees: "OpenDegrees"
    schedule: Schedule
    num_chunks: int
    has_factor: bool = False

    @property
    def label(self) -> str:
        """What progress shows."""
        return f"{self.schedule}, {self.degrees.pp_degree} x {self.num_chunks} stages"

    def advance(self, incumbent: Incumbent, tolerance: float) -> "Sequence[OpenSchedule | OpenLooped]":
        """Raise the bound by (9); return this where that is enough, else the settings."""
        incumbent.budget.spend()
        if not self.has_factor:
            self.has_factor = True
            self.bound = max(self.bound, self.work.factor_bound(self.schedule, self.num_chunks))
            return [self]
        settings = self.degrees.settings(incumbent, [(self.schedule, self.num_chunks)])
        return [OpenLooped(max(bound, self.bound), setting) for bound, setting in settings]


@dataclass(slots=True)
class OpenLooped:
    """One setting."""

    bound: float
    setting: Setting
    is_bounded: bool = False

    @property
    def label(self) -> str:
        """What progress shows."""
        return f"{self.setting.schedule}, {self.setting.pp_degree} x {self.setting.num_chunks} stages"

    def advance(self, incumbent: Incumbent, tolerance: float) -> "list[OpenLooped]":
        """Bound it by its own tables; then look for plans, and leave out what is not decided."""
        incumbent.budget.spend()
        if not self.is_bounded:
            self.is_bounded = True
            own = Work(incumbent.problems, [self.setting])
            self.bound = max(self.bound, own.bound(self.setting.schedule, self.setting.num_chunks))
            return [self] if self.bound < float("inf") else []
        looped = Looped(incumbent, self.setting)
        if not looped.search(tolerance):
            incumbent.left_out_s = min(incumbent.left_out_s, max(self.bound, looped.least_s))
            return []
        self.bound = max(self.bound, incumbent.limit_s(tolerance))
        return [self]


class Work:
    """What settings that differ in schedule, sharding, shards and placement do at least, all layers together."""

    def __init__(self, problems: Problems, settings: Sequence[Setting]) -> None:
        self.problems = problems
        self.pp, self.m = settings[0].pp_degree, settings[0].num_microbatches
        space, tp, rows = problems.space, settings[0].tp_degree, settings[0].microbatch_size
        every = tuple(dict.fromkeys(setting.shardings for setting in settings))
        at = dict.fromkeys(
            found
            for setting in settings
            for found in zip(space.stage_routes(*setting.degrees).tensor, problems.gpu_types(setting), strict=True)
        )
        tables = [problems.table(rows, tp, every, route, types) for route, types in at]
        self.table = tables[0] if len(tables) == 1 else LayerTable.least(tables)
        cluster = space.pricer.cluster
        self.room = float(max(cluster.gpus[name].memory for name in space.gpu_types) - cluster.memory_reserve)
        rules = [problems.rules(setting) for setting in settings]
        trainable = self.table.trainable.astype(float)
        total = trainable + self.table.frozen
        self.states = min(
            float(r.param_bytes(total[0, -1]) + r.grad_bytes(trainable[0, -1]) + r.optimizer_bytes(trainable[0, -1]))
            for r in rules
        )
        self.weight = np.diff(self.table.weight_sum)

    def bound(self, schedule: Schedule, chunks: int) -> float:
        """Return a lower bound by (6), (11) and (12); inf where nothing fits."""
        work = self.table.forward + self.table.backward
        extra = self._least_recompute_s(schedule, chunks)
        bound = self.m * (float(work.sum()) + extra) / self.pp
        return max(bound, self._room_bound(work)) if self.problems.chained else bound

    def factor_bound(self, schedule: Schedule, chunks: int) -> float:
        """Return a lower bound by (9); 0 where it is not worth its time, or does not hold."""
        table, pp = self.table, self.pp
        if not self.problems.chained or pp == 1 or pp * chunks > MOST_FACTOR_STAGES:
            return 0.0
        work = table.forward + table.backward
        busy = work > 0
        if not busy.any():
            return 0.0
        most = work[busy] + table.forward[busy]  # with recomputation, which is none of F and W
        forward, weight = (float((part[busy] / most).min()) for part in (table.forward, self.weight))
        inputs = float(((table.backward - self.weight)[busy] / work[busy]).min())
        shares = (_down(forward), _down(min(inputs, 1 - forward - weight)), _down(weight))
        return schedule_factor(schedule, pp, self.m, chunks, shares) * float(work.sum())

    def _room_bound(self, work: Floats) -> float:
        """Return the least step time that (11) does not refute."""
        layer_s = self.m * work
        heads = np.concatenate(([0.0], np.cumsum(np.sort(self.table.forward))))[: self.pp]
        classes = np.array([layer.layer_class for layer in self.problems.space.pricer.profile.layers])
        names, counts = np.unique(classes, return_counts=True)
        laborious = max(range(len(names)), key=lambda k: layer_s[classes == names[k]].sum())
        own = layer_s[classes == names[laborious]].min()

        def refuted(step_s: float) -> bool:
            room = np.maximum(step_s - heads, 0.0)
            places = np.floor(room / own + 1e-9).sum() if own > 0 else np.inf
            return bool(room.sum() < layer_s.sum() or places < counts[laborious])

        low, high = 0.0, float(heads[-1] + layer_s.sum()) * (1 + PRECISION)
        while high - low > PRECISION * high:
            middle = (low + high) / 2
            low, high = (middle, high) if refuted(middle) else (low, middle)
        return low

    def _least_recompute_s(self, schedule: Schedule, chunks: int) -> float:
        """Return (12)."""
        table = self.table
        held = [held_of_all(schedule, self.pp, self.m, chunks, group) for group in range(self.pp)]
        spare = sum(self.room / w for w in held) - self.states / max(held)
        need, ratio = float(table.activations.sum()) - spare, float(table.best_ratio.max())
        if need <= 0:
            return 0.0
        return need / ratio if ratio > 0 else float("inf")


def held_of_all(schedule: Schedule, p: int, m: int, chunks: int, group: int) -> int:
    """Return how many microbatches of each of its chunks a group holds together at some time, at least (m >= p)."""
    if m < p:
        return 1
    if schedule == "zero-bubble":
        return p
    if schedule == "zbv":
        return group + 1
    ahead = min(m * chunks, 2 * (p - 1 - group) + (chunks - 1) * p + 1)
    return max(1, p * (ahead // (p * chunks)) + max(0, ahead % (p * chunks) - (chunks - 1) * p))


def _down(share: float) -> float:
    return max(0.0, float(np.floor(share / SHARE_STEP)) * SHARE_STEP)

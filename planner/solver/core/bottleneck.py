"""The chain of stages whose slowest is the fastest, by dynamic programming over down-sets and devices used.

What a stage costs is asked of an oracle, so any price plugs in: the field's planners differ in little else.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Protocol

import numpy as np

from planner.solver.core.lattice import Floats

_BLOCK = 256  # columns of a block: what is compared fits a processor's cache
Devices = tuple[int, ...]  # how many of each kind of device


@dataclass(frozen=True)
class StageOption:
    """One way to run any stage: the devices it takes, and `times[i, j]` of the stage of what is in j and not in i.

    A time is infinite where the stage can't run so, or is none.
    """

    label: str
    devices: Devices
    times: Floats


class StageOracle(Protocol):
    """What stages cost."""

    @property
    def num_states(self) -> int:
        """The number of down-sets, the empty one and the whole graph included."""

    def options(self, used: Devices) -> Iterator[StageOption]:
        """Yield the ways to run a stage when `used` devices are taken up to and including it."""


@dataclass(frozen=True)
class Stage:
    """The nodes in down-set `stop` that are not in down-set `start`, run as `label` says."""

    start: int
    stop: int
    label: str
    devices: Devices
    time: float


@dataclass(frozen=True)
class Chain:
    """The stages of a plan in order, and the time of the slowest; no stages and infinity where there is no plan."""

    bottleneck: float
    stages: tuple[Stage, ...]


def best_chain(oracle: StageOracle, limits: Devices, *, all_devices: bool) -> Chain:
    """Return the chain of stages with the least bottleneck on at most, or with `all_devices` exactly, `limits` devices.

    F[u][j] = min over options o and down-sets i of max(F[u - devices(o)][i], time(o, i, j)), F[0][empty] = 0.
    """
    count = oracle.num_states
    best: dict[Devices, Floats] = {}
    start = np.full(count, np.inf)
    start[0] = 0.0
    zero = (0,) * len(limits)
    best[zero] = start
    for used in product(*(range(limit + 1) for limit in limits)):
        if used == zero:
            continue
        reached = np.full(count, np.inf)
        for option in oracle.options(used):
            before = best.get(tuple(a - b for a, b in zip(used, option.devices, strict=True)))
            if before is not None:
                np.minimum(reached, _extended(before, option.times, last_only=used == limits), out=reached)
        best[used] = reached
    ends = [limits] if all_devices else list(best)
    end = min(ends, key=lambda used: (best[used][-1], used))
    return _followed(oracle, best, end)


def _extended(before: Floats, times: Floats, *, last_only: bool) -> Floats:
    """Return, for each down-set, the least bottleneck of a chain to it by one more stage; or for the last one alone."""
    count = len(before)
    reached = np.full(count, np.inf)
    if last_only:
        reached[-1] = np.maximum(before, times[:, -1]).min()
        return reached
    for first in range(0, count, _BLOCK):  # stages only lead to larger down-sets, which come later
        columns = slice(first, min(first + _BLOCK, count))
        reached[columns] = np.maximum(before[: columns.stop, None], times[: columns.stop, columns]).min(axis=0)
    return reached


def _followed(oracle: StageOracle, best: dict[Devices, Floats], end: Devices) -> Chain:
    """Return the chain by which a value came about."""
    bottleneck = float(best[end][-1])
    if not np.isfinite(bottleneck):
        return Chain(bottleneck, ())
    stages: list[Stage] = []
    state, used = oracle.num_states - 1, end
    while state:
        for option in oracle.options(used):
            before = tuple(a - b for a, b in zip(used, option.devices, strict=True))
            if before not in best:
                continue
            values = np.maximum(best[before], option.times[:, state])
            previous = int(values.argmin())
            if values[previous] <= bottleneck:
                stages.append(
                    Stage(previous, state, option.label, option.devices, float(option.times[previous, state]))
                )
                state, used = previous, before
                break
        else:
            raise AssertionError("a chain that was found can't be followed")
    return Chain(bottleneck, tuple(reversed(stages)))

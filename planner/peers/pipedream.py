"""PipeDream's profiles (graph.txt) and its objective: the slowest stage, each with replicas of its own.

Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, section 3.1.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from planner.errors import UsageError
from planner.solver.core.bottleneck import Devices, StageOption, best_chain
from planner.solver.core.lattice import Floats, Lattice, down_sets

Ints = NDArray[np.int64]
MAX_STATES = 8_000
_NUMBERS = re.compile(r"(\w+)=(\[[^\]]*\]|[^,]*)")


@dataclass(frozen=True)
class PipeDreamNode:
    """One layer: seconds of forward and of backward for a minibatch, bytes of its output and of its weights."""

    key: str
    name: str
    forward_s: float
    backward_s: float
    activation_bytes: float
    parameter_bytes: float

    @property
    def time_s(self) -> float:
        """Forward and backward together."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class PipeDreamGraph:
    """A profile: nodes, and by node those that read its output."""

    nodes: tuple[PipeDreamNode, ...]
    successors: tuple[tuple[int, ...], ...]


def read_graph(path: Path) -> PipeDreamGraph:
    """Read a graph.txt, without the nodes that their optimizer removes: inputs, and indexing at the end."""
    try:
        return _parse(path.read_text(encoding="utf-8").splitlines(), path)
    except (ValueError, KeyError, IndexError) as error:
        raise UsageError(f"{path} is no graph.txt of PipeDream: {error!r}", hint="give one of their profiles") from None


def _parse(lines: Sequence[str], path: Path) -> PipeDreamGraph:
    nodes: dict[str, PipeDreamNode] = {}
    edges: list[tuple[str, str]] = []
    for number, line in enumerate(lines, 1):
        parts = line.strip().split(" -- ")
        if not line.strip():
            continue
        if line.startswith("\t"):
            edges.append((parts[0], parts[1]))
            continue
        if len(parts) < 3:
            raise UsageError(f"{path}:{number}: {line[:60]!r} is neither a node nor an edge", hint="give a graph.txt")
        try:
            found = {key: _number(text) for key, text in _NUMBERS.findall(parts[2])}
        except ValueError:
            raise UsageError(
                f"{path}:{number}: a value of {parts[0]} is no number: {parts[2][:80]!r}",
                hint="write numbers, or a list of them like [1.0; 2.0]",
            ) from None
        nodes[parts[0]] = PipeDreamNode(
            key=parts[0],
            name=parts[1],
            forward_s=found["forward_compute_time"] / 1000.0,
            backward_s=found["backward_compute_time"] / 1000.0,
            activation_bytes=found["activation_size"],
            parameter_bytes=found["parameter_size"],
        )
    for edge in edges:
        if missing := next((key for key in edge if key not in nodes), None):
            raise UsageError(
                f"{path}: the edge {edge[0]} -- {edge[1]} names {missing}, which is no node of the file",
                hint="give the whole file: it may have been cut off",
            )
    sources = set(nodes) - {target for _, target in edges}
    sinks = set(nodes) - {source for source, _ in edges}
    removed = {key for key in sources if nodes[key].name.startswith("Input")}
    removed |= {key for key in sinks if nodes[key].name.startswith("__getitem__")}
    kept = [key for key in nodes if key not in removed]
    index = {key: position for position, key in enumerate(kept)}
    successors: list[list[int]] = [[] for _ in kept]
    for source, target in edges:
        if source in index and target in index:
            successors[index[source]].append(index[target])
    return PipeDreamGraph(tuple(nodes[key] for key in kept), tuple(map(tuple, successors)))


def _number(text: str) -> float:
    return sum(map(float, text.strip("[] ").split(";")))


@dataclass(frozen=True)
class PipeDreamSettings:
    """What their optimizer is asked: machines on each level, bytes/s between them, and its flags."""

    num_machines: tuple[int, ...]
    bandwidths: tuple[float, ...]
    boundaries_cost: bool = True  # --activation_compression_ratio 1
    straight: bool = False
    fewer_machines: bool = False
    memory_bytes: float = math.inf


def _crossing(graph: PipeDreamGraph, lattice: Lattice) -> Floats:
    """Return the bytes that leave each down-set, as they count them: outputs of its augmented antichain.

    Those are its maximal nodes, and each node before one of these, a, that is also read by a node which is neither a
    nor before a: even where that reader is in the down-set too, so that parallel branches pay for what they both read.
    """
    count, members = len(graph.nodes), lattice.members
    before = np.zeros((count, count), dtype=bool)  # before[a, p]: p is an ancestor of a
    edges = np.zeros((count, count), dtype=bool)
    for node, after in enumerate(graph.successors):
        edges[node, list(after)] = True
    for node in _topological(graph.successors):
        before[edges[node]] |= before[node]
        before[edges[node], node] = True
    extended = before | np.eye(count, dtype=bool)
    read_beside = before & ((~extended).astype(np.float32) @ edges.T.astype(np.float32) > 0)
    small = members.astype(np.float32)
    maximal = members & (small @ edges.T.astype(np.float32) == 0)
    sent = maximal | (maximal.astype(np.float32) @ read_beside.astype(np.float32) > 0)
    return np.asarray(sent @ np.array([node.activation_bytes for node in graph.nodes]))


def _topological(successors: Sequence[Sequence[int]]) -> Iterator[int]:
    """Yield the nodes, each after those that it reads."""
    missing = [0] * len(successors)
    for after in successors:
        for node in after:
            missing[node] += 1
    ready = [node for node, count in enumerate(missing) if not count]
    while ready:
        node = ready.pop()
        yield node
        for other in successors[node]:
            missing[other] -= 1
            if not missing[other]:
                ready.append(other)


@dataclass(frozen=True)
class PipeDreamOracle:
    """A stage of r machines: max((C + 4 (r - 1) W / (b r)) / r, in, out), in and out 2 act / (b r).

    `compute` has the seconds of every stage, the other arrays belong to `states`, numbers of down-sets of the whole
    graph. The first stage pays no boundary, the whole graph's last none behind it, and what the first synchronises is
    shared by the machines `within` each.
    """

    settings: PipeDreamSettings
    num_machines: int
    bandwidth: float
    within: int
    states: Ints
    compute: Floats
    parameters: Floats
    activations: Floats
    entering: Floats
    leaving: Floats

    @property
    def num_states(self) -> int:
        """The number of down-sets."""
        return len(self.states)

    def interval(self, start: int, stop: int) -> "PipeDreamOracle":
        """Return the oracle of the stages between two down-sets, by their places here."""
        between = np.isfinite(self.compute[start]) & np.isfinite(self.compute[:, stop])
        places = np.array([start, *np.flatnonzero(between), stop])
        arrays = {name: getattr(self, name)[places] for name in ("parameters", "activations", "entering", "leaving")}
        return replace(self, states=self.states[places], compute=self.compute[np.ix_(places, places)], **arrays)

    def options(self, used: Devices) -> Iterator[StageOption]:
        """Yield the replica counts of a stage that ends at `used` machines."""
        for count in [1] if self.settings.straight else range(1, used[0] + 1):
            yield StageOption(f"x{count}", (count,), self._fitting(self._times[count], used[0], count))

    def first_stage(self, count: int) -> Floats:
        """Return the seconds of every stage as the first one of a chain, on `count` machines."""
        if self.settings.straight and count > 1:
            return np.full_like(self.compute, np.inf)
        return self._fitting(self._with_sync(count, self.within), count, count)

    def _with_sync(self, count: int, within: int) -> Floats:
        weights = self.parameters[None, :] - self.parameters[:, None]
        return np.asarray((self.compute + 4 * (count - 1) * weights / (self.bandwidth * count) / within) / count)

    def _fitting(self, times: Floats, used: int, count: int) -> Floats:
        """Return times, infinite where a stage that ends at `used` machines stashes more than fits."""
        if math.isinf(self.settings.memory_bytes):
            return times
        held = self.activations + self.parameters
        stashed = math.ceil((self.num_machines - used) / count) * (held[None, :] - held[:, None])
        return np.where(stashed <= self.settings.memory_bytes, times, np.inf)

    @cached_property
    def _times(self) -> dict[int, Floats]:
        found: dict[int, Floats] = {}
        for count in range(1, (1 if self.settings.straight else self.num_machines) + 1):
            times = self._with_sync(count, 1)
            if self.settings.boundaries_cost:
                entering, leaving = (2.0 * size / (self.bandwidth * count) for size in (self.entering, self.leaving))
                np.maximum(times, np.maximum(entering[:, None], leaving[None, :]), out=times)
                times[~np.isfinite(self.compute)] = np.inf
            times[0] = self._with_sync(count, self.within)[0]
            found[count] = times
        return found


@dataclass(frozen=True)
class PipeDreamStage:
    """Nodes on `replicas` machines of a level; on an outer level, each runs the stages `inner` of the one below."""

    nodes: frozenset[int]
    replicas: int
    inner: tuple["PipeDreamStage", ...] = ()


@dataclass(frozen=True)
class PipeDreamPlan:
    """The stages of a plan, and the seconds of a minibatch in the slowest; no stages where nothing fits."""

    bottleneck_s: float
    stages: tuple[PipeDreamStage, ...]


def solve_pipedream(graph: PipeDreamGraph, settings: PipeDreamSettings) -> PipeDreamPlan:
    """Return the best plan by PipeDream's objective; on two levels, the outer one divides what the inner one makes."""
    lattice = down_sets(graph.successors, limit=MAX_STATES)
    times = lattice.sums([node.time_s for node in graph.nodes])
    compute = np.where(lattice.inside, times[None, :] - times[:, None], np.inf)
    crossing = _crossing(graph, lattice)
    leaving = crossing.copy()
    leaving[-1] = 0.0
    within = 1
    oracles: list[PipeDreamOracle] = []
    for machines, bandwidth in zip(settings.num_machines, settings.bandwidths, strict=True):
        if oracles:
            compute = _all_intervals(oracles[-1])
        oracle = PipeDreamOracle(
            settings=settings,
            num_machines=machines,
            bandwidth=bandwidth,
            within=within,
            states=np.arange(lattice.num_states),
            compute=compute,
            parameters=lattice.sums([node.parameter_bytes for node in graph.nodes]),
            activations=lattice.sums([node.activation_bytes for node in graph.nodes]),
            entering=crossing,
            leaving=leaving,
        )
        oracles.append(oracle)
        within = machines
    return _plan(lattice, oracles[:-1], oracles[-1])


def _plan(lattice: Lattice, inner: list[PipeDreamOracle], oracle: PipeDreamOracle) -> PipeDreamPlan:
    """Return the best plan of an oracle, each stage with its own plan on the levels below."""
    chain = best_chain(oracle, (oracle.num_machines,), all_devices=not oracle.settings.fewer_machines)
    stages = []
    for stage in chain.stages:
        start, stop = int(oracle.states[stage.start]), int(oracle.states[stage.stop])
        nodes = np.flatnonzero(lattice.members[stop] & ~lattice.members[start])
        below = _plan(lattice, inner[:-1], inner[-1].interval(start, stop)).stages if inner else ()
        stages.append(PipeDreamStage(frozenset(map(int, nodes)), stage.devices[0], below))
    return PipeDreamPlan(chain.bottleneck, tuple(stages))


def _all_intervals(oracle: PipeDreamOracle) -> Floats:
    """Return the least bottleneck of every interval of states on all machines of a level, or at most those."""
    machines = oracle.num_machines
    best = {used: oracle.first_stage(used) for used in range(1, machines + 1)}
    for used in range(2, machines + 1):
        for option in oracle.options((used,)):
            if (count := option.devices[0]) < used:
                best[used] = np.minimum(best[used], _min_max(best[used - count], option.times))
    return np.min(list(best.values()), axis=0) if oracle.settings.fewer_machines else best[machines]


def _min_max(left: Floats, right: Floats) -> Floats:
    """Return the product of two upper triangular matrices in which max takes the place of times, and min of plus."""
    count = len(left)
    product = np.full_like(left, np.inf)
    for middle in range(1, count - 1):
        rows, columns = left[:middle, middle], right[middle, middle + 1 :]
        part = product[:middle, middle + 1 :]
        np.minimum(part, np.maximum(rows[:, None], columns[None, :]), out=part)
    return product

"""A second price of plans, from first principles: every row, element and rank counted one by one. Slow, for small ones.

It shares no code with `planner.cost`: profiles, clusters and plans are read as data. Layers are priced at microbatch
sizes 1, 2 and 4, and at 3 halfway between; 1F1B and GPipe.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from planner.cluster import Cluster
from planner.model_profile import LayerCost, ModelProfile
from planner.plan import Plan, Stage

MASTER = {"fp32": 4, "bf16-mixed": 4, "bf16": 2}
WORKING = {"fp32": 4, "bf16-mixed": 2, "bf16": 2}
STATES = {"adamw": 2, "adam": 2, "sgd-momentum": 1, "sgd": 0}


@dataclass(frozen=True)
class Price:
    """What is compared."""

    step_s: float
    peak_bytes: tuple[int, ...]


class Repricing:
    """The price of one plan."""

    def __init__(self, plan: Plan, profile: ModelProfile, cluster: Cluster) -> None:
        self.plan, self.profile, self.cluster = plan, profile, cluster
        self.place: dict[int, tuple[int, str]] = {}
        node = 0
        for group in cluster.node_groups:
            for _ in range(group.count):
                for _ in range(group.gpus_per_node):
                    self.place[len(self.place)] = (node, group.gpu)
                node += 1
        names = [layer.name for layer in profile.layers]
        self.layers_of = [[names.index(name) for name in stage.layers] for stage in plan.stages]
        self.stage_of = {layer: s for s, layers in enumerate(self.layers_of) for layer in layers}

    def price(self) -> Price:
        """Return step time and the memory of every stage's GPUs."""
        return Price(self.step_s(), tuple(self.peak_bytes(s) for s in range(len(self.plan.stages))))

    # --- links -------------------------------------------------------------------------------------------------------

    def ring(self, ranks: Iterable[int]) -> tuple[float, float]:
        """Bytes per second and seconds per message of a ring: between nodes, all ranks of a node bring their share."""
        nodes = Counter(self.place[rank][0] for rank in ranks)
        inside, outside = self.cluster.intra_node, self.cluster.inter_node
        if len(nodes) == 1:
            return inside.bandwidth, inside.latency
        shared = min(nodes.values()) * outside.bandwidth
        return max(outside.bandwidth, min(shared, inside.bandwidth)), outside.latency

    def slowest_ring(self, groups: list[list[int]]) -> tuple[float, float]:
        rings = [self.ring(group) for group in groups]
        return min(bandwidth for bandwidth, _ in rings), max(latency for _, latency in rings)

    def pass_around(self, num_bytes: float, groups: list[list[int]]) -> float:
        """Seconds in which every rank of a ring has seen n - 1 of n parts."""
        n = len(groups[0])
        bandwidth, latency = self.slowest_ring(groups)
        return (n - 1) * (latency + num_bytes / n / bandwidth) if n > 1 and num_bytes else 0.0

    def links(self, pairs: Iterable[tuple[int, int]]) -> tuple[float, float]:
        """The slowest bandwidth and latency of messages between pairs of ranks."""
        found = [
            self.cluster.intra_node if self.place[a][0] == self.place[b][0] else self.cluster.inter_node
            for a, b in pairs
        ]
        return min(link.bandwidth for link in found), max(link.latency for link in found)

    # --- layers ------------------------------------------------------------------------------------------------------

    def cost_on(self, layer: int, stage: Stage, gpu: str, field: str) -> float:
        """A number of a layer on a GPU type."""
        layer_class = self.profile.layer_class(layer)
        way = stage.shardings.get(layer_class.name, "replicated")
        degree = stage.tp_degree if way != "replicated" else 1
        costs: Iterable[LayerCost] = layer_class.costs_by_gpu.get(gpu, layer_class.costs)
        at = {c.microbatch_size: getattr(c, field) for c in costs if (c.sharding, c.tp_degree) == (way, degree)}
        rows = stage.microbatch_size
        return at[rows] if rows in at else (at[rows - 1] + at[rows + 1]) / 2

    def slow(self, layer: int, stage: Stage, *fields: str) -> float:
        """The sum of numbers of a layer on that of the stage's GPUs where it is largest."""
        types = {self.place[rank][1] for rank in stage.gpus}
        return max(sum(self.cost_on(layer, stage, gpu, field) for field in fields) for gpu in types)

    def size(self, layer: int, stage: Stage, field: str) -> int:
        return round(self.slow(layer, stage, field))

    def collectives_s(self, layer: int, stage: Stage, phase: str) -> float:
        layer_class = self.profile.layer_class(layer)
        way = layer_class.sharding(stage.shardings.get(layer_class.name, "replicated"), stage.tp_degree)
        t = stage.tp_degree
        groups = [list(stage.gpus[i : i + t]) for i in range(0, len(stage.gpus), t)]
        return sum(
            2 * self.pass_around(call.bytes_per_row * stage.microbatch_size + call.fixed_bytes, groups)
            for call in (way.collectives if way else ())
            if call.phase == phase and call.kind == "all_reduce"
        )

    def action_s(self, s: int) -> tuple[float, float]:
        """Seconds of a forward and a backward of a stage."""
        stage, forward, backward = self.plan.stages[s], 0.0, 0.0
        for layer in self.layers_of[s]:
            once = self.slow(layer, stage, "forward_time_s") + self.collectives_s(layer, stage, "forward")
            forward += once
            backward += self.slow(layer, stage, "backward_input_time_s", "backward_weight_time_s")
            backward += self.collectives_s(layer, stage, "backward")
            if self.profile.layers[layer].name in stage.recompute:
                backward += once
        return forward, backward

    # --- rows that cross ---------------------------------------------------------------------------------------------

    def crossing(self, a: int, b: int, *, gradient: bool) -> list[Any]:
        return [
            edge
            for edge in self.profile.edges
            if self.stage_of[edge.producer] == a
            and any(self.stage_of[consumer] == b for consumer in edge.consumers)
            and (edge.needs_grad or not gradient)
        ]

    def message(self, a: int, b: int, *, gradient: bool) -> tuple[float, float] | None:
        """Seconds that the busiest link is busy, and latency, for values from a to b (gradients: from b to a)."""
        edges = self.crossing(a, b, gradient=gradient)
        if not edges:
            return None
        sender, receiver = (self.plan.stages[s] for s in ((b, a) if gradient else (a, b)))
        reader = self.plan.stages[b]
        rows = sender.microbatch_size * sender.dp_degree
        turn: Counter[int] = Counter()
        chosen: dict[tuple[int, int, int], int] = {}
        sent: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)  # (row, receiver) by sender
        received: defaultdict[int, set[int]] = defaultdict(set)
        fixed_sent: Counter[int] = Counter()
        fixed_received: Counter[int] = Counter()
        for source in range(sender.dp_degree):
            for replica in range(receiver.dp_degree):
                own = [
                    row
                    for row in range(rows)
                    if row // sender.microbatch_size == source and row // receiver.microbatch_size == replica
                ]
                for index in range(receiver.tp_degree) if own else ():
                    who = turn[source] % sender.tp_degree
                    turn[source] += 1
                    chosen[source, replica, index] = who
                    giver = sender.gpus[source * sender.tp_degree + who]
                    taker = receiver.gpus[replica * receiver.tp_degree + index]
                    sent[giver] |= {(row, taker) for row in own}
                    received[taker] |= set(own)
                    if own[0] % reader.microbatch_size == 0:  # the first rows of a replica of the later stage
                        fixed_sent[giver] += 1
                        fixed_received[taker] += 1
        loads = [(len(found), fixed_sent[rank]) for rank, found in sent.items()]
        loads += [(len(found), fixed_received[rank]) for rank, found in received.items()]
        busiest = max(
            sum(round(edge.bytes_per_row * count) + times * edge.fixed_bytes for edge in edges)
            for count, times in loads
        )
        bandwidth, latency = self.links((giver, taker) for giver, found in sent.items() for _, taker in found)
        return busiest / bandwidth, latency

    # --- states ------------------------------------------------------------------------------------------------------

    def storages(self) -> list[tuple[list[tuple[int, str]], bool, int]]:
        """Every parameter: who reads it by which name, whether it is trained, and its elements."""
        found: dict[str, list[tuple[int, str]]] = {}
        for index, layer in enumerate(self.profile.layers):
            for name in layer.parameters:
                found.setdefault(self.profile.parameters[name].tied_to or name, []).append((index, name))
        result = []
        for first, readers in found.items():
            parameter = self.profile.parameters[first]
            elements = 1
            for size in parameter.shape:
                elements *= size
            result.append((readers, parameter.trainable, elements))
        return result

    def is_divided(self, layer: int, name: str, stage: Stage) -> bool:
        layer_class = self.profile.layer_class(layer)
        way = layer_class.sharding(stage.shardings.get(layer_class.name, "replicated"), stage.tp_degree)
        return way is not None and name.removeprefix(f"{self.profile.layers[layer].module}.") in way.parameters

    def elements(self, s: int) -> int:
        """Elements of trained parameters that one GPU of a stage computes with; drawn profiles freeze none."""
        stage, total = self.plan.stages[s], 0
        for readers, is_trained, elements in self.storages():
            inside = [(layer, name) for layer, name in readers if self.stage_of[layer] == s]
            if inside and is_trained:
                total += elements // (stage.tp_degree if self.is_divided(*inside[0], stage) else 1)
        return total

    def shards(self, stage: Stage) -> int:
        whole = stage.dp_degree if self.plan.data_parallel == "sharded" else 1
        return whole if stage.shard_degree is None else stage.shard_degree

    def once_s(self, s: int) -> tuple[float, float, float]:
        """Seconds before the first forward, of reducing gradients, and of the optimizer."""
        stage, count = self.plan.stages[s], self.elements(s)
        t, d, n = stage.tp_degree, stage.dp_degree, self.shards(stage)
        master, working = MASTER[self.plan.precision], WORKING[self.plan.precision]
        gpus = [self.cluster.gpus[self.place[rank][1]] for rank in stage.gpus]
        memory = min(gpu.memory_bandwidth * gpu.memory_efficiency for gpu in gpus)
        replicas = [[stage.gpus[i * t + index] for i in range(d)] for index in range(t)]
        within = [ranks[i : i + n] for ranks in replicas for i in range(0, d, n)]
        across = [[ranks[i] for i in range(shard, d, n)] for ranks in replicas for shard in range(n)]
        copies = d > 1 or self.plan.precision == "bf16-mixed"
        before = count * (master + working) / n / memory if copies else 0.0
        before += self.pass_around(count * working, within)
        reduce = self.pass_around(count * master, within) + 2 * self.pass_around(count * master / n, across)
        optimizer = (3 + 2 * STATES[self.plan.optimizer]) * master * count / n / memory
        return before, reduce, optimizer

    def holders(self, layers: Iterable[int]) -> list[int]:
        """The stages that hold what layers read."""
        return sorted({self.stage_of[layer] for layer in layers})

    def ties(self) -> list[tuple[list[int], float]]:
        """Stages that share a parameter, and seconds of summing its gradient between them: every element followed."""
        found = []
        for readers, is_trained, elements in self.storages():
            stages = self.holders([layer for layer, _ in readers])
            if len(stages) == 1 or not is_trained:
                continue
            held: list[dict[int, tuple[int, int]]] = []  # by stage: what each position holds, in parts of 48
            layouts = set()
            for s in stages:
                stage = self.plan.stages[s]
                layer, name = next((layer, name) for layer, name in readers if self.stage_of[layer] == s)
                divided, n = self.is_divided(layer, name, stage), self.shards(stage)
                layouts.add((stage.tp_degree, stage.dp_degree, n, divided))
                pieces = n * (stage.tp_degree if divided else 1)
                own = {}
                for position in range(len(stage.gpus)):
                    replica, index = divmod(position, stage.tp_degree)
                    piece = (index * n if divided else 0) + replica % n
                    own[position] = (piece * 48 // pieces, (piece + 1) * 48 // pieces)
                held.append(own)
            width = MASTER[self.plan.precision]
            if len(layouts) == 1:
                tp, _, n, divided = layouts.pop()
                part = elements // (tp if divided else 1) * width / n
                groups = [list(ranks) for ranks in zip(*(self.plan.stages[s].gpus for s in stages), strict=True)]
                found.append((stages, 2 * self.pass_around(part, groups)))
                continue
            sent: Counter[int] = Counter()
            received: Counter[int] = Counter()
            pairs = set()
            for a, source in zip(stages, held, strict=True):
                for b, target in zip(stages, held, strict=True):
                    if a == b:
                        continue
                    for start, stop in sorted(set(source.values())):
                        holders = [position for position, own in source.items() if own == (start, stop)]
                        takers = sorted(
                            (own[0], position)
                            for position, own in target.items()
                            if max(own[0], start) < min(own[1], stop)
                        )
                        for turn, (_, position) in enumerate(takers):
                            giver = self.plan.stages[a].gpus[holders[turn % len(holders)]]
                            taker = self.plan.stages[b].gpus[position]
                            parts = min(target[position][1], stop) - max(target[position][0], start)
                            sent[giver] += parts
                            received[taker] += parts
                            pairs.add((giver, taker))
            bandwidth, latency = self.links(pairs)
            most = max(*sent.values(), *received.values())
            found.append((stages, latency + most * elements * width / 48 / bandwidth))
        return found

    # --- the step ----------------------------------------------------------------------------------------------------

    def order(self, s: int) -> list[tuple[str, int]]:
        m, p = self.plan.num_microbatches, len(self.plan.stages)
        ahead = m if self.plan.schedule == "gpipe" else min(m, p - s)
        forwards, backwards = [("F", i) for i in range(m)], [("B", i) for i in range(m)]
        listed = forwards[:ahead]
        for i in range(m):
            listed.append(backwards[i])
            listed += forwards[ahead + i : ahead + i + 1]
        return listed

    def step_s(self) -> float:
        stages = range(len(self.plan.stages))
        seconds = [self.action_s(s) for s in stages]
        once = [self.once_s(s) for s in stages]
        orders = [self.order(s) for s in stages]
        values = {(a, b): self.message(a, b, gradient=False) for a in stages for b in stages if a < b}
        gradients = {(a, b): self.message(a, b, gradient=True) for a in stages for b in stages if a < b}

        @cache
        def end(s: int, kind: str, i: int) -> float:
            at = orders[s].index((kind, i))
            start = end(s, *orders[s][at - 1]) if at else once[s][0]
            if kind == "F":
                came = [sent("F", a, s, i) for a in stages if values.get((a, s))]
            else:
                came = [sent("B", s, b, i) for b in stages if gradients.get((s, b))]
            return max(start, *came, 0.0) + seconds[s][kind == "B"]

        def leaves(kind: str, a: int, b: int, i: int) -> float:
            found = (values if kind == "F" else gradients)[a, b]
            assert found is not None
            before = leaves(kind, a, b, i - 1) if i else 0.0
            return max(before, end(a if kind == "F" else b, kind, i)) + found[0]

        def sent(kind: str, a: int, b: int, i: int) -> float:
            found = (values if kind == "F" else gradients)[a, b]
            assert found is not None
            return leaves(kind, a, b, i) + found[1]

        done = [end(s, *orders[s][-1]) + once[s][1] for s in stages]
        for sharing, tie_s in self.ties():
            together = max(done[s] for s in sharing) + tie_s
            for s in sharing:
                done[s] = together
        return max(done[s] + once[s][2] for s in stages)

    # --- memory ------------------------------------------------------------------------------------------------------

    def states_bytes(self, s: int) -> int:
        stage, count = self.plan.stages[s], self.elements(s)
        n, master = self.shards(stage), MASTER[self.plan.precision]
        copies = stage.dp_degree > 1 or self.plan.precision == "bf16-mixed"
        states = -(-count * master // n) + (count * WORKING[self.plan.precision] if copies else 0)
        states += count * master + (-(-count * master // n) if n > 1 else 0)
        return states + -(-count * master * STATES[self.plan.optimizer] // n)

    def apart(self, a: int, b: int) -> bool:
        """Whether two stages are on different GPUs."""
        return a != b

    def buffer_bytes(self, s: int) -> int:
        received = received_grad = sent = sent_grad = 0
        for edge in self.profile.edges:
            size = edge.num_bytes(self.plan.stages[s].microbatch_size)
            start = self.stage_of[edge.producer]
            ends = [self.stage_of[consumer] for consumer in edge.consumers]
            if start < s and s in ends and self.apart(start, s):
                received += size
                received_grad += size if edge.needs_grad else 0
            if start == s and any(end > s and self.apart(s, end) for end in ends):
                sent += size
                sent_grad += size if edge.needs_grad else 0
        return received + sent + 2 * sent_grad + received_grad

    def remade(self, s: int) -> set[int]:
        names = self.plan.stages[s].recompute
        return {layer for layer in self.layers_of[s] if self.profile.layers[layer].name in names}

    def kept_bytes(self, s: int, remade: set[int]) -> int:
        stage, layers = self.plan.stages[s], self.layers_of[s]
        rows = stage.microbatch_size
        received = sum(
            edge.num_bytes(rows)
            for edge in self.profile.edges
            if self.stage_of[edge.producer] < s and s in {self.stage_of[consumer] for consumer in edge.consumers}
        )
        kept = max(received, 0 if layers[0] in remade else self.size(layers[0], stage, "saved_input_bytes"))
        for layer in layers:
            kept += 0 if layer in remade else self.size(layer, stage, "activation_bytes")
            if layer > layers[0]:
                read = sum(edge.num_bytes(rows) for edge in self.profile.edges if layer in edge.consumers)
                left = 0 if layer - 1 in remade else self.size(layer - 1, stage, "saved_output_bytes")
                kept += max(left, read if layer in remade else self.size(layer, stage, "saved_input_bytes"))
        return kept + (0 if layers[-1] in remade else self.size(layers[-1], stage, "saved_output_bytes"))

    def transient_bytes(self, s: int, remade: set[int]) -> int:
        stage = self.plan.stages[s]
        return max(
            self.size(layer, stage, "transient_bytes")
            + (self.size(layer, stage, "activation_bytes") if layer in remade else 0)
            for layer in self.layers_of[s]
        )

    def bucket_bytes(self, s: int) -> int:
        stage = self.plan.stages[s]
        largest = max(int(self.slow(layer, stage, "trainable_param_count")) for layer in self.layers_of[s])
        return largest * MASTER[self.plan.precision] if stage.dp_degree > 1 else 0

    def peak_bytes(self, s: int) -> int:
        m, p, remade = self.plan.num_microbatches, len(self.plan.stages), self.remade(s)
        kept = self.kept_bytes(s, remade) * (m if self.plan.schedule == "gpipe" else min(m, p - s))
        held = self.states_bytes(s) + kept + self.transient_bytes(s, remade)
        return held + self.buffer_bytes(s) + self.bucket_bytes(s) + self.cluster.memory_reserve

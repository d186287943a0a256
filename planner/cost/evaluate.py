"""`evaluate`: the only place where a plan is priced."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from planner.cluster import Cluster, Gpu
from planner.cost.checks import check_plan
from planner.cost.communication import Route
from planner.cost.gpu_types import GpuCosts, slowest_numbers
from planner.cost.layers import REPLICATED, LayerNumbers, layer_numbers, parameter_sharding
from planner.cost.memory import input_bytes, stage_values
from planner.cost.messages import stage_messages
from planner.cost.parameters import ParameterCounts
from planner.cost.places import DataRoutes, Places
from planner.cost.stage import group_memory, stage_bytes, stage_elements, stage_times
from planner.cost.states import COMPUTE_DTYPE, StateRules, memory_bytes_per_s
from planner.cost.step import Event, PricedStages, all_events, finish_step, play_stages
from planner.cost.ties import tied_sums
from planner.errors import UsageError
from planner.graph import shared_storages
from planner.model_profile import ModelProfile
from planner.orders import profile_of_plan
from planner.plan import SPLIT_SCHEDULES, Plan, Stage, coverage_problem
from planner.prediction import MemoryUse, Prediction, StagePrediction
from planner.schedule import group_actions, held_at_once


class Pricer:
    """Prices plans for one profile on one cluster; keeps what layers and routes cost, which plans share."""

    def __init__(self, profile: ModelProfile, cluster: Cluster) -> None:
        self.profile = profile
        self.cluster = cluster
        self.places = Places(cluster)
        self.shared = shared_storages(profile)
        self.index_of = {layer.name: index for index, layer in enumerate(profile.layers)}
        self._classes = {layer_class.name: layer_class for layer_class in profile.layer_classes}
        self._gpu_costs = GpuCosts(profile, cluster)
        self._numbers: dict[tuple[str, int, int, str, Route, str], LayerNumbers] = {}
        self._inputs: dict[int, tuple[int, ...]] = {}
        self.parameters = ParameterCounts(profile, self.shared)
        read = {(edge.producer, consumer) for edge in profile.edges for consumer in edge.consumers}
        self._apart = {layer for layer in range(1, len(profile.layers)) if (layer - 1, layer) not in read}
        self._orders: dict[tuple[str, ...], Pricer] = {}

    def numbers(
        self, class_name: str, rows: int, tp_degree: int, sharding: str, route: Route, gpu: str | None = None
    ) -> LayerNumbers:
        """Return what a layer of that class costs on a GPU type, by default the cluster's first."""
        gpu = gpu or self.cluster.node_groups[0].gpu
        key = (class_name, rows, tp_degree, sharding, route, gpu)
        if key not in self._numbers:
            layer_class = self._classes[class_name]
            known = self._gpu_costs.costs(layer_class, gpu)
            found = layer_numbers(self.profile, layer_class, rows, tp_degree, sharding, route, known)
            speed = self.cluster.speed_fraction
            self._numbers[key] = replace(
                found,
                forward_s=found.forward_s / speed,
                backward_s=found.backward_s / speed,
                backward_weight_s=found.backward_weight_s / speed,
            )
        return self._numbers[key]

    def layer_table(
        self, rows: int, tp_degree: int, shardings: Mapping[str, str], route: Route, gpus: Sequence[str] = ()
    ) -> tuple[LayerNumbers, ...]:
        """Return what every layer costs; `shardings` maps classes to names, others are replicated.

        `gpus` are the types of the GPUs that work in step, by default the cluster's first: the slowest counts.
        """
        by_class = {
            name: slowest_numbers(
                [
                    self.numbers(name, rows, tp_degree, shardings.get(name, REPLICATED), route, gpu)
                    for gpu in gpus or (None,)
                ]
            )
            for name in self._classes
        }
        apart = {name: replace(numbers, apart=True) for name, numbers in by_class.items()}
        return tuple(
            (apart if index in self._apart else by_class)[layer.layer_class]
            for index, layer in enumerate(self.profile.layers)
        )

    def inputs(self, rows: int) -> tuple[int, ...]:
        """Return the bytes of other layers' values that each layer reads."""
        if rows not in self._inputs:
            self._inputs[rows] = input_bytes(self.profile, rows)
        return self._inputs[rows]

    def ring(self, ranks: tuple[int, ...]) -> Route:
        """Return the route of a ring over a group."""
        return self.places.ring(ranks)

    def tensor_route(self, gpus: Sequence[int], tp_degree: int) -> Route:
        """Return the route of a stage's tensor-parallel groups, which work in step."""
        return self.places.tensor_route(gpus, tp_degree)

    def data_route(self, gpus: Sequence[int], tp_degree: int) -> Route:
        """Return the route of a stage's data-parallel groups."""
        return self.places.data_routes(gpus, tp_degree, 1).across

    def data_routes(self, gpus: Sequence[int], tp_degree: int, shard_degree: int) -> DataRoutes:
        """Return the routes of a stage's replicas, where `shard_degree` neighbours share their states."""
        return self.places.data_routes(gpus, tp_degree, shard_degree)

    def message_route(self, source: Sequence[int], target: Sequence[int]) -> Route:
        """Return the route between two stages: every GPU talks to the one of the same number."""
        count = min(len(source), len(target))
        return self.places.message_route(source[:count], target[:count])

    def repeats(
        self, tp_degree: int, shardings: Mapping[str, str], first: int = 0
    ) -> tuple[tuple[tuple[int, ...], bool, int], ...]:
        """Return the storages that several layers read, as (layers, trainable, elements on one GPU).

        How a storage is divided is told by its first layer from `first` on: that of a stage that starts there.
        """
        found = []
        for shared in self.shared:
            layer, name = next((item for item in shared.names if item[0] >= first), shared.names[0])
            chosen = shardings.get(self.profile.layers[layer].layer_class, REPLICATED)
            divided = parameter_sharding(self.profile, layer, name, tp_degree, chosen) is not None
            found.append((shared.layers, shared.trainable, shared.num_elements // (tp_degree if divided else 1)))
        return tuple(found)

    def evaluate(self, plan: Plan) -> Prediction:
        """Return what a plan costs; UsageError or ProfileError where it does not fit the profile or the cluster."""
        priced = self._price(plan)
        step_s = finish_step(priced, play_stages(priced))[0]
        silent_s = finish_step(priced, play_stages(priced, comm=False), comm=False)[0]
        m, num_stages = plan.num_microbatches, len(plan.stages)
        tied_s = [sum(seconds for stages, seconds in priced.tied if s in stages) for s in range(num_stages)]
        sends: list[float] = [0.0] * num_stages
        for message in priced.messages:
            sends[message.source] += message.forward_busy_s + message.forward_latency_s
            if message.has_gradient:
                sends[message.target] += message.backward_busy_s + message.backward_latency_s
        split = plan.schedule in SPLIT_SCHEDULES
        are_told = len({group.gpu for group in self.cluster.node_groups}) > 1
        types = [tuple(self.places.count_types(stage.gpus)) if are_told else () for stage in plan.stages]
        stages = tuple(
            StagePrediction(
                forward_time_s=t.forward_action_s(),
                backward_time_s=t.backward_action_s(),
                weight_time_s=t.weight_s if split else 0.0,
                recompute_time_s=t.recompute_s,
                tensor_parallel_time_s=t.forward_comm_s + t.backward_comm_s,
                send_time_s=sends[index],
                data_parallel_time_s=t.gather_s + t.reduce_s + tied_s[index],
                optimizer_time_s=t.optimizer_s + t.cast_s,
                busy_time_s=m * (t.forward_action_s() + t.backward_action_s())
                + t.cast_s + t.gather_s + t.reduce_s + tied_s[index] + t.optimizer_s,
                param_count=priced.param_counts[index],
                gpu=" + ".join(types[index]),
                memory=priced.memory[index],
            )
            for index, t in enumerate(priced.times)
        )  # fmt: skip
        sizes = [len(stage.gpus) for stage in plan.stages]
        num_gpus = sum(sizes[of_group[0]] for of_group in priced.groups)
        busy = sum(stage.busy_time_s * size for stage, size in zip(stages, sizes, strict=True)) / num_gpus
        return Prediction(
            step_time_s=step_s,
            samples_per_s=plan.global_batch_size / step_s if step_s else 0.0,
            tokens_per_s=plan.global_batch_size * self.profile.provenance.tokens_per_row / step_s if step_s else 0.0,
            mfu_fraction=self._mfu(plan, step_s),
            bubble_fraction=min(1.0, max(0.0, 1.0 - busy / step_s)) if step_s else 0.0,
            exposed_comm_time_s=max(0.0, step_s - silent_s),
            bottleneck_stage=max(range(num_stages), key=lambda index: (stages[index].time_s, -index)),
            stages=stages,
            whole=tuple(self.parameters.whole_parts(plan.stages)),
        )

    def timeline(self, plan: Plan) -> tuple[Event, ...]:
        """Return everything the stages do, in the order of stage and start."""
        return tuple(sorted(all_events(self._price(plan)), key=lambda event: (event.stage, event.start_s)))

    def _mfu(self, plan: Plan, step_s: float) -> float | None:
        """Return model FLOPs (three forwards of useful work, no recomputation) over what the GPUs could do; or None."""
        counts: Counter[str] = Counter()
        for stages in plan.groups:
            counts.update(self.places.count_types(plan.stages[stages[0]].gpus))
        total = 0.0
        for name, count in counts.items():
            peak = self.cluster.gpus[name].peak_flops.get(COMPUTE_DTYPE[plan.precision])
            if not peak:
                return None
            total += count * peak
        if not step_s or not self.profile.forward_flops_per_row:
            return None  # a profile without FLOPs, as imported ones are, says nothing of them
        return 3.0 * self.profile.forward_flops_per_row * plan.global_batch_size / (step_s * total)

    def in_order(self, names: Sequence[str]) -> "Pricer":
        """Return the pricer of the profile in the order of these layers; itself where they are no order of them."""
        found = profile_of_plan(self.profile, names)
        if found is self.profile:
            return self
        key = tuple(names)
        if key not in self._orders:
            other = Pricer(found, self.cluster)
            # costs are those of classes, routes those of the cluster
            other._numbers, other._gpu_costs, other.places = self._numbers, self._gpu_costs, self.places
            self._orders = {key: other}
        return self._orders[key]

    def _price(self, plan: Plan) -> PricedStages:
        ordered = self.in_order([name for stage in plan.stages for name in stage.layers])
        if ordered is not self:
            return ordered._price(plan)
        spans = self._spans(plan)
        groups, split = plan.groups, plan.schedule in SPLIT_SCHEDULES
        setting = (plan.schedule, len(groups), plan.num_microbatches, plan.num_chunks)
        beside = {stage: [spans[other] for other in stages if other != stage] for stages in groups for stage in stages}
        times, held = [], []
        for index, ((first, stop), stage) in enumerate(zip(spans, plan.stages, strict=True)):
            tp_route = self.tensor_route(stage.gpus, stage.tp_degree)
            types = list(self.places.count_types(stage.gpus))
            layers = self.layer_table(stage.microbatch_size, stage.tp_degree, stage.shardings, tp_route, types)
            repeats = self.repeats(stage.tp_degree, stage.shardings, first)
            remade = frozenset(self.index_of[name] for name in stage.recompute)
            shards = stage.num_shards(plan.data_parallel)
            rules = StateRules(plan.optimizer, plan.precision, plan.data_parallel, stage.dp_degree, shards)
            earlier = [span for span in beside[index] if span[0] < first]
            elements = stage_elements(layers, repeats, first, stop, earlier)
            gpu = self._gpu(stage.gpus)
            values = stage_values(self.profile, stage.microbatch_size, first, stop)
            sent = stage_values(self.profile, stage.microbatch_size, first, stop, beside[index])
            routes = self.data_routes(stage.gpus, stage.tp_degree, shards)
            times.append(
                stage_times(layers, first, stop, remade, elements, rules, gpu, stage.tp_degree, tp_route, routes)
            )
            held.append(
                stage_bytes(
                    layers, self.inputs(stage.microbatch_size), values, sent, first, stop, remade, elements, rules,
                    split=split,
                )
            )  # fmt: skip
        memory: dict[int, MemoryUse] = {}
        counts: dict[int, int] = {}
        for stages, rows in zip(groups, held_at_once(*setting), strict=True):
            used = group_memory([held[stage] for stage in stages], rows, self.cluster.memory_reserve, split=split)
            chosen = {
                layer: plan.stages[stage].shardings.get(self.profile.layers[layer].layer_class, REPLICATED)
                for stage in stages
                for layer in range(*spans[stage])
            }
            count = self.parameters.of_layers(chosen, plan.stages[stages[0]].tp_degree)
            memory |= dict.fromkeys(stages, used)
            counts |= dict.fromkeys(stages, count)
        return PricedStages(
            times=tuple(times),
            memory=tuple(memory[stage] for stage in range(len(spans))),
            param_counts=tuple(counts[stage] for stage in range(len(spans))),
            messages=tuple(stage_messages(self.profile, plan.stages, self.places)),
            tied=tuple(tied_sums(self.profile, self.shared, plan, self.places)),
            actions=group_actions(*setting),
            groups=groups,
        )

    def _spans(self, plan: Plan) -> list[tuple[int, int]]:
        """Return [first, stop) of every stage; UsageError unless the stages are the profile's layers in order."""
        names = [name for stage in plan.stages for name in stage.layers]
        expected = [layer.name for layer in self.profile.layers]
        if problem := coverage_problem(names, expected):
            raise UsageError(
                f"the plan is not for the profile {self.profile.name!r}: {problem}",
                hint="price the plan with the profile it was made from",
            )
        spans, first = [], 0
        for stage in plan.stages:
            spans.append((first, first + len(stage.layers)))
            first += len(stage.layers)
        check_plan(plan, self.profile, self.cluster)
        return spans

    def capacity(self, stage: Stage) -> int:
        """Return the bytes of memory of a stage's GPUs: of those that have least."""
        return min(gpu.memory for gpu in self.places.gpus(stage.gpus))

    def _gpu(self, gpus: Sequence[int]) -> Gpu:
        """Return the slowest memory among a stage's GPUs: they finish together."""
        return min(self.places.gpus(gpus), key=memory_bytes_per_s)


def evaluate(plan: Plan, profile: ModelProfile, cluster: Cluster) -> Prediction:
    """Return what a plan is predicted to cost: step time, and time and memory of every stage by owner."""
    return Pricer(profile, cluster).evaluate(plan)


def timeline(plan: Plan, profile: ModelProfile, cluster: Cluster) -> tuple[Event, ...]:
    """Return everything the stages of a plan do within a step, with times."""
    return Pricer(profile, cluster).timeline(plan)

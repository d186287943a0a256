"""Works out what each stage of a plan holds: its nodes, modules, and the values it receives and sends."""

from dataclasses import dataclass, replace

from planner.arguments import BatchInt, ParamRef, Ref, leaves
from planner.cost.layers import REPLICATED, tie_conflict
from planner.errors import EmitError
from planner.graph import shared_storages, shared_updates
from planner.model_profile import LayerClass, ModelProfile
from planner.plan import Plan, coverage_problem
from planner.program import Node, Tensor
from planner.sharding import Sharding


@dataclass(frozen=True)
class Transfer:
    """A value that crosses between stages, once from its producer to each consumer."""

    name: str
    source: int
    targets: tuple[int, ...]
    tensor: Tensor


@dataclass(frozen=True)
class LayerCall:
    """A layer on a stage: its class and sharding, and whether its activations are remade in backward."""

    name: str
    module: str
    layer_class: LayerClass
    sharding: Sharding | None
    recompute: bool


@dataclass(frozen=True)
class StageCode:
    """Everything the code of one stage is written from."""

    index: int
    rows: int
    nodes: tuple[Node, ...]
    layers: tuple[LayerCall, ...]
    inputs: tuple[str, ...]
    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    updated_buffers: tuple[str, ...]
    called_whole: tuple[str, ...]
    draws: tuple[str, ...]
    receives: tuple[Transfer, ...]
    sends: tuple[Transfer, ...]
    is_last: bool
    forward_counts: tuple[str, ...] = ()
    loss_is_known: bool = True


def stage_codes(plan: Plan, profile: ModelProfile) -> list[StageCode]:
    """Return what each stage's code is written from; EmitError where the plan does not fit the profile."""
    owner = _stage_of_layers(plan, profile)
    _check_inputs(plan, profile)
    _check_updates(plan, profile, owner)
    _check_shared(plan, profile, owner)
    transfers = _transfers(profile, owner)
    derived = _derived_nodes(profile)
    stages = [_stage_code(plan, profile, index, owner, transfers, derived) for index in range(len(plan.stages))]
    unread = _unread_parameters(profile, stages)
    return [replace(stages[0], parameters=(*stages[0].parameters, *unread)), *stages[1:]]


def _unread_parameters(profile: ModelProfile, stages: list[StageCode]) -> list[str]:
    """Return what no stage reads, under any of its names: the first stage keeps it, so that it is saved as it was."""
    held = {name for stage in stages for name in stage.parameters}
    prefixes = tuple(f"{name}." for stage in stages for name in stage.modules)
    kept: list[str] = []
    for name, parameter in profile.parameters.items():
        group = next((group for group in profile.tied if name in group), (name,))
        read = any(other in held or other.startswith(prefixes) for other in group)
        if not read and parameter.persistent and group[0] not in kept:
            kept.append(group[0])
    return kept


def _stage_of_layers(plan: Plan, profile: ModelProfile) -> list[int]:
    order = [name for stage in plan.stages for name in stage.layers]
    names = [layer.name for layer in profile.layers]
    if problem := coverage_problem(order, names):
        raise EmitError(
            f"the plan is not for the profile {profile.name!r}: {problem}", hint="solve again with this profile"
        )
    return [index for index, stage in enumerate(plan.stages) for _ in stage.layers]


def _check_shared(plan: Plan, profile: ModelProfile, owner: list[int]) -> None:
    """Refuse a plan that divides a parameter that several layers read in several ways."""
    stages = [plan.stages[index] for index in owner]
    chosen = {
        index: stage.shardings.get(profile.layers[index].layer_class, REPLICATED) for index, stage in enumerate(stages)
    }
    for shared in shared_storages(profile):
        conflict = tie_conflict(profile, shared, plan.tp_degree, chosen)
        if conflict is not None:
            first, second = (profile.layers[index].name for index in conflict)
            raise EmitError(
                f"layers {first!r} and {second!r} share {shared.name!r} and divide it differently over "
                f"tp_degree {plan.tp_degree}",
                hint="leave both whole, or divide both the same way",
            )


def _check_updates(plan: Plan, profile: ModelProfile, owner: list[int]) -> None:
    """Refuse a plan where one stage or replica updates a buffer and another has a copy that would go stale."""
    dp_degree = max(stage.dp_degree for stage in plan.stages)
    if dp_degree > 1 and profile.carried_buffers:
        raise EmitError(
            f"forward updates buffer {profile.carried_buffers[0]!r}, and what is trained on reads it: each of "
            f"{dp_degree} replicas would go on from one of its own, which is another computation",
            hint="solve with --pin dp_degree=1",
        )
    for cut, shared in shared_updates(profile).items():
        if owner[cut - 1] != owner[cut]:
            first, last = (profile.layers[shared.layers[index]].name for index in (0, -1))
            raise EmitError(
                f"forward updates buffer {shared.name!r}, and layers {first!r} and {last!r} read it, on stages "
                f"{owner[shared.layers[0]]} and {owner[shared.layers[-1]]}: each would have one of its own",
                hint="leave these layers on one stage, as `planner solve` does without --pin cuts",
            )


def _check_inputs(plan: Plan, profile: ModelProfile) -> None:
    """Refuse an input that has rows in two dimensions, where a plan cuts the batch: it has no rows to cut out."""
    for name in profile.program.inputs if plan.num_microbatches * plan.stages[0].dp_degree > 1 else ():
        grown = [dim for dim, size in enumerate(profile.program.tensors[name].shape) if isinstance(size, BatchInt)]
        if len(grown) > 1:
            raise EmitError(
                f"input {name!r} grows with the batch along dimensions {grown[0]} and {grown[1]}, so a microbatch "
                "is no slice of it",
                hint="compute it inside the model, or solve with --pin num_microbatches=1 --pin dp_degree=1",
            )


def _transfers(profile: ModelProfile, owner: list[int]) -> list[Transfer]:
    found: dict[tuple[str, int], set[int]] = {}
    for edge in profile.edges:
        source = owner[edge.producer]
        targets = {owner[consumer] for consumer in edge.consumers} - {source}
        if targets:
            found.setdefault((edge.value, source), set()).update(targets)
    return [
        Transfer(name, source, tuple(sorted(targets)), profile.program.tensors[name])
        for (name, source), targets in found.items()
    ]


def _derived_nodes(profile: ModelProfile) -> set[int]:
    """Return the positions of nodes whose values every stage makes for itself."""
    made_anew = {*profile.input_only_values, *profile.program.inputs}
    return {
        position
        for position, node in enumerate(profile.program.nodes)
        if (writes := list(node.writes())) and all(name in made_anew for name in writes)
    }


def _stage_code(
    plan: Plan, profile: ModelProfile, index: int, owner: list[int], transfers: list[Transfer], derived: set[int]
) -> StageCode:
    stage = plan.stages[index]
    mine = [position for position, owned in enumerate(owner) if owned == index]
    first, last = profile.layers[mine[0]], profile.layers[mine[-1]]
    is_last = index == len(plan.stages) - 1
    sends = tuple(transfer for transfer in transfers if transfer.source == index)
    receives = tuple(transfer for transfer in transfers if index in transfer.targets)
    needed = {transfer.name for transfer in sends}
    if is_last:
        needed |= {leaf.name for leaf in leaves(profile.program.output) if isinstance(leaf, Ref)}
    counted = {count.value for count in profile.loss.counts} if profile.loss is not None else set()
    given: set[str] = set()  # counts, which forward gets for the whole step
    kept: list[Node] = []
    for position in reversed(range(len(profile.program.nodes))):
        node = profile.program.nodes[position]
        own = first.start <= position < last.stop and position not in derived
        if not own and position not in derived:
            continue
        # a module is called even for nothing: it may change its buffers, and its parameters are the model's
        lasting = own and (node.in_place or node.kind in ("setitem", "module"))
        if lasting or any(name in needed for name in node.writes()):
            kept.append(node)
            given.update(name for name in node.reads() if name in counted)
            needed.update(name for name in node.reads() if name not in counted)
    nodes = tuple(reversed(kept))
    made = {name for node in nodes for name in node.writes()}
    known = {transfer.name for transfer in receives} | set(profile.program.inputs) | given
    missing = next((name for node in nodes for name in node.reads() if name not in made | known), None)
    if missing is not None:
        raise EmitError(
            f"stage {index} reads {missing!r}, which no stage before it sends",
            hint="report this as a bug, with the profile",
        )
    calls = tuple(_layer_call(plan, profile, index, position) for position in mine)
    reads = {name for node in nodes for name in node.reads()}
    if is_last:
        reads |= {leaf.name for leaf in leaves(profile.program.output) if isinstance(leaf, Ref)}
    modules = tuple(dict.fromkeys(node.target for node in nodes if node.kind == "module"))
    read = [name for node in nodes for name in node.params()]
    if is_last:
        read += [leaf.name for leaf in leaves(profile.program.output) if isinstance(leaf, ParamRef)]
    parameters = tuple(dict.fromkeys(read))
    held = tuple(f"{module}." for module in modules)
    return StageCode(
        index=index,
        rows=stage.microbatch_size,
        nodes=nodes,
        layers=calls,
        inputs=tuple(name for name in profile.program.inputs if name in reads),
        modules=modules,
        parameters=parameters,
        updated_buffers=tuple(name for name in profile.updated_buffers if name in parameters or name.startswith(held)),
        called_whole=tuple(name for name in profile.called_whole if name in modules or name.startswith(held)),
        draws=(
            *dict.fromkeys(node.target for node in nodes if node.kind == "draw"),
            *(name for name in profile.drawing_outside if name in modules or name.startswith(held)),
        ),
        receives=receives,
        sends=sends,
        is_last=is_last,
        loss_is_known=profile.loss_is_known or not is_last,
        forward_counts=tuple(count.value for count in profile.loss.counts if count.value in given)
        if profile.loss is not None
        else (),
    )


def _layer_call(plan: Plan, profile: ModelProfile, index: int, position: int) -> LayerCall:
    stage, layer = plan.stages[index], profile.layers[position]
    layer_class = profile.layer_class(position)
    sharding = None
    if stage.tp_degree > 1 and layer.layer_class in stage.shardings:
        name = stage.shardings[layer.layer_class]
        sharding = layer_class.sharding(name, stage.tp_degree)
        if sharding is None and name != "replicated":
            raise EmitError(
                f"layer {layer.name!r} has no sharding {name!r} for tp_degree {stage.tp_degree} in the profile",
                hint=f"profile the model again with --tp {stage.tp_degree}",
            )
    if layer.name in stage.recompute and profile.writes_its_input(position):
        raise EmitError(
            f"layer {layer.name!r} writes over its own input in place, so its forward can't be run again",
            hint=f"take {layer.name} out of the recomputed layers, or solve again",
        )
    return LayerCall(layer.name, layer.module, layer_class, sharding, layer.name in stage.recompute)

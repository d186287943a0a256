"""Turns a solution of the integer program into a `Sharding`: styles, slices, constants, moves, collectives."""

import re
from collections.abc import Iterable, Mapping

from planner.arguments import BatchInt, ParamRef, Ref, leaves
from planner.program import Tensor
from planner.sharding import Collective, CollectiveCall, Move, ShardedParameter, Sharding, Style
from planner.tp_rules.aliases import last_writes
from planner.tp_rules.integer_program import Choice, Step
from planner.tp_rules.layer import Operand, Tables, tensor_of
from planner.tp_rules.state import ENTERED, PARTIAL, WHOLE, ModuleInfo, Shard, State

# The collectives of each kind of move, forward and backward.
_COLLECTIVES: dict[str, tuple[Collective | None, Collective | None]] = {
    "enter": (None, "all_reduce"),
    "sum_ranks": ("all_reduce", None),
    "scatter_sum": ("reduce_scatter", "all_gather"),
    "gather_slices": ("all_gather", None),
    "gather_entered": ("all_gather", "reduce_scatter"),
    "take_slice": (None, "all_gather"),
    "take_entered": (None, None),
    "on_first": (None, None),
}
_SUFFIXES = {
    "enter": "tp",
    "sum_ranks": "sum",
    "scatter_sum": "slice",
    "gather_slices": "whole",
    "gather_entered": "tp",
    "take_slice": "slice",
    "take_entered": "slice",
    "on_first": "first",
}
# Steps in the order in which one can start from the result of another.
_ORDER = (
    "sum_ranks",
    "scatter_sum",
    "take_slice",
    "enter",
    "take_entered",
    "gather_slices",
    "gather_entered",
    "on_first",
)


def make_sharding(tables: Tables, choice: Choice, name: str, reasons: Mapping[str, str]) -> Sharding:
    """Return a solution as a record; `reasons` says of parameters why they are whole."""
    layer = tables.layer
    cut = {key: state for key, state in choice.parameters.items() if isinstance(state, Shard)}
    styles = {target: style for target, info in layer.modules.items() if (style := _style(target, info, cut))}
    unreduced = _unreduced(tables, choice, styles)
    moves, calls = _moves(tables, choice, styles, unreduced)
    partial = [key for key, state in choice.parameters.items() if state == ENTERED and key in layer.trainable]
    return Sharding(
        name=name,
        tp_degree=tables.degree,
        styles=styles,
        parameters={key: ShardedParameter(dim=s.dim, parts=s.parts, sizes=s.sizes) for key, s in cut.items()},
        moves=tuple(moves),
        unreduced=tuple(unreduced),
        rewrites=tuple(rewrite for row in choice.rows.values() for rewrite in row.rewrites),
        partial_gradients=tuple(partial),
        collectives=tuple(sorted(calls, key=lambda call: call.phase == "backward")),
        draws_apart=tuple(
            node.name
            for node in tables.nodes
            if node.random and any(isinstance(state, Shard) for _, state in choice.rows[node.name].needs)
        ),
        replicated={key: reasons[key] for key, state in choice.parameters.items() if key not in cut and key in reasons},
    )


def weight_name(target: str) -> str:
    """Return the name of a module's weight."""
    return f"{target}.weight" if target else "weight"


def _style(target: str, info: ModuleInfo, cut: Mapping[str, Shard]) -> Style | None:
    shard = cut.get(weight_name(target))
    if shard is None or info.kind not in ("linear", "embedding"):
        return None
    if info.kind == "embedding":
        return "vocabulary" if shard.dim == 0 else "column"
    return "column" if shard.dim == info.weight_out_dim else "row"


def _unreduced(tables: Tables, choice: Choice, styles: Mapping[str, Style]) -> list[str]:
    """Return the modules whose partial sums are more than summed at once, all of a module's calls alike."""
    found: dict[str, None] = {}
    steps = {(step.operand, step.kind) for step in choice.moves}
    for node in tables.nodes:
        if node.kind != "module" or styles.get(node.target) not in ("row", "vocabulary"):
            continue
        for value, state in choice.rows[node.name].makes:
            read = any((Ref(value), PARTIAL) in row.needs for row in choice.rows.values())
            if state == PARTIAL and (read or (Ref(value), "sum_ranks") not in steps):
                found[node.target] = None
    return list(found)


def _moves(
    tables: Tables, choice: Choice, styles: Mapping[str, Style], unreduced: Iterable[str]
) -> tuple[list[Move], list[CollectiveCall]]:
    """Return the moves in an order in which they can be made, and the collectives of a forward and backward."""
    taken = set(tables.layer.body.tensors)
    made = _made_states(tables, choice)
    reduces_itself = {
        value
        for node in tables.nodes
        if node.kind == "module" and node.target in styles and node.target not in unreduced
        for value, state in choice.rows[node.name].makes
        if state == PARTIAL
    }
    places = _places(tables)
    by_operand: dict[Operand, list[Step]] = {}
    for step in choice.moves:
        by_operand.setdefault(step.operand, []).append(step)
    moves: list[Move] = []
    calls: list[CollectiveCall] = []
    for operand in sorted(by_operand, key=lambda o: (places.get(o, (-1, None))[0], o.name)):
        holders: dict[State, Ref | ParamRef] = {made[operand]: operand}
        for step in sorted(by_operand[operand], key=lambda s: _ORDER.index(s.kind)):
            calls += _calls(step, tensor_of(tables.layer, operand))
            if step.kind == "sum_ranks" and operand.name in reduces_itself:
                holders[WHOLE] = operand
                continue
            readers = _readers(tables, choice, operand, step.target, made[operand])
            output = step.target == WHOLE and operand in set(_outputs(tables))
            plain = re.sub(r"\W", "_", operand.name)
            name = _fresh(f"{plain}_{_SUFFIXES[step.kind]}", taken)
            shard = next((s for s in (step.target, step.source) if isinstance(s, Shard)), Shard(0))
            source = holders.get(step.source, holders.get(WHOLE, operand))
            moves.append(
                Move(
                    name=name,
                    kind=step.kind,
                    source=source,
                    after=places.get(operand, (-1, None))[1],
                    dim=shard.dim,
                    parts=shard.parts,
                    sizes=shard.sizes,
                    readers=tuple(readers),
                    output=output,
                )
            )
            holders[step.target] = Ref(name)
    return moves, calls


def _made_states(tables: Tables, choice: Choice) -> dict[Operand, State]:
    made: dict[Operand, State] = {Ref(name): WHOLE for name in tables.layer.body.inputs}
    for node in tables.nodes:
        for value, state in choice.rows[node.name].makes:
            made.setdefault(Ref(value), state)
    return made | {ParamRef(name): state for name, state in choice.parameters.items()}


def _places(tables: Tables) -> dict[Operand, tuple[int, str | None]]:
    """Return after which node each value has its final content: where it is made, or last written in place."""
    writes = last_writes(tables.nodes, tables.layer.modules)
    places: dict[Operand, tuple[int, str | None]] = {}
    for name in tables.layer.body.inputs:
        position = writes.get(name, -1)
        places[Ref(name)] = (position, tables.nodes[position].name if position >= 0 else None)
    for position, node in enumerate(tables.nodes):
        for name in node.writes():
            last = max(position, writes.get(name, -1))
            places.setdefault(Ref(name), (last, tables.nodes[last].name))
    return places


def _readers(tables: Tables, choice: Choice, operand: Operand, state: State, made: State) -> list[str]:
    if state == made:
        return []
    return [node.name for node in tables.nodes if (operand, state) in choice.rows[node.name].needs]


def _outputs(tables: Tables) -> list[Ref]:
    return [leaf for leaf in leaves(tables.layer.body.output) if isinstance(leaf, Ref)]


def _fresh(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _calls(step: Step, tensor: Tensor) -> list[CollectiveCall]:
    forward, backward = _COLLECTIVES[step.kind]
    found = [collective(forward, tensor, "forward")] if forward and step.forward else []
    return found + ([collective(backward, tensor, "backward")] if backward and step.backward else [])


def collective(kind: Collective, tensor: Tensor, phase: str) -> CollectiveCall:
    """Return a collective on a tensor, by the bytes of the whole of it."""
    first, second = tensor.num_bytes(1), tensor.num_bytes(2)
    grows = any(isinstance(dim, BatchInt) for dim in tensor.shape)
    return CollectiveCall(
        kind=kind,
        bytes_per_row=float(second - first),
        fixed_bytes=0 if grows else first,
        phase="forward" if phase == "forward" else "backward",
    )

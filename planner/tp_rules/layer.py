"""A layer as the rules see it: what it calls and reads, and the ways to run each of its nodes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from planner.arguments import ParamRef, Ref, leaves
from planner.program import Node, Program, Tensor
from planner.sharding import Rewrite
from planner.tp_rules.state import ENTERED, PARTIAL, WHOLE, IllegalShardingError, ModuleInfo, Shard, State, divided

Operand = Ref | ParamRef


@dataclass(frozen=True, kw_only=True)
class LayerBody:
    """An opened layer: its body, the leaf modules that it calls, and the parameters and buffers that it reads.

    `trainable` names the parameters that gradients flow to; `buffers` what is no parameter; `tied` groups of names that
    share one; `kept_whole` those that are read beside the layer, and must stay as they are.
    """

    body: Program
    modules: Mapping[str, ModuleInfo]
    parameter_shapes: Mapping[str, tuple[int, ...]]
    trainable: frozenset[str]
    buffers: frozenset[str] = frozenset()
    tied: tuple[tuple[str, ...], ...] = ()
    kept_whole: frozenset[str] = frozenset()

    def needs_grad(self, operand: Operand) -> bool:
        """Return whether gradients flow to an operand."""
        if isinstance(operand, Ref):
            return self.body.tensors[operand.name].requires_grad
        return operand.name in self.trainable


@dataclass(frozen=True, slots=True)
class Row:
    """One way to run a node: the states it needs, those it makes, and the constants that shrink."""

    needs: tuple[tuple[Operand, State], ...]
    makes: tuple[tuple[str, State], ...]
    rewrites: tuple[Rewrite, ...] = ()


@dataclass
class Tables:
    """The rows of every live node by name, the states of every operand, and why others can't be."""

    layer: LayerBody
    degree: int
    nodes: tuple[Node, ...]
    rows: dict[str, list[Row]] = field(default_factory=dict)
    states: dict[Operand, dict[State, frozenset[str]]] = field(default_factory=dict)
    slices: dict[Operand, set[Shard]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    parts: dict[int, list[Shard]] = field(default_factory=dict)

    def choices(self, size: Any, dim: int) -> list[Shard]:
        """Return the divisions of a dimension of that size that divide by the degree; IllegalShardingError if none."""
        found = []
        error: IllegalShardingError | None = None
        for shard in self.parts.get(size, [Shard(0)]):
            try:
                divided(size, self.degree, shard)
                found.append(shard.at(dim))
            except IllegalShardingError as reason:
                error = error or reason
        if not found and error is not None:
            raise error
        return found

    def shards(self, operand: Operand) -> list[Shard]:
        """Return the divided states that an operand can be in."""
        return [state for state in self.states.get(operand, {}) if isinstance(state, Shard)]

    def admit(self, operand: Operand, state: State, origins: Iterable[str] = ()) -> None:
        """Note that an operand can be in a state, and which parameters' division that comes from."""
        known = self.states.setdefault(operand, {})
        known[state] = known.get(state, frozenset()) | frozenset(origins)

    def origins(self, needs: Iterable[tuple[Operand, State]]) -> frozenset[str]:
        """Return the parameters whose division is behind the states that a row needs."""
        divided_needs = [(operand, state) for operand, state in needs if isinstance(state, Shard) or state == PARTIAL]
        return frozenset().union(
            *(self.states.get(operand, {}).get(state, frozenset()) for operand, state in divided_needs)
        )

    def refuse(self, needs: Iterable[tuple[Operand, State]], reason: str) -> None:
        """Keep the first reason for which the parameters behind some states can't be divided."""
        for name in sorted(self.origins(needs)):
            self.errors.setdefault(name, reason)


def live_nodes(body: Program) -> list[Node]:
    """Return the nodes that the body's output depends on, and those that write in place."""
    needed = {leaf.name for leaf in leaves(body.output) if isinstance(leaf, Ref)}
    kept = []
    for node in reversed(body.nodes):
        if node.in_place or node.kind == "setitem" or any(name in needed for name in node.writes()):
            kept.append(node)
            needed.update(node.reads())
    return kept[::-1]


def operands_of(layer: LayerBody, node: Node) -> list[Operand]:
    """Return the values and parameters that a node reads, a module's own parameters among them, each once."""
    found: list[Operand] = [leaf for leaf in leaves((node.args, node.kwargs)) if isinstance(leaf, Ref | ParamRef)]
    if node.kind == "module":
        prefix = f"{node.target}." if node.target else ""
        found += [ParamRef(f"{prefix}{name}") for name in layer.modules[node.target].parameters]
    return list(dict.fromkeys(found))


def entered(layer: LayerBody, operand: Operand) -> State:
    """Return the state in which every rank holds an operand of divided computation."""
    return ENTERED if layer.needs_grad(operand) else WHOLE


def uniform_row(layer: LayerBody, operands: list[Operand], results: list[str], state: State) -> Row:
    """Return the row in which every rank runs a node on whole values: WHOLE, or ENTERED where gradients flow."""

    def of(operand: Operand) -> State:
        return state if state == WHOLE else entered(layer, operand)

    return Row(tuple((o, of(o)) for o in operands), tuple((name, of(Ref(name))) for name in results))


def tensor_of(layer: LayerBody, operand: Operand) -> Tensor:
    """Return what is known of a value, or of a parameter as the value that it is."""
    if isinstance(operand, Ref):
        return layer.body.tensors[operand.name]
    like = next((t for t in layer.body.tensors.values() if t.follows_model_dtype), None)
    return Tensor(
        shape=layer.parameter_shapes.get(operand.name, ()),
        dtype=like.dtype if like else "float32",
        requires_grad=operand.name in layer.trainable,
        follows_model_dtype=True,
    )

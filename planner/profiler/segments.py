"""Lays out the nodes to run for one layer: as it is, or as one rank of a tensor-parallel group has it."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from planner.arguments import ParamRef, Ref, leaves, map_argument
from planner.profiler.classes import OpenedClass
from planner.profiler.layers import Segment
from planner.program import Node, Program
from planner.sharding import Move, Sharding
from planner.tp_rules import moves_after, rewrite_node, rewrite_output

_INNER = "inner_"


def divided_nodes(
    program: Program, segment: Segment, stop: int, opened: OpenedClass, sharding: Sharding
) -> tuple[Node, ...]:
    """Return nodes [start, stop) of a layer as one rank runs them; communication is left out, it is priced elsewhere.

    The module's call is replaced by its rewritten body. A divided embedding looks up indices of the local range, a
    gathered value is put together from copies and a slice is cut off, so that what follows has the sizes it really has.
    """
    nodes: list[Node] = []
    for node in program.nodes[segment.start : stop]:
        if node.kind == "module" and node.target == segment.module:
            nodes.extend(_divided_call(node, segment, opened, sharding))
        else:
            nodes.append(node)
    return tuple(nodes)


def _divided_call(call: Node, segment: Segment, opened: OpenedClass, sharding: Sharding) -> Iterator[Node]:
    if opened.body is None:
        yield from _divided_leaf(call, segment.module, "", opened, sharding)
        return
    outer = dict(zip(_signature_refs(opened), _call_refs(call, segment.module), strict=True))
    output = rewrite_output(opened.body.output, sharding)
    same = {move.name: move.source for move in sharding.moves if move.kind in _SAME_SIZE}

    def rename(leaf: Any) -> Any:
        while isinstance(leaf, Ref) and leaf.name in same:
            leaf = same[leaf.name]
        if isinstance(leaf, Ref):
            return outer.get(leaf.name, Ref(f"{_INNER}{leaf.name}"))
        if isinstance(leaf, ParamRef):
            return ParamRef(f"{segment.module}.{leaf.name}")
        return leaf

    yield from _moved(moves_after(None, sharding), opened, sharding, rename)
    for node in opened.body.nodes:
        changed = rewrite_node(node, sharding)
        moved = changed.model_copy(
            update={
                "name": f"{_INNER}{changed.name}",
                "args": map_argument(changed.args, rename),
                "kwargs": map_argument(changed.kwargs, rename),
                "result": map_argument(changed.result, rename),
            }
        )
        if node.kind == "module":
            target = f"{segment.module}.{node.target}" if node.target else segment.module
            yield from _divided_leaf(moved.model_copy(update={"target": target}), target, node.target, opened, sharding)
        else:
            yield moved
        yield from _moved(moves_after(node.name, sharding), opened, sharding, rename)
    for given, inner in zip(leaves(call.result), leaves(output), strict=True):
        if isinstance(given, Ref) and isinstance(inner, Ref):  # a parameter that is passed through stays one
            source = rename(inner)
            if source != given:
                yield Node(name=given.name, kind="method", target="view_as", args=(source, source), result=given)


# Moves whose result is as large as their source.
_SAME_SIZE = ("enter", "sum_ranks", "on_first")


def _moved(
    moves: Iterable[Move], opened: OpenedClass, sharding: Sharding, rename: Callable[[Any], Any]
) -> Iterator[Node]:
    """Yield nodes that stand for moves: copies side by side for what is gathered, a slice for what is scattered."""
    for move in moves:
        if move.kind in _SAME_SIZE:
            continue
        source, result = rename(move.source), Ref(f"{_INNER}{move.name}")
        if move.kind in ("gather_slices", "gather_entered"):
            copies = (source,) * sharding.tp_degree
            yield Node(name=result.name, kind="function", target="torch.cat", args=(copies, move.dim), result=result)
            continue
        size = _whole_shape(move.source, opened, sharding)[move.dim] // sharding.tp_degree
        args = (source, move.dim, 0, size)
        yield Node(name=result.name, kind="method", target="narrow", args=args, result=result)


def _whole_shape(source: Any, opened: OpenedClass, sharding: Sharding) -> tuple[Any, ...]:
    """Return the whole shape of what a move starts from; moves change no whole shape."""
    assert opened.body is not None
    by_name = {move.name: move for move in sharding.moves}
    while source.name in by_name and isinstance(source, Ref):
        source = by_name[source.name].source
    if isinstance(source, ParamRef):
        return opened.parameter_shapes[source.name]
    return opened.body.tensors[source.name].shape


def _divided_leaf(call: Node, target: str, relative: str, opened: OpenedClass, sharding: Sharding) -> Iterable[Node]:
    style = sharding.styles.get(relative)
    if style == "vocabulary":
        rows = opened.modules[relative].parameters["weight"][0] // sharding.tp_degree
        local = f"{call.name}_local_ids"
        yield Node(
            name=local,
            kind="method",
            target="remainder",
            args=(call.args[0], rows),
            result=Ref(local),
            no_grad=call.no_grad,
        )
        yield call.model_copy(update={"args": (Ref(local), *call.args[1:])})
    elif relative in sharding.gather and isinstance(call.result, Ref):
        part = f"{call.name}_part"
        yield call.model_copy(update={"name": part, "result": Ref(part)})
        copies = tuple(Ref(part) for _ in range(sharding.tp_degree))
        yield Node(name=call.name, kind="function", target="torch.cat", args=(copies, -1), result=call.result)
    else:
        yield call


def _signature_refs(opened: OpenedClass) -> list[str]:
    return list(
        dict.fromkeys(leaf.name for _, value in opened.signature for leaf in leaves(value) if isinstance(leaf, Ref))
    )


def _call_refs(call: Node, module: str) -> list[Ref | ParamRef]:
    """Return the values a call passes, in the order of the inputs of its body; foreign parameters are values too."""
    passed = (leaf for leaf in leaves((call.args, call.kwargs)) if isinstance(leaf, Ref | ParamRef))
    return list(dict.fromkeys(p for p in passed if isinstance(p, Ref) or not p.name.startswith(f"{module}.")))

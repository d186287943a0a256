"""Applies a sharding to the body of a layer: the constants that shrink, and values that nodes read in other forms."""

from collections.abc import Iterator
from typing import Any

from planner.arguments import ParamRef, Ref, map_argument
from planner.program import Node
from planner.sharding import Move, Sharding


def rewrite_node(node: Node, sharding: Sharding) -> Node:
    """Return a node as one rank runs it: its constants that shrink replaced, its operands those that moves made."""
    args: Any = node.args
    kwargs: Any = node.kwargs
    for rewrite in sharding.rewrites:
        if rewrite.node == node.name:
            where, *rest = rewrite.path
            if where == "args":
                args = _replaced(args, rest, rewrite.value)
            else:
                kwargs = _replaced(kwargs, rest, rewrite.value)
    moved = {_base(move, sharding): Ref(move.name) for move in sharding.moves if node.name in move.readers}
    if moved:
        args, kwargs = (map_argument(given, lambda leaf: _moved(leaf, moved)) for given in (args, kwargs))
    return node.model_copy(update={"args": args, "kwargs": kwargs})


def rewrite_output(output: Any, sharding: Sharding) -> Any:
    """Return the output of a body, of the values that moves made where it takes those."""
    moved = {_base(move, sharding): Ref(move.name) for move in sharding.moves if move.output}
    return map_argument(output, lambda leaf: _moved(leaf, moved))


def moves_after(node: str | None, sharding: Sharding) -> Iterator[Move]:
    """Yield the moves that are made after a node (None: first of all), in order."""
    return (move for move in sharding.moves if move.after == node)


def _moved(leaf: Any, moved: dict[Any, Ref]) -> Any:
    return moved.get(leaf, leaf) if isinstance(leaf, Ref | ParamRef) else leaf


def _base(move: Move, sharding: Sharding) -> Any:
    """Return the value or parameter that a move, or the moves before it, started from."""
    by_name = {other.name: other for other in sharding.moves}
    source = move.source
    while isinstance(source, Ref) and source.name in by_name:
        source = by_name[source.name].source
    return source


def _replaced(container: Any, path: list[int | str], value: Any) -> Any:
    if not path:
        return value
    first, *rest = path
    if isinstance(container, dict):
        return {key: _replaced(item, rest, value) if key == first else item for key, item in container.items()}
    items = [_replaced(item, rest, value) if position == first else item for position, item in enumerate(container)]
    return tuple(items) if isinstance(container, tuple) else items

"""Applies a sharding to the body of a layer: the constants that shrink, and what enters divided computation."""

from typing import Any

from planner.model_profile import Sharding
from planner.program import Node, Ref, map_argument

ENTERED = "_tp"


def rewrite_node(node: Node, sharding: Sharding, *, enter: bool) -> Node:
    """Return a node with the constants that shrink replaced; with `enter` it reads what it divides in entered form."""
    args: Any = node.args
    kwargs: Any = node.kwargs
    for rewrite in sharding.rewrites:
        if rewrite.node == node.name:
            where, *rest = rewrite.path
            if where == "args":
                args = _replaced(args, rest, rewrite.value)
            else:
                kwargs = _replaced(kwargs, rest, rewrite.value)
    if enter:
        entered = {value for value, readers in sharding.enter.items() if node.name in readers}

        def change(leaf: Any) -> Any:
            return Ref(f"{leaf.name}{ENTERED}") if isinstance(leaf, Ref) and leaf.name in entered else leaf

        args, kwargs = map_argument(args, change), map_argument(kwargs, change)
    return node.model_copy(update={"args": args, "kwargs": kwargs})


def _replaced(container: Any, path: list[int | str], value: Any) -> Any:
    if not path:
        return value
    first, *rest = path
    if isinstance(container, dict):
        return {key: _replaced(item, rest, value) if key == first else item for key, item in container.items()}
    items = [_replaced(item, rest, value) if position == first else item for position, item in enumerate(container)]
    return tuple(items) if isinstance(container, tuple) else items

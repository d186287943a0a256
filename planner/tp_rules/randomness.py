"""Random numbers in a divided layer: on whole values every rank draws the same, on divided ones each its own."""

from collections.abc import Mapping

from planner.program import Node, Program, Ref, leaves
from planner.tp_rules.state import State


def draws_apart(body: Program, states: Mapping[str, State]) -> tuple[str, ...]:
    """Return the nodes that draw random numbers for a divided value: every rank draws for a part of its own."""

    def is_divided(node: Node) -> bool:
        read = [leaf.name for leaf in leaves((node.args, node.kwargs)) if isinstance(leaf, Ref)]
        return any(states.get(name) is not None for name in read)

    return tuple(node.name for node in body.nodes if node.random and is_divided(node))

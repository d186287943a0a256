"""Finds what a module gives away by another way than its result, as in a list or a cache, and what is called whole."""

from collections.abc import Iterable
from typing import Any

from planner.arguments import Ref, leaves
from planner.profiler.recording import Call


def open_escaping(calls: list[Call], inputs: Iterable[int], results: Any) -> None:
    """Mark the modules whose inner values are read after they have returned, and are not in their results.

    Code that calls such a module whole can't reach those values, so it has to be opened: a leaf becomes one that can
    be. `inputs` numbers the values that are there before the calls, `results` are read after all of them.
    """
    made: dict[str, int] = {str(number): -1 for number in inputs}
    last_read: dict[str, int] = {}
    stops: dict[int, int] = {}
    position = 0

    def visit(listed: list[Call]) -> None:
        nonlocal position
        for call in listed:
            position += 1
            for leaf in leaves((call.args, call.kwargs)):
                if isinstance(leaf, Ref):
                    last_read[leaf.name] = position
            visit(call.body)
            position += 1
            stops[id(call)] = position
            for leaf in leaves(call.result):
                if isinstance(leaf, Ref):
                    made.setdefault(leaf.name, position)

    visit(calls)
    last_read.update({leaf.name: position + 1 for leaf in leaves(results) if isinstance(leaf, Ref)})

    def mark(listed: list[Call]) -> set[str]:
        """Return the values that calls make and that are read later than the last of them."""
        alive: set[str] = set()
        for call in listed:
            stop = stops[id(call)]
            returned = {leaf.name for leaf in leaves(call.result) if isinstance(leaf, Ref)}
            inner = {name for name in mark(call.body) if last_read[name] > stop}
            if inner - returned:
                call.escapes, call.leaf = True, False
            alive |= inner | {name for name in returned if made[name] == stop and last_read.get(name, -1) > stop}
        return alive

    mark(calls)


def called_whole(calls: Iterable[Call]) -> dict[str, str]:
    """Return the modules that are called whole because their code looks at values, each with the reason."""
    found: dict[str, str] = {}
    for call in calls:
        if call.kind == "module" and call.opaque:
            found[call.target] = call.opaque
        found |= called_whole(call.body)
    return found


def drawing_outside(calls: Iterable[Call]) -> list[str]:
    """Return those of the modules called whole that draw with Python's or numpy's generators."""
    found: dict[str, None] = {}
    for call in calls:
        if call.draws_outside:
            found[call.target] = None
        found |= dict.fromkeys(drawing_outside(call.body))
    return list(found)

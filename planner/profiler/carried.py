"""Buffers that carry values from one forward to the next into what is trained on.

Running statistics that a norm keeps for evaluation are updated in training, but not read. The codes of a codebook, the
vectors of a spectral norm or a count of steps are: what a microbatch computes depends on all that came before it. One
process takes the microbatches one after another; replicas would each go on from their own.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn

from planner.arguments import ParamRef, Ref, leaves
from planner.profiler.loss_state import flat, operation, refs
from planner.profiler.recording import Call

# They update running statistics in training, and read them in evaluation only.
_NORMS = {"batch_norm", "instance_norm"}


def carried_buffers(
    model: nn.Module, calls: Iterable[Call], updated: tuple[str, ...], trained_on: Any
) -> tuple[str, ...]:
    """Return those of the `updated` buffers whose value of the last forward reaches the values of `trained_on`."""
    buffers = dict(model.named_buffers(remove_duplicate=False))
    known = {name: id(buffers[name]) for name in updated if name in buffers}
    if not known:
        return ()
    held = {number: frozenset({number}) for number in known.values()}  # which buffers' old values a buffer holds
    reached: dict[str, frozenset[int]] = {}  # and a value
    for call in flat(calls):
        if call.body:
            continue
        given = list(leaves((call.args, call.kwargs)))
        found: frozenset[int] = frozenset()
        for leaf in given:
            if isinstance(leaf, Ref):
                found |= reached.get(leaf.name, frozenset())
            elif isinstance(leaf, ParamRef) and leaf.name in known and operation(call) not in _NORMS:
                found |= held[known[leaf.name]]
        if call.kind == "module":
            found |= _read_inside(model.get_submodule(call.target), held)
        for name in refs(call.result):
            reached[name] = reached.get(name, frozenset()) | found
        target = call.args[0] if call.args and (call.in_place or call.kind == "setitem") else None
        if isinstance(target, Ref):
            reached[target.name] = reached.get(target.name, frozenset()) | found
        elif isinstance(target, ParamRef) and target.name in known:
            source = call.args[1] if len(call.args) > 1 else None
            if operation(call) == "copy" and isinstance(source, Ref):  # nothing of what was there stays
                found = reached.get(source.name, frozenset())
            elif operation(call) in ("zero", "fill"):
                found = frozenset()
            held[known[target.name]] = found
    carried: frozenset[int] = frozenset().union(*(reached.get(name, frozenset()) for name in refs(trained_on)))
    return tuple(name for name, number in known.items() if number in carried)


def _read_inside(module: nn.Module, held: dict[int, frozenset[int]]) -> frozenset[int]:
    """Return the buffers that a module reads whose calls are not known."""
    found: frozenset[int] = frozenset()
    for inner in module.modules():
        if not (isinstance(inner, nn.modules.batchnorm._NormBase) and inner.training):
            for buffer in inner.buffers(recurse=False):
                found |= held.get(id(buffer), frozenset())
    return found


def carried_notes(carried: tuple[str, ...]) -> list[str]:
    """Return what to tell of such buffers."""
    if not carried:
        return []
    return [
        (
            f"what is trained on reads buffer {carried[0]!r}, which forward updates: dp_degree stays 1, "
            "since every replica would go on from its own"
        )
    ]

"""Refuses writes in place that no plan could repeat: the value that is written and its other views are apart.

Stages exchange values, not memory. A value that is written in place goes on from the layer that wrote it; but another
view of the same memory, made in an earlier layer and read after the write, would be a copy of its own on another stage.
So would an input of the model, of which every stage has its own.
"""

from collections.abc import Iterator, Mapping, Sequence

from planner.arguments import Ref, leaves
from planner.errors import CaptureError
from planner.profiler.layers import Segment
from planner.profiler.recording import Call


def check_in_place(
    calls: Sequence[Call],
    output: object,
    inputs: Mapping[str, str],
    storages: Mapping[str, int],
    segments: Sequence[Segment],
) -> None:
    """Raise CaptureError for a write in place whose effect another layer would miss; `inputs` are names by number."""
    layer_of = [index for index, segment in enumerate(segments) for _ in range(segment.start, segment.stop)]
    made: dict[str, int] = dict.fromkeys(inputs, -1)
    written: dict[int, tuple[int, str, Call]] = {}
    """by storage: (layer, value, call) of the last write in place"""
    parts: dict[str, tuple[object, ...]] = {}
    """by part of a tensor: the tensor and the index"""
    for position, call in enumerate(calls):
        layer = layer_of[position]
        if call.kind == "getitem":
            parts.update(dict.fromkeys(_refs(call.result), call.args))
        # `x[i] += y` reads the part x[i], writes it, and puts it back where it was: whoever has x then has all of it
        back = call.kind == "setitem" and any(parts.get(name) == call.args[:2] for name in _refs(call.args[2:]))
        for value in _refs(call.args[2:] if back else (call.args, call.kwargs)):
            _check_read(value, layer, made, inputs, storages, written)
        for value in _changes(call):
            written[storages[value]] = (layer, value, call)
        for value in _refs(call.result):
            made.setdefault(value, layer)
    for value in _refs(output):
        _check_read(value, len(segments), made, inputs, storages, written)


def _check_read(
    value: str,
    layer: int,
    made: Mapping[str, int],
    inputs: Mapping[str, str],
    storages: Mapping[str, int],
    written: Mapping[int, tuple[int, str, Call]],
) -> None:
    if storages.get(value) not in written:
        return
    writer, target, call = written[storages[value]]
    if made[value] >= writer:  # of the writing layer, or made from what was written
        return
    is_input = value in inputs
    if (is_input and layer > writer) or (not is_input and value != target):
        what = f"input {inputs[value]!r}" if is_input else "another view of the same tensor"
        raise CaptureError(
            f"{call.location or call.scope or 'the model'}: `{call.target}` writes in place, and {what} is read after "
            "that in another layer: a stage of its own would read the old values",
            hint="write into a copy (x = x.clone()), or leave out the in-place variant of the operation",
        )


def _refs(value: object) -> Iterator[str]:
    return (leaf.name for leaf in leaves(value) if isinstance(leaf, Ref))


def _changes(call: Call) -> Iterator[str]:
    yield from (ref.name for ref in call.written)
    if call.in_place:
        read = set(_refs((call.args, call.kwargs)))
        yield from (name for name in _refs(call.result) if name in read)

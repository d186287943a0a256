"""Layers that a forward leaves out at random (stochastic depth, LayerDrop), decided by a random number in Python.

A program has no branches, so it computes such a layer always and takes its input in place of its result as often as
the model leaves it out: the same distribution, and the same gradients but for zeros where a parameter had none. That
leaving a layer out means no more than that is shown by a second recording, in which every such layer is left out.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from planner.arguments import Device, Ref, TrainingValue, leaves, map_argument
from planner.errors import CaptureError
from planner.profiler.recording import Call, Recording
from planner.program import Tensor

HINT = (
    "set its probability to 0 in the model's configuration (layerdrop=0.0, say), or let the decision leave out one "
    "module that returns one tensor"
)


def has_skips(calls: list[Call]) -> bool:
    """Return whether a module among the calls is left out at random."""
    return any(call.skipped_with for call in _every(calls))


def skip_notes(calls: list[Call]) -> list[str]:
    """Return what people should know of modules that are left out at random."""
    found = {call.target: call.skipped_with for call in _every(calls) if call.skipped_with}
    if not found:
        return []
    first = next(iter(found))
    others = f" and {len(found) - 1} more" if len(found) > 1 else ""
    what = f"left out at random (probability {found[first]:g}); a plan computes it and drops the result"
    return [f"{first}{others}: {what}, so that its parameters get zero gradients where one process has none"]


def _every(calls: list[Call]) -> list[Call]:
    return [inner for call in calls for inner in (call, *_every(call.body))]


def without_skipped(recording: Recording) -> Recording:
    """Return the recording as it is when every module that may be left out is: its input stands for its result."""
    instead: dict[str, Ref] = {}

    def change(leaf: Any) -> Any:
        while isinstance(leaf, Ref) and leaf.name in instead:
            leaf = instead[leaf.name]
        return leaf

    def changed(calls: list[Call]) -> list[Call]:
        kept = []
        for call in calls:
            if call.skipped_with:
                instead[result_of(call).name] = input_of(call, recording.tensors)
            else:
                kept.append(_mapped(call, change, changed(call.body)))
        return kept

    calls, loss_calls = changed(recording.calls), changed(recording.loss_calls)
    output, loss = map_argument(recording.output, change), map_argument(recording.loss, change)
    return replace(recording, calls=calls, loss_calls=loss_calls, output=output, loss=loss)


def _mapped(call: Call, change: Callable[[Any], Any], body: list[Call]) -> Call:
    return replace(
        call,
        args=map_argument(call.args, change),
        kwargs={key: map_argument(item, change) for key, item in call.kwargs.items()},
        result=map_argument(call.result, change),
        body=body,
    )


def result_of(call: Call) -> Ref:
    """Return the one tensor that a module gives which may be left out."""
    if not isinstance(call.result, Ref):
        raise CaptureError(f"{call.target} is left out at random, and returns no single tensor", hint=HINT)
    return call.result


def input_of(call: Call, tensors: dict[int, torch.Tensor]) -> Ref:
    """Return the first input of a module that has the shape and dtype of its result."""
    result = result_of(call)
    like = tensors[int(result.name)]
    for leaf in leaves((call.args, call.kwargs)):
        if isinstance(leaf, Ref) and leaf != result:
            given = tensors[int(leaf.name)]
            if given.shape == like.shape and given.dtype == like.dtype:
                return leaf
    raise CaptureError(f"{call.target} is left out at random, and no input is like its result", hint=HINT)


def insert_choices(recording: Recording, tensors: dict[str, Tensor], *, in_evaluation: bool) -> Recording:
    """Return the recording with a choice between result and input after every module that may be left out.

    What is made newly is entered into `tensors`. `in_evaluation` tells that modules are left out there too.
    """
    instead: dict[str, Ref] = {}

    def change(leaf: Any) -> Any:
        return instead.get(leaf.name, leaf) if isinstance(leaf, Ref) else leaf

    def new(like: Call, target: str, args: tuple[Any, ...], tensor: Tensor, **kwargs: Any) -> Call:
        number = str(max(map(int, tensors)) + 1)
        tensors[number] = tensor
        return Call(
            kind="function",
            target=target,
            args=args,
            kwargs=kwargs,
            scope=like.scope,
            no_grad=like.no_grad,
            location=like.location,
            result=Ref(number),
        )

    def changed(calls: list[Call]) -> list[Call]:
        made = []
        for call in calls:
            done = _mapped(call, change, changed(call.body))
            made.append(done)
            if not call.skipped_with:
                continue
            number = Tensor(shape=(), dtype="float32")
            training = True if in_evaluation else TrainingValue(True, False)
            one = new(done, "torch.ones", ((),), number, device=Device())
            kept = new(done, "torch.nn.functional.dropout", (one.result, call.skipped_with, training), number)
            kept.random = True
            flag = new(done, "operator.ne", (kept.result, 0), Tensor(shape=(), dtype="bool"))
            given, result = change(input_of(call, recording.tensors)), result_of(call)
            choice = new(done, "torch.where", (flag.result, result, given), tensors[result.name])
            made += [one, kept, flag, choice]
            instead[result.name] = choice.result
        return made

    calls, loss_calls = changed(recording.calls), changed(recording.loss_calls)
    output, loss = map_argument(recording.output, change), map_argument(recording.loss, change)
    return replace(recording, calls=calls, loss_calls=loss_calls, output=output, loss=loss)

"""Makes a recorded loss add up over microbatches: what it divides by is counted over the whole step.

Where a loss divides by a count of the batch (targets that are not ignored, a mask's ones), microbatches that count
differently would weigh differently: the mean of their losses is not the loss of the whole batch. The calls are walked
in order, every value's kind (`batch_kinds`) is derived from its operands', and

- a value made from inputs and targets alone, which is linear in the batch and which the loss reads in any other way,
  becomes a *count*: emitted code gets it for the whole step;
- a sum over rows is multiplied by the number of microbatches in the step;
- what makes rows depend on one another (statistics of a batch, products of its rows) stays and is named: there
  microbatching changes the loss, whoever does it.

The changed calls compute the same as the recorded ones when the whole step is one microbatch.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from planner.arguments import BatchInt, Fields, ParamRef, Ref, leaves, map_argument
from planner.model_profile import BATCH_NORM as BATCH_NORM_TEXT
from planner.model_profile import WRITES_BUFFER
from planner.profiler.batch_kinds import CONSTANT, KEEPS_LABELS, MEAN, ROWS, batch_dims, module_coupling
from planner.profiler.loss_rules import Rules
from planner.profiler.loss_state import flat, operation, place, refs
from planner.profiler.recording import Call
from planner.profiler.torch_internals import BATCH_NORM
from planner.program import Tensor
from planner.units import counted

_MAX_PASSES = 32
COUNTS = "counts in a microbatch what rows are divided by"
_IN_PLACE = {
    **dict.fromkeys(("iadd", "add"), "add"),
    **dict.fromkeys(("isub", "sub"), "sub"),
    **dict.fromkeys(("imul", "mul"), "mul"),
    **dict.fromkeys(("itruediv", "div"), "truediv"),
}


@dataclass(frozen=True)
class Meaning:
    """What `read_meaning` found: the calls as they must be, and what to tell of the loss.

    `counts` maps values to "sum" or "mean": what emitted code gets of them over the step. `ignored` maps inputs and
    targets that are labels to the value that leaves one out. `rewrites_loss` says that calls of loss_fn were changed.
    `inside` are modules that must be opened first, because calls inside them have to change.
    """

    calls: list[Call]
    loss_calls: list[Call]
    output: Any
    loss: Any
    tensors: dict[str, Tensor]
    counts: dict[str, str] = field(default_factory=dict)
    coupled: tuple[str, ...] = ()
    ignored: dict[str, int] = field(default_factory=dict)
    degree: int = 0
    rewrites_loss: bool = False
    inside: frozenset[str] = frozenset()


def read_meaning(
    model: nn.Module,
    calls: list[Call],
    loss_calls: list[Call],
    output: Any,
    loss: Any,
    tensors: dict[str, Tensor],
    sources: dict[str, str],
) -> Meaning:
    """Return the calls of a forward and its loss so that microbatches add up; `sources` names inputs and targets."""
    found = loss_value(output, loss, tensors)
    if found is None:
        return Meaning(
            calls, loss_calls, output, loss, tensors, coupled=_couplings(model, calls, output, tensors, sources)
        )
    counts: dict[str, str] = {}
    for _ in range(_MAX_PASSES):
        walk = _Walk(model, tensors, sources, counts, [*calls, *loss_calls], {found})
        changed = walk.rewrite(calls)
        changed_loss = walk.rewrite(loss_calls)
        if not walk.restart:
            break
    now = walk.current(Ref(found)).name
    kind = walk.kinds.get(now, MEAN)
    scaled = now
    if kind.form == "rows":  # of a shape without rows, so what made it is not understood
        walk.couple(found, "the loss", "depends on the batch in a way that is not understood")
    elif kind.form == "linear" and kind.degree:
        scaled, scale = walk.scaled(Ref(now), kind.degree, (changed_loss or changed or calls)[-1])
        (changed_loss if loss_calls else changed).extend(scale)

    def renamed(leaf: Any) -> Any:
        return Ref(scaled) if leaf == Ref(found) else walk.current(leaf)

    return Meaning(
        calls=changed,
        loss_calls=changed_loss,
        output=map_argument(output, walk.current if loss_calls else renamed),
        loss=map_argument(loss, renamed),
        tensors=walk.tensors,
        counts=walk.used_counts([*changed, *changed_loss]),
        coupled=_grouped(walk.coupled),
        ignored=walk.ignored,
        degree=kind.degree if kind.form == "linear" and now not in walk.mixed else 0,
        rewrites_loss=[id(c) for c in changed_loss] != [id(c) for c in loss_calls]
        or bool(walk.used_counts(changed_loss)),
        inside=frozenset(walk.inside),
    )


def _couplings(
    model: nn.Module, calls: list[Call], output: Any, tensors: dict[str, Tensor], sources: dict[str, str]
) -> tuple[str, ...]:
    """Return what makes rows of the output depend on one another, where nobody knows what is trained on."""
    numbers = {number for number in refs(output) if number in tensors and batch_dims(tensors[number])}
    walk = _Walk(model, tensors, sources, {}, calls, numbers)
    walk.rewrite(calls)  # what it changes is left: a count of the step needs the loss that it is for
    places = {number: place(call) for call in flat(calls) for number in refs(call.result)}
    counted_at = {(places.get(number, "the model"), COUNTS) for number in walk.counts}
    counted_at |= {(owner, COUNTS) for owner in walk.inside}
    return _grouped([*walk.coupled, *sorted(counted_at)])


def _grouped(coupled: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Return what makes rows depend on one another, each thing once with the places where it does."""
    places: dict[str, list[str]] = {}
    for where, what in coupled:
        places.setdefault(what, []).append(where)
    found = []
    for what, listed in places.items():
        others = f" and {counted(len(listed) - 1, 'other place')}" if len(listed) > 1 else ""
        found.append(f"{listed[0]}{others}: {what}")
    return tuple(found)


def loss_value(output: Any, loss: Any, tensors: dict[str, Tensor]) -> str | None:
    """Return the number of the value that is trained on, or None where it is not known."""
    if isinstance(loss, Fields):
        loss = dict(loss.items)
    if isinstance(loss, dict):
        loss = loss.get("loss")
    if isinstance(loss, Ref) and loss.name in tensors and not batch_dims(tensors[loss.name]):
        return loss.name
    return None


class _Walk(Rules):
    """One walk over the calls with a set of counts known from the start; `restart` when it found another."""

    def rewrite(self, calls: list[Call]) -> list[Call]:
        """Return the calls with those changed that must change."""
        changed: list[Call] = []
        for call in calls:
            if self.alias:
                call = replace(
                    call,
                    args=map_argument(call.args, self.current),
                    kwargs={key: map_argument(item, self.current) for key, item in call.kwargs.items()},
                )
            if call.kind == "module":
                self._module(call)
                changed.append(call)
            else:
                changed.extend(self._call(call))
        return changed

    def current(self, leaf: Any) -> Any:
        """Return what a value is now that was written in place."""
        while isinstance(leaf, Ref) and leaf.name in self.alias:
            leaf = Ref(self.alias[leaf.name])
        return leaf

    def _module(self, call: Call) -> None:
        module = self.model.get_submodule(call.target)
        results = refs(call.result)
        if isinstance(module, BATCH_NORM) and (module.training or not module.track_running_stats):
            for number in results:
                self.couple(number, call.target, BATCH_NORM_TEXT)
        first = next(iter(refs((call.args, call.kwargs))), None)
        if first is not None and (what := module_coupling(module, self.tensors[first])):
            for number in results:
                self.couple(number, call.target, what)
        if call.opaque:
            for number in results:
                self.couple(number, call.target, "its code looks at values, which are those of a microbatch")
        if call.body:
            outer, self.owner = self.owner, self.owner or call.target
            self.rewrite(call.body)
            self.owner = outer
        operands = [leaf for leaf in leaves((call.args, call.kwargs)) if isinstance(leaf, Ref)]
        for number in results:
            if number in self.kinds:
                continue
            constant = all(self.kind(leaf) == CONSTANT for leaf in operands)
            dims = batch_dims(self.tensors[number])
            self.kinds[number] = ROWS if dims else CONSTANT if constant else MEAN
            if call.body:
                continue
            if not dims and not constant:
                self.couple(number, call.target, "makes one value of all rows")
            for leaf in operands if dims else ():
                kind = self.kind(leaf)
                if kind.form == "rows" and kind.degree:
                    self.couple_grown(number, leaf, call.location or call.target)
                elif kind.form == "linear":
                    self.couple(number, call.location or call.target, "takes a value of the whole batch")

    def _call(self, call: Call) -> list[Call]:
        call = self._out_of_place(call)
        name, results = operation(call), refs(call.result)
        operands = [leaf for leaf in leaves((call.args, call.kwargs)) if isinstance(leaf, Ref)]
        written = next((leaf for leaf in call.args if isinstance(leaf, ParamRef)), None) if call.in_place else None
        if written is not None or (call.kind == "setitem" and isinstance(call.args[0], ParamRef)):
            self.coupled[(written or call.args[0]).name, WRITES_BUFFER] = None
        self._trace(call, name, operands, results)
        if not any(number in self.relevant for number in results):
            for number in results:
                self.kind(Ref(number))
            return [call]
        made = self.apply(call, name, operands)
        if made is None:
            made = self.unknown(call, name, operands)
        kind, calls = made
        if any(leaf.name in self.mixed for leaf in operands):
            self.mixed.update(number for number in results if not batch_dims(self.tensors[number]))
        for number in results:
            if number in self.counts and self.owner is None:
                self.kinds[number] = CONSTANT
                continue
            dims, constants = batch_dims(self.tensors[number]), self._has_offset(number)
            self.kinds[number] = kind if dims or kind.form != "rows" else MEAN
            if kind.form == "rows" and kind.degree:
                known = (self.grown[leaf.name] for leaf in operands if leaf.name in self.grown)
                self.grown[number] = next(known, place(call))
            if dims and kind.form != "rows":
                if kind.form == "linear":
                    self.couple(number, place(call), f"`{name}` gives every row a value of the whole batch")
                self.kinds[number] = ROWS
            elif kind.form == "rows" and not dims:
                self.couple(number, place(call), f"`{name}` makes one value of all rows")
            if len(dims) > 1:
                self.couple(number, place(call), f"`{name}` relates every row to every other")
            elif constants:
                self.couple(number, place(call), f"`{name}` leaves out rows, or adds some")
        return calls

    def _out_of_place(self, call: Call) -> Call:
        """Return a sum or product that is written into one number (`loss += ...`) as a call that makes a new value."""
        operator = _IN_PLACE.get(operation(call)) if call.in_place else None
        first = call.args[0] if call.args else None
        if operator is None or self.owner is not None or not isinstance(first, Ref) or len(call.args) != 2:
            return call
        if call.kwargs or self.kind(first).form == "rows" or batch_dims(self.tensors[first.name]):
            return call
        made = self.new(call, "function", f"operator.{operator}", call.args, self.tensors[first.name])
        self.alias[first.name] = made.result.name
        return made

    def _has_offset(self, number: str) -> bool:
        return any(isinstance(size, BatchInt) and size.constant for size in self.tensors[number].shape)

    def _trace(self, call: Call, name: str, operands: list[Ref], results: list[str]) -> None:
        """Keep which values come from inputs and targets alone, and which are labels that a user gave."""
        trained = any(isinstance(leaf, ParamRef) and leaf.name in self.trainable for leaf in leaves(call.args))
        pure = not (call.in_place or call.kind == "setitem" or trained or name in ("bernoulli", "rand", "randn"))
        if pure and all(leaf.name in self.known for leaf in operands):
            self.known.update(results)
        else:
            self.known.difference_update(results)
        if call.in_place or any(leaf.name in self.varies for leaf in operands):
            self.varies.update(results)
        if any(leaf.name in self.after_count for leaf in operands):
            self.after_count.update(results)
        first = call.args[0] if call.args else None
        if name in KEEPS_LABELS and isinstance(first, Ref) and first.name in self.labels:
            self.labels.update(dict.fromkeys(results, self.labels[first.name]))

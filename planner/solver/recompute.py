"""Which layers of a stage to recompute: the least extra time within a memory budget, exactly.

For a stage of layers a..b-1 with x_l = 1 where layer l is recomputed and p microbatches in flight:

    (1)  minimise    sum_l t_l x_l
    (2)  subject to  p * A(x) + X(x) <= budget
    (3)  A(x) = sum_l act_l (1 - x_l) + what is kept between neighbours (cost.memory)
    (4)  X(x) = max_l (transient_l + act_l x_l)

(2) couples neighbours only, so the choices along the chain are labels (A, X, time), extended layer by layer, dominated
ones dropped: `_extend`. Layers of one class have equal numbers, so labels are few. Where all layers differ they may
be many: beyond `MAX_LABELS` the integer program goes to CP-SAT: `_integer_program`. Times are integers of 1e-15 s, so
that sums don't depend on their order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from planner.cost.layers import LayerNumbers
from planner.cost.memory import activation_bytes, between_bytes, transient_bytes

MAX_LABELS = 3000
_TICKS_PER_S = 1e15


@dataclass(frozen=True, slots=True)
class Choice:
    """The recomputed layers of a stage, the seconds they add per microbatch, and `in_flight * A + X` bytes."""

    layers: tuple[int, ...]
    seconds: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Label:
    kept: int  # A so far, without what the stage receives
    transient: int
    ticks: int
    remade: bool
    before: "_Label | None"


_State = tuple[bool, bool]  # whether the first and the last layer are recomputed
_Front = dict[_State, list[_Label]]


class RecomputeChoices:
    """The choices for every stage of one layer table; fronts are made when asked for, and kept."""

    def __init__(
        self,
        layers: Sequence[LayerNumbers],
        inputs: Sequence[int],
        allowed: Sequence[tuple[bool, ...]],
        classes: Sequence[str],
    ) -> None:
        self._layers = layers
        self._inputs = inputs
        self._allowed = allowed
        self._classes = classes
        self._ticks = [round(layer.recompute_s * _TICKS_PER_S) for layer in layers]
        self._fronts: dict[int, list[_Front | None]] = {}
        self._timeless: RecomputeChoices | None = None
        self._answers: dict[tuple[int, int, int, int, int], Choice | None] = {}

    def fastest(self, first: int, stop: int, received: int, in_flight: int, budget: int) -> Choice | None:
        """Return the choice of least time whose bytes are within `budget`; None where there is none."""
        key = (first, stop, received, in_flight, budget)
        if key not in self._answers:
            self._answers[key] = self._fastest(*key)
        return self._answers[key]

    def leanest(self, first: int, stop: int, received: int, in_flight: int) -> int:
        """Return the least bytes of any choice; labels of equal time are few, whatever the layers."""
        if self._timeless is None:
            self._timeless = RecomputeChoices(self._layers, self._inputs, self._allowed, self._classes)
            self._timeless._ticks = [0] * len(self._layers)
        front = self._timeless._front(first, stop)
        if front is None:
            return self._integer_program(first, stop, received, in_flight, None)[0]
        return min(in_flight * kept + label.transient for kept, label in self._closed(front, first, stop, received))

    def _fastest(self, first: int, stop: int, received: int, in_flight: int, budget: int) -> Choice | None:
        front = self._front(first, stop)
        if front is None:
            _, found = self._integer_program(first, stop, received, in_flight, budget)
            return None if found is None else self._choice(first, stop, received, in_flight, found)
        best: tuple[tuple[int, int], _Label] | None = None
        for kept, label in self._closed(front, first, stop, received):
            num_bytes = in_flight * kept + label.transient
            if num_bytes <= budget and (best is None or (label.ticks, num_bytes) < best[0]):
                best = ((label.ticks, num_bytes), label)
        if best is None:
            return None
        remade: list[int] = []
        label_at, index = best[1], stop - 1
        while True:
            if label_at.remade:
                remade.append(index)
            if label_at.before is None:
                break
            label_at, index = label_at.before, index - 1
        chosen = self._choice(first, stop, received, in_flight, tuple(reversed(remade)))
        regular = self._choice(first, stop, received, in_flight, self._regular(first, stop, chosen.layers))
        same = sum(self._ticks[i] for i in regular.layers) == sum(self._ticks[i] for i in chosen.layers)
        return regular if same and regular.num_bytes <= budget else chosen

    def _regular(self, first: int, stop: int, remade: Sequence[int]) -> tuple[int, ...]:
        """Return as many layers of each class, the first ones: easier to read than any other choice of equal cost."""
        counts: dict[str, int] = {}
        for index in remade:
            counts[self._classes[index]] = counts.get(self._classes[index], 0) + 1
        chosen = []
        for index in range(first, stop):
            forced = len(self._allowed[index]) == 1
            if forced and index in remade:
                counts[self._classes[index]] -= 1
                chosen.append(index)
        for index in range(first, stop):
            if len(self._allowed[index]) == 2 and counts.get(self._classes[index], 0) > 0:
                counts[self._classes[index]] -= 1
                chosen.append(index)
        return tuple(sorted(chosen))

    def _choice(self, first: int, stop: int, received: int, in_flight: int, remade: tuple[int, ...]) -> Choice:
        kept = activation_bytes(self._layers, self._inputs, received, first, stop, remade)
        transient = transient_bytes(self._layers, first, stop, remade)
        seconds = sum(self._layers[index].recompute_s for index in remade)
        return Choice(remade, seconds, in_flight * kept + transient)

    def _closed(self, front: _Front, first: int, stop: int, received: int) -> "list[tuple[int, _Label]]":
        """Return (A, label) for every label that ends a stage: its last output and its inputs counted."""
        closed: list[tuple[int, _Label]] = []
        for (first_remade, last_remade), labels in front.items():
            held = max(received, 0 if first_remade else self._layers[first].saved_input_bytes)
            held += 0 if last_remade else self._layers[stop - 1].saved_output_bytes
            closed.extend((label.kept + held, label) for label in labels)
        return closed

    def _front(self, first: int, stop: int) -> _Front | None:
        """Return the labels for layers [first, stop), or None where they are too many."""
        fronts = self._fronts.setdefault(first, [self._start(first)])
        while len(fronts) < stop - first:
            last = fronts[-1]
            fronts.append(None if last is None else self._extend(last, first + len(fronts)))
        return fronts[stop - first - 1]

    def _start(self, first: int) -> _Front:
        layer = self._layers[first]
        front: _Front = {}
        for remade in self._allowed[first]:
            extra = layer.activation_bytes if remade else 0
            ticks = self._ticks[first] if remade else 0
            label = _Label(layer.activation_bytes - extra, layer.transient_bytes + extra, ticks, remade, None)
            front[remade, remade] = [label]
        return front

    def _extend(self, front: _Front, index: int) -> _Front | None:
        """Return the labels with layer `index` added, kept or recomputed."""
        layer, left = self._layers[index], self._layers[index - 1]
        grown: _Front = {}
        for (first_remade, last_remade), labels in front.items():
            output = 0 if last_remade else left.saved_output_bytes
            for remade in self._allowed[index]:
                between = between_bytes(output, self._inputs[index] if remade else layer.saved_input_bytes, layer)
                kept = between + (0 if remade else layer.activation_bytes)
                transient = layer.transient_bytes + (layer.activation_bytes if remade else 0)
                ticks = self._ticks[index] if remade else 0
                grown.setdefault((first_remade, remade), []).extend(
                    _Label(old.kept + kept, max(old.transient, transient), old.ticks + ticks, remade, old)
                    for old in labels
                )
        kept_front = {state: _undominated(labels) for state, labels in grown.items()}
        return kept_front if sum(map(len, kept_front.values())) <= MAX_LABELS else None

    def _integer_program(
        self, first: int, stop: int, received: int, in_flight: int, budget: int | None
    ) -> tuple[int, tuple[int, ...] | None]:
        """Return (least bytes, -) without a budget; (0, the layers of least time), or (0, None), within one."""
        from ortools.sat.python import cp_model

        model = cp_model.CpModel()
        span = range(first, stop)
        x: dict[int, Any] = {index: model.new_bool_var(f"remade_{index}") for index in span}
        for index in span:
            if len(self._allowed[index]) == 1:
                model.add(x[index] == int(self._allowed[index][0]))
        largest = (
            1
            + sum(self._inputs)
            + sum(n.activation_bytes + n.saved_input_bytes + n.saved_output_bytes for n in self._layers)
        )
        terms: list[Any] = [self._layers[index].activation_bytes * (1 - x[index]) for index in span]
        for before, index in pairwise(span):  # (3), what is kept between neighbours
            between = model.new_int_var(0, largest, f"between_{index}")
            left = self._layers[before].saved_output_bytes * (1 - x[before])
            saved = self._layers[index].saved_input_bytes
            own = saved + (self._inputs[index] - saved) * x[index]
            if self._layers[index].apart:
                model.add(between >= left + own)
            else:
                model.add(between >= left)
                model.add(between >= own)
            terms.append(between)
        held = model.new_int_var(received, max(received, largest), "held")
        model.add(held >= self._layers[first].saved_input_bytes * (1 - x[first]))
        terms += [held, self._layers[stop - 1].saved_output_bytes * (1 - x[stop - 1])]
        bound = max(n.transient_bytes + n.activation_bytes for n in self._layers[first:stop])
        transient = model.new_int_var(0, bound, "transient")
        for index in span:  # (4)
            layer = self._layers[index]
            model.add(transient >= layer.transient_bytes + layer.activation_bytes * x[index])
        num_bytes = in_flight * sum(terms) + transient
        if budget is None:
            model.minimize(num_bytes)
        else:
            model.add(num_bytes <= budget)  # (2)
            shift = max(1, sum(self._ticks[index] for index in span) // 10**15)
            model.minimize(sum(-(-self._ticks[index] // shift) * x[index] for index in span))  # (1)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1  # the same answer every time
        solver.parameters.random_seed = 0
        status = solver.solve(model)
        if status != cp_model.OPTIMAL:
            return 0, None
        remade = tuple(index for index in span if solver.boolean_value(x[index]))
        return (round(solver.objective_value), None) if budget is None else (0, remade)


def _undominated(labels: list[_Label]) -> list[_Label]:
    """Return the labels that no other one equals or beats in bytes, transient and time."""
    kept: list[_Label] = []
    stairs: list[tuple[int, int]] = []
    for label in sorted(labels, key=lambda label: (label.ticks, label.kept, label.transient)):
        if any(a <= label.kept and b <= label.transient for a, b in stairs):
            continue
        stairs = [(a, b) for a, b in stairs if not (label.kept <= a and label.transient <= b)]
        stairs.append((label.kept, label.transient))
        kept.append(label)
    return kept

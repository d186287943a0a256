"""What is known of values while the calls of a loss are walked, and the calls that are made beside them."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch import nn

from planner.arguments import Device, Ref, leaves
from planner.profiler.batch_kinds import CONSTANT, MEAN, ROWS, Kind, batch_dims
from planner.profiler.recording import Call
from planner.program import Tensor


def flat(calls: Iterable[Call]) -> Iterator[Call]:
    """Yield calls, and the calls inside them."""
    for call in calls:
        yield call
        yield from flat(call.body)


def refs(value: Any) -> list[str]:
    """Return the numbers of the values in a structure."""
    return [leaf.name for leaf in leaves(value) if isinstance(leaf, Ref)]


def operation(call: Call) -> str:
    """Return what a call does by one word, whether it is a function, a method or an operator."""
    if call.kind in ("getitem", "setitem"):
        return call.kind
    return call.target.rpartition(".")[2].strip("_")


def place(call: Call) -> str:
    """Return where in the user's code a call stands."""
    return call.location or call.scope or "the model"


class State:
    """The values of a walk: their kinds, which are counts, which are made from inputs and targets alone."""

    def __init__(
        self,
        model: nn.Module,
        tensors: dict[str, Tensor],
        sources: dict[str, str],
        counts: dict[str, str],
        calls: list[Call],
        trained_on: Collection[str],
    ) -> None:
        self.model, self.tensors, self.counts, self.restart = model, dict(tensors), counts, False
        self.trainable = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self.kinds: dict[str, Kind] = {number: ROWS if batch_dims(tensors[number]) else CONSTANT for number in sources}
        self.known = set(sources)  # values made from inputs and targets alone
        self.varies = set(sources)  # values that other data could make others
        self.after_count: set[str] = set(counts)
        self.labels = dict(sources)
        self.ignored: dict[str, int] = {}
        self.coupled: dict[tuple[str, str], None] = {}  # where, and what
        self.inside: set[str] = set()
        self.made: dict[str, str] = {}
        self.mixed: set[str] = set()  # values of the whole batch that are no sum over rows: each microbatch has its own
        self.grown: dict[str, str] = {}  # values of rows that depend on the number of rows: where that came in
        self.zeros: set[str] = set()  # tensors of zeros
        self.direct: set[str] = set()  # counts that only divide a sum over rows
        self.alias: dict[str, str] = {}  # values that were written in place: what they are now
        self.parts: str | None = None
        self.owner: str | None = None
        self.next = max(map(int, tensors), default=0) + 1
        every = list(flat(calls))
        self.uses = Counter(number for call in every if not call.body for number in set(refs((call.args, call.kwargs))))
        self.relevant = set(trained_on)
        for call in reversed(every):
            if call.in_place or call.kind == "setitem" or self.relevant & set(refs(call.result)):
                self.relevant.update(refs((call.args, call.kwargs)))

    # -- what is known of values ------------------------------------------------------------------------------------

    def kind(self, value: Any) -> Kind:
        """Return the kind of an argument; numbers and parameters are constants."""
        if not isinstance(value, Ref):
            return CONSTANT
        if value.name not in self.kinds:
            self.kinds[value.name] = ROWS if batch_dims(self.tensors[value.name]) else CONSTANT
        return self.kinds[value.name]

    def couple(self, number: str, where: str, what: str) -> None:
        """Note that rows depend on one another, where the loss depends on that."""
        if number in self.relevant:
            self.coupled[where, what] = None
            if not batch_dims(self.tensors[number]):
                self.mixed.add(number)

    def couple_grown(self, number: str, value: Ref, where: str) -> None:
        """Note that a value which depends on the number of rows is read by something that is not linear in it."""
        self.couple(number, self.grown.get(value.name, where), "a value of each row depends on the number of rows")

    def settle(self, value: Any) -> bool:
        """Make a linear value made from inputs and targets alone a count, a constant of the step; whether it is one."""
        if not isinstance(value, Ref) or self.kind(value).form != "linear" or value.name not in self.known:
            return False
        kind = self.kind(value)
        if value.name in self.mixed | self.after_count or kind.degree not in (0, 1) or value.name not in self.relevant:
            return False
        if self.owner is not None:
            self.inside.add(self.owner)
        else:
            self.counts[value.name] = "sum" if kind.degree == 1 else "mean"
            self.restart = True
        self.kinds[value.name] = CONSTANT
        return True

    def used_counts(self, calls: list[Call]) -> dict[str, str]:
        """Return the counts that something reads, in the order of their making."""
        over = {**self.counts, **self.made, **dict.fromkeys(self.direct, "mean")}
        return {number: over[number] for call in calls for number in refs(call.result) if number in over}

    # -- new calls --------------------------------------------------------------------------------------------------

    def new(self, like: Call, kind: Any, target: str, args: tuple[Any, ...], tensor: Tensor, **options: Any) -> Call:
        """Return a call beside `like` that makes a new value."""
        number = str(self.next)
        self.next += 1
        self.tensors[number] = tensor
        self.relevant.add(number)
        return Call(
            kind=kind,
            target=target,
            args=args,
            kwargs=options.get("kwargs", {}),
            scope=like.scope,
            no_grad=like.no_grad,
            location=like.location,
            result=Ref(number),
            name=options.get("name", ""),
        )

    def scaled(self, value: Ref, degree: int, like: Call) -> tuple[str, list[Call]]:
        """Return the value with degree 0, and the calls that make it: times the number of microbatches of the step."""
        calls = []
        if value.name in self.mixed:
            self.kinds[value.name] = MEAN
            return value.name, []
        if self.owner is not None:
            self.inside.add(self.owner)
            return value.name, []
        if self.parts is None:
            one = Tensor(shape=(), dtype="float32")
            calls.append(
                self.new(
                    like, "function", "torch.ones", ((),), one, kwargs={"device": Device()}, name="num_microbatches"
                )
            )
            self.parts = calls[-1].result.name
            self.made[self.parts] = "sum"
        tensor = self.tensors[value.name]
        for _ in range(abs(degree)):
            target = "operator.mul" if degree > 0 else "operator.truediv"
            calls.append(self.new(like, "function", target, (value, Ref(self.parts)), tensor))
            value = calls[-1].result
        self.kinds[value.name] = MEAN
        return value.name, calls

"""What each operation makes of the kinds of its operands, and how it must change so that microbatches add up."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from planner.arguments import BatchFloat, BatchInt, ParamRef, Ref, leaves, map_argument
from planner.profiler.batch_kinds import (
    ALONG,
    COMBINED,
    CONSTANT,
    FACTORIES,
    FILLS,
    MEAN,
    PRODUCTS,
    ROWS,
    SAME,
    SUM,
    Kind,
    batch_dims,
    bound_arguments,
    computes_with_rows,
    couples_rows,
    power_of_rows,
    reduction_of,
)
from planner.profiler.loss_state import State, place, refs
from planner.profiler.recording import Call
from planner.program import Tensor

_NUMBERS = (ParamRef, BatchInt, BatchFloat)
_ZEROS = {"zeros", "zeros_like", "new_zeros"}  # what sums are begun with


class Rules(State):
    """The rules: each takes a call, and gives the kind of what it makes and the calls that take its place."""

    def unknown(self, call: Call, name: str, operands: list[Ref]) -> tuple[Kind, list[Call]]:
        """Return the kind of what an operation makes that may do anything within a row."""
        kinds = set()
        if computes_with_rows(name, call.args, call.kwargs):
            self._couple_results(call, f"`{name}` computes with the number of rows, which is that of a microbatch")
        for leaf in operands:
            kind = self.kind(leaf)
            if kind.form == "linear" and not self.settle(leaf):
                self._couple_results(call, f"`{name}` is no sum over rows, and takes a value of the whole batch")
            kinds.add(self.kind(leaf))
            if kind.form == "rows" and couples_rows(name, call.args, call.kwargs, self.tensors[leaf.name]):
                self._couple_results(call, f"`{name}` works along the dimension of the batch")
            if kind.form == "rows" and kind.degree:
                for number in refs(call.result):
                    self.couple_grown(number, leaf, place(call))
        if kinds <= {CONSTANT} or name in FACTORIES:
            return CONSTANT, [call]
        return (ROWS if any(kind.form == "rows" for kind in kinds) else MEAN), [call]

    def _couple_results(self, call: Call, what: str) -> None:
        for number in refs(call.result):
            self.couple(number, place(call), what)

    def apply(self, call: Call, name: str, operands: list[Ref]) -> tuple[Kind, list[Call]] | None:
        """Return the kind of what a known operation makes and the calls that do it; None for other operations."""
        if call.in_place or call.kind == "setitem":
            return None
        if name in _ZEROS:
            self.zeros.update(refs(call.result))
        kinds = [self.kind(leaf) for leaf in operands]
        if set(kinds) <= {CONSTANT} and not any(
            isinstance(leaf, BatchInt | BatchFloat) for leaf in leaves((call.args, call.kwargs))
        ):
            return CONSTANT, [call]
        first = call.args[0] if call.args else None
        if name in ("cross_entropy", "nll_loss", "nll_loss_nd", "nll_loss2d"):
            return self._cross_entropy(call, name)
        if (arguments := bound_arguments(name, call.args, call.kwargs)) is not None:
            if any(kind.form == "linear" for kind in kinds) or computes_with_rows(name, call.args, call.kwargs):
                return None
            reduction = reduction_of(arguments)
            return (ROWS if reduction == "none" else SUM if reduction == "sum" else MEAN), [call]
        if name in FILLS and computes_with_rows(name, call.args, call.kwargs):
            return self._filled(call, name)
        if name in SAME and isinstance(first, Ref) and name not in ALONG:
            return self.kind(first), [call]
        if name in ("sum", "mean", "nansum", "count_nonzero") and len(operands) == 1:
            return self._reduced(self.kind(operands[0]), call, times=0 if name == "mean" else 1), [call]
        if name in PRODUCTS and not any(kind.form == "linear" for kind in kinds):
            rows = any(batch_dims(self.tensors[number]) for number in refs(call.result))
            return (ROWS if rows else SUM), [call]
        if name in ("add", "sub", "rsub") and len(call.args) == 2 and not call.kwargs:
            return self._added(call, list(call.args))
        if name == "where" and len(call.args) == 3 and self.kind(call.args[0]) == CONSTANT:
            return self._added(call, list(call.args[1:]))
        if name in COMBINED and isinstance(first, tuple | list):
            return self._added(call, list(first))
        if name in ("mul", "multiply", "truediv", "div", "divide", "true_divide") and len(call.args) == 2:
            return self._multiplied(call, divides=name not in ("mul", "multiply")) if not call.kwargs else None
        return None

    def _filled(self, call: Call, name: str) -> tuple[Kind, list[Call]] | None:
        """Return the kind of a new tensor of one number that grows with the rows."""
        value = next(iter([*call.args[FILLS[name] :], *(call.kwargs.get(key) for key in ("data", "fill_value"))]))
        if not (power := power_of_rows(value)):
            return None
        rows = any(batch_dims(self.tensors[number]) for number in refs(call.result))
        return Kind("rows" if rows else "linear", power), [call]

    def _reduced(self, kind: Kind, call: Call, *, times: int) -> Kind:
        if kind.form != "rows" or any(batch_dims(self.tensors[number]) for number in refs(call.result)):
            return kind
        return Kind("linear", kind.degree + times)

    def _added(self, call: Call, terms: list[Any]) -> tuple[Kind, list[Call]] | None:
        if not all(power_of_rows(term) is None or power_of_rows(term) for term in terms):
            return None
        kinds = [Kind("linear", power) if (power := power_of_rows(term)) else self.kind(term) for term in terms]
        if any(kind.form == "rows" for kind in kinds):
            for term in terms:
                self.settle(term)
            kinds = [self.kind(term) for term in terms]
            if all(kind.form == "rows" for kind in kinds) and len({kind.degree for kind in kinds}) == 1:
                return kinds[0], [call]
            return None
        real = [
            (term, kind)
            for term, kind in zip(terms, kinds, strict=True)
            if (term.name not in self.zeros if isinstance(term, Ref) else isinstance(term, _NUMBERS) or term)
        ]
        if not real:
            return CONSTANT, [call]
        degrees = {kind.degree if kind.form == "linear" else 0 for _, kind in real}
        if len(degrees) <= 1 and all(kind.form == "linear" for _, kind in real):
            return real[0][1], [call]
        if any(power_of_rows(term) for term, _ in real):
            return None
        if all(kind == CONSTANT or (isinstance(term, Ref) and term.name in self.known) for term, kind in real):
            for term, _ in real:
                self.settle(term)
            return CONSTANT, [call]
        calls: list[Call] = []
        renamed: dict[str, str] = {}
        for term, kind in real:
            if isinstance(term, Ref) and kind.form == "linear" and kind.degree:
                renamed[term.name], made = self.scaled(term, kind.degree, call)
                calls.extend(made)

        def change(leaf: Any) -> Any:
            return Ref(renamed[leaf.name]) if isinstance(leaf, Ref) and leaf.name in renamed else leaf

        return MEAN, [*calls, replace(call, args=map_argument(call.args, change)) if renamed else call]

    def _multiplied(self, call: Call, *, divides: bool) -> tuple[Kind, list[Call]] | None:
        left, right = call.args
        if power_of_rows(right) is not None or power_of_rows(left) is not None:
            return self._times_rows(call, divides=divides)
        if divides and self.kind(right).form == "linear":
            if not self.settle(right):
                return None
        elif self.kind(left).form != "constant" and self.kind(right).form != "constant":
            for side in (right, left):
                if self.kind(side).form == "linear":
                    self.settle(side)
        a, b = self.kind(left), self.kind(right)
        if b == CONSTANT:
            return self._divided(call, a) if divides else (a, [call])
        if a == CONSTANT and not divides:
            return b, [call]
        if a.form == b.form == "rows":
            return Kind("rows", a.degree + (-b.degree if divides else b.degree)), [call]
        return None

    def _times_rows(self, call: Call, *, divides: bool) -> tuple[Kind, list[Call]] | None:
        """Return the kind of a product or quotient of a value and a power of the number of rows."""
        left, right = call.args
        power, value = power_of_rows(right), left
        inverted = divides and power is None  # rows / value
        if power is None:
            power, value = power_of_rows(left), right
        if inverted:
            self.settle(value)
        kind = self.kind(value)
        if not power or power_of_rows(value) is not None or (inverted and kind.form == "linear"):
            return None
        if inverted:
            return Kind("linear" if kind == CONSTANT else "rows", power - kind.degree), [call]
        return Kind("linear" if kind == CONSTANT else kind.form, kind.degree + (-power if divides else power)), [call]

    def _divided(self, call: Call, kind: Kind) -> tuple[Kind, list[Call]]:
        """Return the kind of a value divided by a constant; a sum over rows becomes a mean where that is a count."""
        count = call.args[1]
        if kind != SUM or not isinstance(count, Ref) or count.name not in self.after_count:
            return kind, [call]
        if self.counts.get(count.name) == "sum" and self.uses[count.name] == 1 and self.owner is None:
            self.direct.add(count.name)
            return MEAN, [call]
        result = call.result
        inner = replace(call, result=Ref(str(self.next)))
        self.tensors[str(self.next)] = self.tensors[result.name]
        self.kinds[str(self.next)] = SUM
        self.next += 1
        _, calls = self.scaled(inner.result, 1, call)
        if not calls:
            return MEAN, [call]
        calls[-1].result = result
        return MEAN, [*calls[:-1], inner, calls[-1]]

    def _cross_entropy(self, call: Call, name: str) -> tuple[Kind, list[Call]] | None:
        arguments = bound_arguments(name, call.args, call.kwargs)
        target = arguments.get("target") if arguments else None
        if arguments is None or not isinstance(target, Ref):
            return None
        reduction = reduction_of(arguments)
        whole = self.tensors[target.name].dtype.startswith(("float", "bfloat"))  # probabilities: none is ignored
        index = arguments["ignore_index"]
        if target.name in self.labels and not whole:
            self.ignored[self.labels[target.name]] = index
        if reduction != "mean" or whole or (target.name in self.known and target.name not in self.varies):
            return (ROWS if reduction == "none" else SUM if reduction == "sum" else MEAN), [call]
        if target.name not in self.known or target.name in self.after_count:
            self._couple_results(call, f"`{name}` averages over targets that the model computes")
            return MEAN, [call]
        if self.owner is not None:
            self.inside.add(self.owner)
            return MEAN, [call]
        calls = list(self._count(call, target, arguments))
        count = calls[-1].result
        self.made[count.name] = "mean"
        self.kinds[count.name] = CONSTANT
        legacy = {key: None for key in ("size_average", "reduce") if arguments.get(key) is not None}
        kwargs = {key: value for key, value in arguments.items() if key not in ("input", "target")}
        kwargs = {key: value for key, value in kwargs.items() if not _is_default(name, key, value)} | legacy
        kwargs = {key: value for key, value in kwargs.items() if value is not None} | {"reduction": "sum"}
        scalar = self.tensors[call.result.name]
        args = (arguments["input"], target)
        total = replace(self.new(call, "function", call.target, args, scalar), kwargs=kwargs)
        divided = replace(call, target="operator.truediv", args=(total.result, count), kwargs={}, name="mean_loss")
        return MEAN, [*calls, total, divided]

    def _count(self, call: Call, target: Ref, arguments: dict[str, Any]) -> Iterator[Call]:
        """Yield the calls that count the targets that are not ignored, by their weights where the classes have some."""
        index, weight = arguments["ignore_index"], arguments.get("weight")
        labels = self.tensors[target.name]
        flags = labels.replace(dtype="bool", requires_grad=False, follows_model_dtype=False)
        valid = self.new(call, "function", "operator.ne", (target, index), flags)
        yield valid
        if weight is None:
            total = Tensor(shape=(), dtype="int64")
            yield self.new(call, "method", "sum", (valid.result,), total, name="num_targets")
            return
        known = self.tensors.get(weight.name) if isinstance(weight, Ref) else None
        described = {
            "dtype": known.dtype if known else str(self._parameter(weight).dtype).removeprefix("torch."),
            "follows_model_dtype": known.follows_model_dtype if known else True,
        }
        safe = self.new(call, "function", "operator.mul", (target, valid.result), labels)
        yield safe
        picked = self.new(call, "getitem", "", (weight, safe.result), labels.replace(**described))
        yield picked
        weighed = self.new(call, "function", "operator.mul", (picked.result, valid.result), labels.replace(**described))
        yield weighed
        scalar = Tensor(shape=(), **described)
        yield self.new(call, "method", "sum", (weighed.result,), scalar, name="weight_of_targets")

    def _parameter(self, name: ParamRef) -> Any:
        owner, _, last = name.name.rpartition(".")
        return getattr(self.model.get_submodule(owner), last)


def _is_default(name: str, key: str, value: Any) -> bool:
    defaults = bound_arguments(name, (None, None), {})
    return defaults is not None and defaults.get(key) == value and type(defaults.get(key)) is type(value)

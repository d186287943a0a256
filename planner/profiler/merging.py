"""Merges recordings of one forward: what differs between them is what depends on the batch, the dtype or training.

A number that changes with the rows is a polynomial of them; another difference of structure is a
`StructureDiffersError`, which `capture` tells as an error or as a note.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from planner.arguments import MODEL_DTYPE, BatchFloat, BatchInt, Dtype, Fields, ParamRef, Ref, TrainingValue
from planner.profiler.recording import Call, Recording

# Two is the smallest batch that no code treats as a scalar; three differs from it in every power and multiple. What
# both say of a number is tried at eleven rows, which is no multiple and no power of two, and next to none above it.
ROWS = (2, 3)
TRIED_ROWS = 11

Leaf = Callable[[Any, Any], Any]


class StructureDiffersError(Exception):
    """Two recordings differ: `what`, at a statement."""

    def __init__(self, what: str, location: str) -> None:
        super().__init__(what)
        self.what = what
        self.location = location


def rows_dim(base: int, more: int) -> int | BatchInt:
    """Return a size or number of two batches as one that follows the rows, linear until `polynomial` sees a third."""
    first, second = ROWS
    if base == more:
        return base
    per_row, remainder = divmod(more - base, second - first)
    if remainder:
        raise StructureDiffersError(f"{base} and {more} rows", "")
    return BatchInt(per_row, base - per_row * first)


def rows_leaf(base: Any, other: Any) -> Any:
    """Unify two constants recorded with different numbers of rows."""
    if type(base) is int and type(other) is int:
        return rows_dim(base, other)
    if type(base) is float and type(other) is float:
        return _rows_float(base, other)
    raise StructureDiffersError(f"the constant {base!r} ({other!r} in the larger batch)", "")


def _rows_float(base: float, other: float) -> BatchFloat:
    """Return a float that is proportional to the rows, or to their inverse: two values say no more than that."""
    first, second = ROWS
    if math.isclose(base * second, other * first, rel_tol=1e-12):
        return BatchFloat(base / first)
    if math.isclose(base * first, other * second, rel_tol=1e-12):
        return BatchFloat(base * first, -1)
    raise StructureDiffersError(f"the constant {base!r} ({other!r} in the larger batch)", "")


def dtype_leaf(rows: int, base: Any, other: Any) -> Any:
    """Unify two constants, the other recorded with another model dtype and another number of rows."""
    if isinstance(base, Dtype) and isinstance(other, Dtype):
        return Dtype(MODEL_DTYPE)
    rounding = isinstance(base, float) and isinstance(other, float) and math.isclose(base, other, rel_tol=1e-6)
    limit = isinstance(base, float) and abs(base) > 1e4  # the lowest number of a dtype, used to mask
    if rounding or limit:
        return base
    if isinstance(base, BatchInt) and type(other) is int:
        return polynomial(base, rows, other)
    if isinstance(base, BatchFloat) and isinstance(other, float) and math.isclose(base.at(rows), other, rel_tol=1e-6):
        return base
    expected = f"{other!r} in float64 with {rows} rows"
    raise StructureDiffersError(f"the constant {base!r} ({expected})", "")


def polynomial(base: BatchInt, rows: int, value: int) -> BatchInt:
    """Return the polynomial of the rows that is what `base` is at the first two numbers of rows, and `value` at `rows`.

    It is linear where that agrees, or else quadratic (the pairs of a batch) with whole coefficients.
    """
    if base.at(rows) == value:
        return base
    first, second = ROWS
    squared, remainder = divmod(value - base.at(rows), (rows - first) * (rows - second) or 1)
    if remainder or rows in ROWS:
        numbers = f"{base.at(first)}, {base.at(second)} and {value}"
        raise StructureDiffersError(f"a size or number is {numbers} with {first}, {second} and {rows} rows", "")
    return BatchInt(
        base.per_row - squared * (first + second), base.constant + squared * first * second, base.squared + squared
    )


def training_leaf(base: Any, other: Any) -> Any:
    """Unify two constants recorded in training and in evaluation mode."""
    if isinstance(base, BatchInt | BatchFloat) and type(other) in (int, float) and base.at(ROWS[0]) == other:
        return base
    if base == Dtype(MODEL_DTYPE) and isinstance(other, Dtype):
        return base
    if isinstance(base, bool | int | float) and isinstance(other, bool | int | float):
        return TrainingValue(base, other)
    raise StructureDiffersError(f"the constant {base!r} ({other!r} in evaluation)", "")


def same_leaf(base: Any, other: Any) -> Any:
    """Refuse any difference between two recordings of the same."""
    raise StructureDiffersError(f"the constant {base!r} (then {other!r})", "")


def merge(base: Recording, other: Recording, leaf: Leaf) -> tuple[Recording, dict[int, int]]:
    """Return `base` with every constant that differs from `other` unified by `leaf`, and other's number of each value.

    A call may return its own operand in one recording and a copy in the other (a cast to the dtype it has, a dropout
    that is off): a value of one recording may stand for several of the other.
    """
    merger = _Merger(leaf)
    merger.pair_inputs(base, other)
    merged = replace(
        base,
        calls=merger.calls(base.calls, other.calls),
        loss_calls=merger.calls(base.loss_calls, other.loss_calls),
        output=merger.unify(base.output, other.output),
        loss=merger.unify(base.loss, other.loss),
    )
    return merged, merger.numbers


class _Merger:
    def __init__(self, leaf: Leaf) -> None:
        self.leaf = leaf
        self.pairs: set[tuple[Ref | ParamRef, Ref | ParamRef]] = set()
        self.numbers: dict[int, int] = {}

    def pair_inputs(self, base: Recording, other: Recording) -> None:
        """Pair the inputs of the two recordings."""
        for ours, theirs in ((base.inputs, other.inputs), (base.targets, other.targets)):
            for name, number in ours.items():
                self._pair(Ref(str(number)), Ref(str(theirs[name])))

    def _pair(self, base: Any, other: Any) -> Any:
        if isinstance(base, Ref | ParamRef) and isinstance(other, Ref | ParamRef):
            self.pairs.add((base, other))
            if isinstance(base, Ref) and isinstance(other, Ref):
                self.numbers.setdefault(int(base.name), int(other.name))
            return base
        return self.leaf(base, other) if base != other else base

    def calls(self, base: list[Call], other: list[Call]) -> list[Call]:
        """Return the calls of `base`, unified."""
        merged = []
        for index in range(max(len(base), len(other))):
            if index >= len(base) or index >= len(other):
                extra = (base if index < len(base) else other)[index]
                raise StructureDiffersError(
                    f"whether `{extra.target or extra.kind}` is called", extra.location or extra.scope
                )
            merged.append(self._call(base[index], other[index]))
        return merged

    def _call(self, base: Call, other: Call) -> Call:
        where = base.location or other.location or base.scope or "the model"
        if (base.kind, base.target) != (other.kind, other.target):
            raise StructureDiffersError(
                f"`{base.target or base.kind}` or `{other.target or other.kind}` being called", where
            )
        try:
            args, kwargs = self.unify(base.args, other.args), self.unify(base.kwargs, other.kwargs)
            body = self.calls(base.body, other.body)
            result = _walk(base.result, other.result, self._pair)
        except StructureDiffersError as error:
            if error.location:
                raise
            raise StructureDiffersError(f"{error.what} of `{base.target or base.kind}`", where) from None
        return replace(base, args=args, kwargs=kwargs, result=result, body=body)

    def unify(self, base: Any, other: Any) -> Any:
        """Return an argument of `base` unified with that of `other`."""
        return _walk(base, other, self._read)

    def _read(self, base: Any, other: Any) -> Any:
        if isinstance(base, Ref | ParamRef) and isinstance(other, Ref | ParamRef):
            if (base, other) in self.pairs or (base == other and isinstance(base, ParamRef)):
                return base
            raise StructureDiffersError("which value is used", "")
        if type(base) is type(other) and (base == other or (base != base and other != other)):
            return base
        return self.leaf(base, other)


def _walk(base: Any, other: Any, change: Leaf) -> Any:
    """Return a structure with `change` applied to each pair of leaves of two structures of the same form."""
    if type(base) is type(other):
        match base:
            case Fields() if [name for name, _ in base.items] == [name for name, _ in other.items]:
                others = iter(other.items)
                return base.map(lambda item: _walk(item, next(others)[1], change))
            case tuple() if len(base) == len(other):
                return tuple(_walk(a, b, change) for a, b in zip(base, other, strict=True))
            case list() if len(base) == len(other):
                return [_walk(a, b, change) for a, b in zip(base, other, strict=True)]
            case dict() if list(base) == list(other):
                return {key: _walk(item, other[key], change) for key, item in base.items()}
            case slice():
                items = zip((base.start, base.stop, base.step), (other.start, other.stop, other.step), strict=True)
                return slice(*(_walk(a, b, change) for a, b in items))
        if isinstance(base, tuple | list):
            counts = f"the number of values ({len(base)} or {len(other)})"
            raise StructureDiffersError(counts, "")
    return change(base, other)

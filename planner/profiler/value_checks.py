"""Passes checks of values: statements that only raise or warn where the data is wrong (`assert (x >= 0).all()`).

Right data takes one way through such a statement, so a program can be recorded on it; the check itself is not part of
the program. Which way that is, is read from the statement's source.
"""

import ast
import dis
import functools
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from planner.arguments import Ref, leaves

if TYPE_CHECKING:
    from planner.profiler.recording import Call

_TORCH_CHECKS = "_check"  # torch's own functions that raise unless a condition holds: _check_tensor_all_with, ...
_WARNERS = {"print", "warn", "warn_once", "warning", "warning_once", "info", "info_once", "debug", "error", "exception"}


def passing_value(frame: FrameType | None) -> bool | None:
    """Return the truth value with which a check passes that `frame` is making; None where it makes none.

    `frame` is the one that asks for the truth of a tensor, or for its only item.
    """
    if frame is None:
        return None
    code = frame.f_code
    if code.co_name.startswith(_TORCH_CHECKS) and code.co_filename.endswith(str(Path("torch") / "__init__.py")):
        return True
    position = next(p for i, p in enumerate(code.co_positions()) if i == frame.f_lasti // 2)
    instruction = dis.opname[code.co_code[frame.f_lasti]]
    for statement in _checks(code.co_filename):
        parts = dict(_parts(statement.test, isinstance(statement, ast.Assert)))
        spans = {_span(part): value for part, value in parts.items()}
        if position in spans and not isinstance(statement.test, ast.BoolOp):
            return spans[position]
        # A jump may have the place of the whole statement: then it must not matter which part of the test it is for.
        if "JUMP" in instruction and (position == _span(statement) or position in spans):
            values = {value for part, value in parts.items() if _may_be_tensor(part)}
            return values.pop() if len(values) == 1 else None
        if position in spans:
            return spans[position]
    return None


def _span(node: ast.expr | ast.stmt) -> tuple[int | None, ...]:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _may_be_tensor(part: ast.expr) -> bool:
    """Return whether a part of a test may be the truth of a tensor: no compound is, and no question about None."""
    if isinstance(part, ast.BoolOp) or (isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.Not)):
        return False
    return not (isinstance(part, ast.Compare) and isinstance(part.ops[0], ast.Is | ast.IsNot | ast.In | ast.NotIn))


@functools.cache
def _checks(filename: str) -> tuple[ast.Assert | ast.If, ...]:
    """Return the statements of a file that do nothing but check."""
    try:
        tree = ast.parse(Path(filename).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ()
    return tuple(
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert) or (isinstance(node, ast.If) and not node.orelse and _only_tells(node.body))
    )


def _only_tells(body: list[ast.stmt]) -> bool:
    return all(isinstance(statement, ast.Raise | ast.Pass) or _is_warning(statement) for statement in body)


def _is_warning(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.Expr):
        return False
    if isinstance(statement.value, ast.Constant):
        return True
    function = statement.value.func if isinstance(statement.value, ast.Call) else None
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in _WARNERS


def _parts(test: ast.expr, wanted: bool) -> Iterator[tuple[ast.expr, bool]]:
    """Yield the parts of a test whose truth decides it, each with the truth that gives the test the one wanted."""
    yield test, wanted
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield from _parts(operand, not wanted)
        case ast.BoolOp(values=values):
            for value in values:
                yield from _parts(value, wanted)
        case ast.Call(func=ast.Name(id="bool"), args=[argument]):
            yield from _parts(argument, wanted)


def caller(depth: int) -> FrameType:
    """Return the frame `depth` calls above the one that calls this."""
    return sys._getframe(depth + 1)


def drop_unread(frames: "Iterable[list[Call]]", results: Any, checked: set[str]) -> None:
    """Remove the calls that only computed what was checked: those of `checked`, and what nothing else reads.

    `frames` hold the calls, `results` are read after all of them.
    """
    reads: Counter[str] = Counter(leaf.name for leaf in leaves(results) if isinstance(leaf, Ref))
    makers: dict[str, tuple[list[Call], Call]] = {}
    for frame, call in _walk(frames):
        reads.update(leaf.name for leaf in leaves((call.args, call.kwargs)) if isinstance(leaf, Ref))
        made = [leaf.name for leaf in leaves(call.result) if isinstance(leaf, Ref)]
        if call.kind == "module" or call.in_place or call.random:  # never removed
            reads.update(made)
        else:
            makers.update(dict.fromkeys(made, (frame, call)))
    suspects = list(checked)
    while suspects:
        name = suspects.pop()
        if reads[name] or name not in makers:
            continue
        frame, call = makers[name]
        made = [leaf.name for leaf in leaves(call.result) if isinstance(leaf, Ref)]
        if any(reads[other] for other in made):
            continue
        frame[:] = [other for other in frame if other is not call]
        for other in made:
            del makers[other]
        for leaf in leaves((call.args, call.kwargs)):
            if isinstance(leaf, Ref):
                reads[leaf.name] -= 1
                suspects.append(leaf.name)


def _walk(frames: "Iterable[list[Call]]") -> "Iterator[tuple[list[Call], Call]]":
    for frame in frames:
        for call in frame:
            yield frame, call
            yield from _walk([call.body])

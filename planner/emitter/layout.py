"""Breaks generated lines that are too long, one item a line, as a formatter would."""

from collections.abc import Iterable, Iterator
from itertools import pairwise

MAX_WIDTH = 110
_CLOSING = {"(": ")", "[": "]", "{": "}"}


def wrap_lines(lines: Iterable[str]) -> Iterator[str]:
    """Yield lines, each longer than the width broken at the commas of its last bracket that stretches to its end."""
    for line in lines:
        yield from _wrap(line)


def _wrap(line: str) -> Iterator[str]:
    indent = line[: len(line) - len(line.lstrip())]
    opening = _outer_bracket(line) if len(line) > MAX_WIDTH else None
    if opening is None:
        yield line
        return
    end = _matching(line, opening)
    items = _split(line[opening + 1 : end])
    tail = line[end + 1 :]
    yield line[: opening + 1]
    comma = "" if len(items) == 1 and _is_comprehension(items[0]) else ","
    for item in items:
        yield from _wrap(f"{indent}    {item}{comma}")
    yield f"{indent}{line[end]}{tail}"


def _outer_bracket(line: str) -> int | None:
    """Return the position of the first bracket whose partner ends the line (but for a colon or comma)."""
    for position, character in enumerate(line):
        if character in "\"'":
            return None if position == 0 else _after_text(line, position)
        if character in _CLOSING and _ends(line, position):
            return position
    return None


def _after_text(line: str, start: int) -> int | None:
    end = line.find(line[start], start + 1)
    for position in range(end + 1, len(line)):
        if line[position] in _CLOSING and _ends(line, position):
            return position
    return None


def _ends(line: str, opening: int) -> bool:
    end = _matching(line, opening)
    return end > opening + 1 and line[end + 1 :] in ("", ",", ":")


def _brackets(text: str) -> Iterator[tuple[int, str, int]]:
    """Yield (position, character, depth after it) of everything that does not stand inside quotes."""
    depth, quote = 0, ""
    for position, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
            continue
        if character in "\"'":
            quote = character
        elif character in _CLOSING:
            depth += 1
        elif character in _CLOSING.values():
            depth -= 1
        yield position, character, depth


def _matching(line: str, opening: int) -> int:
    return next((opening + position for position, _, depth in _brackets(line[opening:]) if position and not depth), -1)


def _is_comprehension(content: str) -> bool:
    top = "".join(character if depth == 0 else "" for _, character, depth in _brackets(content))
    return " for " in top


def _split(content: str) -> list[str]:
    """Return the items between the top-level commas."""
    commas = [position for position, character, depth in _brackets(content) if character == "," and depth == 0]
    items = [content[start + 1 : stop].strip() for start, stop in pairwise([-1, *commas, len(content)])]
    return [item for item in items if item]

"""Names and numbers as people read them."""

from collections.abc import Sequence


def _numbered(name: str) -> tuple[tuple[str, str], int] | None:
    """Return (what stands before and after the last number of a dotted name, the number), or None."""
    parts = name.split(".")
    for position in reversed(range(len(parts))):
        if parts[position].isdecimal():
            return (".".join(parts[:position]), ".".join(parts[position + 1 :])), int(parts[position])
    return None


def layer_ranges(names: Sequence[str]) -> str:
    """Return layer names in order, consecutive ones as a range: 'embed, layers.0-9, norm'."""
    parts: list[str] = []
    position = 0
    while position < len(names):
        stop = position + 1
        first = _numbered(names[position])
        while stop < len(names) and first is not None:
            if _numbered(names[stop]) != (first[0], first[1] + stop - position):
                break
            stop += 1
        if stop - position > 1 and first is not None:
            (before, after), number = first
            span = f"{number}-{number + stop - position - 1}"
            parts.append(".".join(part for part in (before, span, after) if part))
        else:
            parts.append(names[position])
        position = stop
    return ", ".join(parts)


def rank_ranges(ranks: Sequence[int]) -> str:
    """Return ranks in order, consecutive ones as a range: '0-7, 12'."""
    parts: list[str] = []
    position = 0
    while position < len(ranks):
        stop = position + 1
        while stop < len(ranks) and ranks[stop] == ranks[position] + stop - position:
            stop += 1
        parts.append(f"{ranks[position]}-{ranks[stop - 1]}" if stop - position > 1 else str(ranks[position]))
        position = stop
    return ", ".join(parts)


def percent(fraction: float) -> str:
    """Return a fraction for people: '12.3 %'."""
    return f"{100 * fraction:.3g} %"

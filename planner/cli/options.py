"""How the text of options becomes values: lists, times, KEY=VALUE pairs."""

import math

from planner.errors import UsageError
from planner.units import parse_seconds

MAX_DIGITS = 9


def parse_counts(text: str | None, option: str) -> tuple[int, ...] | None:
    """Return '1,2,4' as ascending positive integers without repeats; None stays None."""
    if text is None:
        return None
    if any(len(part.strip()) > MAX_DIGITS for part in text.split(",")):
        raise UsageError(
            f"{option} has a number of more than {MAX_DIGITS} digits", hint=f"write it like {option} 1,2,4"
        )
    try:
        counts = {int(part) for part in text.split(",")}
    except ValueError:
        counts = {0}
    if min(counts) < 1:
        raise UsageError(f"{option} {text!r} is no list of positive integers", hint=f"write it like {option} 1,2,4")
    return tuple(sorted(counts))


def parse_duration(text: str | None, option: str) -> float | None:
    """Return seconds from '90', '90s' or '500ms'; None stays None."""
    if text is None:
        return None
    try:
        seconds = parse_seconds(f"{text}s" if _is_number(text) else text)
    except ValueError:  # its words are about files, where a time must have a unit
        raise UsageError(f"{option} {text!r} is no time", hint=f"write it like {option} 90s") from None
    if seconds <= 0:
        raise UsageError(f"{option} {text!r} is not longer than 0 s", hint=f"write it like {option} 90s")
    return seconds


def parse_share(text: str, option: str) -> float:
    """Return the fraction of '1%', from 0 to less than 1."""
    number = text.strip().removesuffix("%").strip()
    if not text.strip().endswith("%") or not _is_number(number) or not 0 <= float(number) < 100:
        raise UsageError(f"{option} {text!r} is no share from 0% to less than 100%", hint=f"write it like {option} 1%")
    return float(number) / 100


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def parse_pairs(texts: list[str], option: str, example: str = "tp_degree=2") -> tuple[tuple[str, str], ...]:
    """Return 'KEY=VALUE' texts as pairs in the order given; what the keys mean is the solver's to check."""
    pairs = []
    for text in texts:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not (key and equals and value):
            raise UsageError(f"{option} {text!r} is not KEY=VALUE", hint=f"write it like {option} {example}")
        pairs.append((key, value))
    return tuple(pairs)

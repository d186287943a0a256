"""Limits on decisions: `--limit KEY=RANGE`, where RANGE is A..B, A.. or ..B, both ends included.

pp_degree=2..8          any count that can be pinned: degrees, microbatches, num_gpus (GPUs used)
memory=70GiB            peak memory per GPU, at most (also ..70GiB)
recompute=25%           of every stage's forward time, at most that much is run again (also ..25%)
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from planner.errors import UsageError
from planner.units import parse_bytes

MAX_DIGITS = 18
OPTION = "--limit"
AT_MOST = ("memory", "recompute")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits, read: least and most of counts (None: no limit), bytes per GPU, and a share of the forward."""

    counts: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    memory_bytes: int | None = None
    recompute_fraction: float = float("inf")

    def admits(self, key: str, value: int) -> bool:
        """Return whether a count is within its limits."""
        least, most = self.counts.get(key, (1, None))
        return least <= value and (most is None or value <= most)


def read_limits(pairs: Sequence[tuple[str, str]], counts: Sequence[str]) -> Limits:
    """Return limits by meaning; `counts` are the keys that have a range. UsageError says what is wrong with one."""
    ranges: dict[str, tuple[int, int | None]] = {}
    memory: int | None = None
    recompute = float("inf")
    for position, (key, value) in enumerate(pairs):
        what = f"{OPTION} {key}"
        earlier = next((other for before, other in pairs[:position] if before == key), None)
        if earlier is not None:
            raise UsageError(f"{what} is given twice, as {earlier} and {value}", hint="give it once, as a range")
        if key in counts:
            ranges[key] = _range(value, key)
        elif key == "memory":
            memory = _memory(_most(value, key))
        elif key == "recompute":
            recompute = _fraction(_most(value, key))
        else:
            known = (*counts, *AT_MOST)
            hint = f"limits are on {', '.join(known)}; --pin and --exclude take words and names"
            raise UsageError(f"{what}={value}: nothing of that name has a range", hint=hint)
    return Limits(ranges, memory, recompute)


def _range(text: str, key: str) -> tuple[int, int | None]:
    """Return both ends of a range of counts, the second None where it has none."""
    what = f"{OPTION} {key}={text if len(text) <= 2 * MAX_DIGITS else text[: 2 * MAX_DIGITS] + '...'}"
    hint = f"write it like {OPTION} {key}=2..8, {key}=..8 or {key}=2.."
    first, dots, last = (part.strip() for part in text.partition(".."))
    if not dots and text.isdecimal():
        raise UsageError(f"{what} is one number, no range", hint=f"give --pin {key}={text}, or a range like {key}=2..8")
    ends = [end for end in (first, last) if end]
    if not dots or not ends or not all(end.isdecimal() and len(end) <= MAX_DIGITS for end in ends):
        raise UsageError(f"{what} is no range of counts", hint=hint)
    least, most = int(first or 1), int(last) if last else None
    if least < 1 or (most is not None and most < least):
        raise UsageError(f"{what} holds no count of at least 1", hint=hint)
    return least, most


def _most(text: str, key: str) -> str:
    """Return the upper end of a range that has no other."""
    first, dots, last = (part.strip() for part in text.partition(".."))
    if dots and (first or not last):
        example = "70GiB" if key == "memory" else "25%"
        raise UsageError(f"{OPTION} {key}={text}: only the most can be limited", hint=f"write it like {key}={example}")
    return last if dots else text.strip()


def _memory(text: str) -> int:
    try:
        found = parse_bytes(text)
    except ValueError as error:
        raise UsageError(f"{OPTION} memory: {error}", hint="write it like memory=70GiB") from None
    if found < 1:
        raise UsageError(f"{OPTION} memory={text} leaves no memory", hint="write it like memory=70GiB")
    return found


def _fraction(text: str) -> float:
    number = text.removesuffix("%").strip()
    try:
        percent = float(number)
    except ValueError:
        percent = -1.0
    if not text.endswith("%") or not 0 <= percent <= 100:
        hint = "write it like recompute=25%: the most of a stage's forward time that is run again"
        raise UsageError(f"{OPTION} recompute={text} is no share from 0% to 100%", hint=hint)
    return percent / 100

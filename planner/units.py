"""Quantities with units: parsed from text people write, formatted for people to read.

Inside the program every quantity is SI: seconds, bytes, bytes per second, FLOP per second.
GB = 10^9 bytes, GiB = 2^30 bytes.
"""

import math
import re
from typing import Annotated

from pydantic import BeforeValidator

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BYTES = {f"{prefix}B": factor for prefix, factor in _DECIMAL.items()} | {
    f"{prefix}iB": 1024.0**power for power, prefix in enumerate("KMGTP", start=1)
}
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_FLOPS = {f"{prefix}FLOP/s": factor for prefix, factor in _DECIMAL.items()}
_BANDWIDTHS = {f"{unit}/s": factor for unit, factor in _BYTES.items()}
_QUANTITY = re.compile(r"\s*([0-9.eE+-]+)\s*([A-Za-z/]*)\s*")


def _parse(value: object, kind: str, units: dict[str, float], example: str) -> float:
    if isinstance(value, bool) or not isinstance(value, str):
        raise ValueError(f"{kind} {value!r} has no unit; write it as text with one, like {example!r}")
    match = _QUANTITY.fullmatch(value)
    unit = match.group(2) if match else ""
    if not match or unit not in units:
        problem = "has no unit" if match and not unit else f"has no known unit ({', '.join(units)})"
        raise ValueError(f"{kind} {value!r} {problem}; write it like {example!r}")
    try:
        number = float(match.group(1)) * units[unit]
    except ValueError:
        raise ValueError(f"{kind} {value!r} does not start with a number; write it like {example!r}") from None
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"{kind} {value!r} must be finite and not negative")
    return number


def parse_bytes(value: object) -> int:
    """Return the bytes in text such as '80GiB'; ValueError names the missing or unknown unit."""
    return round(_parse(value, "size", _BYTES, "80GiB"))


def parse_bandwidth(value: object) -> float:
    """Return bytes per second from text such as '450GB/s'."""
    return _parse(value, "bandwidth", _BANDWIDTHS, "450GB/s")


def parse_seconds(value: object) -> float:
    """Return seconds from text such as '5us'."""
    return _parse(value, "time", _TIMES, "5us")


def parse_flops(value: object) -> float:
    """Return floating-point operations per second from text such as '989TFLOP/s'."""
    return _parse(value, "speed", _FLOPS, "989TFLOP/s")


ByteSize = Annotated[int, BeforeValidator(parse_bytes)]
Bandwidth = Annotated[float, BeforeValidator(parse_bandwidth)]
Seconds = Annotated[float, BeforeValidator(parse_seconds)]
FlopRate = Annotated[float, BeforeValidator(parse_flops)]


def _scaled(value: float, steps: list[tuple[float, str]]) -> str:
    for factor, unit in steps:
        if abs(value) >= factor:
            return f"{value / factor:.3g} {unit}" if abs(value) / factor < 999.5 else f"{value / factor:,.0f} {unit}"
    factor, unit = steps[-1]
    return f"{value / factor:.3g} {unit}"


def format_bytes(value: float) -> str:
    """Return bytes for people, in binary units: '1.5 GiB'."""
    return _scaled(value, [(2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")])


def format_bandwidth(value: float) -> str:
    """Return bytes per second for people, in decimal units as in configs: '450 GB/s'."""
    return _scaled(value, [(1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "B/s")])


def format_seconds(value: float) -> str:
    """Return seconds for people: '12.3 ms'."""
    return _scaled(value, [(1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")])


def format_flops(value: float) -> str:
    """Return a count of floating-point operations for people: '32.9 TFLOP'."""
    return _scaled(value, [(1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1.0, "FLOP")])


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a number of things for people: '1 stage', '4 stages'."""
    return f"{count} {noun}" if count == 1 else f"{count} {plural or noun + 's'}"


def format_count(value: float) -> str:
    """Return a count for people: '8.03 B' (10^9)."""
    return _scaled(value, [(1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"), (1.0, "")]).strip()

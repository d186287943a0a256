"""Sees which code of a model runs under an autocast that its own forward enables: no program can hold the casts.

They happen below the functions that a recording sees. Where there is no GPU, torch switches an autocast for one off as
it is made, so what was asked for is noted then.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def asked_autocasts() -> Iterator[None]:
    """Note on every autocast made inside whether it was asked to be enabled, also on a device that is not there."""
    original = torch.autocast.__init__

    def init(
        self: torch.autocast,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        original(self, device_type, dtype, enabled, *args, **kwargs)
        self._planner_asked = bool(enabled)  # type: ignore[attr-defined]

    torch.autocast.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = original  # type: ignore[method-assign]


class Autocasts:
    """The autocasts that a forward has entered and not left, innermost last, with their devices."""

    def __init__(self) -> None:
        self._entered: list[tuple[str, bool]] = []

    def enabled(self) -> bool:
        """Return whether one is enabled for any device: the innermost of each device counts."""
        return any(dict(self._entered).values())

    @contextmanager
    def seen(self) -> Iterator[None]:
        """Follow the autocasts entered inside."""
        enter: Any = torch.autocast.__enter__
        leave: Any = torch.autocast.__exit__

        def entered(autocast: torch.autocast) -> Any:
            result = enter(autocast)
            asked = getattr(autocast, "_planner_asked", autocast._enabled)
            self._entered.append((autocast.device, asked))
            return result

        def left(autocast: torch.autocast, *error: Any) -> Any:
            if self._entered:
                self._entered.pop()
            return leave(autocast, *error)

        torch.autocast.__enter__, torch.autocast.__exit__ = entered, left  # type: ignore[method-assign]
        try:
            with asked_autocasts():
                yield
        finally:
            torch.autocast.__enter__, torch.autocast.__exit__ = enter, leave  # type: ignore[method-assign]

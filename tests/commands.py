"""Running a command line in a test, and what is expected of one that fails."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    code: int
    out: str
    err: str

    def assert_one_error(self, code: int, *words: str) -> None:
        """One error and a hint on stderr, no traceback, nothing on stdout."""
        lines = self.err.splitlines()
        errors = [line for line in lines if line.startswith("error: ")]
        assert (self.code, len(errors), self.out) == (code, 1, ""), self
        assert any(line.startswith("hint: ") for line in lines), self.err
        assert "Traceback" not in self.err
        assert all(word in self.err for word in words), self.err


Run = Callable[..., Done]

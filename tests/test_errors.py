"""The tree of errors: what scripts and people rely on."""

import inspect

import pytest

from planner import errors
from planner.errors import PlannerError, UsageError

ALL = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, PlannerError) and kind is not PlannerError
]


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    assert errors.__doc__ is not None
    drawn = {line.split("── ")[1].split()[0] for line in errors.__doc__.splitlines() if "── " in line}
    assert drawn == {kind.__name__ for kind in ALL}


@pytest.mark.parametrize("kind", ALL)
def test_an_error_has_a_message_a_hint_and_an_exit_code(kind: type[PlannerError]) -> None:
    error = kind("layer 'a' needs 2 GiB, 1 GiB is free", hint="use more GPUs")
    assert str(error) == error.message == "layer 'a' needs 2 GiB, 1 GiB is free"
    assert error.hint == "use more GPUs"
    assert error.exit_code == (2 if kind is UsageError else 1)

"""Which operators of torch draw random numbers."""

from typing import Any


def draws_numbers(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call of an operator draws; one that only does so to drop something has to drop something."""
    if all(tag.name != "nondeterministic_seeded" for tag in operator.tags):  # torch's own mark of them
        return False
    for position, item in enumerate(operator._schema.arguments):
        if item.name in ("p", "dropout_p", "dropout"):  # of dropout, attention, recurrent layers
            return bool(args[position] if position < len(args) else kwargs.get(item.name, item.default_value))
    return True

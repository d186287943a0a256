"""Writes plan.py without losing what people edited."""

from pathlib import Path

from planner.emitter.source import HASH_LINE, content_hash
from planner.errors import UsageError
from planner.records import read_text, write_text


def write_plan(source: str, path: Path, *, force: bool = False) -> None:
    """Write the source of a plan; UsageError, without `force`, if the file there was edited or is none of ours.

    A link is followed; what is no regular file is refused, with `force` too.
    """
    if not force and _is_there(path):
        text = read_text(path, what="plan")
        _, found, recorded = text.rpartition(f"\n{HASH_LINE}")
        if not found:
            raise UsageError(
                f"{path} exists and is no file that planner wrote",
                hint="give another name with -o, or --force to replace it",
            )
        if recorded.strip() != content_hash(text):
            raise UsageError(
                f"{path} was edited by hand", hint="give another name with -o, or --force to lose the edits"
            )
    write_text(path, source)


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:
        raise UsageError(f"{str(path)!r} can't be written: {error}", hint="give another path") from None

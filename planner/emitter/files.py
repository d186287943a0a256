"""Writes plan.py without losing what people edited."""

from pathlib import Path

from planner.emitter.source import HASH_LINE, content_hash
from planner.errors import UsageError
from planner.records import read_text, write_text


def write_plan(source: str, path: Path, *, force: bool = False) -> None:
    """Write the source of a plan; UsageError as `check_overwrite`.

    A link is followed; what is no regular file is refused, with `force` too.
    """
    check_overwrite(path, force=force)
    write_text(path, source)


def check_overwrite(path: Path, *, force: bool = False) -> None:
    """Raise UsageError where a plan can't take the place of a file: none of ours, or, without `force`, edited by hand.

    What planner did not write (the model's own file, say) is nobody's to replace, with `force` neither.
    """
    if not _is_there(path) or path.is_dir():  # writing says what is wrong with a folder
        return
    text = read_text(path, what="plan")
    _, found, recorded = text.rpartition(f"\n{HASH_LINE}")
    if not text.strip():
        return
    if not found:
        raise UsageError(
            f"{path} exists and is no file that planner wrote: it is not replaced",
            hint="give another name with -o, or remove the file",
        )
    if recorded.strip() != content_hash(text) and not force:
        raise UsageError(f"{path} was edited by hand", hint="give another name with -o, or --force to lose the edits")


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:
        raise UsageError(f"{str(path)!r} can't be written: {error}", hint="give another path") from None

"""The base of every data type, and the one way files are read and written.

Records are frozen; unknown keys are errors that name the nearest valid key; NaN, infinities and values
outside their range are refused. Files are written whole or not at all.
"""

import difflib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Self, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from planner.errors import FileFormatError, UsageError


def _number(value: Any) -> Any:
    """Return a number; ValueError for a truth value or text that would become one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("not a number")
    if isinstance(value, int) and abs(value) > 2**1023:
        raise ValueError("too large")
    return value


# No count of a model or cluster is larger, and sums and products of such numbers stay finite.
MAX_COUNT = 2**63
MAX_TIME_S = 1e9
MAX_MISSING = 8  # missing keys of a file that are told by name

NonNegativeInt = Annotated[int, Field(ge=0, le=MAX_COUNT, strict=True)]
PositiveInt = Annotated[int, Field(ge=1, le=MAX_COUNT, strict=True)]
ByteCount = NonNegativeInt
NonNegativeFloat = Annotated[float, BeforeValidator(_number), Field(ge=0, le=1e30, allow_inf_nan=False)]
TimeSeconds = Annotated[float, BeforeValidator(_number), Field(ge=0, le=MAX_TIME_S, allow_inf_nan=False)]
Fraction = Annotated[float, BeforeValidator(_number), Field(ge=0, le=1, allow_inf_nan=False)]


class Record(BaseModel):
    """A frozen, validated value."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    def replace(self, **changes: Any) -> Self:
        """Return a copy with the given fields changed, validated anew."""
        return type(self).model_validate({name: getattr(self, name) for name in type(self).model_fields} | changes)


FROM_FILE = "from file"  # validation context: fields with an encoded form arrive encoded

RecordT = TypeVar("RecordT", bound=Record)


def _records_at(annotation: Any, location: tuple[int | str, ...]) -> list[type[Record]]:
    """Return the records that may stand at a location inside a value of this type; best effort, for hints."""
    if get_origin(annotation) in (Union, UnionType):
        return [found for member in get_args(annotation) for found in _records_at(member, location)]
    if get_origin(annotation) is Annotated:
        return _records_at(get_args(annotation)[0], location)
    is_record = isinstance(annotation, type) and issubclass(annotation, Record)
    if not location:
        return [annotation] if is_record else []
    first, rest = location[0], location[1:]
    if is_record:
        field = annotation.model_fields.get(str(first))
        return _records_at(field.annotation, rest) if field else []
    members = get_args(annotation)[1:] if get_origin(annotation) is dict else get_args(annotation)
    return [found for member in members for found in _records_at(member, rest)]


def _field_names(record: type[Record], location: tuple[int | str, ...]) -> list[str]:
    """Return the valid keys beside the one at a location inside a record."""
    return sorted({name for found in _records_at(record, location[:-1]) for name in found.model_fields})


def reason(error: ValueError) -> str:
    """Return what is wrong in one sentence: of several problems of a record, the first."""
    message: str = error.errors(include_url=False)[0]["msg"] if isinstance(error, ValidationError) else str(error)
    return message.removeprefix("Value error, ")


def _short(value: Any) -> str:
    """Return a value for a message: what is long is cut."""
    if isinstance(value, int) and abs(value) >= 10**40:
        return "a larger integer"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def validate(record: type[RecordT], data: Any, *, source: str) -> RecordT:
    """Return `data` as a record; FileFormatError names the file, the key and what would be right."""
    try:
        return record.model_validate(data, context=FROM_FILE)
    except RecursionError:
        raise FileFormatError(f"{source}: nested too deeply", hint="check that this is the file you meant") from None
    except ValidationError as error:
        problems = error.errors(include_url=False)
        # A misspelt key is missing under its right name too: the spelling is what to tell.
        first = next((problem for problem in problems if problem["type"] == "extra_forbidden"), problems[0])
        location = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            key = str(first["loc"][-1])
            valid = _field_names(record, first["loc"])
            near = difflib.get_close_matches(key, valid, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"valid keys here: {', '.join(valid)}"
            raise FileFormatError(f"{source}: unknown key {location!r}", hint=hint) from None
        if first["type"] == "missing":
            names = [".".join(map(str, problem["loc"])) for problem in problems if problem["type"] == "missing"]
            more = f" and {len(names) - MAX_MISSING} more" if len(names) > MAX_MISSING else ""
            listed = f"{', '.join(map(repr, names[:MAX_MISSING]))}{more}"
            are, what = ("are", "them") if len(names) > 1 else ("is", listed)
            raise FileFormatError(f"{source}: {listed} {are} missing", hint=f"add {what} to the file") from None
        message = first["msg"].removeprefix("Value error, ")
        shown = "" if isinstance(first["input"], Mapping | list | tuple) else f", found {_short(first['input'])}"
        where = f"{location!r}: " if location else ""
        raise FileFormatError(f"{source}: {where}{message}{shown}", hint="correct this value in the file") from None


def read_json(path: Path, *, what: str) -> Any:
    """Return the parsed JSON of a file; NaN and infinities, which JSON does not have, are refused."""
    text = read_text(path, what=what)

    def refuse(constant: str) -> Any:
        raise FileFormatError(f"{path}: {constant} is not a number", hint=f"write this {what} again: it was corrupted")

    try:
        data = json.loads(text, parse_constant=refuse)
        if "\\ud" in text.lower():  # a lone half of a surrogate pair: text that no file can hold
            json.dumps(data, ensure_ascii=False).encode()
        return data
    except json.JSONDecodeError as error:
        raise FileFormatError(
            f"{path}: not JSON at line {error.lineno}, column {error.colno}: {error.msg}",
            hint=f"check that this is the {what} file you meant",
        ) from None
    except RecursionError:
        problem = "nested too deeply"
    except UnicodeEncodeError:
        problem = "text with half of a surrogate pair"
    except ValueError as error:
        problem = str(error).partition(";")[0]
    raise FileFormatError(f"{path}: {problem}", hint=f"check that this is the {what} file you meant")


def read_text(path: Path, *, what: str) -> str:
    """Return the text of a regular file; UsageError where there is none."""
    try:
        if path.exists() and not path.is_file():
            kind = "a folder" if path.is_dir() else "no regular file"
            raise UsageError(f"{what} file {str(path)!r} can't be read: it is {kind}", hint="check the path")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"{what} file {str(path)!r} does not exist", hint="check the path") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{what} file {str(path)!r} can't be read: {error}", hint="check the path") from None


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all: a temporary file beside it takes its place at the end.

    A link is followed: the file it names is replaced, not the link. UsageError where nothing can be written.
    """
    try:
        path = path.resolve()
        if path.exists() and not path.is_file():
            kind = "a folder" if path.is_dir() else "no regular file"
            raise UsageError(f"{str(path)!r} can't be written: it is {kind}", hint="give another path")
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, text)
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: links that go round in a circle
        raise UsageError(f"{str(path)!r} can't be written: {error}", hint="give another path") from None


def _replace(path: Path, text: str) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise

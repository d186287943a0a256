"""The arguments of recorded calls as data: values by name, numbers that depend on the batch, dtypes, containers.

`encode` makes JSON data of them and `decode` reads it back, refusing whatever a call can't have.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from planner.names import attribute_name, identifier, qualified_name


@dataclass(frozen=True, slots=True)
class Ref:
    """A value produced by an earlier node, or an input, by name."""

    name: str


@dataclass(frozen=True, slots=True)
class ParamRef:
    """A parameter or buffer of the model, by its fully qualified name."""

    name: str


@dataclass(frozen=True, slots=True)
class BatchInt:
    """An integer that depends on the batch: `squared * rows**2 + per_row * rows + constant`."""

    per_row: int
    constant: int = 0
    squared: int = 0

    def at(self, rows: int) -> int:
        """Return the integer for a batch of `rows`."""
        return self.squared * rows**2 + self.per_row * rows + self.constant


@dataclass(frozen=True, slots=True)
class BatchFloat:
    """A float that depends on the batch: `factor * rows`, or `factor / rows` where `power` is -1."""

    factor: float
    power: int = 1

    def at(self, rows: int) -> float:
        """Return the float for a batch of `rows`."""
        return self.factor * rows if self.power == 1 else self.factor / rows


MODEL_DTYPE = "model"


@dataclass(frozen=True, slots=True)
class Dtype:
    """A torch dtype by name, such as 'bfloat16'; `MODEL_DTYPE` is the one the model's parameters are built in."""

    name: str


@dataclass(frozen=True, slots=True)
class Constant:
    """A named constant of torch that is no number: a memory format or layout, such as 'channels_last'."""

    name: str


@dataclass(frozen=True, slots=True)
class Device:
    """The device on which the stage runs."""


@dataclass(frozen=True, slots=True)
class Fields:
    """An object with named fields: a dataclass, a Hugging Face output, or with `in_order` a named tuple."""

    items: tuple[tuple[str, Any], ...]
    in_order: bool = False

    def map(self, change: Callable[[Any], Any]) -> "Fields":
        """Return the same kind of object with every item changed."""
        return Fields(tuple((name, change(item)) for name, item in self.items), self.in_order)


@dataclass(frozen=True, slots=True)
class TrainingValue:
    """A constant that depends on the training flag of the module it stands in, such as a dropout probability."""

    training: bool | int | float | None
    evaluation: bool | int | float | None


# One of the above, a scalar, or a tuple, list, dict or slice of arguments.
Argument = Any


def encode(value: Argument) -> Any:
    """Return an argument as JSON data; `decode` is its inverse."""
    match value:
        case Ref(name):
            return {"ref": name}
        case ParamRef(name):
            return {"param": name}
        case BatchInt(per_row, constant, squared):
            return {"batch": [per_row, constant, squared] if squared else [per_row, constant]}
        case BatchFloat(factor, power):
            return {"batch_float": [factor, power]}
        case Dtype(name):
            return {"dtype": name}
        case Constant(name):
            return {"constant": name}
        case Device():
            return {"device": True}
        case TrainingValue(training, evaluation):
            return {"training": [training, evaluation]}
        case Fields(items, in_order):
            return {"named_tuple" if in_order else "fields": [[name, encode(item)] for name, item in items]}
        case slice():
            return {"slice": [encode(value.start), encode(value.stop), encode(value.step)]}
        case tuple():
            return {"tuple": [encode(item) for item in value]}
        case list():
            return [encode(item) for item in value]
        case dict():
            return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
        case float() if not math.isfinite(value):
            return {"float": str(value)}
        case complex():
            return {"complex": [value.real, value.imag]}
        case _ if value is Ellipsis:
            return {"ellipsis": True}
        case None | bool() | int() | float() | str():
            return value
    raise ValueError(f"{value!r} can't be part of a program")


# A program holds no deeper structure and no larger integer: what reads it recurses, and torch has none wider.
MAX_DEPTH = 64
MAX_INTEGER = 2**64

MEMORY_FORMATS = {"contiguous_format", "channels_last", "channels_last_3d", "preserve_format"}
LAYOUTS = {"strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged"}


def constant_name(name: Any) -> str:
    """Return `name` if it is a memory format or layout of torch; ValueError otherwise."""
    if not isinstance(name, str) or name not in MEMORY_FORMATS | LAYOUTS:
        raise ValueError(f"{name!r} is no memory format or layout of torch")
    return name


def dtype_name(name: Any) -> str:
    """Return `name` if it is a dtype of known width, or `MODEL_DTYPE`; ValueError otherwise."""
    if identifier(name) != MODEL_DTYPE:
        dtype_bytes(name)
    return str(name)


def _scalar(data: Any) -> Any:
    """Return a number, text or None as it is; ValueError for anything else, or an integer too large."""
    if data is not None and not isinstance(data, bool | int | float | str):
        raise ValueError(f"{data!r} is no number, text or null")
    if isinstance(data, int) and abs(data) > MAX_INTEGER:
        raise ValueError("an integer is larger than 2^64")
    return data


def integer(data: Any) -> int:
    """Return `data` if it is an integer within bounds; ValueError otherwise."""
    if isinstance(data, bool) or not isinstance(data, int):
        raise ValueError(f"{data!r} is not an integer")
    return int(_scalar(data))


def _exactly(count: int, data: Any) -> list[Any]:
    if not isinstance(data, list) or len(data) != count:
        raise ValueError(f"{data!r} is not a list of {count}")
    return data


def _listed(data: Any) -> list[Any]:
    if not isinstance(data, list):
        raise ValueError(f"{data!r} is not a list")
    return data


def _special_float(data: Any) -> float:
    if data not in ("inf", "-inf", "nan"):
        raise ValueError(f"{data!r} is none of inf, -inf, nan")
    return float(data)


def _batch_int(data: Any) -> BatchInt:
    if not isinstance(data, list) or len(data) not in (2, 3):
        raise ValueError(f"{data!r} is not a list of 2 or 3")
    return BatchInt(*map(integer, data))


def _batch_float(data: Any) -> BatchFloat:
    factor, power = _exactly(2, data)
    if not isinstance(factor, float) or not math.isfinite(factor) or integer(power) not in (1, -1):
        raise ValueError(f"{data!r} is not a finite float and a power of 1 or -1")
    return BatchFloat(factor, power)


def _complex(data: Any) -> complex:
    real, imaginary = (float(_scalar(part)) for part in _exactly(2, data))
    if not (math.isfinite(real) and math.isfinite(imaginary)):
        raise ValueError(f"{data!r} is not finite")
    return complex(real, imaginary)


def _fields(data: Any, depth: int, *, in_order: bool = False) -> Fields:
    pairs = [_exactly(2, pair) for pair in _listed(data)]
    return Fields(tuple((attribute_name(name), _decode(item, depth)) for name, item in pairs), in_order)


def _dict(data: Any, depth: int) -> dict[Any, Any]:
    return {_scalar(key): _decode(item, depth) for key, item in (_exactly(2, pair) for pair in _listed(data))}


def _training(data: Any) -> TrainingValue:
    training, evaluation = map(_scalar, _exactly(2, data))
    return TrainingValue(training, evaluation)


_DECODERS: dict[str, Callable[[Any, int], Argument]] = {
    "ref": lambda data, depth: Ref(identifier(data)),
    "param": lambda data, depth: ParamRef(qualified_name(data)),
    "batch": lambda data, depth: _batch_int(data),
    "batch_float": lambda data, depth: _batch_float(data),
    "dtype": lambda data, depth: Dtype(dtype_name(data)),
    "constant": lambda data, depth: Constant(constant_name(data)),
    "device": lambda data, depth: Device(),
    "training": lambda data, depth: _training(data),
    "fields": _fields,
    "named_tuple": lambda data, depth: _fields(data, depth, in_order=True),
    "slice": lambda data, depth: slice(*(_decode(item, depth) for item in _exactly(3, data))),
    "tuple": lambda data, depth: tuple(_decode(item, depth) for item in _listed(data)),
    "dict": _dict,
    "float": lambda data, depth: _special_float(data),
    "complex": lambda data, depth: _complex(data),
    "ellipsis": lambda data, depth: Ellipsis,
}


def decode(data: Any) -> Argument:
    """Return the argument that `encode` turned into JSON data; ValueError where it is none."""
    return _decode(data, 0)


def _decode(data: Any, depth: int) -> Argument:
    if depth > MAX_DEPTH:
        raise ValueError(f"an argument is nested deeper than {MAX_DEPTH}")
    if isinstance(data, list):
        return [_decode(item, depth + 1) for item in data]
    if isinstance(data, dict):
        if len(data) != 1 or next(iter(data)) not in _DECODERS:
            raise ValueError(f"{sorted(data)} is no kind of argument; kinds are {', '.join(_DECODERS)}")
        kind, content = next(iter(data.items()))
        return _DECODERS[kind](content, depth + 1)
    return _scalar(data)


def map_argument(value: Argument, change: Callable[[Any], Any]) -> Argument:
    """Return the argument with `change` applied to every leaf (refs and scalars), containers kept."""
    match value:
        case Fields():
            return value.map(lambda item: map_argument(item, change))
        case slice():
            return slice(*(map_argument(item, change) for item in (value.start, value.stop, value.step)))
        case tuple():
            return tuple(map_argument(item, change) for item in value)
        case list():
            return [map_argument(item, change) for item in value]
        case dict():
            return {key: map_argument(item, change) for key, item in value.items()}
    return change(value)


def leaves(value: Argument) -> Iterator[Any]:
    """Yield the leaves (refs and scalars) of an argument in order."""
    match value:
        case Fields(items):
            for _, item in items:
                yield from leaves(item)
        case slice():
            yield from leaves((value.start, value.stop, value.step))
        case tuple() | list():
            for item in value:
                yield from leaves(item)
        case dict():
            for item in value.values():
                yield from leaves(item)
        case _:
            yield value


def dtype_bytes(name: str) -> int:
    """Return the bytes of one element of a torch dtype; ValueError for an unknown one."""
    widths = {"bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "complex64": 8, "complex128": 16}
    widths |= {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
    if name.startswith("float8"):
        return 1
    if name not in widths:
        raise ValueError(f"dtype {name!r} is not known")
    return widths[name]

"""A recorded forward as data: structured calls with validated names, never source text.

A `Program` is straight-line: every `Node` calls a submodule, a function of torch, or a method or attribute of a
tensor, on values that earlier nodes or the inputs produced. Integers that grow with the batch are `BatchInt`, so a
program recorded at one batch size is valid at any.
"""

import keyword
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, PlainSerializer, ValidationInfo

from planner.records import FROM_FILE, Record


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
    """An integer that depends on the batch: `per_row * rows + constant`."""

    per_row: int
    constant: int = 0

    def at(self, rows: int) -> int:
        """Return the integer for a batch of `rows`."""
        return self.per_row * rows + self.constant


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
    """An object with named fields (a dataclass, a named tuple, a Hugging Face output)."""

    items: tuple[tuple[str, Any], ...]


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
        case BatchInt(per_row, constant):
            return {"batch": [per_row, constant]}
        case Dtype(name):
            return {"dtype": name}
        case Constant(name):
            return {"constant": name}
        case Device():
            return {"device": True}
        case TrainingValue(training, evaluation):
            return {"training": [training, evaluation]}
        case Fields(items):
            return {"fields": [[name, encode(item)] for name, item in items]}
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


_DECODERS: dict[str, Callable[[Any], Argument]] = {
    "ref": lambda data: Ref(str(data)),
    "param": lambda data: ParamRef(str(data)),
    "batch": lambda data: BatchInt(int(data[0]), int(data[1])),
    "dtype": lambda data: Dtype(identifier(data)),
    "constant": lambda data: Constant(identifier(data)),
    "device": lambda data: Device(),
    "training": lambda data: TrainingValue(data[0], data[1]),
    "fields": lambda data: Fields(tuple((identifier(name), decode(item)) for name, item in data)),
    "slice": lambda data: slice(*(decode(item) for item in data)),
    "tuple": lambda data: tuple(decode(item) for item in data),
    "dict": lambda data: {decode(key): decode(item) for key, item in data},
    "float": lambda data: float(data),
    "complex": lambda data: complex(*data),
    "ellipsis": lambda data: Ellipsis,
}


def decode(data: Any) -> Argument:
    """Return the argument that `encode` turned into JSON data; ValueError where it is none."""
    if isinstance(data, list):
        return [decode(item) for item in data]
    if isinstance(data, dict):
        if len(data) != 1 or next(iter(data)) not in _DECODERS:
            raise ValueError(f"{sorted(data)} is no kind of argument; kinds are {', '.join(_DECODERS)}")
        kind, content = next(iter(data.items()))
        return _DECODERS[kind](content)
    return data


def map_argument(value: Argument, change: Callable[[Any], Any]) -> Argument:
    """Return the argument with `change` applied to every leaf (refs and scalars), containers kept."""
    match value:
        case Fields(items):
            return Fields(tuple((name, map_argument(item, change)) for name, item in items))
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


def identifier(name: str) -> str:
    """Return `name` if it is a Python identifier and no keyword; ValueError otherwise."""
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"{name!r} is not an identifier")
    return name


def qualified_name(name: str) -> str:
    """Return `name` if it is a dotted module path such as 'layers.3.mlp'; ValueError otherwise."""
    if not isinstance(name, str) or (
        name and not all(part.isidentifier() or part.isdigit() for part in name.split("."))
    ):
        raise ValueError(f"{name!r} is not the name of a module or parameter")
    return name


Identifier = Annotated[str, AfterValidator(identifier)]
QualifiedName = Annotated[str, AfterValidator(qualified_name)]


def _decode_from_file(data: Any, info: ValidationInfo) -> Argument:
    """Decode what comes from a file; values built in Python are arguments already."""
    return decode(data) if info.context == FROM_FILE else data


Encoded = Annotated[Any, BeforeValidator(_decode_from_file), PlainSerializer(encode)]
NodeKind = Literal["module", "function", "method", "attribute", "getitem", "setitem"]

# Functions and methods a program may name: anything public of these torch namespaces. Profiles are data that strangers
# may hand in, and plan.py made from them is run, so a name outside is refused on reading.
FUNCTION_NAMESPACES = (
    "torch.nn.functional",
    "torch.special",
    "torch.fft",
    "torch.linalg",
    "torch._C._nn",
    "torch",
    "operator",
    "math",
)
_FORBIDDEN = {"load", "save", "compile", "set_default_device", "import_ir_module", "hub", "classes", "ops"}


def function_name(name: str) -> str:
    """Return `name` if a program may call it; ValueError otherwise."""
    namespace, _, attribute = name.rpartition(".")
    allowed = namespace in FUNCTION_NAMESPACES and attribute.isidentifier() and attribute not in _FORBIDDEN
    if not allowed or (attribute.startswith("_") and namespace not in ("torch._C._nn", "torch")):
        raise ValueError(f"a program may not call {name!r}")
    return name


class Tensor(Record):
    """What is known of a tensor: dimensions (some growing with the batch), dtype, whether gradients flow to it.

    `follows_model_dtype`: the dtype changes with the one the model is built in (a mask or a float32 island does not).
    """

    shape: Annotated[
        tuple[int | BatchInt, ...],
        BeforeValidator(lambda dims: tuple(decode(dim) for dim in dims)),
        PlainSerializer(lambda dims: [encode(dim) for dim in dims]),
    ]
    dtype: Identifier
    requires_grad: bool = False
    follows_model_dtype: bool = False

    def sizes(self, rows: int) -> tuple[int, ...]:
        """Return the shape for a batch of `rows`."""
        return tuple(dim.at(rows) if isinstance(dim, BatchInt) else dim for dim in self.shape)

    def num_bytes(self, rows: int) -> int:
        """Return the bytes for a batch of `rows`."""
        return math.prod(self.sizes(rows)) * dtype_bytes(self.dtype)

    @property
    def batch_dim(self) -> int | None:
        """The first dimension that grows with the batch, or None."""
        return next((index for index, dim in enumerate(self.shape) if isinstance(dim, BatchInt)), None)


def dtype_bytes(name: str) -> int:
    """Return the bytes of one element of a torch dtype; ValueError for an unknown one."""
    widths = {"bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "complex64": 8, "complex128": 16}
    widths |= {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
    if name.startswith("float8"):
        return 1
    if name not in widths:
        raise ValueError(f"dtype {name!r} is not known")
    return widths[name]


class Node(Record):
    """One call: `name = target(*args, **kwargs)`.

    `target` is a module's fully qualified name (kind module), a function's dotted name (function), a tensor's method
    or attribute (method, attribute; the tensor is args[0]); getitem is `args[0][args[1]]`, setitem assigns args[2].
    `result` is the structure of what it returns: `Ref`s to the tensors in it. A node that makes one tensor
    has `result == Ref(name)`; one that makes several names each, and one that returns a value made before (a write in
    place, a cast to the dtype it has) refers to that value: then `name` only identifies the node.
    """

    name: Identifier
    kind: NodeKind
    target: str
    args: Encoded = ()
    kwargs: Encoded = {}
    result: Encoded = None
    in_place: bool = False
    no_grad: bool = False

    def model_post_init(self, context: Any) -> None:
        """Validate the target by its kind."""
        if self.kind == "module":
            qualified_name(self.target)
        elif self.kind == "function":
            function_name(self.target)
        elif self.kind in ("method", "attribute"):
            identifier(self.target)

    def reads(self) -> Iterator[str]:
        """Yield the names of the values this node reads."""
        for leaf in leaves((self.args, self.kwargs)):
            if isinstance(leaf, Ref):
                yield leaf.name

    def params(self) -> Iterator[str]:
        """Yield the fully qualified names of parameters and buffers this node reads directly."""
        for leaf in leaves((self.args, self.kwargs)):
            if isinstance(leaf, ParamRef):
                yield leaf.name

    def writes(self) -> Iterator[str]:
        """Yield the names of the tensors this node produces."""
        for leaf in leaves(self.result):
            if isinstance(leaf, Ref):
                yield leaf.name


class Program(Record):
    """Straight-line calls from `inputs` to `output`; `tensors` describes every named value."""

    inputs: tuple[Identifier, ...]
    nodes: tuple[Node, ...]
    output: Encoded
    tensors: dict[Identifier, Tensor]

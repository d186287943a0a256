"""A recorded forward as data: structured calls with validated names, never source text.

A `Program` is straight-line: every `Node` calls a submodule, a function of torch, or a method or attribute of a
tensor, on values that earlier nodes or the inputs produced. Numbers that depend on the batch are `BatchInt` and
`BatchFloat`, so a program recorded at one batch size is valid at any.
"""

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, PlainSerializer, ValidationInfo

from planner.arguments import (
    Argument,
    BatchInt,
    ParamRef,
    Ref,
    decode,
    dtype_bytes,
    dtype_name,
    encode,
    integer,
    leaves,
)
from planner.names import ATTRIBUTES, draw_name, function_name, identifier, method_name, plain_text, qualified_name
from planner.records import FROM_FILE, Record

Identifier = Annotated[str, AfterValidator(identifier)]
QualifiedName = Annotated[str, AfterValidator(qualified_name)]
PlainText = Annotated[str, AfterValidator(plain_text)]
DtypeName = Annotated[str, AfterValidator(dtype_name)]


def _decode_from_file(data: Any, info: ValidationInfo) -> Argument:
    """Decode what comes from a file; values built in Python are arguments already."""
    return decode(data) if info.context == FROM_FILE else data


Encoded = Annotated[Any, BeforeValidator(_decode_from_file), PlainSerializer(encode)]
NodeKind = Literal["module", "function", "method", "attribute", "getitem", "setitem", "draw"]


class Tensor(Record):
    """What is known of a tensor: dimensions (some growing with the batch), dtype, whether gradients flow to it.

    `follows_model_dtype`: the dtype changes with the one the model is built in (a mask or a float32 island does not).
    """

    shape: Annotated[
        tuple[int | BatchInt, ...],
        BeforeValidator(lambda dims: _dimensions(dims)),
        PlainSerializer(lambda dims: [encode(dim) for dim in dims]),
    ]
    dtype: DtypeName
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


def _dimensions(data: Any) -> tuple[int | BatchInt, ...]:
    """Return the dimensions of a shape, encoded or not; ValueError where one is no size."""
    if not isinstance(data, list | tuple):
        raise ValueError("a shape is a list of sizes")
    dims = tuple(dim if isinstance(dim, BatchInt) else decode(dim) for dim in data)
    for dim in dims:
        if not isinstance(dim, BatchInt) and integer(dim) < 0:
            raise ValueError(f"{dim} is no size of a dimension")
    return dims


class Node(Record):
    """One call: `name = target(*args, **kwargs)`.

    `target` is a module's fully qualified name (kind module), a function's dotted name (function), a tensor's method
    or attribute (method, attribute; the tensor is args[0]); getitem is `args[0][args[1]]`, setitem assigns args[2].
    A draw calls a function of the model's own code that draws with Python's or numpy's generators, and makes a tensor
    of what it returns: 'layers.3:sample' is the function `sample` in the file of that module's class.
    `result` is the structure of what it returns: `Ref`s to the tensors in it. A node that makes one tensor
    has `result == Ref(name)`; one that makes several names each, and one that returns a value made before (a write in
    place, a cast to the dtype it has) refers to that value: then `name` only identifies the node. `random`: it draws
    random numbers when the model trains. `written` are the values among its arguments that a module changes in place.
    """

    name: Identifier
    kind: NodeKind
    target: str
    args: Encoded = ()
    kwargs: Encoded = {}
    result: Encoded = None
    in_place: bool = False
    written: tuple[Identifier, ...] = ()
    no_grad: bool = False
    random: bool = False

    def model_post_init(self, context: Any) -> None:
        """Validate the target by its kind, and that the arguments are some."""
        if not isinstance(self.args, tuple):
            raise ValueError(f"node {self.name!r}: args is not a tuple")
        if not isinstance(self.kwargs, dict):
            raise ValueError(f"node {self.name!r}: kwargs is not a dict")
        for key in self.kwargs:
            identifier(key)
        if self.kind == "module":
            qualified_name(self.target)
            if not self.target:
                raise ValueError(f"node {self.name!r}: a program can't call its own model")
            return
        if self.kind == "function":
            function_name(self.target)
            return
        if self.kind == "draw":
            draw_name(self.target)
            if not isinstance(self.result, Ref) or not self.random:
                raise ValueError(f"node {self.name!r}: a draw is random, and makes one tensor")
            return
        count = {"getitem": 2, "setitem": 3, "method": 1, "attribute": 1}[self.kind]
        fits = len(self.args) >= count if self.kind == "method" else len(self.args) == count
        if not fits or not isinstance(self.args[0], Ref | ParamRef):
            raise ValueError(f"node {self.name!r}: a {self.kind} needs {count} arguments, the first of them a value")
        if self.kind == "method":
            method_name(self.target)
        elif self.kind == "attribute" and self.target not in ATTRIBUTES:
            raise ValueError(f"a program may not read the attribute {self.target!r}")

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

    def changes(self) -> Iterator[str]:
        """Yield the names of the values that this node changes in place."""
        yield from self.written
        if self.in_place:
            read = set(self.reads())
            yield from (name for name in self.writes() if name in read)

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

    def model_post_init(self, context: Any) -> None:
        """Refuse a program that reads or returns a value before it is there, or one of which nothing is known."""
        if len(set(self.inputs)) != len(self.inputs):
            raise ValueError("an input of the program is listed twice")
        if len({node.name for node in self.nodes}) != len(self.nodes):
            raise ValueError("two nodes of the program have one name")
        made = set(self.inputs)
        for node in self.nodes:
            for name in (*node.reads(), *node.written):
                if name not in made:
                    raise ValueError(f"node {node.name!r} reads {name!r}, which no input or earlier node makes")
            made.update(node.writes())
        for leaf in leaves(self.output):
            if isinstance(leaf, Ref) and leaf.name not in made:
                raise ValueError(f"the program returns {leaf.name!r}, which no node makes")
        if unknown := made - set(self.tensors):
            raise ValueError(f"value {min(unknown)!r} of the program is not in its tensors")

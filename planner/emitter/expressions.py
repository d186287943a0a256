"""Renders the calls of a program as Python statements."""

import keyword
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from planner.arguments import (
    MODEL_DTYPE,
    BatchFloat,
    BatchInt,
    Constant,
    Device,
    Dtype,
    Fields,
    ParamRef,
    Ref,
    TrainingValue,
    leaves,
)
from planner.program import Node

_INFIX = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "div": "/", "floordiv": "//", "mod": "%", "pow": "**"}
_INFIX |= {
    "matmul": "@",
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "and_": "&",
    "or_": "|",
    "xor": "^",
}
_METHODS_AS_OPERATORS = {"add", "sub", "mul", "div", "matmul", "pow", "eq", "ne", "lt", "le", "gt", "ge"}


class Renderer:
    """Renders arguments and nodes; what surrounds the code decides how modules and parameters are spelled.

    `module` and `parameter` give the expression for a name; `device` and `dtype` those for the stage's device and the
    model's dtype; `batch` the variable that holds the number of rows.
    """

    def __init__(
        self,
        *,
        module: Callable[[str], str],
        parameter: Callable[[str], str],
        device: str = "self.device",
        dtype: str = "self.dtype",
        batch: str = "batch",
    ) -> None:
        self.module = module
        self.parameter = parameter
        self.device = device
        self.dtype = dtype
        self.batch = batch

    def argument(self, value: Any) -> str:
        """Return an argument as an expression."""
        match value:
            case Ref(name):
                return name
            case ParamRef(name):
                return self.parameter(name)
            case BatchInt():
                return self._batch_int(value)
            case BatchFloat(factor, power):
                return f"({factor!r} {'*' if power == 1 else '/'} {self.batch})"
            case Dtype(name):
                return self.dtype if name == MODEL_DTYPE else f"torch.{name}"
            case Constant(name):
                return f"torch.{name}"
            case Device():
                return self.device
            case TrainingValue(training, evaluation):
                if (training, evaluation) == (True, False):
                    return "self.training"
                return f"({training!r} if self.training else {evaluation!r})"
            case Fields(items, in_order):
                listed = ", ".join(f"{name}={self.argument(item)}" for name, item in items)
                return f"{'named_tuple' if in_order else 'Output'}({listed})"
            case slice():
                start, stop, step = (
                    self.argument(item) if item is not None else None for item in (value.start, value.stop, value.step)
                )
                return f"slice({start}, {stop}, {step})" if step is not None else f"slice({start}, {stop})"
            case tuple():
                return f"({', '.join(map(self.argument, value))}{',' if len(value) == 1 else ''})"
            case list():
                return f"[{', '.join(map(self.argument, value))}]"
            case dict():
                return f"{{{', '.join(f'{key!r}: {self.argument(item)}' for key, item in value.items())}}}"
            case float() if not math.isfinite(value):
                return f'float("{value}")'
            case _ if value is Ellipsis:
                return "..."
            case _:
                return repr(value)

    def _batch_int(self, value: BatchInt) -> str:
        """Return the polynomial of the rows."""
        powers = [(value.squared, f"{self.batch} * {self.batch}"), (value.per_row, self.batch), (value.constant, "")]
        text = ""
        for factor, power in powers:
            if factor:
                size = power if power and abs(factor) == 1 else " * ".join(filter(None, (str(abs(factor)), power)))
                sign = ("-" if factor < 0 else "") if not text else (" - " if factor < 0 else " + ")
                text += sign + size
        return f"({text})" if " + " in text or " - " in text or text.startswith("-") else text

    def index(self, value: Any) -> str:
        """Return what stands between the brackets of `x[...]`."""
        if isinstance(value, slice):
            start, stop, step = (
                "" if item is None else self.argument(item) for item in (value.start, value.stop, value.step)
            )
            return f"{start}:{stop}:{step}" if step else f"{start}:{stop}"
        if isinstance(value, tuple) and value:
            return f"{', '.join(map(self.index, value))}{',' if len(value) == 1 else ''}"
        return self.argument(value)

    def call(self, node: Node) -> str:
        """Return the expression that a node computes."""
        arguments = [self.argument(item) for item in node.args]
        keywords = [f"{key}={self.argument(item)}" for key, item in node.kwargs.items()]
        everything = ", ".join([*arguments, *keywords])
        match node.kind:
            case "module":
                return f"{self.module(node.target)}({everything})"
            case "draw":
                name = f'"{node.target}"'
                return f"self.draw_numbers({', '.join([name, *arguments, *keywords])})"
            case "attribute":
                return f"{arguments[0]}.{node.target}"
            case "getitem":
                return f"{arguments[0]}[{self.index(node.args[1])}]"
            case "method":
                if node.target in _METHODS_AS_OPERATORS and len(arguments) == 2 and not keywords:
                    return f"{arguments[0]} {_INFIX[node.target]} {arguments[1]}"
                return f"{arguments[0]}.{node.target}({', '.join([*arguments[1:], *keywords])})"
        namespace, _, name = node.target.rpartition(".")
        if namespace == "operator" and name in _INFIX and len(arguments) == 2:
            return f"{arguments[0]} {_INFIX[name]} {arguments[1]}"
        if namespace == "operator" and name in ("neg", "invert"):
            return f"{'-' if name == 'neg' else '~'}{arguments[0]}"
        target = f"F.{name}" if namespace == "torch.nn.functional" else node.target
        return f"{target}({everything})"

    def statements(self, node: Node, needed: Callable[[str], bool]) -> Iterator[str]:
        """Yield the statements of a node; results that are not `needed` get no name."""
        if node.kind == "setitem":
            yield f"{self.argument(node.args[0])}[{self.index(node.args[1])}] = {self.argument(node.args[2])}"
            return
        expression = self.call(node)
        wanted = [leaf.name for leaf in leaves(node.result) if isinstance(leaf, Ref) and needed(leaf.name)]
        if not wanted:
            yield expression
        elif isinstance(node.result, Ref):
            yield f"{node.result.name} = {expression}"
        elif _is_flat(node.result):
            targets = [item.name if isinstance(item, Ref) and item.name in wanted else "_" for item in node.result]
            yield f"{', '.join(targets)}{',' if len(targets) == 1 else ''} = {expression}"
        else:
            yield f"{node.name} = {expression}"
            for name, path in value_paths(node.result, node.name):
                if name in wanted:
                    yield f"{name} = {path}"

    def body(self, nodes: Iterable[Node], needed: Callable[[str], bool]) -> Iterator[str]:
        """Yield the statements of nodes; runs without gradients stand under one `with torch.no_grad():`."""
        in_no_grad = False
        for node in nodes:
            if node.no_grad and not in_no_grad:
                yield "with torch.no_grad():"
            in_no_grad = node.no_grad
            for statement in self.statements(node, needed):
                yield f"    {statement}" if in_no_grad else statement


def _is_flat(result: Any) -> bool:
    return isinstance(result, tuple | list) and all(
        not isinstance(item, tuple | list | dict | Fields) for item in result
    )


def value_paths(result: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield the values inside a result with the expression that reaches each."""
    match result:
        case Ref(name):
            yield name, path
        case Fields(items):
            for name, item in items:
                yield from value_paths(item, f"{path}.{name}")
        case tuple() | list():
            for position, item in enumerate(result):
                yield from value_paths(item, f"{path}[{position}]")
        case dict():
            for key, item in result.items():
                yield from value_paths(item, f"{path}[{key!r}]")


def attribute_path(name: str, root: str) -> str:
    """Return the expression for a module: dotted where Python allows, else by get_submodule."""
    parts = name.split(".") if name else []
    plain = [_is_attribute(part) for part in parts]
    if all(plain):
        return ".".join([root, *parts])
    last = max(index for index, found in enumerate(plain) if not found)
    inner = f'{root}.get_submodule("{".".join(parts[: last + 1])}")'
    return ".".join([inner, *parts[last + 1 :]])


def parameter_path(name: str, root: str) -> str:
    """Return the expression for a parameter or buffer: as for a module, but one in a list of parameters has a number.

    Such a list holds each under its number as an attribute, which only `getattr` can spell.
    """
    owner, _, last = name.rpartition(".")
    if _is_attribute(last):
        return f"{attribute_path(owner, root)}.{last}"
    return f'getattr({attribute_path(owner, root)}, "{last}")'


def _is_attribute(part: str) -> bool:
    return part.isidentifier() and not keyword.iskeyword(part)


def docstring_text(text: str) -> str:
    """Return text as it stands inside a docstring: neither quotes nor backslashes can end it."""
    return text.replace("\\", "\\\\").replace('"', '\\"')

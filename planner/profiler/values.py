"""Numbers the values of a forward, and writes Python values as the arguments of a program.

Values are numbered in the order of their making; a tensor object is one value, so aliasing and in-place writes keep
their meaning: a call that writes a value that already exists refers to that value again.
"""

import sys
import traceback
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from planner.arguments import Constant, Device, Dtype, Fields, ParamRef, Ref
from planner.errors import CaptureError
from planner.profiler.plain_tensors import MAX_SPELLED_OUT, plain_tensors, spelled_out
from planner.profiler.recording import Call, UnrecordableError, Unsupported, source_line
from planner.program import NodeKind

_THIS_FOLDER = str(Path(__file__).parent)
LOSS = "loss_fn"


class Values:
    """The values of one forward: `frames` are the calls of the modules that are running, `scopes` their names.

    `root` is what runs where no module of the model does, as an error calls it.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = names_by_id(model.named_modules(remove_duplicate=False))
        tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        named = [*tensors, *plain_tensors(model).items()]
        self.params = names_by_id(named)
        self.kept = [tensor for _, tensor in named]  # alive though forward may replace them, so that ids stay unique
        self.values: dict[int, int] = {}
        self.tensors: dict[int, torch.Tensor] = {}
        self.frames: list[list[Call]] = [[]]
        self.scopes, self.root = [""], "the model"
        self.constants: list[tuple[str, int, Any]] = []

    def bind(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor, a new one if it has none."""
        if id(tensor) not in self.values:
            self.values[id(tensor)] = len(self.tensors)
            self.tensors[len(self.tensors)] = tensor  # kept alive, so that ids stay unique
        return self.values[id(tensor)]

    def name_here(self, names: list[str]) -> str:
        """Return the name of a module or tensor; of several, the one nearest to the module that is running."""
        scope = self.scopes[-1]
        while len(names) > 1 and scope:
            inside = next((name for name in names if name.startswith(f"{scope}.")), None)
            if inside is not None:
                return inside
            scope = scope.rpartition(".")[0]
        return names[0]

    def encode(self, value: Any, *, defining: bool = False) -> Any:
        """Return a Python value as a program argument; tensors become references."""
        match value:
            case torch.Tensor():
                if id(value) in self.params:
                    return ParamRef(self.name_here(self.params[id(value)]))
                if not defining and id(value) not in self.values:
                    return self._spell_out(value)
                return Ref(str(self.bind(value)))
            case torch.Size():
                return tuple(int(item) for item in value)
            case slice():
                return slice(*(self.encode(item, defining=defining) for item in (value.start, value.stop, value.step)))
            case tuple() if hasattr(value, "_fields"):
                named = ((name, getattr(value, name)) for name in value._fields)
                return Fields(tuple((k, self.encode(item, defining=defining)) for k, item in named), in_order=True)
            case tuple():
                return tuple(self.encode(item, defining=defining) for item in value)
            case list():
                return [self.encode(item, defining=defining) for item in value]
            case dict() if type(value) not in (dict, OrderedDict, defaultdict):
                items = dict(value)
                if fields := getattr(type(value), "__dataclass_fields__", None):  # what is None stays readable
                    items = {name: getattr(value, name) for name in fields}
                return Fields(tuple((str(k), self.encode(v, defining=defining)) for k, v in items.items()))
            case dict():
                return {key: self.encode(item, defining=defining) for key, item in value.items()}
            case torch.dtype():
                return Dtype(str(value).removeprefix("torch."))
            case torch.device():
                return Device()
            case torch.memory_format() | torch.layout():
                return Constant(str(value).removeprefix("torch."))
            case None | bool() | int() | float() | complex() | str() if type(value).__module__ != "numpy":
                return as_python(value)
        if value is Ellipsis:
            return value
        if (plain := as_python(value)) is not value:
            return plain
        if hasattr(type(value), "__dataclass_fields__"):
            names = value.__dataclass_fields__
            return Fields(tuple((name, self.encode(getattr(value, name), defining=defining)) for name in names))
        return Unsupported(value)

    def _spell_out(self, tensor: torch.Tensor) -> Ref:
        """Record a call that makes a small tensor from its values, which stands outside the model and nobody trains."""
        values = spelled_out(tensor)
        if values is None:
            raise self._unknown_tensor(tensor)
        self.kept.append(tensor)
        self.constants.append((self.location(), id(tensor), values))
        result = Ref(str(len(self.tensors)))
        self.tensors[len(self.tensors)] = tensor
        call = self.add("function", "torch.tensor", (values,), {"dtype": tensor.dtype, "device": tensor.device})
        call.result = result
        self.frames[-1].append(call)
        return result

    def _unknown_tensor(self, tensor: torch.Tensor) -> CaptureError:
        shape, where = tuple(tensor.shape), self.location()
        return UnrecordableError(
            f"{where}: a tensor of shape {shape} in {self.scopes[-1] or self.root} was made where "
            "recording can't see it (outside the model, numpy, a custom autograd function, or C++)"
            f"{source_line(where)}",
            hint="register it as a buffer of the module that reads it (register_buffer), or return it from the forward "
            "of the module that makes it",
        )

    def location(self) -> str:
        """Return 'file:line' of the innermost statement that is not torch's."""
        for frame, line in traceback.walk_stack(sys._getframe()):
            filename = frame.f_code.co_filename
            if "/torch/" not in filename and not filename.startswith(("<", _THIS_FOLDER)):
                return f"{filename}:{line}"
        return "unknown line"

    def add(self, kind: NodeKind, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Return a new call with encoded arguments, not yet appended."""
        return Call(
            kind=kind,
            target=target,
            args=tuple(self.encode(item) for item in args),
            kwargs={key: self.encode(item) for key, item in kwargs.items()},
            scope=self.scopes[-1],
            no_grad=not torch.is_grad_enabled(),
            location=self.location() if kind != "module" else "",
        )


def as_python(value: Any) -> Any:
    """Return a number or text of a kind of its own (numpy's, an enumeration's) as Python's; anything else as it is.

    An array of numpy's is nested lists, as long as a program may hold it.
    """
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        size, kind = getattr(value, "size", 0), getattr(getattr(value, "dtype", None), "kind", "")
        return value.tolist() if 0 < size <= MAX_SPELLED_OUT and kind in "biufcU" else value
    kinds: tuple[type, ...] = (bool, int, float, complex)
    if isinstance(value, str):
        return str.__str__(value)
    return next((kind(value) for kind in kinds if isinstance(value, kind)), value)


def names_by_id(named: Iterable[tuple[str, Any]]) -> dict[int, list[str]]:
    """Return every name of each module or tensor, by its id."""
    found: dict[int, list[str]] = {}
    for name, item in named:
        found.setdefault(id(item), []).append(name)
    return found


def flatten(value: Any) -> Iterator[Any]:
    """Yield what containers hold, of any depth."""
    if isinstance(value, tuple | list):
        for item in value:
            yield from flatten(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from flatten(item)
    else:
        yield value


def fresh(result: Any, known: set[int]) -> Any:
    """Return a result as a value of its own where a call gave back its operand (a cast to the dtype it has, a dropout
    that is off): whether it does may depend on dtype and training, and the structure of a recording must not."""
    if isinstance(result, torch.Tensor) and id(result) in known:
        return result.view_as(result)
    return result

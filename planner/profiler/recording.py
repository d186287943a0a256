"""What a recording is made of: calls, and what can't be one."""

import linecache
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from planner.arguments import Ref
from planner.errors import CaptureError
from planner.program import NodeKind

# Of torch's modules, those whose forward is a composition of layers.
_OPENED: tuple[type[nn.Module], ...] = (
    *(nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder),
    *(nn.TransformerEncoderLayer, nn.TransformerDecoderLayer),
)


@dataclass
class Call:
    """One recorded call; `scope` is the module in whose forward it stands.

    `body` are the calls inside a module, also those of a leaf that is not torch's own: a leaf is never opened, but
    what it does to a divided value is read from its body. `escapes`: later calls read values of the body that are
    not in the result, so it has to be opened. `written` are the arguments that a module changed in place. `opaque`
    tells why no program can hold the call. `random`: it draws random numbers, `draws_outside`: with Python's or
    numpy's generators. `skipped_with` is the probability with which it is left out.
    """

    kind: NodeKind
    target: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    scope: str
    no_grad: bool
    location: str
    result: Any = None
    in_place: bool = False
    written: tuple[Ref, ...] = ()
    leaf: bool = False
    escapes: bool = False
    opaque: str = ""
    random: bool = False
    draws_outside: bool = False
    skipped_with: float = 0.0
    body: list["Call"] = field(default_factory=list)
    name: str = ""  # what to call its result, where that says more than the target


@dataclass
class Recording:
    """The calls of a forward, the values they made (by number) and the structure of the output and the loss.

    `constants` are the values of the tensors that stood outside the model, each with the line that read it,
    `updated_buffers` the names of those that the forward changed, `checks` the lines that only check values, which the
    program does not, `decisions` those where Python decides by a random number.
    """

    inputs: dict[str, int]
    targets: dict[str, int]
    calls: list[Call]
    output: Any
    loss_calls: list[Call]
    loss: Any
    tensors: dict[int, torch.Tensor]
    constants: tuple[tuple[str, Any], ...] = ()
    updated_buffers: tuple[str, ...] = ()
    kept: dict[tuple[str, str], Any] = field(default_factory=dict)
    checks: tuple[str, ...] = ()
    decisions: tuple[str, ...] = ()


class UnrecordableError(CaptureError):
    """A statement that no program can hold; the module that it stands in may be called whole."""


class DrewError(UnrecordableError):
    """Random numbers that are not torch's; `functions` ('module:function') are those of which one may have drawn."""

    def __init__(self, message: str, *, hint: str, functions: tuple[str, ...]) -> None:
        super().__init__(message, hint=hint)
        self.functions = functions


class Unsupported:
    """Stands for an argument that no program can hold; an error only if the call that has it is emitted."""

    def __init__(self, value: object) -> None:
        self.description = f"{type(value).__module__}.{type(value).__qualname__}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unsupported) and other.description == self.description

    def __hash__(self) -> int:
        return hash(self.description)


def is_leaf(module: nn.Module) -> bool:
    """Return whether a module is always called whole: it has no children, or is torch's own and no stack of layers."""
    if isinstance(module, _OPENED):
        return False
    return not any(True for _ in module.children()) or type(module).__module__.startswith("torch.nn")


def source_line(where: str) -> str:
    """Return the line of 'file:line' as a second line of an error's message; nothing where it can't be read."""
    path, _, number = where.rpartition(":")
    text = linecache.getline(path, int(number)).strip() if number.isdigit() else ""
    return f"\n    {text}" if text else ""

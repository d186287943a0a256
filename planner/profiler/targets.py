"""Names by which a program calls the functions of torch that a recording sees."""

from typing import Any

import torch
from torch.overrides import resolve_name

from planner.errors import CaptureError

_OPERATORS = {
    name: f"operator.{name.strip('_')}"
    if name not in ("__and__", "__or__", "__invert__")
    else f"operator.{name.strip('_')}_"
    for name in (
        *(
            "__add__",
            "__sub__",
            "__mul__",
            "__truediv__",
            "__floordiv__",
            "__mod__",
            "__pow__",
            "__matmul__",
            "__neg__",
        ),
        *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__and__", "__or__", "__xor__", "__invert__"),
    )
}
_OPERATORS["__invert__"] = "operator.invert"


# Functions of torch that are Python, and call what is recorded by a name that is not public.
_PUBLIC_NAMES = {
    "torch._grouped_mm": "torch.nn.functional.grouped_mm",
    "torch._is_all_true": "torch.all",
    "torch._is_any_true": "torch.any",
    "_is_all_true": "all",
    "_is_any_true": "any",
}


def target_of(func: Any, name: str) -> tuple[Any, str]:
    """Return the kind and name by which a program calls a torch function."""
    kind, target = _target(func, name)
    return kind, _PUBLIC_NAMES.get(target, target)


def _target(func: Any, name: str) -> tuple[Any, str]:
    if name == "__get__":
        owner = (resolve_name(func) or "").split(".")
        return ("attribute", owner[-2]) if len(owner) >= 2 else ("skip", "")
    if name == "__set__":
        raise CaptureError(
            f"setting an attribute of a tensor ({resolve_name(func)}) can't be recorded", hint="use a method"
        )
    if name == "__getitem__":
        return "getitem", ""
    if name == "__setitem__":
        return "setitem", ""
    resolved = resolve_name(func) or ""
    namespace, _, attribute = resolved.rpartition(".")
    if namespace in ("torch.Tensor", "torch._C.TensorBase", "torch._C._TensorBase"):
        if attribute in _OPERATORS:
            return "function", _OPERATORS[attribute]
        return "method", attribute
    if namespace.startswith("torch"):
        for public in ("torch.nn.functional", "torch.special", "torch.fft", "torch.linalg", "torch._C._nn", "torch"):
            module: Any = torch
            for part in public.split(".")[1:]:
                module = getattr(module, part)
            if getattr(module, name, None) is func:
                return "function", f"{public}.{name}"
        return "function", resolved
    for public in ("torch.nn.functional", "torch", "torch._C._nn"):
        module = torch
        for part in public.split(".")[1:]:
            module = getattr(module, part)
        if getattr(module, name, None) is func:
            return "function", f"{public}.{name}"
    return "function", resolved or name

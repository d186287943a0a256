"""Which modules are divided by themselves: linear layers and embeddings, also those that scale what they look up."""

from typing import Literal

from torch import nn

from planner.arguments import ParamRef, Ref, leaves
from planner.profiler.recording import Call

# What maps every element by itself: then a row that another rank looks up can be replaced by zeros afterwards.
_SCALING = frozenset(
    {"mul", "div", "truediv", "add", "sub", "rmul", "radd", "rsub"}
    | {"to", "type", "type_as", "float", "double", "half", "bfloat16"}
)


def kind_of(module: nn.Module, call: Call) -> Literal["linear", "embedding"] | None:
    """Return which of those that can be divided a module is; None for others, and for what changes its forward."""
    if isinstance(module, nn.Linear):
        return "linear" if type(module).forward is nn.Linear.forward else None
    if isinstance(module, nn.Embedding):
        plain = module.max_norm is None and not (module.sparse or module.scale_grad_by_freq)
        own = type(module).forward is nn.Embedding.forward or _scales_rows(module, call)
        return "embedding" if plain and own else None
    # Hugging Face's: y = x @ weight + bias, weight [in, out]
    return "linear" if type(module).__name__ == "Conv1D" and hasattr(module, "nf") else None


def _scales_rows(module: nn.Module, call: Call) -> bool:
    """Return whether an embedding's own forward looks up its argument, and only scales by constants what it gets."""
    constants = {f"{call.target}.{name}" for name, buffer in module.named_buffers() if buffer.dim() == 0}
    given, made = [leaf for leaf in leaves((call.args, call.kwargs)) if isinstance(leaf, Ref)], set[str]()
    if not call.body or len(given) != 1:
        return False
    for position, inner in enumerate(call.body):
        name = inner.target.rpartition(".")[2].strip("_")
        read = [leaf for leaf in leaves((inner.args, inner.kwargs)) if isinstance(leaf, Ref | ParamRef)]
        if position == 0:
            fits = name == "embedding" and inner.args[:2] == (given[0], ParamRef(f"{call.target}.weight"))
        else:
            fits = name in _SCALING and all(
                leaf.name in made if isinstance(leaf, Ref) else leaf.name in constants for leaf in read
            )
        if not fits or inner.in_place or not isinstance(inner.result, Ref):
            return False
        made.add(inner.result.name)
    return bool(call.result == call.body[-1].result)

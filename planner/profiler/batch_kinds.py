"""How values depend on the rows of a batch, and what operations make of that.

With M microbatches in a step, a value v of a microbatch and V of the whole batch are of one of these kinds:

    constant    V = v                            parameters, numbers, what has no rows
    rows        V = M^d * (v_1, v_2, ..., v_M)   one after another along a dimension of the batch
    linear      V = M^(d-1) * (v_1 + ... + v_M)  d = 1: a sum over rows; d = 0: a mean over rows

A loss must be linear with d = 0: then the mean of the microbatches' losses is the loss of the whole batch.
"""

import inspect
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.nn import functional as F

from planner.arguments import BatchFloat, BatchInt, leaves
from planner.model_profile import BY_FREQUENCY
from planner.program import Tensor

Form = Literal["constant", "rows", "linear"]


@dataclass(frozen=True)
class Kind:
    """One of the kinds above, with its degree d."""

    form: Form
    degree: int = 0


CONSTANT, ROWS, SUM, MEAN = Kind("constant"), Kind("rows"), Kind("linear", 1), Kind("linear", 0)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Operations that are linear in their first operand and read nothing else of the batch.
SAME = _words(
    "neg positive float double half bfloat16 to type type_as view reshape flatten unflatten squeeze unsqueeze clone "
    "contiguous detach transpose permute t expand expand_as broadcast_to repeat view_as reshape_as unbind chunk "
    "split select narrow alias movedim swapaxes repeat_interleave T H mT mH real data requires_grad getitem pad "
    "index_select conj"
)
# Of these, those that keep the numbers of a tensor of labels as they are.
KEEPS_LABELS = SAME - {"neg"} | _words("long int masked_fill where clone")
FACTORIES = _words(
    "new_zeros new_ones new_full new_empty new_tensor zeros ones full arange tensor empty zeros_like ones_like "
    "full_like empty_like eye linspace as_tensor scalar_tensor"
)
PRODUCTS = _words("matmul mm bmm mv dot inner einsum tensordot addmm linear outer vdot")
COMBINED = _words("stack cat concat concatenate hstack vstack")
# Operations that compute with numbers, where others take them as sizes, counts and positions.
ARITHMETIC = _words(
    "add sub rsub mul multiply div divide truediv true_divide floordiv floor_divide mod remainder fmod pow iadd isub "
    "imul itruediv ifloordiv imod ipow addcmul addcdiv addmm addmv addbmm baddbmm addr lerp clamp clip clamp_min "
    "clamp_max minimum maximum eq ne lt le gt ge where masked_fill fill full full_like new_full tensor as_tensor "
    "scalar_tensor new_tensor scaled_dot_product_attention"
)
# Factories whose numbers are the values of what they make: position of these.
FILLS = {"tensor": 0, "as_tensor": 0, "scalar_tensor": 0, "new_tensor": 1, "full": 1, "full_like": 1, "new_full": 2}
# Operations along a dimension, which couple the rows where it is one of the batch: position of the argument, default.
ALONG: dict[str, tuple[int, Any]] = {
    **dict.fromkeys(
        ("softmax", "log_softmax", "softmin", "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"), (1, None)
    ),
    **dict.fromkeys(("sort", "argsort", "flip"), (1, -1)),
    **dict.fromkeys(("topk", "kthvalue"), (2, -1)),
    "normalize": (2, 1),
    "roll": (2, "all"),
}


def batch_dims(tensor: Tensor) -> list[int]:
    """Return the dimensions that grow with the batch."""
    return [index for index, size in enumerate(tensor.shape) if isinstance(size, BatchInt)]


def couples_rows(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], operand: Tensor) -> bool:
    """Return whether an operation works along a dimension of the batch, and so mixes rows."""
    if name not in ALONG:
        return False
    position, default = ALONG[name]
    dim = kwargs.get("dim", kwargs.get("dims", args[position] if len(args) > position else default))
    listed = dim if isinstance(dim, tuple | list) else (dim,)
    along = batch_dims(operand)
    return bool(along) and any(
        item == "all" or (isinstance(item, int) and item % max(len(operand.shape), 1) in along) for item in listed
    )


_SOFTMAXES = (nn.Softmax, nn.LogSoftmax, nn.Softmin)


def module_coupling(module: nn.Module, operand: Tensor) -> str:
    """Return how a module of torch, given its first operand, makes rows depend on one another; nothing where not.

    Attention and recurrent modules work along their sequence, which is dimension 0 unless they are told otherwise.
    """
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.scale_grad_by_freq:
        return BY_FREQUENCY
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        along = (1 if module.batch_first and len(operand.shape) == 3 else 0) in batch_dims(operand)
    else:
        along = isinstance(module, _SOFTMAXES) and couples_rows("softmax", (None, module.dim), {}, operand)
    return "works along the dimension of the batch" if along else ""


def bound_arguments(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of a loss function of torch by name, with defaults; None where it is none."""
    function = getattr(F, name, None)
    if not callable(function):
        return None
    try:
        signature = inspect.signature(function)
        bound = signature.bind(*args, **kwargs)
    except (TypeError, ValueError):
        return None
    if "reduction" not in signature.parameters:
        return None
    bound.apply_defaults()
    return dict(bound.arguments)


def power_of_rows(value: Any) -> int | None:
    """Return with which power of the number of rows a number grows, 0 where it is no power; None for other values."""
    if isinstance(value, BatchInt):
        return 0 if value.constant or (value.per_row and value.squared) else 2 if value.squared else 1
    return value.power if isinstance(value, BatchFloat) else None


def computes_with_rows(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operation takes a number of rows, or what was computed from it, as a number to compute with."""
    if name in FILLS:
        position = FILLS[name]
        args, kwargs = args[position : position + 1], {k: v for k, v in kwargs.items() if k in ("data", "fill_value")}
    found = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, BatchInt | BatchFloat)]
    if any(isinstance(leaf, BatchFloat) for leaf in found):
        return True
    return bool(found) and (name in ARITHMETIC or bound_arguments(name, args, kwargs) is not None)


def reduction_of(arguments: dict[str, Any]) -> str:
    """Return 'mean', 'sum' or 'none': what a loss function does with the losses of the rows."""
    average, reduce = arguments.get("size_average"), arguments.get("reduce")
    if average is None and reduce is None:
        return str(arguments["reduction"])
    if reduce is False:
        return "none"
    return "sum" if average is False else "mean"

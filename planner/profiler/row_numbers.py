"""Finds where a model computes with the numbers of a batch's rows: in a plan every microbatch counts from 0 again."""

from collections.abc import Iterable, Mapping

from planner.arguments import BatchInt, leaves
from planner.profiler.loss_state import flat, operation, place, refs
from planner.profiler.recording import Call
from planner.program import Tensor

# They pick rows by their numbers, which a microbatch does among its own.
_PICKS = {
    *("getitem", "setitem", "index_select", "gather", "take_along_dim", "index_add", "index_put", "index_copy"),
    *("index_fill", "scatter", "scatter_add", "scatter_reduce", "one_hot", "cross_entropy", "nll_loss"),
}


def row_number_couplings(calls: Iterable[Call], tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the first place where `arange` over rows, or integers made from it, become floating-point numbers."""
    numbers: set[str] = set()
    for call in flat(calls):
        if call.body:
            continue
        made = [name for name in refs(call.result) if name in tensors]
        if operation(call) == "arange" and any(isinstance(leaf, BatchInt) for leaf in leaves((call.args, call.kwargs))):
            numbers.update(made)
            if not any(_is_float(tensors[name]) for name in made):
                continue
        elif not numbers.intersection(refs((call.args, call.kwargs))):
            continue
        elif operation(call) in _PICKS:
            if numbers.intersection(refs(call.args[:1])):
                numbers.update(made)
            continue
        if any(_is_float(tensors[name]) for name in made):
            what = "computes with the numbers of the batch's rows, which every microbatch counts from 0"
            return [f"{place(call)}: `{operation(call)}` {what}"]
        numbers.update(name for name in made if tensors[name].dtype != "bool")
    return []


def _is_float(tensor: Tensor) -> bool:
    return tensor.dtype.startswith(("float", "bfloat", "complex"))

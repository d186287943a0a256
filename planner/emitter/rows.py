"""Spells what generated code reads off its arguments: rows, device and dtype."""

from collections.abc import Iterable, Iterator

from planner.arguments import MODEL_DTYPE, BatchFloat, BatchInt, Device, Dtype, leaves
from planner.program import Node, Tensor

LOCALS = ("batch", "device", "dtype")


def local_name(name: str, taken: Iterable[str]) -> str:
    """Return the name of a local variable that no argument has."""
    return f"{name}_" if name in taken else name


def context_lines(
    nodes: Iterable[Node], given: dict[str, Tensor], indent: str, batch: str, device: str, dtype: str
) -> Iterator[str]:
    """Yield the lines that set the rows, device and dtype from given values, where nodes use them."""
    used = [leaf for node in nodes for leaf in leaves((node.args, node.kwargs))]
    if any(isinstance(leaf, BatchInt | BatchFloat) for leaf in used):
        yield f"{indent}{batch} = {batch_expression(given)}"
    if any(isinstance(leaf, Device) for leaf in used):
        yield f"{indent}{device} = {next(iter(given))}.device"
    if any(leaf == Dtype(MODEL_DTYPE) for leaf in used):
        floating = next((name for name, tensor in given.items() if tensor.follows_model_dtype), next(iter(given)))
        yield f"{indent}{dtype} = {floating}.dtype"


def batch_expression(given: dict[str, Tensor]) -> str:
    """Return the number of rows, read off the first value that has them as a dimension of its own."""
    for name, tensor in given.items():
        for dim, size in enumerate(tensor.shape):
            if size == BatchInt(1, 0):
                return f"{name}.size({dim})"
    for name, tensor in given.items():
        for dim, size in enumerate(tensor.shape):
            if isinstance(size, BatchInt) and size.constant == 0:
                return f"{name}.size({dim}) // {size.per_row}"
    raise ValueError("no value has a batch dimension")


def name_tuple(names: Iterable[str]) -> str:
    """Return names as a tuple of texts."""
    listed = [f'"{name}"' for name in names]
    return f"({', '.join(listed)}{',' if len(listed) == 1 else ''})"

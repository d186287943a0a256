"""Operations on partial sums: those that are linear in them, so that what the ranks compute still adds up."""

from typing import Any

from planner.arguments import ParamRef, Ref, leaves
from planner.program import Node
from planner.tp_rules.operations import Context, argument, operation_name, words

# With one operand: what they do to a sum they do to its terms.
_LINEAR = words(
    "view reshape flatten unflatten transpose swapaxes swapdims permute T mT t unsqueeze squeeze expand broadcast_to "
    "getitem split chunk tensor_split split_with_sizes unbind contiguous clone alias neg sum mean dropout"
)
_ADDING = frozenset({"add", "sub", "radd", "rsub", "iadd", "isub"})
_SCALING = frozenset({"mul", "rmul", "div", "truediv", "true_divide", "imul", "itruediv"})
_JOINING = frozenset({"cat", "concat", "concatenate", "stack"})
_CASTING = frozenset({"to", "float", "half", "double", "bfloat16", "type", "type_as"})


def partial_operands(context: Context, node: Node) -> list[tuple[Ref | ParamRef, ...]]:
    """Return the choices of operands that may be partial sums, all others whole; the result is then a partial sum.

    Dropout draws the same mask on all ranks of a group. A cast that narrows would round every term.
    """
    name = operation_name(node)
    operands = list(
        dict.fromkeys(leaf for leaf in leaves((node.args, node.kwargs)) if isinstance(leaf, Ref | ParamRef))
    )
    first = node.args[0] if node.args else None
    if node.in_place or not operands:
        return []
    if name in _LINEAR and isinstance(first, Ref):
        return [(first,)]
    if name in _ADDING and len(operands) == len(node.args) == 2 and not node.kwargs:
        return [tuple(operands)]
    if name in _SCALING and len(node.args) == 2 and not node.kwargs:
        places = node.args[:1] if name not in ("mul", "rmul", "imul") else node.args
        return [(place,) for place in places if isinstance(place, Ref) and node.args[0] != node.args[1]]
    if name in _JOINING:
        items: Any = node.args[0]
        return [tuple(dict.fromkeys(items))] if all(isinstance(item, Ref) for item in items) else []
    if name in _CASTING and isinstance(first, Ref) and operands == [first]:
        made = [context.tensors[result].dtype for result in node.writes()]
        return [(first,)] if made == [context.tensors[first.name].dtype] else []
    return []


def broadcast_sources(context: Context, node: Node) -> list[int]:
    """Return the dimensions of an `expand` along which every rank can make its own slice of a whole operand."""
    if operation_name(node) not in ("expand", "broadcast_to") or not isinstance(node.args[0], Ref | ParamRef):
        return []
    before, after = context.shape(node.args[0]), context.result_shape(node)
    shift = len(after) - len(before)
    given = argument(node, 1, "size")[0]
    sizes = given if isinstance(given, tuple | list) else node.args[1:]
    return [
        dim
        for dim, size in enumerate(after)
        if isinstance(size, int)
        and size % context.degree == 0
        and len(sizes) == len(after)
        and sizes[dim] == size
        and (dim < shift or before[dim - shift] == 1)
    ]

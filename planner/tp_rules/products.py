"""Rules of reductions, normalizations, products and attention: what must not run over the divided dimension."""

from typing import Any

from planner.arguments import Ref, leaves
from planner.program import Node
from planner.tp_rules.operations import Context, argument, broadcast, dimension, operation_name, rule, same_state
from planner.tp_rules.state import PARTIAL, IllegalShardingError, RuleState, Shard, divided


@rule("softmax", "log_softmax", "cumsum", "flip", "roll", "sort")
def _along(context: Context, node: Node) -> RuleState:
    state = context.state(node.args[0])
    if state is None:
        return None
    dim, path = argument(node, 1, "dim")
    dims = dim if isinstance(dim, tuple | list) else (dim,)
    if not path or state.dim in [dimension(item, len(context.shape(node.args[0]))) for item in dims]:
        raise IllegalShardingError(f"{operation_name(node)} runs along the divided dimension")
    return state


@rule("mean", "sum", "var", "std", "amax", "amin", "norm", "prod", "logsumexp", "any", "all")
def _reduce(context: Context, node: Node) -> RuleState:
    state = context.state(node.args[0])
    if state is None:
        return None
    rank = len(context.shape(node.args[0]))
    dim, path = argument(node, 1, "dim")
    if not path or dim is None:
        raise IllegalShardingError(f"{operation_name(node)} runs over the divided dimension")
    dims = [dimension(item, rank) for item in (dim if isinstance(dim, tuple | list) else (dim,))]
    if state.dim in dims:
        if operation_name(node) == "sum" and not state.sequence:
            return PARTIAL
        raise IllegalShardingError(f"{operation_name(node)} runs over the divided dimension")
    kept = len(context.result_shape(node)) == rank
    return state if kept else state.at(state.dim - sum(item < state.dim for item in dims))


@rule("layer_norm", "rms_norm")
def _normalize(context: Context, node: Node) -> RuleState:
    state = context.state(node.args[0])
    if state is None:
        return None
    shape, _ = argument(node, 1, "normalized_shape")
    if state.dim >= len(context.shape(node.args[0])) - len(shape):
        raise IllegalShardingError(f"{operation_name(node)} runs over the divided dimension")
    return state


@rule("matmul", "bmm", "mm")
def _matmul(context: Context, node: Node) -> RuleState:
    return _product(context, node.args[0], node.args[1], len(context.result_shape(node)))


@rule("addmm")
def _added_product(context: Context, node: Node) -> RuleState:
    """A bias and a product: divided by columns, as both are, or by the rows of the first factor."""
    if len(node.args) != 3 or node.kwargs:
        raise IllegalShardingError(f"{operation_name(node)} with factors, or with arguments by name")
    bias, left, right = node.args
    rank = len(context.result_shape(node))
    made = _product(context, left, right, rank)
    if made == PARTIAL:
        raise IllegalShardingError("divided by rows, every rank would add the bias")
    if made is None and context.state(bias) is not None:
        raise IllegalShardingError("a divided bias is added to a whole product")
    position = made.dim - rank + len(context.shape(bias)) if isinstance(made, Shard) else -1
    wanted = made.at(position) if isinstance(made, Shard) and position >= 0 else None
    if wanted is not None and context.shape(bias)[position] == 1:
        wanted = None
    if context.state(bias) != wanted:
        raise IllegalShardingError("the bias is not divided as the product is")
    return made


def _product(context: Context, left: Any, right: Any, out_rank: int) -> RuleState:
    """Return the state of a matrix product; PARTIAL where both factors are divided along what it sums over."""
    states = (context.state(left), context.state(right))
    if states == (None, None):
        return None
    ranks = (len(context.shape(left)), len(context.shape(right)))
    if min(ranks) < 2:
        raise IllegalShardingError("a product with a vector")
    contracts = [
        state is not None and state.dim == rank - from_last
        for state, rank, from_last in zip(states, ranks, (1, 2), strict=True)
    ]
    if any(contracts):
        return _contraction(contracts, states)
    found: set[Shard] = set()
    for state, rank in zip(states, ranks, strict=True):
        if state is not None:
            found.add(state.at(state.dim + out_rank - rank))
    if len(found) > 1:
        raise IllegalShardingError("both factors of a product are divided, along different dimensions")
    result = found.pop()
    if result.dim < out_rank - 2:  # a batch dimension: both must be divided, or broadcast
        for operand, state, rank in zip((left, right), states, ranks, strict=True):
            position = result.dim - (out_rank - rank)
            if state is None and position >= 0 and context.shape(operand)[position] != 1:
                raise IllegalShardingError("a whole factor meets a divided one")
    return result


def _contraction(contracts: list[bool], states: tuple[Shard | None, Shard | None]) -> RuleState:
    left, right = states
    if not all(contracts) or left is None or right is None:
        raise IllegalShardingError("a product contracts the divided dimension of one factor only")
    if left.at(0) != right.at(0):
        raise IllegalShardingError("a product contracts dimensions that are divided into different parts")
    if left.sequence:
        raise IllegalShardingError("a product contracts the sequence")
    return PARTIAL


@rule("grouped_mm")
def _grouped(context: Context, node: Node) -> RuleState:
    """Rows of the first factor, each with one of the matrices of the second: (rows, k) and (matrices, k, n)."""
    rows, matrices = node.args[0], node.args[1]
    others = [leaf for leaf in leaves((node.args[2:], node.kwargs)) if context.state(leaf) is not None]
    bias = argument(node, 3, "bias")[0]
    given, cut = context.state(rows), context.state(matrices)
    if others or cut is None or len(context.shape(matrices)) != 3 or len(context.shape(rows)) != 2:
        raise IllegalShardingError("a grouped product of other factors than rows and three-dimensional weights")
    if cut.dim == 2 and given is None and bias is None:
        return cut.at(1)
    if cut.dim == 1 and bias is None:
        return _contraction([given is not None and given.dim == 1, True], (given, cut))
    raise IllegalShardingError("a grouped product is divided by matrices, which all ranks' rows need")


@rule("linear")
def _linear(context: Context, node: Node) -> RuleState:
    x, weight = argument(node, 0, "input")[0], argument(node, 1, "weight")[0]
    bias = argument(node, 2, "bias")[0]
    rank = len(context.shape(x))
    given, cut, added = context.state(x), context.state(weight), context.state(bias)
    if len(context.shape(weight)) != 2:
        raise IllegalShardingError("a linear function whose weight is no matrix")
    if cut is None:
        if given is None or added is not None or given.dim == rank - 1:
            raise IllegalShardingError("a linear function of a divided input whose weight is whole")
        return given
    if cut.dim == 0:
        if given is not None or (bias is not None and added != cut):
            raise IllegalShardingError("a linear function divided by columns takes a whole input and a divided bias")
        return cut.at(len(context.result_shape(node)) - 1)
    if bias is not None:
        raise IllegalShardingError("divided by rows, every rank would add the bias")
    return _contraction([given is not None and given.dim == rank - 1, True], (given, cut.at(0)))


@rule("einsum")
def _einsum(context: Context, node: Node) -> RuleState:
    equation = node.args[0]
    operands = list(node.args[1]) if isinstance(node.args[1], list | tuple) else list(node.args[1:])
    if not isinstance(equation, str) or "." in equation or "->" not in equation:
        raise IllegalShardingError("an einsum that names no dimensions")
    inputs, _, output = equation.replace(" ", "").partition("->")
    letters = inputs.split(",")
    divided_by: dict[str, Shard] = {}
    for names, operand in zip(letters, operands, strict=True):
        state = context.state(operand)
        if state is not None:
            letter = names[state.dim]
            if names.count(letter) > 1 or divided_by.get(letter, state.at(0)) != state.at(0):
                raise IllegalShardingError("an einsum of values that are divided differently")
            divided_by[letter] = state.at(0)
    if len(divided_by) != 1:
        raise IllegalShardingError("an einsum of values divided along several dimensions")
    ((letter, state),) = divided_by.items()
    for names, operand in zip(letters, operands, strict=True):
        if letter in names and context.state(operand) is None:
            raise IllegalShardingError("a whole factor meets a divided one")
    if letter in output:
        return state.at(output.index(letter))
    return _contraction([True, True], (state, state))


@rule("scaled_dot_product_attention")
def _attention(context: Context, node: Node) -> RuleState:
    query, key, value = (argument(node, position, name)[0] for position, name in enumerate(("query", "key", "value")))
    state = same_state(context, [query, key, value])
    if state is None:
        return None
    rank = len(context.shape(query))
    if state.dim >= rank - 2:
        raise IllegalShardingError("attention runs over the divided dimension")
    mask, _ = argument(node, 3, "attn_mask")
    if isinstance(mask, Ref):
        broadcast(context, [query, mask] if len(context.shape(mask)) <= rank else [mask], rank)
    for operand in (query, key):
        divided(context.shape(operand)[state.dim], context.degree, state)
    return state

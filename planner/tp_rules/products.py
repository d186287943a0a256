"""Rules of reductions, normalizations, products and attention: what must not run over the divided dimension."""

from planner.program import Node, Ref
from planner.tp_rules.operations import Context, argument, broadcast, dimension, operation_name, rule, same_state
from planner.tp_rules.state import IllegalShardingError, Shard, State, divided


@rule("softmax", "log_softmax", "cumsum", "flip", "roll", "sort")
def _along(context: Context, node: Node) -> State:
    state = context.state(node.args[0])
    if state is None:
        return None
    dim, path = argument(node, 1, "dim")
    dims = dim if isinstance(dim, tuple | list) else (dim,)
    if not path or state.dim in [dimension(item, len(context.shape(node.args[0]))) for item in dims]:
        raise IllegalShardingError(f"{operation_name(node)} runs along the divided dimension")
    return state


@rule("mean", "sum", "var", "std", "amax", "amin", "norm", "prod", "logsumexp", "any", "all")
def _reduce(context: Context, node: Node) -> State:
    state = context.state(node.args[0])
    if state is None:
        return None
    rank = len(context.shape(node.args[0]))
    dim, path = argument(node, 1, "dim")
    if not path or dim is None:
        raise IllegalShardingError(f"{operation_name(node)} runs over the divided dimension")
    dims = [dimension(item, rank) for item in (dim if isinstance(dim, tuple | list) else (dim,))]
    if state.dim in dims:
        raise IllegalShardingError(f"{operation_name(node)} runs over the divided dimension")
    kept = len(context.result_shape(node)) == rank
    return state if kept else Shard(state.dim - sum(item < state.dim for item in dims), state.parts)


@rule("layer_norm", "rms_norm")
def _normalize(context: Context, node: Node) -> State:
    state = context.state(node.args[0])
    if state is None:
        return None
    shape, _ = argument(node, 1, "normalized_shape")
    if state.dim >= len(context.shape(node.args[0])) - len(shape):
        raise IllegalShardingError(f"{operation_name(node)} runs over the divided dimension")
    return state


@rule("matmul", "bmm", "mm")
def _matmul(context: Context, node: Node) -> State:
    left, right = node.args[0], node.args[1]
    states = (context.state(left), context.state(right))
    if states == (None, None):
        return None
    ranks = (len(context.shape(left)), len(context.shape(right)))
    out_rank = len(context.result_shape(node))
    if min(ranks) < 2:
        raise IllegalShardingError("a product with a vector")
    found: set[Shard] = set()
    for state, rank, contracted in zip(states, ranks, (1, 2), strict=True):
        if state is None:
            continue
        if state.dim == rank - contracted:
            raise IllegalShardingError("a product contracts the divided dimension")
        found.add(Shard(state.dim + out_rank - rank, state.parts))
    if len(found) > 1:
        raise IllegalShardingError("both factors of a product are divided, along different dimensions")
    result = found.pop()
    if result.dim < out_rank - 2:  # a batch dimension: both must be divided, or broadcast
        for operand, state, rank in zip((left, right), states, ranks, strict=True):
            position = result.dim - (out_rank - rank)
            if state is None and position >= 0 and context.shape(operand)[position] != 1:
                raise IllegalShardingError("a whole factor meets a divided one")
    return result


@rule("scaled_dot_product_attention")
def _attention(context: Context, node: Node) -> State:
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
    heads = context.shape(key)[state.dim]
    divided(heads, context.degree, state.parts)
    return state

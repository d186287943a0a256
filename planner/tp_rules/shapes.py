"""Rules of operations that change shapes: where the divided dimension goes."""

from typing import Any

from planner.program import BatchInt, Node, Ref, leaves
from planner.tp_rules.operations import Context, argument, dimension, operation_name, rule, same_state
from planner.tp_rules.state import IllegalShardingError, Shard, State, divided, product_of


def reshaped(
    context: Context, state: Shard, before: tuple[int | BatchInt, ...], after: tuple[int | BatchInt, ...]
) -> Shard:
    """Return where a divided dimension goes in a reshape; IllegalShardingError where its slices come apart."""
    left = right = 0
    while left < len(before):
        end_left, end_right = left + 1, right + 1
        while product_of(before[left:end_left]) != product_of(after[right:end_right]):
            small_left = product_of(before[left:end_left]) < product_of(after[right:end_right])
            if small_left and end_left < len(before):
                end_left += 1
            elif end_right < len(after):
                end_right += 1
            else:
                raise IllegalShardingError(f"a reshape from {before} to {after} can't be followed")
        if left <= state.dim < end_left:
            return _within_group(context, state, before, left, after[right:end_right], right)
        left, right = end_left, end_right
    raise IllegalShardingError(f"a reshape from {before} to {after} loses the divided dimension")


def _within_group(
    context: Context,
    state: Shard,
    before: tuple[int | BatchInt, ...],
    first: int,
    after: tuple[int | BatchInt, ...],
    offset: int,
) -> Shard:
    parts = state.parts
    for dim in before[first : state.dim]:
        if dim != 1:  # outer dimensions merge into it: it becomes that many parts
            if not isinstance(dim, int) or parts != 1:
                raise IllegalShardingError("dimensions outside the divided one merge into it")
            parts = dim * parts
    for index, dim in enumerate(after):
        if dim == 1 and index + 1 < len(after):
            continue
        if isinstance(dim, int) and parts > 1 and dim == parts and index + 1 < len(after):
            parts = 1
            continue
        if parts > 1 and index + 1 < len(after) and isinstance(dim, int) and dim < parts:
            raise IllegalShardingError("a fused dimension is split across its parts")
        divided(dim, context.degree, parts)
        return Shard(offset + index, parts)
    raise IllegalShardingError("the divided dimension disappears")


@rule("view", "reshape")
def _view(context: Context, node: Node) -> State:
    state = context.state(node.args[0])
    if state is None:
        return None
    after = context.result_shape(node)
    result = reshaped(context, state, context.shape(node.args[0]), after)
    _rewrite_size(context, node, 1, "shape", result, after)
    return result


@rule("expand", "broadcast_to")
def _expand(context: Context, node: Node) -> State:
    state = context.state(node.args[0])
    if state is None:
        return None
    after = context.result_shape(node)
    result = Shard(state.dim + len(after) - len(context.shape(node.args[0])), state.parts)
    _rewrite_size(context, node, 1, "size", result, after)
    return result


def _rewrite_size(
    context: Context, node: Node, first: int, keyword: str, state: Shard, after: tuple[int | BatchInt, ...]
) -> None:
    """Divide the size argument of the divided dimension, given as `f(x, a, b)`, `f(x, (a, b))` or by keyword."""
    given, path = argument(node, first, keyword)
    if isinstance(given, tuple | list):
        size, path = given[state.dim], (*path, state.dim)
    else:
        size, path = node.args[first + state.dim], ("args", first + state.dim)
    if size != -1:
        context.rewrite(node, path, divided(after[state.dim], context.degree, state.parts))


@rule("flatten")
def _flatten(context: Context, node: Node) -> State:
    state = context.state(node.args[0])
    return None if state is None else reshaped(context, state, context.shape(node.args[0]), context.result_shape(node))


@rule("unflatten")
def _unflatten(context: Context, node: Node) -> State:
    state = context.state(node.args[0])
    if state is None:
        return None
    shape = context.shape(node.args[0])
    after = context.result_shape(node)
    result = reshaped(context, state, shape, after)
    dim, _ = argument(node, 1, "dim")
    given, path = argument(node, 2, "sizes")
    position = result.dim - dimension(dim, len(shape))
    if 0 <= position < len(given) and given[position] != -1:
        context.rewrite(node, (*path, position), divided(after[result.dim], context.degree, result.parts))
    return result


@rule("transpose", "swapaxes", "swapdims")
def _transpose(context: Context, node: Node) -> State:
    state = context.state(node.args[0])
    if state is None:
        return None
    rank = len(context.shape(node.args[0]))
    first, second = (dimension(argument(node, 1, "dim0")[0], rank), dimension(argument(node, 2, "dim1")[0], rank))
    return Shard({first: second, second: first}.get(state.dim, state.dim), state.parts)


@rule("permute")
def _permute(context: Context, node: Node) -> State:
    state = context.state(node.args[0])
    if state is None:
        return None
    dims = node.args[1] if isinstance(argument(node, 1, "dims")[0], tuple | list) else node.args[1:]
    rank = len(context.shape(node.args[0]))
    return Shard([dimension(dim, rank) for dim in dims].index(state.dim), state.parts)


@rule("T", "mT", "t")
def _last_two(context: Context, node: Node) -> State:
    state = context.state(node.args[0])
    if state is None:
        return None
    rank = len(context.shape(node.args[0]))
    return Shard({rank - 1: rank - 2, rank - 2: rank - 1}.get(state.dim, state.dim), state.parts)


@rule("unsqueeze")
def _unsqueeze(context: Context, node: Node) -> State:
    state = context.state(node.args[0])
    if state is None:
        return None
    position = dimension(argument(node, 1, "dim")[0], len(context.shape(node.args[0])) + 1)
    return Shard(state.dim + (position <= state.dim), state.parts)


@rule("squeeze")
def _squeeze(context: Context, node: Node) -> State:
    state = context.state(node.args[0])
    if state is None:
        return None
    dim, path = argument(node, 1, "dim")
    if not path:
        raise IllegalShardingError("squeeze without a dimension")
    position = dimension(dim, len(context.shape(node.args[0])))
    return Shard(state.dim - (position < state.dim), state.parts)


@rule("getitem")
def _getitem(context: Context, node: Node) -> State:
    state = context.state(node.args[0])
    if state is None:
        return None
    rank = len(context.shape(node.args[0]))
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    if any(isinstance(item, Ref | list) for item in index):
        raise IllegalShardingError("a divided value is indexed by a tensor")
    used = sum(item is not None and item is not Ellipsis for item in index)
    spread: list[Any] = []
    for item in index:
        spread.extend([slice(None)] * (rank - used) if item is Ellipsis else [item])
    if Ellipsis not in index:
        spread.extend([slice(None)] * (rank - used))
    before = after = 0
    for item in spread:
        if item is None:
            after += 1
            continue
        if before == state.dim:
            if item != slice(None):
                raise IllegalShardingError("a divided dimension is indexed")
            return Shard(after, state.parts)
        before += 1
        after += isinstance(item, slice)
    raise IllegalShardingError("a divided dimension is indexed")


@rule("split", "chunk", "tensor_split", "split_with_sizes")
def _split(context: Context, node: Node) -> State | tuple[State, ...]:
    state = context.state(node.args[0])
    results = len([leaf for leaf in leaves(node.result) if isinstance(leaf, Ref)])
    if state is None:
        return (None,) * results
    shape = context.shape(node.args[0])
    dim = dimension(argument(node, 2, "dim", 0)[0], len(shape))
    if dim != state.dim:
        return (state,) * results
    outputs = [context.tensors[name].shape[dim] for name in node.writes()]
    if state.parts != results or len(set(outputs)) != 1:
        raise IllegalShardingError(f"a divided dimension of {state.parts} part(s) is split into {results}")
    given, path = argument(node, 1, "split_size")
    if operation_name(node) in ("split", "split_with_sizes"):
        if isinstance(given, int):
            context.rewrite(node, path, divided(given, context.degree))
        else:
            for position, size in enumerate(given):
                context.rewrite(node, (*path, position), divided(size, context.degree))
    divided(outputs[0], context.degree)
    return (Shard(dim),) * results


@rule("unbind")
def _unbind(context: Context, node: Node) -> State | tuple[State, ...]:
    state = context.state(node.args[0])
    results = len([leaf for leaf in leaves(node.result) if isinstance(leaf, Ref)])
    if state is None:
        return (None,) * results
    dim = dimension(argument(node, 1, "dim", 0)[0], len(context.shape(node.args[0])))
    if dim == state.dim:
        raise IllegalShardingError("a divided dimension is unbound")
    return (Shard(state.dim - (dim < state.dim), state.parts),) * results


@rule("cat", "concat", "concatenate")
def _cat(context: Context, node: Node) -> State:
    items = list(node.args[0])
    state = same_state(context, items)
    if state is not None and dimension(argument(node, 1, "dim", 0)[0], len(context.shape(items[0]))) == state.dim:
        raise IllegalShardingError("values are concatenated along the divided dimension")
    return state


@rule("stack")
def _stack(context: Context, node: Node) -> State:
    items = list(node.args[0])
    state = same_state(context, items)
    if state is None:
        return None
    position = dimension(argument(node, 1, "dim", 0)[0], len(context.shape(items[0])) + 1)
    return Shard(state.dim + (position <= state.dim), state.parts)


@rule("repeat_interleave")
def _repeat_interleave(context: Context, node: Node) -> State:
    state = context.state(node.args[0])
    if state is None:
        return None
    dim, path = argument(node, 2, "dim")
    if not path or not isinstance(argument(node, 1, "repeats")[0], int) or state.parts != 1:
        raise IllegalShardingError("repeat_interleave needs a dimension and a number")
    dimension(dim, len(context.shape(node.args[0])))
    return state

"""Rules of operations that change shapes: where the divided dimension goes."""

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

from planner.arguments import BatchInt, Ref, leaves
from planner.program import Node
from planner.tp_rules.operations import Context, Path, argument, dimension, operation_name, rule, same_state
from planner.tp_rules.state import IllegalShardingError, RuleState, Shard, divided, product_of


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
    if state.sizes:  # unequal parts stay together
        others = [dim for dim in before[first : state.dim] if dim != 1]
        places = [index for index, dim in enumerate(after) if dim == sum(state.sizes)]
        if others or len(places) != 1 or any(dim not in (1, sum(state.sizes)) for dim in after):
            raise IllegalShardingError("a dimension of unequal parts is reshaped")
        return state.at(offset + places[0])
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
        return replace(state, dim=offset + index, parts=parts)
    raise IllegalShardingError("the divided dimension disappears")


@rule("view", "reshape")
def _view(context: Context, node: Node) -> RuleState:
    state = context.state(node.args[0])
    if state is None:
        return None
    after = context.result_shape(node)
    result = reshaped(context, state, context.shape(node.args[0]), after)
    _rewrite_size(context, node, 1, "shape", result, after)
    return result


@rule("expand", "broadcast_to")
def _expand(context: Context, node: Node) -> RuleState:
    state = context.state(node.args[0])
    if state is None:
        return None
    after = context.result_shape(node)
    result = state.at(state.dim + len(after) - len(context.shape(node.args[0])))
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
        context.rewrite(node, path, divided(after[state.dim], context.degree, state))


@rule("flatten")
def _flatten(context: Context, node: Node) -> RuleState:
    state = context.state(node.args[0])
    return None if state is None else reshaped(context, state, context.shape(node.args[0]), context.result_shape(node))


@rule("unflatten")
def _unflatten(context: Context, node: Node) -> RuleState:
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
        context.rewrite(node, (*path, position), divided(after[result.dim], context.degree, result))
    return result


@rule("transpose", "swapaxes", "swapdims")
def _transpose(context: Context, node: Node) -> RuleState:
    state = context.state(node.args[0])
    if state is None:
        return None
    rank = len(context.shape(node.args[0]))
    first, second = (dimension(argument(node, 1, "dim0")[0], rank), dimension(argument(node, 2, "dim1")[0], rank))
    return state.at({first: second, second: first}.get(state.dim, state.dim))


@rule("permute")
def _permute(context: Context, node: Node) -> RuleState:
    state = context.state(node.args[0])
    if state is None:
        return None
    dims = node.args[1] if isinstance(argument(node, 1, "dims")[0], tuple | list) else node.args[1:]
    rank = len(context.shape(node.args[0]))
    return state.at([dimension(dim, rank) for dim in dims].index(state.dim))


@rule("T", "mT", "t")
def _last_two(context: Context, node: Node) -> RuleState:
    state = context.state(node.args[0])
    if state is None:
        return None
    rank = len(context.shape(node.args[0]))
    return state.at({rank - 1: rank - 2, rank - 2: rank - 1}.get(state.dim, state.dim))


@rule("unsqueeze")
def _unsqueeze(context: Context, node: Node) -> RuleState:
    state = context.state(node.args[0])
    if state is None:
        return None
    position = dimension(argument(node, 1, "dim")[0], len(context.shape(node.args[0])) + 1)
    return state.at(state.dim + (position <= state.dim))


@rule("squeeze")
def _squeeze(context: Context, node: Node) -> RuleState:
    state = context.state(node.args[0])
    if state is None:
        return None
    dim, path = argument(node, 1, "dim")
    if not path:
        raise IllegalShardingError("squeeze without a dimension")
    position = dimension(dim, len(context.shape(node.args[0])))
    return state.at(state.dim - (position < state.dim))


@rule("getitem")
def _getitem(context: Context, node: Node) -> RuleState:
    state = context.state(node.args[0])
    if state is None:
        raise IllegalShardingError("a whole value is indexed by a divided one")
    rank = len(context.shape(node.args[0]))
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    if any(isinstance(item, Ref | list) for item in index):
        return _looked_up(context, state, index)
    used = sum(item is not None and item is not Ellipsis for item in index)
    spread: list[tuple[Any, Path]] = []
    for position, item in enumerate(index):
        path: Path = ("args", 1, position) if isinstance(node.args[1], tuple) else ("args", 1)
        spread.extend([(slice(None), ())] * (rank - used) if item is Ellipsis else [(item, path)])
    if Ellipsis not in index:
        spread.extend([(slice(None), ())] * (rank - used))
    before = after = 0
    for item, path in spread:
        if item is None:
            after += 1
            continue
        if before == state.dim:
            if item == slice(None):
                return state.at(after)
            return _slice_of_parts(context, node, state, item, path).at(after)
        before += 1
        after += isinstance(item, slice)
    raise IllegalShardingError("a divided dimension is indexed")


def _looked_up(context: Context, state: Shard, index: tuple[Any, ...]) -> Shard:
    """Return the state of rows taken by a tensor of indices: dimensions behind the first move on."""
    (rows, *others) = index
    if others or not isinstance(rows, Ref) or context.tensors[rows.name].dtype == "bool" or state.dim == 0:
        raise IllegalShardingError("a divided value is indexed by a tensor")
    if context.state(rows) is not None:
        raise IllegalShardingError("a value is indexed by a divided one")
    return state.at(state.dim - 1 + len(context.shape(rows)))


def _slice_of_parts(context: Context, node: Node, state: Shard, item: Any, path: Path) -> Shard:
    """Return the state of a slice of the divided dimension, which must take whole parts."""
    size = context.shape(node.args[0])[state.dim]
    ends = (item.start, item.stop) if isinstance(item, slice) else (item, item)
    if (
        not isinstance(size, int)
        or not isinstance(item, slice)
        or item.step not in (None, 1)
        or any(end is not None and not isinstance(end, int) for end in ends)
    ):
        raise IllegalShardingError("a divided dimension is indexed")
    start, stop, _ = item.indices(size)
    (taken,) = _cut(context, state, size, [(start, stop)])
    context.rewrite(node, path, slice(start // context.degree, stop // context.degree))
    return taken


def _cut(context: Context, state: Shard, size: int, spans: list[tuple[int, int]]) -> list[Shard]:
    """Return the states of spans of a divided dimension; IllegalShardingError where one cuts through a part."""
    sizes = state.sizes or (size // state.parts,) * state.parts
    ends = list(accumulate(sizes, initial=0))
    found = []
    for start, stop in spans:
        if state.sequence or start not in ends or stop not in ends or start >= stop:
            raise IllegalShardingError(f"a divided dimension of {state.parts} part(s) is cut at {start} and {stop}")
        inside = sizes[ends.index(start) : ends.index(stop)]
        for part in inside:
            divided(part, context.degree)
        found.append(Shard(state.dim, len(inside), inside if len(set(inside)) > 1 else ()))
    return found


@rule("split", "chunk", "tensor_split", "split_with_sizes")
def _split(context: Context, node: Node) -> RuleState | tuple[RuleState, ...]:
    state = context.state(node.args[0])
    results = len([leaf for leaf in leaves(node.result) if isinstance(leaf, Ref)])
    if state is None:
        return (None,) * results
    shape = context.shape(node.args[0])
    dim = dimension(argument(node, 2, "dim", 0)[0], len(shape))
    if dim != state.dim:
        return (state,) * results
    size, outputs = shape[dim], [context.tensors[name].shape[dim] for name in node.writes()]
    whole = [output for output in outputs if isinstance(output, int)]
    if not isinstance(size, int) or sum(whole) != size:
        raise IllegalShardingError("a divided dimension that grows with the batch is split")
    ends = list(accumulate(whole, initial=0))
    states = _cut(context, state, size, list(pairwise(ends)))
    name = operation_name(node)
    given, path = argument(node, 1, "split_size", argument(node, 1, "split_size_or_sections", None)[0])
    if name == "chunk" or (name == "tensor_split" and isinstance(given, int)):
        if len(set(whole)) != 1:
            raise IllegalShardingError("a divided dimension is split into unequal parts by their number")
        return tuple(states)
    if not path:
        raise IllegalShardingError("a divided dimension is split by sizes that are not given")
    if isinstance(given, int):
        context.rewrite(node, path, divided(given, context.degree))
    else:
        for position, part in enumerate(given):
            context.rewrite(node, (*path, position), divided(part, context.degree))
    return tuple(states)


@rule("unbind")
def _unbind(context: Context, node: Node) -> RuleState | tuple[RuleState, ...]:
    state = context.state(node.args[0])
    results = len([leaf for leaf in leaves(node.result) if isinstance(leaf, Ref)])
    if state is None:
        return (None,) * results
    dim = dimension(argument(node, 1, "dim", 0)[0], len(context.shape(node.args[0])))
    if dim == state.dim:
        raise IllegalShardingError("a divided dimension is unbound")
    return (state.at(state.dim - (dim < state.dim)),) * results


@rule("cat", "concat", "concatenate")
def _cat(context: Context, node: Node) -> RuleState:
    items = list(node.args[0])
    state = context.state(items[0])
    if state is not None and dimension(argument(node, 1, "dim", 0)[0], len(context.shape(items[0]))) == state.dim:
        return _joined(context, items, state)
    return same_state(context, items)


def _joined(context: Context, items: list[Any], first: Shard) -> Shard:
    """Return the state of values that are joined along the divided dimension: each is so many parts of it."""
    sizes: list[int] = []
    for item in items:
        state, size = context.state(item), context.shape(item)[first.dim]
        if state is None or state.dim != first.dim or first.sequence or not isinstance(size, int):
            raise IllegalShardingError("values divided differently are joined along the divided dimension")
        sizes.extend(state.sizes or (size // state.parts,) * state.parts)
    return Shard(first.dim, len(sizes), tuple(sizes) if len(set(sizes)) > 1 else ())


@rule("stack")
def _stack(context: Context, node: Node) -> RuleState:
    items = list(node.args[0])
    state = same_state(context, items)
    if state is None:
        return None
    position = dimension(argument(node, 1, "dim", 0)[0], len(context.shape(items[0])) + 1)
    return state.at(state.dim + (position <= state.dim))


@rule("repeat_interleave")
def _repeat_interleave(context: Context, node: Node) -> RuleState:
    state = context.state(node.args[0])
    if state is None:
        return None
    dim, path = argument(node, 2, "dim")
    if not path or not isinstance(argument(node, 1, "repeats")[0], int) or state.parts != 1 or state.sequence:
        raise IllegalShardingError("repeat_interleave needs a dimension and a number")
    dimension(dim, len(context.shape(node.args[0])))
    return state

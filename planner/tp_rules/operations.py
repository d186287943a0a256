"""How each operation carries a divided dimension: from the states of its operands to the states of its results.

Every rule gets a `Context` and a node, returns the state of each result by name, and calls `context.rewrite` for the
constants that shrink. An operation without a rule takes replicated values only.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from planner.model_profile import Rewrite
from planner.program import BatchInt, Node, ParamRef, Ref, Tensor, TrainingValue, leaves
from planner.tp_rules.state import IllegalShardingError, Shard, State, divided, product_of

Path = tuple[int | str, ...]


@dataclass
class Context:
    """The states so far, and what the rules decide along the way."""

    degree: int
    tensors: dict[str, Tensor]
    parameter_shapes: dict[str, tuple[int, ...]]
    states: dict[str, State] = field(default_factory=dict)
    rewrites: list[Rewrite] = field(default_factory=list)

    def state(self, argument: Any) -> State:
        """Return the state of an operand; parameters and scalars are replicated."""
        return self.states.get(argument.name) if isinstance(argument, Ref) else None

    def shape(self, argument: Any) -> tuple[int | BatchInt, ...]:
        """Return the whole shape of an operand; () for a scalar."""
        if isinstance(argument, Ref):
            return self.tensors[argument.name].shape
        if isinstance(argument, ParamRef):
            return self.parameter_shapes[argument.name]
        return ()

    def result_shape(self, node: Node) -> tuple[int | BatchInt, ...]:
        """Return the whole shape of a node's (first) result."""
        return self.tensors[next(iter(node.writes()))].shape

    def rewrite(self, node: Node, path: Path, value: int) -> None:
        """Note that the constant at `path` of a node becomes `value`."""
        self.rewrites.append(Rewrite(node=node.name, path=path, value=value))


Rule = Callable[[Context, Node], State | tuple[State, ...]]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operations by the last part of their names."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def operation_name(node: Node) -> str:
    """Return the short name by which rules know an operation."""
    return (
        node.kind
        if node.kind in ("getitem", "setitem")
        else node.target.rpartition(".")[2].removesuffix("_").strip("_") or node.target
    )


def argument(node: Node, position: int, name: str, default: Any = None) -> tuple[Any, Path]:
    """Return an argument given by position or by name, and its path."""
    if len(node.args) > position:
        return node.args[position], ("args", position)
    if name in node.kwargs:
        return node.kwargs[name], ("kwargs", name)
    return default, ()


def _dim(value: Any, rank: int) -> int:
    if not isinstance(value, int):
        raise IllegalShardingError(f"dimension {value!r} is not a number")
    return value % rank if rank else 0


# -- elementwise --------------------------------------------------------------------------------------------------------


def broadcast(context: Context, operands: list[Any], out_rank: int) -> State:
    """Return the state of a broadcast of operands; all must be divided alike, or have size one where others are divided."""
    found: State = None
    for operand in operands:
        state = context.state(operand)
        if state is not None:
            aligned = Shard(state.dim + out_rank - len(context.shape(operand)), state.parts)
            if found is not None and found != aligned:
                raise IllegalShardingError("operands are divided along different dimensions")
            found = aligned
    if found is None:
        return None
    for operand in operands:
        shape = context.shape(operand)
        position = found.dim - (out_rank - len(shape))
        if context.state(operand) is None and position >= 0 and shape[position] != 1:
            raise IllegalShardingError("a whole operand meets a divided one")
    return found


@rule(
    *(
        "add",
        "sub",
        "mul",
        "div",
        "truediv",
        "true_divide",
        "floordiv",
        "mod",
        "pow",
        "rsub",
        "radd",
        "rmul",
        "rtruediv",
        "rpow",
    ),
    *(
        "neg",
        "exp",
        "log",
        "log1p",
        "tanh",
        "sigmoid",
        "sqrt",
        "rsqrt",
        "reciprocal",
        "abs",
        "sin",
        "cos",
        "erf",
        "square",
    ),
    *(
        "gelu",
        "silu",
        "relu",
        "relu6",
        "elu",
        "leaky_relu",
        "softplus",
        "hardswish",
        "hardtanh",
        "mish",
        "logsigmoid",
        "selu",
    ),
    *(
        "to",
        "float",
        "half",
        "double",
        "bfloat16",
        "type",
        "type_as",
        "contiguous",
        "clone",
        "detach",
        "dropout",
        "alias",
    ),
    *(
        "where",
        "masked_fill",
        "clamp",
        "clip",
        "clamp_min",
        "clamp_max",
        "minimum",
        "maximum",
        "lerp",
        "addcmul",
        "addcdiv",
    ),
    *("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "invert", "logical_and", "logical_or", "logical_not"),
    *("iadd", "isub", "imul", "itruediv", "ior", "iand", "zeros_like", "ones_like", "full_like", "nan_to_num", "sign"),
)
def _elementwise(context: Context, node: Node) -> State:
    operands = [leaf for leaf in leaves((node.args, node.kwargs)) if isinstance(leaf, Ref | ParamRef)]
    rank = max((len(context.shape(operand)) for operand in operands), default=0)
    return broadcast(context, operands, rank)


# -- shape --------------------------------------------------------------------------------------------------------------


def reshaped(
    context: Context, state: Shard, before: tuple[int | BatchInt, ...], after: tuple[int | BatchInt, ...]
) -> Shard:
    """Return where a divided dimension goes in a reshape; IllegalShardingError where its slices would not be contiguous."""
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
    position = result.dim - _dim(dim, len(shape))
    if 0 <= position < len(given) and given[position] != -1:
        context.rewrite(node, (*path, position), divided(after[result.dim], context.degree, result.parts))
    return result


@rule("transpose", "swapaxes", "swapdims")
def _transpose(context: Context, node: Node) -> State:
    state = context.state(node.args[0])
    if state is None:
        return None
    rank = len(context.shape(node.args[0]))
    first, second = (_dim(argument(node, 1, "dim0")[0], rank), _dim(argument(node, 2, "dim1")[0], rank))
    return Shard({first: second, second: first}.get(state.dim, state.dim), state.parts)


@rule("permute")
def _permute(context: Context, node: Node) -> State:
    state = context.state(node.args[0])
    if state is None:
        return None
    dims = node.args[1] if isinstance(argument(node, 1, "dims")[0], tuple | list) else node.args[1:]
    rank = len(context.shape(node.args[0]))
    return Shard([_dim(dim, rank) for dim in dims].index(state.dim), state.parts)


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
    position = _dim(argument(node, 1, "dim")[0], len(context.shape(node.args[0])) + 1)
    return Shard(state.dim + (position <= state.dim), state.parts)


@rule("squeeze")
def _squeeze(context: Context, node: Node) -> State:
    state = context.state(node.args[0])
    if state is None:
        return None
    dim, path = argument(node, 1, "dim")
    if not path:
        raise IllegalShardingError("squeeze without a dimension")
    position = _dim(dim, len(context.shape(node.args[0])))
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
    dim = _dim(argument(node, 2, "dim", 0)[0], len(shape))
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
    dim = _dim(argument(node, 1, "dim", 0)[0], len(context.shape(node.args[0])))
    if dim == state.dim:
        raise IllegalShardingError("a divided dimension is unbound")
    return (Shard(state.dim - (dim < state.dim), state.parts),) * results


@rule("cat", "concat", "concatenate")
def _cat(context: Context, node: Node) -> State:
    items = list(node.args[0])
    state = _same(context, items)
    if state is not None and _dim(argument(node, 1, "dim", 0)[0], len(context.shape(items[0]))) == state.dim:
        raise IllegalShardingError("values are concatenated along the divided dimension")
    return state


@rule("stack")
def _stack(context: Context, node: Node) -> State:
    items = list(node.args[0])
    state = _same(context, items)
    if state is None:
        return None
    position = _dim(argument(node, 1, "dim", 0)[0], len(context.shape(items[0])) + 1)
    return Shard(state.dim + (position <= state.dim), state.parts)


def _same(context: Context, items: list[Any]) -> State:
    states = {context.state(item) for item in items}
    if len(states) > 1:
        raise IllegalShardingError("values divided differently are joined")
    return states.pop() if states else None


@rule("repeat_interleave")
def _repeat_interleave(context: Context, node: Node) -> State:
    state = context.state(node.args[0])
    if state is None:
        return None
    dim, path = argument(node, 2, "dim")
    if not path or not isinstance(argument(node, 1, "repeats")[0], int) or state.parts != 1:
        raise IllegalShardingError("repeat_interleave needs a dimension and a number")
    _dim(dim, len(context.shape(node.args[0])))
    return state


# -- reductions and products --------------------------------------------------------------------------------------------


@rule("softmax", "log_softmax", "cumsum", "flip", "roll", "sort")
def _along(context: Context, node: Node) -> State:
    state = context.state(node.args[0])
    if state is None:
        return None
    dim, path = argument(node, 1, "dim")
    dims = dim if isinstance(dim, tuple | list) else (dim,)
    if not path or state.dim in [_dim(item, len(context.shape(node.args[0]))) for item in dims]:
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
    dims = [_dim(item, rank) for item in (dim if isinstance(dim, tuple | list) else (dim,))]
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
    state = _same(context, [query, key, value])
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


def constant(value: Any) -> Any:
    """Return the training-time value of a constant that depends on the training flag."""
    return value.training if isinstance(value, TrainingValue) else value

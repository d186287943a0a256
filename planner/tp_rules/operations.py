"""How each operation carries a divided dimension: from the states of its operands to the states of its results.

Every rule gets a `Context` and a node, returns the state of each result (None: the whole value, PARTIAL: a part of the
sum), and calls `context.rewrite` for the constants that shrink. An operation without a rule takes whole values only.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from planner.arguments import BatchInt, ParamRef, Ref, leaves
from planner.program import Node, Tensor
from planner.sharding import Rewrite
from planner.tp_rules.state import IllegalShardingError, RuleState, Shard

Path = tuple[int | str, ...]


@dataclass
class Context:
    """How the values and parameters that a node reads are divided (those not listed are whole), and what shrinks."""

    degree: int
    tensors: Mapping[str, Tensor]
    parameter_shapes: Mapping[str, tuple[int, ...]]
    states: Mapping[Ref | ParamRef, Shard | None] = field(default_factory=dict)
    rewrites: list[Rewrite] = field(default_factory=list)

    def state(self, argument: Any) -> Shard | None:
        """Return how an operand is divided; scalars are whole."""
        return self.states.get(argument) if isinstance(argument, Ref | ParamRef) else None

    def shape(self, argument: Any) -> tuple[int | BatchInt, ...]:
        """Return the whole shape of an operand; () for a scalar."""
        if isinstance(argument, Ref):
            return self.tensors[argument.name].shape
        if isinstance(argument, ParamRef):
            if argument.name not in self.parameter_shapes:
                raise IllegalShardingError(f"{argument.name} is a parameter of another layer")
            return self.parameter_shapes[argument.name]
        return ()

    def result_shape(self, node: Node) -> tuple[int | BatchInt, ...]:
        """Return the whole shape of a node's (first) result."""
        return self.tensors[next(iter(node.writes()))].shape

    def rewrite(self, node: Node, path: Path, value: Any) -> None:
        """Note that the constant at `path` of a node becomes `value`."""
        self.rewrites.append(Rewrite(node=node.name, path=path, value=value))


Rule = Callable[[Context, Node], RuleState | tuple[RuleState, ...]]
RULES: dict[str, Rule] = {}


def words(text: str) -> frozenset[str]:
    """Return the words of a text as a set: names of operations."""
    return frozenset(text.split())


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


def dimension(value: Any, rank: int) -> int:
    """Return a dimension counted from the front."""
    if not isinstance(value, int):
        raise IllegalShardingError(f"dimension {value!r} is not a number")
    return value % rank if rank else 0


def broadcast(context: Context, operands: list[Any], out_rank: int) -> Shard | None:
    """Return the state of a broadcast of operands; all divided alike, or of size one there."""
    found: Shard | None = None
    for operand in operands:
        state = context.state(operand)
        if state is not None:
            aligned = state.at(state.dim + out_rank - len(context.shape(operand)))
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
        "copy",
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
def _elementwise(context: Context, node: Node) -> RuleState:
    operands = [leaf for leaf in leaves((node.args, node.kwargs)) if isinstance(leaf, Ref | ParamRef)]
    rank = max((len(context.shape(operand)) for operand in operands), default=0)
    return broadcast(context, operands, rank)


def same_state(context: Context, items: list[Any]) -> Shard | None:
    """Return the one state of several values; IllegalShardingError if they are divided differently."""
    states = {context.state(item) for item in items}
    if len(states) > 1:
        raise IllegalShardingError("values divided differently are joined")
    return states.pop() if states else None

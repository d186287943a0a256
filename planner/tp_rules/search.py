"""Searches the ways to divide a layer: a depth-first search over its linear and embedding modules.

Column (output features divided), row (input features divided), vocabulary (embedding rows divided) or replicated are
tried module by module in the order of the calls; propagation refutes what does not work. The best sharding divides the
most parameter bytes, then communicates the least.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from planner.model_profile import CollectiveCall, ShardedParameter, Sharding, Style
from planner.program import BatchInt, Node, ParamRef, Program, Ref, Tensor, leaves
from planner.tp_rules import products, shapes  # noqa: F401 -- importing them registers their rules
from planner.tp_rules.operations import RULES, Context, operation_name
from planner.tp_rules.randomness import draws_apart
from planner.tp_rules.state import IllegalShardingError, ModuleInfo, Shard, State, divided

MAX_ATTEMPTS = 4000


@dataclass(frozen=True)
class _Choice:
    style: Style | None
    parts: int = 1


class _UndecidedError(Exception):
    def __init__(self, module: str, options: list[_Choice]) -> None:
        super().__init__(module)
        self.module = module
        self.options = options


@dataclass
class _Outcome:
    """What one assignment of choices leads to."""

    choices: dict[str, _Choice]
    enter: dict[str, dict[str, None]] = field(default_factory=dict)
    partial: dict[str, None] = field(default_factory=dict)
    reduced: list[str] = field(default_factory=list)
    context: Context | None = None


def find_shardings(
    body: Program, modules: Mapping[str, ModuleInfo], parameter_shapes: Mapping[str, tuple[int, ...]], degree: int
) -> tuple[Sharding, ...]:
    """Return the shardings of a layer for a degree, best first; empty where nothing can be divided.

    `modules` describes the leaf modules the body calls; `parameter_shapes` the parameters it reads directly.
    """
    best: tuple[tuple[float, float], _Outcome] | None = None
    reasons: dict[str, str] = {}
    stack: list[dict[str, _Choice]] = [{}]
    attempts = 0
    while stack and attempts < MAX_ATTEMPTS:
        choices = stack.pop()
        attempts += 1
        if best is not None and _divided_bytes(choices, modules, optimistic=True) < best[0][0]:
            continue
        try:
            outcome = _propagate(body, modules, parameter_shapes, degree, choices)
        except _UndecidedError as undecided:
            stack.extend({**choices, undecided.module: option} for option in reversed(undecided.options))
            continue
        except IllegalShardingError as error:
            last = next(reversed(choices), None)
            if last is not None and choices[last].style is not None:
                reasons.setdefault(last, str(error))
            continue
        score = (_divided_bytes(choices, modules), -_communicated_bytes(body, outcome))
        if any(choice.style for choice in choices.values()) and (best is None or score > best[0]):
            best = (score, outcome)
    return () if best is None else (_sharding(body, modules, degree, best[1], reasons),)


def _divided_bytes(
    choices: Mapping[str, _Choice], modules: Mapping[str, ModuleInfo], *, optimistic: bool = False
) -> float:
    divided_modules = [
        info.num_bytes
        for name, info in modules.items()
        if info.kind in ("linear", "embedding") and (choices[name].style is not None if name in choices else optimistic)
    ]
    return float(sum(divided_modules))


def _communicated_bytes(body: Program, outcome: _Outcome) -> float:
    return float(sum(body.tensors[name].num_bytes(1) for name in (*outcome.enter, *outcome.reduced)))


def _propagate(
    body: Program,
    modules: Mapping[str, ModuleInfo],
    parameter_shapes: Mapping[str, tuple[int, ...]],
    degree: int,
    choices: dict[str, _Choice],
) -> _Outcome:
    context = Context(degree=degree, tensors=body.tensors, parameter_shapes=dict(parameter_shapes))
    outcome = _Outcome(choices=choices, context=context)
    for node in body.nodes:
        states = _node_states(body, modules, context, outcome, node)
        produced = list(node.writes())
        if node.kind == "setitem":
            produced = []
        for name, state in zip(produced, states, strict=True):
            context.states[name] = state
        _note_entering(body, modules, context, outcome, node, divided_result=any(state is not None for state in states))
    for leaf in leaves(body.output):
        if isinstance(leaf, Ref) and context.state(leaf) is not None:
            raise IllegalShardingError("the layer's output would stay divided")
    return outcome


def _node_states(
    body: Program, modules: Mapping[str, ModuleInfo], context: Context, outcome: _Outcome, node: Node
) -> list[State]:
    count = 0 if node.kind == "setitem" else len(list(node.writes()))
    if node.kind == "module":
        return _module_states(body, modules[node.target], context, outcome, node, count)
    if all(context.state(leaf) is None for leaf in leaves((node.args, node.kwargs)) if isinstance(leaf, Ref)):
        return [None] * count
    rule = RULES.get(operation_name(node))
    if rule is None or node.kind == "setitem":
        raise IllegalShardingError(f"`{operation_name(node)}` has no rule for divided values")
    result = rule(context, node)
    return list(result) if isinstance(result, tuple) else [result] * count


def _module_states(
    body: Program, info: ModuleInfo, context: Context, outcome: _Outcome, node: Node, count: int
) -> list[State]:
    operands = [leaf for leaf in leaves((node.args, node.kwargs)) if isinstance(leaf, Ref)]
    states = [context.state(operand) for operand in operands]
    if info.kind in ("linear", "embedding") and len(operands) == 1:
        return [_divisible_module(body, info, context, outcome, node, states[0])]
    if all(state is None for state in states):
        return [None] * count
    if info.kind == "elementwise" and len(operands) == 1:
        return states[:1]
    if info.kind == "normalization" and len(operands) == 1:
        state = states[0]
        if state is not None and state.dim >= len(context.shape(operands[0])) - info.normalized_dims:
            raise IllegalShardingError(f"{node.target!r} normalizes over the divided dimension")
        return [state]
    if info.kind == "recorded" and info.body is not None:
        return _recorded_states(info, context, operands, states, count)
    raise IllegalShardingError(f"{node.target!r} takes whole values only")


def _divisible_module(
    body: Program, info: ModuleInfo, context: Context, outcome: _Outcome, node: Node, state: State
) -> State:
    output = next(iter(node.writes()))
    last = len(context.tensors[output].shape) - 1
    out_size, in_size = _features(info)
    if state is not None and info.kind == "linear" and state.dim == len(context.shape(node.args[0])) - 1:
        choice = outcome.choices.setdefault(node.target, _Choice("row", state.parts))
        if choice.style != "row" or choice.parts != state.parts:
            raise IllegalShardingError(f"{node.target!r} gets a divided input but is not divided by rows")
        divided(in_size, context.degree, state.parts)
        outcome.reduced.append(output)
        return None
    if state is not None:
        if info.kind == "embedding":
            raise IllegalShardingError(f"{node.target!r} gets divided indices")
        return state  # whole weights on a slice of the rows: their gradients are partial
    if node.target not in outcome.choices:
        raise _UndecidedError(node.target, _options(body, info, context.degree, node))
    choice = outcome.choices[node.target]
    if choice.style is None:
        return None
    if choice.style == "vocabulary":
        outcome.reduced.append(output)
        return None
    if choice.style != "column":
        raise IllegalShardingError(f"{node.target!r} is called with a whole and with a divided input")
    divided(out_size, context.degree, choice.parts)
    return Shard(last, choice.parts)


def _features(info: ModuleInfo) -> tuple[int, int]:
    weight = info.parameters["weight"]
    return (
        (weight[info.weight_out_dim], weight[1 - info.weight_out_dim])
        if info.kind == "linear"
        else (weight[0], weight[1])
    )


def _options(body: Program, info: ModuleInfo, degree: int, node: Node) -> list[_Choice]:
    """Return the choices for a module with a whole input: divided first, by the parts its output is taken into."""
    size, _ = _features(info)
    if info.kind == "embedding":
        return [*([_Choice("vocabulary")] if size % degree == 0 else []), _Choice(None)]
    parts = {1}
    for reader in body.nodes:
        if reader.kind == "module" or not set(node.writes()) & set(reader.reads()):
            continue
        outputs = len([leaf for leaf in leaves(reader.result) if isinstance(leaf, Ref)])
        if outputs > 1:
            parts.add(outputs)
        elif operation_name(reader) in ("view", "reshape", "unflatten"):
            shape = body.tensors[next(iter(reader.writes()))].shape
            parts.update(dim for dim in shape if isinstance(dim, int) and 1 < dim <= 4)
    options = [_Choice("column", count) for count in sorted(parts) if size % (degree * count) == 0]
    return [*options, _Choice(None)]


def _recorded_states(
    info: ModuleInfo, context: Context, operands: list[Ref], states: list[State], count: int
) -> list[State]:
    """Propagate through the recorded body of a leaf module, whose code can't be rewritten."""
    assert info.body is not None
    unique = list(dict.fromkeys(operand.name for operand in operands))
    by_name = {operand.name: state for operand, state in zip(operands, states, strict=True)}
    sizes = info.constants | info.parameters
    inner = Context(degree=context.degree, tensors=info.body.tensors, parameter_shapes=sizes)
    inner.states = {name: by_name[outer] for name, outer in zip(info.body.inputs, unique, strict=True)}
    for node in info.body.nodes:
        if node.kind in ("module", "setitem"):
            raise IllegalShardingError("a leaf module calls modules or writes in place")
        produced = _node_states(info.body, {}, inner, _Outcome(choices={}), node)
        inner.states.update(zip(node.writes(), produced, strict=True))
    if inner.rewrites:
        raise IllegalShardingError("a leaf module has shape constants that would change")
    results = [inner.state(leaf) for leaf in leaves(info.body.output) if isinstance(leaf, Ref)]
    return results if len(results) == count else [results[0] if results else None] * count


def _note_entering(
    body: Program,
    modules: Mapping[str, ModuleInfo],
    context: Context,
    outcome: _Outcome,
    node: Node,
    *,
    divided_result: bool,
) -> None:
    """Note whole operands of divided computation: their gradients are partial on every rank and must be summed."""
    row = node.kind == "module" and outcome.choices.get(node.target, _Choice(None)).style == "row"
    if not divided_result or row:
        return
    for leaf in leaves((node.args, node.kwargs)):
        if isinstance(leaf, Ref) and context.state(leaf) is None and body.tensors[leaf.name].requires_grad:
            outcome.enter.setdefault(leaf.name, {})[node.name] = None
        if isinstance(leaf, ParamRef):
            outcome.partial[leaf.name] = None
    if node.kind == "module" and outcome.choices.get(node.target, _Choice(None)).style is None:
        outcome.partial.update({f"{node.target}.{name}": None for name in modules[node.target].parameters})


def _sharding(
    body: Program, modules: Mapping[str, ModuleInfo], degree: int, outcome: _Outcome, reasons: Mapping[str, str]
) -> Sharding:
    assert outcome.context is not None
    parameters: dict[str, ShardedParameter] = {}
    for name, choice in outcome.choices.items():
        for parameter, dim in _divided_dims(modules[name], choice).items():
            parameters[f"{name}.{parameter}" if name else parameter] = ShardedParameter(dim=dim, parts=choice.parts)
    calls = [_collective("all_reduce", body.tensors[name], "forward") for name in outcome.reduced]
    calls += [_collective("all_reduce", body.tensors[name], "backward") for name in outcome.enter]
    replicated = {
        name: reasons.get(name, "divided, it would leave the layer's output divided or communicate more")
        for name, choice in outcome.choices.items()
        if choice.style is None
    }
    return Sharding(
        name="tensor",
        tp_degree=degree,
        styles={name: choice.style for name, choice in outcome.choices.items() if choice.style is not None},
        parameters=parameters,
        enter={name: tuple(readers) for name, readers in outcome.enter.items()},
        rewrites=tuple(outcome.context.rewrites),
        partial_gradients=tuple(outcome.partial),
        collectives=tuple(calls),
        replicated=replicated,
        draws_apart=draws_apart(body, outcome.context.states),
    )


def _divided_dims(info: ModuleInfo, choice: _Choice) -> dict[str, int]:
    if choice.style is None:
        return {}
    if choice.style == "vocabulary":
        return {"weight": 0}
    if choice.style == "row":
        return {"weight": 1 - info.weight_out_dim}
    return {"weight": info.weight_out_dim} | ({"bias": 0} if "bias" in info.parameters else {})


def _collective(kind: Any, tensor: Tensor, phase: Any) -> CollectiveCall:
    first, second = tensor.num_bytes(1), tensor.num_bytes(2)
    grows = any(isinstance(dim, BatchInt) for dim in tensor.shape)
    return CollectiveCall(
        kind=kind, bytes_per_row=float(second - first), fixed_bytes=0 if grows else first, phase=phase
    )


def standalone_sharding(
    info: ModuleInfo, inputs: tuple[Tensor, ...], output: Tensor, degree: int
) -> tuple[Sharding, ...]:
    """Return the sharding of a layer that is one linear or embedding module by itself; empty where it does not divide.

    A linear layer is divided by columns and its output gathered; an embedding by vocabulary.
    """
    if info.kind not in ("linear", "embedding") or _features(info)[0] % degree:
        return ()
    if info.kind == "embedding":
        choice, calls = _Choice("vocabulary"), [_collective("all_reduce", output, "forward")]
    else:
        choice = _Choice("column")
        calls = [_collective("all_gather", output, "forward")]
        calls += [_collective("all_reduce", tensor, "backward") for tensor in inputs if tensor.requires_grad]
    dims = dict(_divided_dims(info, choice))
    return (
        Sharding(
            name="tensor",
            tp_degree=degree,
            styles={"": choice.style} if choice.style is not None else {},
            parameters={name: ShardedParameter(dim=dim) for name, dim in dims.items()},
            gather=("",) if info.kind == "linear" else (),
            collectives=tuple(calls),
        ),
    )

"""Runs the nodes of a recorded program on tensors.

Nodes are prepared once (names looked up, constants resolved for a batch, device and dtype) and run many times, so that
what a measurement adds to the model's own work is one dictionary look-up per value.
"""

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from planner.arguments import Fields, Ref, leaves
from planner.errors import ProfileError
from planner.profiler.arguments import Environment, bind, fill, find_function, resolve
from planner.profiler.arguments import Target as Target  # what `run_derived` is called with
from planner.profiler.torch_internals import FakeTensor
from planner.program import Node, Program

Step = Callable[[Environment], None]

# What running a node may raise when the program or the device is at fault; all else is a bug and keeps its traceback.
RUN_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, NotImplementedError)


def _callable(node: Node, module_call: Callable[[str], nn.Module]) -> Callable[..., Any]:
    match node.kind:
        case "module":
            return module_call(node.target)
        case "function":
            return find_function(node.target)
        case "method":
            return _method(node.target)
        case "attribute":
            return operator.attrgetter(node.target)
        case "getitem":
            return operator.getitem
        case "setitem":
            return _set_item
        case "draw":
            raise ProfileError(
                f"{node.target} draws random numbers, and can't be run by itself",
                hint="report this as a bug, with the model",
            )


def _method(name: str) -> Callable[..., Any]:
    def call(owner: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(owner, name)(*args, **kwargs)

    return call


def _set_item(owner: Any, index: Any, value: Any) -> Any:
    if isinstance(owner, FakeTensor) and isinstance(index, torch.Tensor) and index.dtype == torch.bool:
        rest = owner.dim() - index.dim()
        if not isinstance(value, torch.Tensor) or value.dim() <= rest:  # backward would count the mask's true elements
            return owner.copy_(torch.where(index.reshape(*index.shape, *[1] * rest), value, owner))
    owner[index] = value
    return owner


def prepare_node(
    node: Node, module_call: Callable[[str], nn.Module], parameter: Callable[[str], torch.Tensor], target: Target
) -> Step:
    """Return a function that runs one node on an environment."""
    function = _callable(node, module_call)
    args = resolve(tuple(node.args), parameter, target)
    kwargs = resolve(dict(node.kwargs), parameter, target)
    result, no_grad = node.result, node.no_grad
    constant_args = not any(isinstance(leaf, Ref) for leaf in leaves(args))
    constant_kwargs = not any(isinstance(leaf, Ref | Fields) for leaf in leaves(kwargs))

    def step(environment: Environment) -> None:
        filled = args if constant_args else fill(args, environment)
        named = kwargs if constant_kwargs else fill(kwargs, environment)
        if no_grad:
            with torch.no_grad():
                value = function(*filled, **named)
        else:
            value = function(*filled, **named)
        if type(result) is Ref:
            environment[result.name] = value
        else:
            bind(result, value, environment)

    return step


def run_nodes(
    nodes: Iterable[Node],
    environment: Environment,
    *,
    module_call: Callable[[str], nn.Module],
    parameter: Callable[[str], torch.Tensor],
    rows: int,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Run nodes in order, reading from and entering into `environment`.

    `module_call` gives the module of a name, `parameter` a parameter or buffer. ProfileError names the node that fails.
    """
    target = Target(rows, device, dtype)
    for node in nodes:
        try:
            prepare_node(node, module_call, parameter, target)(environment)
        except RUN_ERRORS as error:
            raise node_error(node, error) from error


def node_error(node: Node, error: BaseException) -> ProfileError:
    """Return the error of a node that can't be run."""
    what = f"{node.kind} {node.target!r}" if node.target else node.kind
    return ProfileError(
        f"{node.name} ({what}) can't be run: {type(error).__name__}: {error}",
        hint="check that the model's own forward runs on this device, in this dtype",
    )


def last_reads(nodes: Sequence[Node], keep: Collection[str]) -> list[tuple[str, ...]]:
    """Return, for each node, the values that nothing reads after it and that are not to be kept."""
    seen = set(keep)
    dead: list[tuple[str, ...]] = []
    for node in reversed(nodes):
        mentioned = dict.fromkeys((*node.reads(), *node.writes()))
        dead.append(tuple(name for name in mentioned if name not in seen))
        seen.update(mentioned)
    return dead[::-1]


def outside_reads(nodes: Iterable[Node]) -> tuple[str, ...]:
    """Return the values that nodes read and that none of them made before, in the order of their first reading."""
    made: set[str] = set()
    found: dict[str, None] = {}
    for node in nodes:
        found.update(dict.fromkeys(name for name in node.reads() if name not in made))
        made.update(node.writes())
    return tuple(found)


def outside_results(program: Program, start: int, stop: int) -> tuple[str, ...]:
    """Return the values made (or written in place) by nodes [start, stop) that later nodes or the output read."""
    later = {leaf.name for leaf in leaves(program.output) if isinstance(leaf, Ref)}
    for node in program.nodes[stop:]:
        later.update(node.reads())
    made = dict.fromkeys(name for node in program.nodes[start:stop] for name in node.writes())
    return tuple(name for name in made if name in later)


def run_derived(
    program: Program,
    derived: Collection[str],
    inputs: Environment,
    *,
    module_call: Callable[[str], nn.Module],
    parameter: Callable[[str], torch.Tensor],
    target: Target,
) -> Environment:
    """Return the model's inputs and every value of `derived` (computed from the inputs alone, without parameters).

    Runs no other node: the glue of a model, for real inputs, on the device and in the dtype of `target`.
    """
    environment = dict(inputs)
    known = {*derived, *inputs}
    needed = [
        node
        for node in program.nodes
        if any(True for _ in node.writes()) and all(name in known for name in (*node.reads(), *node.writes()))
    ]
    with torch.no_grad():
        run_nodes(
            needed,
            environment,
            module_call=module_call,
            parameter=parameter,
            rows=target.rows,
            device=target.device,
            dtype=target.dtype,
        )
    return environment

"""Writes the generated part of plan.py: tensor-parallel forwards and one class per stage."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from planner.arguments import BatchFloat, BatchInt, Ref, leaves, map_argument
from planner.emitter.expressions import Renderer, attribute_path, docstring_text, parameter_path, value_paths
from planner.emitter.loss_code import Counting, counting_attributes, counting_methods
from planner.emitter.rows import LOCALS, batch_expression, context_lines, local_name, name_tuple
from planner.emitter.stages import LayerCall, StageCode, Transfer
from planner.model_profile import LayerClass
from planner.program import Node, Program, Tensor
from planner.sharding import Move, ShardedParameter, Sharding
from planner.tp_rules import live_nodes, moves_after, rewrite_node, rewrite_output

INDENT = "    "


@dataclass(frozen=True)
class _Run:
    """Consecutive calls of numbered members of one list, each taking the result of the one before: a loop."""

    prefix: str
    start: int
    stop: int
    nodes: tuple[Node, ...]


def python_name(name: str) -> str:
    """Return a class name in lower case with underscores: 'LlamaDecoderLayer' -> 'llama_decoder_layer'."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


# -- tensor-parallel forwards ----------------------------------------------------------------------------


def tensor_parallel_name(call: LayerCall) -> str:
    """Return the name of the constant that holds a layer class's division."""
    assert call.sharding is not None
    way = call.sharding.name.removeprefix("tensor")
    return f"{python_name(call.layer_class.name)}_tp{call.sharding.tp_degree}{way}".upper()


def tensor_parallel_code(layer_class: LayerClass, sharding: Sharding, name: str) -> Iterator[str]:
    """Yield the lines of a layer class's divided forward, and of the constant that names its parts."""
    forward = f"{name.lower()}_forward"
    if layer_class.body is not None:
        yield from _forward_lines(layer_class, layer_class.body, sharding, forward)
        yield ""
        yield ""
    yield f"{name} = TensorParallel("
    if layer_class.body is not None:
        yield f"{INDENT}forward={forward},"
    yield f"{INDENT}styles={{"
    for module, style in _styles(sharding).items():
        yield f'{INDENT * 2}"{module}": {style},'
    yield f"{INDENT}}},"
    if sharding.partial_gradients:
        yield f"{INDENT}partial_gradients={name_tuple(sharding.partial_gradients)},"
    yield ")"


def _styles(sharding: Sharding) -> dict[str, str]:
    """Return the style of every divided module as an expression; parameters read directly are slices of their owner."""
    styles = {module: _style(module, style, sharding) for module, style in sharding.styles.items()}
    slices: dict[str, list[str]] = {}
    for name, cut in sharding.parameters.items():
        owner, _, last = name.rpartition(".")
        if owner not in styles:
            slices.setdefault(owner, []).append(f'"{last}": ({cut.dim}, {_parts(cut)})')
    return styles | {owner: f"Slices({{{', '.join(cuts)}}})" for owner, cuts in slices.items()}


def _parts(cut: ShardedParameter | Move) -> str:
    return _tuple(cut.sizes) if cut.sizes else str(cut.parts)


def _style(module: str, style: str, sharding: Sharding) -> str:
    weight = sharding.parameters[f"{module}.weight" if module else "weight"]
    options = [f"dim={weight.dim}"] if style != "vocabulary" else []
    options += [f"parts={_parts(weight)}"] if weight.parts > 1 else []
    match style:
        case "column":
            options += ["gather=True"] if module in sharding.gather else []
            options += ["enters=True"] if not module else []
        case _:
            options += ["reduce=False"] if module in sharding.unreduced else []
    return f"{style.title()}({', '.join(options)})"


def move_line(move: Move, source: str) -> str:
    """Return the statement that makes a move: a call of a helper."""
    helper = {"gather_entered": "gather_slices", "take_entered": "take_slice"}.get(move.kind, move.kind)
    arguments = [source, "self.tp_group"]
    if helper in ("scatter_sum", "gather_slices", "take_slice"):
        arguments.append(str(move.dim))
        arguments += [_parts(move)] if move.parts > 1 else []
        arguments += ["entered=True"] if helper != move.kind else []
    return f"{move.name} = {helper}({', '.join(arguments)})"


def _forward_lines(layer_class: LayerClass, body: Program, sharding: Sharding, name: str) -> Iterator[str]:
    signature: tuple[tuple[str, Any], ...] = tuple(layer_class.signature)
    yield f"def {name}({', '.join(['self', *(parameter for parameter, _ in signature)])}):"
    yield f'{INDENT}"""{docstring_text(layer_class.module_class)}, divided over {sharding.tp_degree} GPUs."""'
    nodes = [rewrite_node(node, sharding) for node in live_nodes(body)]
    for parameter, value in signature:
        if not isinstance(value, Ref):
            for inner, path in value_paths(value, parameter):
                yield f"{INDENT}{inner} = {path}"
    given = {inner: body.tensors[inner] for inner in body.inputs}
    batch, device, dtype = (local_name(name, [*given, *(name for name, _ in signature)]) for name in LOCALS)
    yield from context_lines(nodes, given, INDENT, batch, device, dtype)
    renderer = Renderer(
        module=lambda target: attribute_path(target, "self"),
        parameter=lambda target: parameter_path(target, "self"),
        device=device,
        dtype=dtype,
        batch=batch,
    )
    output = rewrite_output(body.output, sharding)
    needed = {inner for node in nodes for inner in node.reads()}
    needed |= {
        leaf.name for leaf in leaves((output, [move.source for move in sharding.moves])) if isinstance(leaf, Ref)
    }
    lines = [move_line(move, renderer.argument(move.source)) for move in moves_after(None, sharding)]
    for node in nodes:
        statements = renderer.body([node], lambda value: value in needed)
        if node.name in sharding.draws_apart:
            lines.append("with draws_apart(self.tp_group):")
            statements = (f"{INDENT}{line}" for line in statements)
        lines.extend(statements)
        lines += [move_line(move, renderer.argument(move.source)) for move in moves_after(node.name, sharding)]
    for line in lines:
        yield f"{INDENT}{line}"
    yield f"{INDENT}return {renderer.argument(output)}"


# -- stages ----------------------------------------------------------------------------------------------


def stage_code(
    stage: StageCode, program: Program, tied: frozenset[str], summary: str, counting: Counting | None = None
) -> Iterator[str]:
    """Yield the lines of a stage class; `counting` is what it counts over a step, and its loss."""
    pad = INDENT
    yield f"class Stage{stage.index}(PlanStage):"
    yield f'{pad}"""{summary}"""'
    yield ""
    yield f"{pad}module_names = {_numbered(stage.modules)}"
    parameters = tuple(dict.fromkeys([*stage.parameters, *(counting.parameters if counting else ())]))
    if parameters:
        yield f"{pad}parameter_names = {name_tuple(parameters)}"
    if stage.updated_buffers:
        yield f"{pad}updated_buffers = {name_tuple(stage.updated_buffers)}"
    if stage.called_whole:
        yield f"{pad}called_whole = {name_tuple(stage.called_whole)}"
    if stage.draws:
        yield f"{pad}draws = {name_tuple(stage.draws)}"
    if not stage.loss_is_known:
        yield f"{pad}loss_is_known = False"
    yield f"{pad}inputs = {name_tuple(stage.inputs)}"
    for title, transfers in (("receives", stage.receives), ("sends", stage.sends)):
        if transfers:
            yield f"{pad}{title} = ("
            for transfer in transfers:
                yield f"{pad * 2}{_value(transfer, title, stage.rows)},"
            yield f"{pad})"
    # data parallelism hands a unit views of its arguments, which it could not write in place
    writing = {node.target for node in stage.nodes if node.kind == "module" and node.written}
    units = [call.module for call in stage.layers if _is_unit(call, tied) and call.module not in writing]
    if units:
        yield f"{pad}units = {_numbered(tuple(dict.fromkeys(units)))}"
    divided = {call.module: tensor_parallel_name(call) for call in stage.layers if call.sharding is not None}
    if divided:
        yield f"{pad}tensor_parallel = {_numbered_dict(divided)}"
    if counting is not None:
        yield from counting_attributes(counting)
    yield ""
    arguments = [*stage.inputs, *(transfer.name for transfer in stage.receives), *stage.forward_counts]
    yield f"{pad}def forward(self, {', '.join(arguments)}):"
    given = {name: program.tensors[name] for name in arguments}
    recomputed = {call.module for call in stage.layers if call.recompute}
    lines, renamed = _stage_statements(stage, program, recomputed)
    arguments_read = [leaf for node in stage.nodes for leaf in leaves((node.args, node.kwargs))]
    if any(isinstance(leaf, BatchInt | BatchFloat) for leaf in arguments_read):
        yield f"{pad * 2}{local_name('batch', given)} = {batch_expression(given)}"
    for line in lines:
        yield f"{pad * 2}{line}"
    renderer = _stage_renderer(arguments)
    if stage.is_last:
        yield f"{pad * 2}return {renderer.argument(_rename(program.output, renamed))}"
    else:
        names = [renamed.get(transfer.name, transfer.name) for transfer in stage.sends]
        yield f"{pad * 2}return {', '.join(names)}{',' if len(names) == 1 else ''}" if names else f"{pad * 2}return ()"
    if counting is not None:
        yield from counting_methods(counting)


def _is_unit(call: LayerCall, tied: frozenset[str]) -> bool:
    """A block with parameters of its own becomes a data-parallel unit; tied parameters stay with the stage's root."""
    return call.layer_class.body is not None and not any(name.startswith(f"{call.module}.") for name in tied)


def _stage_renderer(arguments: Iterable[str]) -> Renderer:
    return Renderer(
        module=lambda name: attribute_path(name, "self"),
        parameter=lambda name: parameter_path(name, "self"),
        batch=local_name("batch", arguments),
    )


def _stage_statements(stage: StageCode, program: Program, recomputed: set[str]) -> tuple[list[str], dict[str, str]]:
    """Return the statements of a stage's forward, and the names that loops gave to their results."""
    lines: list[str] = []
    renamed: dict[str, str] = {}
    taken = (
        {name for node in stage.nodes for name in (*node.reads(), *node.writes())}
        | set(stage.forward_counts)
        | set(stage.inputs)
        | {"batch", "layer"}
    )
    uses = _uses(stage, program)
    renderer = _stage_renderer([*stage.inputs, *(transfer.name for transfer in stage.receives)])
    position = 0
    while position < len(stage.nodes):
        run = _run_at(stage, position, uses, recomputed)
        if run is None:
            node = _renamed_node(stage.nodes[position], renamed)
            body = list(renderer.body([node], lambda value: value in uses))
            lines.extend(_with_recompute(node, body, recomputed))
            position += 1
            continue
        first, last = run.nodes[0], run.nodes[-1]
        name = _loop_name(taken)
        lines.append(f"{name} = {renderer.argument(_rename(first.args[0], renamed))}")
        lines.append(f'for layer in layers(self, "{run.prefix}", {run.start}, {run.stop}):')
        rest = [renderer.argument(_rename(item, renamed)) for item in first.args[1:]]
        rest += [f"{key}={renderer.argument(_rename(item, renamed))}" for key, item in first.kwargs.items()]
        call = (
            f"recompute({', '.join(['layer', name, *rest])})"
            if first.target in recomputed
            else f"layer({', '.join([name, *rest])})"
        )
        lines.append(f"{INDENT}{name} = {call}")
        renamed[next(iter(last.writes()))] = name
        position += len(run.nodes)
    return lines, renamed


def _with_recompute(node: Node, body: list[str], recomputed: set[str]) -> list[str]:
    if node.kind != "module" or node.target not in recomputed:
        return body
    target = attribute_path(node.target, "self")
    return [line.replace(f"{target}(", f"recompute({target}, ", 1) for line in body]


def _rename(value: Any, renamed: dict[str, str]) -> Any:
    return map_argument(
        value, lambda leaf: Ref(renamed[leaf.name]) if isinstance(leaf, Ref) and leaf.name in renamed else leaf
    )


def _renamed_node(node: Node, renamed: dict[str, str]) -> Node:
    if not any(name in renamed for name in (*node.reads(), *node.writes())):
        return node
    update = {
        "args": _rename(node.args, renamed),
        "kwargs": _rename(node.kwargs, renamed),
        "result": _rename(node.result, renamed),
    }
    return node.model_copy(update=update)


def _uses(stage: StageCode, program: Program) -> dict[str, int]:
    """Return how often each value of a stage is read, sent or returned."""
    uses: dict[str, int] = {}
    names = [name for node in stage.nodes for name in node.reads()] + [transfer.name for transfer in stage.sends]
    if stage.is_last:
        names += [leaf.name for leaf in leaves(program.output) if isinstance(leaf, Ref)]
    for name in names:
        uses[name] = uses.get(name, 0) + 1
    return uses


def _run_at(stage: StageCode, position: int, uses: dict[str, int], recomputed: set[str]) -> _Run | None:
    first = stage.nodes[position]
    prefix, number = _numbered_target(first)
    if number is None or not first.args or not isinstance(first.args[0], Ref):
        return None
    nodes = [first]
    for node in stage.nodes[position + 1 :]:
        before = nodes[-1]
        continues = (
            _numbered_target(node) == (prefix, number + len(nodes))
            and isinstance(before.result, Ref)
            and node.args[:1] == (before.result,)
            and uses.get(before.result.name) == 1
            and node.args[1:] == first.args[1:]
            and node.kwargs == first.kwargs
            and (node.target in recomputed) == (first.target in recomputed)
        )
        if not continues:
            break
        nodes.append(node)
    last = nodes[-1]
    return (
        _Run(prefix, number, number + len(nodes), tuple(nodes))
        if len(nodes) > 1 and isinstance(last.result, Ref)
        else None
    )


def _numbered_target(node: Node) -> tuple[str, int | None]:
    prefix, _, last = node.target.rpartition(".")
    return (
        (prefix, int(last)) if node.kind == "module" and prefix and last.isdigit() and not node.no_grad else ("", None)
    )


def _loop_name(taken: set[str]) -> str:
    name, count = "hidden", 1
    while name in taken:
        count += 1
        name = f"hidden_{count}"
    taken.add(name)
    return name


def _value(transfer: Transfer, title: str, rows: int) -> str:
    where = f"source={transfer.source}" if title == "receives" else f"targets={_tuple(transfer.targets)}"
    tensor = transfer.tensor
    options = [f'"{transfer.name}"', where, f"shape={_tuple(tensor.sizes(rows))}"]
    options += [] if tensor.follows_model_dtype else [f"dtype=torch.{tensor.dtype}"]
    options += ["requires_grad=True"] if tensor.requires_grad else []
    return f"Value({', '.join(options)})"


def input_value(name: str, tensor: Tensor, rows: int, key: str | None, *, written: bool) -> str:
    """Return the expression that describes an input of the model to the runtime."""
    options = [f'"{name}"', f"shape={_tuple(tensor.sizes(rows))}"]
    options += [] if tensor.batch_dim == 0 else [f"batch_dim={tensor.batch_dim}"]
    options += [] if key is None else [f'key="{key}"']
    options += ["written=True"] if written else []
    return f"Value({', '.join(options)})"


def _tuple(items: Iterable[int]) -> str:
    listed = [str(item) for item in items]
    return f"({', '.join(listed)}{',' if len(listed) == 1 else ''})"


def _runs_of_names(names: Iterable[str]) -> Iterator[tuple[str, int, int] | str]:
    """Yield names, with consecutive numbered ones as (prefix, start, stop)."""
    listed = list(names)
    position = 0
    while position < len(listed):
        prefix, _, last = listed[position].rpartition(".")
        end = position + 1
        if prefix and last.isdigit():
            while end < len(listed) and listed[end] == f"{prefix}.{int(last) + end - position}":
                end += 1
        if end - position > 2:
            yield prefix, int(last), int(last) + end - position
        else:
            yield from listed[position:end]
        position = end


def _numbered(names: tuple[str, ...]) -> str:
    items = list(_runs_of_names(names))
    if len(items) == 1 and not isinstance(items[0], str):
        prefix, start, stop = items[0]
        return f'tuple(f"{prefix}.{{index}}" for index in range({start}, {stop}))'
    parts = [
        f'"{item}"' if isinstance(item, str) else f'*(f"{item[0]}.{{index}}" for index in range({item[1]}, {item[2]}))'
        for item in items
    ]
    return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"


def _numbered_dict(divided: dict[str, str]) -> str:
    parts: list[str] = []
    for item in _runs_of_names(divided):
        if isinstance(item, str):
            parts.append(f'"{item}": {divided[item]}')
        else:
            prefix, start, stop = item
            constants = {divided[f"{prefix}.{number}"] for number in range(start, stop)}
            if len(constants) == 1:
                parts.append(f'**{{f"{prefix}.{{index}}": {constants.pop()} for index in range({start}, {stop})}}')
            else:
                parts.extend(f'"{prefix}.{number}": {divided[f"{prefix}.{number}"]}' for number in range(start, stop))
    return f"{{{', '.join(parts)}}}"

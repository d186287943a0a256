"""Tables of what every node of a layer can do: from which states of its operands to which states of its results.

Built in one pass along the body: the states a value can be in follow from the rows of the node that makes it, and from
slices that later nodes ask for. Rows come from the propagation rules; nothing here chooses among them.
"""

from collections.abc import Iterable
from itertools import product

import planner.tp_rules.products
import planner.tp_rules.shapes  # noqa: F401 -- importing them registers their rules
from planner.arguments import ParamRef, Ref, leaves
from planner.program import Node
from planner.sharding import Rewrite
from planner.tp_rules.layer import LayerBody, Operand, Row, Tables, entered, live_nodes, operands_of, uniform_row
from planner.tp_rules.modules import module_rows
from planner.tp_rules.operations import RULES, Context, argument, operation_name, words
from planner.tp_rules.partial import broadcast_sources, partial_operands
from planner.tp_rules.parts import part_choices
from planner.tp_rules.state import ENTERED, PARTIAL, WHOLE, IllegalShardingError, RuleState, Shard, State, divided

MAX_COMBINATIONS = 1024  # of the states of a node's operands; beyond, all divided operands are divided alike


def build_tables(layer: LayerBody, degree: int) -> Tables:
    """Return the tables of a layer for a degree."""
    tables = Tables(layer=layer, degree=degree, nodes=tuple(live_nodes(layer.body)), parts=part_choices(layer.body))
    for name in layer.body.inputs:
        tables.admit(Ref(name), WHOLE)
    _admit_parameters(tables)
    for node in tables.nodes:
        rows = _node_rows(tables, node)
        tables.rows[node.name] = rows
        for row in rows:
            origins = tables.origins(row.needs)
            for name, state in row.makes:
                tables.admit(Ref(name), state, origins)
        for name in node.writes():
            _admit_sequence(tables, name)
    return tables


def _admit_parameters(tables: Tables) -> None:
    """Give parameters that nodes read directly every division of a dimension of theirs."""
    layer = tables.layer
    for node in tables.nodes:
        for name in node.params():
            operand = ParamRef(name)
            if operand in tables.states:
                continue
            tables.admit(operand, WHOLE)
            shape = layer.parameter_shapes.get(name, ())
            for dim, size in enumerate(shape) if name not in layer.buffers | layer.kept_whole else ():
                try:
                    for shard in tables.choices(size, dim):
                        tables.admit(operand, shard, (name,))
                except IllegalShardingError as error:
                    tables.errors.setdefault(name, str(error))


def _admit_sequence(tables: Tables, name: str) -> None:
    """Let a partial sum of an output's shape (the residual's) be scattered between the batch and the features."""
    body = tables.layer.body
    tensor = body.tensors[name]
    shapes = [body.tensors[leaf.name].shape for leaf in leaves(body.output) if isinstance(leaf, Ref)]
    if PARTIAL in tables.states.get(Ref(name), {}) and tensor.shape in shapes:
        for dim in range(1, len(tensor.shape) - 1):
            size = tensor.shape[dim]
            if isinstance(size, int) and size > 1 and size % tables.degree == 0 and tensor.batch_dim != dim:
                tables.admit(Ref(name), Shard(dim, sequence=True))


def _node_rows(tables: Tables, node: Node) -> list[Row]:
    layer, operands = tables.layer, operands_of(tables.layer, node)
    results = [] if node.kind == "setitem" else list(node.writes())
    rows = [uniform_row(layer, operands, results, WHOLE)]
    info = layer.modules[node.target] if node.kind == "module" else None
    if node.kind != "setitem" and (info is None or info.kind != "opaque") and any(map(layer.needs_grad, operands)):
        rows.append(uniform_row(layer, operands, results, ENTERED))
    if info is not None:
        rows += module_rows(tables, node, info)
    elif node.kind != "setitem":
        rows += _divided_rows(tables, node, operands, results)
        rows += _partial_rows(tables, node, operands, results)
    return list({(row.needs, row.makes): row for row in rows}.values())


def _divided_rows(tables: Tables, node: Node, operands: list[Operand], results: list[str]) -> list[Row]:
    rule = RULES.get(operation_name(node))
    layer = tables.layer
    _ask_for_slices(tables, node, operands)
    rows: list[Row] = []
    refused: dict[tuple[Operand, Shard], str] = {}
    for states in _combinations([[None, *tables.shards(operand)] for operand in operands]):
        given = dict(zip(operands, states, strict=True))
        context = Context(tables.degree, layer.body.tensors, layer.parameter_shapes, given)
        try:
            if rule is None:
                raise IllegalShardingError(f"`{operation_name(node)}` has no rule for divided values")
            made = rule(context, node)
            listed = list(made) if isinstance(made, tuple) else [made] * len(results)
            if any(state is None for state in listed):
                raise IllegalShardingError(f"`{operation_name(node)}` has no rule for such an operand")
        except IllegalShardingError as error:
            for operand, state in given.items():
                if state is not None:
                    refused.setdefault((operand, state), str(error))
            continue
        needs = tuple((o, state if state is not None else entered(layer, o)) for o, state in given.items())
        rows.append(Row(needs, tuple(zip(results, _made(listed), strict=True)), tuple(context.rewrites)))
    usable = {need for row in rows for need in row.needs}
    for need, reason in refused.items():
        if need not in usable:
            tables.refuse([need], f"{reason} ({node.name})")
    context = Context(tables.degree, layer.body.tensors, layer.parameter_shapes)
    rows += [_expanding_row(tables, node, operands, results, dim) for dim in broadcast_sources(context, node)]
    rows += _rows_with_bias(tables, node, results)
    rows += _made_divided(tables, node, operands, results)
    return rows


def _made(listed: list[RuleState]) -> list[State]:
    return [state if state is not None else WHOLE for state in listed]


def _combinations(options: list[list[Shard | None]]) -> Iterable[tuple[Shard | None, ...]]:
    """Yield the states of operands, at least one divided; for many operands only those where all are divided alike."""
    count = 1
    for listed in options:
        count *= len(listed)
    if count <= MAX_COMBINATIONS:
        yield from (states for states in product(*options) if any(state is not None for state in states))
        return
    for shard in dict.fromkeys(state for listed in options for state in listed if state is not None):
        yield tuple(shard if shard in listed else None for listed in options)


def _ask_for_slices(tables: Tables, node: Node, operands: list[Operand]) -> None:
    """Let whole values that a divided one is combined with be sliced: along the sequence, or without gradients."""
    name, layer = operation_name(node), tables.layer
    if name not in _BROADCASTING:
        return
    context = Context(tables.degree, layer.body.tensors, layer.parameter_shapes)
    rank = max((len(context.shape(operand)) for operand in operands), default=0)
    aligned = {
        shard.at(shard.dim + rank - len(context.shape(operand))): None
        for operand in operands
        for shard in tables.shards(operand)
    }
    for operand in operands:
        shape = context.shape(operand)
        for shard in aligned:
            dim = shard.dim - (rank - len(shape))
            wanted = isinstance(operand, Ref) and (shard.sequence or not layer.needs_grad(operand))
            if wanted and dim >= 0 and shape[dim] != 1 and WHOLE in tables.states.get(operand, {}):
                moved = shard.at(dim)
                if moved not in tables.states[operand]:
                    tables.admit(operand, moved)
                    tables.slices.setdefault(operand, set()).add(moved)


_BROADCASTING = words(
    "add sub mul div truediv true_divide iadd isub imul radd rsub rmul where masked_fill minimum maximum "
    "scaled_dot_product_attention lerp addcmul eq ne lt le gt ge and or"
)


def _expanding_row(tables: Tables, node: Node, operands: list[Operand], results: list[str], dim: int) -> Row:
    """Return the row in which every rank expands a whole operand to its own slice."""
    given, path = argument(node, 1, "size")
    place = (*path, dim) if isinstance(given, tuple | list) else ("args", 1 + dim)
    size = divided(tables.layer.body.tensors[results[0]].shape[dim], tables.degree)
    needs = tuple((operand, entered(tables.layer, operand)) for operand in operands)
    return Row(needs, ((results[0], Shard(dim)),), (Rewrite(node=node.name, path=place, value=size),))


def _made_divided(tables: Tables, node: Node, operands: list[Operand], results: list[str]) -> list[Row]:
    """Return the rows of a node that makes an empty or constant tensor, in which every rank makes its own slice."""
    name, layer = operation_name(node), tables.layer
    first = {"new": 1}.get(name.partition("_")[0], 0)
    if name not in _MAKING or len(operands) != first or len(node.args) <= first or len(results) != 1:
        return []
    given, shape = node.args[first], layer.body.tensors[results[0]].shape
    sizes = given if isinstance(given, tuple | list) else node.args[first:]
    rows = []
    for dim, size in enumerate(shape):
        if not isinstance(size, int) or size % tables.degree or len(sizes) != len(shape) or sizes[dim] != size:
            continue
        place = ("args", first, dim) if isinstance(given, tuple | list) else ("args", first + dim)
        rewrite = Rewrite(node=node.name, path=place, value=size // tables.degree)
        for states in product(*(tables.states[operand] for operand in operands)):  # only asked for dtype and device
            needs = tuple(zip(operands, states, strict=True))
            rows.append(Row(needs, ((results[0], Shard(dim)),), (rewrite,)))
    return rows


_MAKING = words("new_empty new_zeros new_ones new_full zeros ones empty full")


def _rows_with_bias(tables: Tables, node: Node, results: list[str]) -> list[Row]:
    """Return the rows of a linear function, or of a bias and a product, divided by rows: one rank adds the bias."""
    name = operation_name(node)
    if name == "linear":
        x, weight = argument(node, 0, "input")[0], argument(node, 1, "weight")[0]
        bias, contracted = argument(node, 2, "bias")[0], 1
    elif name == "addmm" and len(node.args) == 3 and not node.kwargs:
        (bias, x, weight), contracted = node.args, 0
    else:
        return []
    if not (isinstance(x, Ref) and isinstance(weight, Ref | ParamRef) and isinstance(bias, ParamRef)):
        return []
    last = len(tables.layer.body.tensors[x.name].shape) - 1
    rows = []
    for shard in tables.shards(x):
        cut = shard.at(contracted)
        if shard.dim == last and not shard.sequence and cut in tables.states.get(weight, {}):
            tables.admit(bias, PARTIAL)
            needs: tuple[tuple[Operand, State], ...] = ((x, shard), (weight, cut), (bias, PARTIAL))
            rows.append(Row(needs, ((results[0], PARTIAL),)))
    return rows


def _partial_rows(tables: Tables, node: Node, operands: list[Operand], results: list[str]) -> list[Row]:
    layer = tables.layer
    context = Context(tables.degree, layer.body.tensors, layer.parameter_shapes)
    rows = []
    for chosen in partial_operands(context, node):
        if any(PARTIAL in tables.states.get(operand, {}) for operand in chosen):
            for operand in chosen:
                if PARTIAL not in tables.states.get(operand, {}):
                    tables.admit(operand, PARTIAL)
            needs = tuple((o, PARTIAL if o in chosen else entered(layer, o)) for o in operands)
            rows.append(Row(needs, tuple((name, PARTIAL) for name in results)))
    return rows

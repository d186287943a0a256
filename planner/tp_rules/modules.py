"""The rows of leaf modules: linear and embedding layers are divided, others run on what they are given."""

from planner.arguments import ParamRef, Ref, leaves
from planner.program import Node
from planner.tp_rules.layer import Operand, Row, Tables, entered
from planner.tp_rules.operations import RULES, Context, operation_name
from planner.tp_rules.state import PARTIAL, WHOLE, IllegalShardingError, ModuleInfo, RuleState, Shard, State, divided


def module_rows(tables: Tables, node: Node, info: ModuleInfo) -> list[Row]:
    """Return the ways to run a leaf module on divided values or with divided parameters."""
    given = list(dict.fromkeys(leaf for leaf in leaves((node.args, node.kwargs)) if isinstance(leaf, Ref)))
    prefix = f"{node.target}." if node.target else ""
    own = {name: ParamRef(f"{prefix}{name}") for name in info.parameters}
    results = list(node.writes())
    if info.kind in ("linear", "embedding") and len(given) == 1 and len(results) == 1:
        rows = _column_rows(tables, info, given[0], own, results[0])
        rows += _row_rows(tables, info, given[0], own, results[0]) if info.kind == "linear" else []
        rows += _vocabulary_rows(tables, info, given[0], own, results[0]) if info.kind == "embedding" else []
        return rows + _whole_weight_rows(tables, info, given[0], own, results[0])
    if info.kind == "opaque":
        _refuse(tables, given, f"{node.target!r} takes whole values only")
        return []
    if info.kind == "recorded" and info.body is not None:
        return _recorded_rows(tables, node, info, given, own)
    if len(given) != 1 or len(results) != 1:
        return []
    return _simple_rows(tables, node, info, given[0], own)


def _refuse(tables: Tables, operands: list[Ref], reason: str) -> None:
    for operand in operands:
        for shard in tables.shards(operand):
            tables.refuse([(operand, shard)], reason)


def features(info: ModuleInfo) -> tuple[int, int]:
    """Return the output and input features of a linear layer, or the rows and columns of an embedding."""
    weight = info.parameters["weight"]
    if info.kind == "linear":
        return weight[info.weight_out_dim], weight[1 - info.weight_out_dim]
    return weight[0], weight[1]


def _own_needs(own: dict[str, ParamRef], states: dict[str, State]) -> tuple[tuple[Operand, State], ...]:
    return tuple((operand, states[name]) for name, operand in own.items())


def _is_kept(tables: Tables, own: dict[str, ParamRef]) -> bool:
    kept = [operand.name for operand in own.values() if operand.name in tables.layer.kept_whole]
    for name in kept:
        tables.errors.setdefault(name, "it is read outside its layer, where it must be whole")
    return bool(kept)


def _cuts(tables: Tables, weight: ParamRef, size: int, dim: int) -> list[Shard]:
    """Return the divisions of a weight's dimension; none where it does not divide, which is kept as the reason."""
    try:
        return tables.choices(size, dim)
    except IllegalShardingError as error:
        tables.errors.setdefault(weight.name, str(error))
        return []


def _column_rows(tables: Tables, info: ModuleInfo, x: Ref, own: dict[str, ParamRef], output: str) -> list[Row]:
    """Output features divided, in each choice of parts; of an embedding, the columns."""
    weight = own["weight"]
    if _is_kept(tables, own):
        return []
    last = len(tables.layer.body.tensors[output].shape) - 1
    dim = info.weight_out_dim if info.kind == "linear" else 1
    rows = []
    for cut in _cuts(tables, weight, info.parameters["weight"][dim], dim):
        tables.admit(weight, cut, (weight.name,))
        if "bias" in own:
            tables.admit(own["bias"], cut.at(0), (weight.name,))
        needs = _own_needs(own, {"weight": cut, "bias": cut.at(0)})
        rows.append(Row(((x, entered(tables.layer, x)), *needs), ((output, cut.at(last)),)))
    return rows


def _row_rows(tables: Tables, info: ModuleInfo, x: Ref, own: dict[str, ParamRef], output: str) -> list[Row]:
    """Input features divided as the input is: a partial sum, to which the module adds the bias once."""
    if _is_kept(tables, own):
        return []
    last = len(tables.layer.body.tensors[x.name].shape) - 1
    rows = []
    for shard in tables.shards(x):
        if shard.dim == last and not shard.sequence:
            cut = shard.at(1 - info.weight_out_dim)
            try:
                divided(features(info)[1], tables.degree, cut)
            except IllegalShardingError as error:
                tables.refuse([(x, shard)], str(error))
                continue
            tables.admit(own["weight"], cut, (own["weight"].name,))
            rows.append(Row(((x, shard), *_own_needs(own, {"weight": cut, "bias": WHOLE})), ((output, PARTIAL),)))
    return rows


def _vocabulary_rows(tables: Tables, info: ModuleInfo, x: Ref, own: dict[str, ParamRef], output: str) -> list[Row]:
    """An embedding's rows divided: every rank looks up those it has, a partial sum."""
    size = features(info)[0]
    if _is_kept(tables, own):
        return []
    try:
        divided(size, tables.degree)
    except IllegalShardingError as error:
        tables.errors.setdefault(own["weight"].name, str(error))
        return []
    tables.admit(own["weight"], Shard(0), (own["weight"].name,))
    return [Row(((x, WHOLE), (own["weight"], Shard(0))), ((output, PARTIAL),))]


def _whole_weight_rows(tables: Tables, info: ModuleInfo, x: Ref, own: dict[str, ParamRef], output: str) -> list[Row]:
    """Whole weights on a slice of the rows: their gradients are partial."""
    layer, last = tables.layer, len(tables.layer.body.tensors[x.name].shape) - 1
    rows = []
    for shard in tables.shards(x):
        if info.kind == "embedding" or shard.dim < last:
            needs = tuple((operand, entered(layer, operand)) for operand in own.values())
            rows.append(Row(((x, shard), *needs), ((output, shard),)))
    return rows


def _simple_rows(tables: Tables, node: Node, info: ModuleInfo, x: Ref, own: dict[str, ParamRef]) -> list[Row]:
    """Elementwise modules keep any division; normalizations one of a dimension they don't work over."""
    layer, output = tables.layer, next(iter(node.writes()))
    rank = len(layer.body.tensors[x.name].shape)
    needs = tuple((operand, entered(layer, operand)) for operand in own.values())
    rows = []
    for shard in tables.shards(x):
        if info.kind == "normalization" and shard.dim >= rank - info.normalized_dims:
            tables.refuse([(x, shard)], f"{node.target!r} normalizes over the divided dimension")
            continue
        rows.append(Row(((x, shard), *needs), ((output, shard),)))
    if info.additive and not node.in_place and PARTIAL in tables.states.get(x, {}):
        rows.append(Row(((x, PARTIAL),), ((output, PARTIAL),)))
    return rows


def _recorded_rows(
    tables: Tables, node: Node, info: ModuleInfo, given: list[Ref], own: dict[str, ParamRef]
) -> list[Row]:
    """Propagate through the recorded body of a leaf module, whose code can't be rewritten: one operand divided."""
    layer, rows = tables.layer, []
    parameters = tuple((operand, entered(layer, operand)) for operand in own.values())
    for operand in given:
        for shard in tables.shards(operand):
            try:
                made = _through(tables, info, node, given, {operand: shard})
            except IllegalShardingError as error:
                tables.refuse([(operand, shard)], f"{error} (in {node.target!r})")
                continue
            needs = tuple((other, shard if other == operand else entered(layer, other)) for other in given)
            rows.append(Row((*needs, *parameters), tuple(zip(node.writes(), made, strict=True))))
    return rows


def _through(tables: Tables, info: ModuleInfo, node: Node, given: list[Ref], states: dict[Ref, Shard]) -> list[State]:
    """Return the states of a recorded module's results."""
    body = info.body
    assert body is not None
    inner: dict[Ref | ParamRef, Shard | None] = {}
    for name, outer in zip(body.inputs, given, strict=True):
        inner[Ref(name)] = states.get(outer)
    shapes = info.constants | info.parameters
    for step in body.nodes:
        if step.kind in ("module", "setitem"):
            raise IllegalShardingError("a leaf module calls modules or writes in place")
        context = Context(tables.degree, body.tensors, shapes, inner)
        made = _step(context, step)
        if context.rewrites:
            raise IllegalShardingError("a leaf module has shape constants that would change")
        for name, state in zip(step.writes(), made, strict=True):
            if state is not None and not isinstance(state, Shard):
                raise IllegalShardingError("a leaf module would make a partial sum")
            inner[Ref(name)] = state
    results = [inner.get(leaf) for leaf in leaves(body.output) if isinstance(leaf, Ref)]
    count = len(list(node.writes()))
    if len(results) != count:
        results = [results[0] if results else None] * count
    if any(state is None for state in results):
        raise IllegalShardingError("a leaf module returns a whole value and takes a divided one")
    return [state for state in results if state is not None]


def _step(context: Context, step: Node) -> list[RuleState]:
    count = len(list(step.writes()))
    if all(context.state(leaf) is None for leaf in leaves((step.args, step.kwargs)) if isinstance(leaf, Ref)):
        return [None] * count
    rule = RULES.get(operation_name(step))
    if rule is None:
        raise IllegalShardingError(f"`{operation_name(step)}` has no rule for divided values")
    made = rule(context, step)
    found = list(made) if isinstance(made, tuple) else [made] * count
    if any(state is None for state in found):
        raise IllegalShardingError(f"`{operation_name(step)}` has no rule for such an operand")
    return found

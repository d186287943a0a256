"""Which values may share memory, and until where in a body they are written in place."""

from collections.abc import Mapping, Sequence

from planner.arguments import Ref, leaves
from planner.program import Node
from planner.tp_rules.operations import operation_name, words
from planner.tp_rules.state import ModuleInfo

# Operations whose result may be a view of their first operand.
VIEWS = words(
    "view reshape flatten unflatten transpose swapaxes swapdims permute T mT t unsqueeze squeeze expand broadcast_to "
    "getitem split chunk tensor_split split_with_sizes unbind narrow select contiguous to type type_as float double "
    "half bfloat16 alias detach view_as expand_as real imag dropout"
)


def last_writes(nodes: Sequence[Node], modules: Mapping[str, ModuleInfo]) -> dict[str, int]:
    """Return the position of the last write in place to the memory of each value that is written at all.

    Modules may return a view of what they are given (nn.Identity, nn.Dropout in evaluation), but not those that
    multiply or normalize it.
    """
    root: dict[str, str] = {}

    def find(name: str) -> str:
        while root.get(name, name) != name:
            name = root[name]
        return name

    for node in nodes:
        may_view = node.kind == "module" and modules[node.target].kind not in ("linear", "embedding", "normalization")
        shares = may_view or operation_name(node) in VIEWS or node.in_place
        first = next((leaf for leaf in leaves(node.args) if isinstance(leaf, Ref)), None)
        if shares and first is not None:
            for name in node.writes():
                root[find(name)] = find(first.name)
    last: dict[str, int] = {}
    for position, node in enumerate(nodes):
        if (node.in_place or node.kind == "setitem") and isinstance(node.args[0] if node.args else None, Ref):
            last[find(node.args[0].name)] = position
    if not last:
        return {}
    names = {name for node in nodes for name in (*node.reads(), *node.writes())}
    return {name: last[find(name)] for name in names if find(name) in last}

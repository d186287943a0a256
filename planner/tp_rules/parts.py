"""Into which parts a fused dimension may fall: what the body cuts dimensions of that size into.

These are candidates only; that a division works is for the propagation to say.
"""

from itertools import pairwise

from planner.arguments import Ref, leaves
from planner.program import Node, Program
from planner.tp_rules.operations import operation_name
from planner.tp_rules.state import Shard

MAX_PARTS = 8

_SPLITS = ("split", "chunk", "tensor_split", "split_with_sizes")
_VIEWS = ("view", "reshape", "unflatten")


def part_choices(body: Program) -> dict[int, list[Shard]]:
    """Return, by the size of a dimension, its divisions (along dimension 0, to be moved) into parts; one part first."""
    found: dict[int, dict[Shard, None]] = {}
    ends: dict[tuple[str, int, int], set[int]] = {}
    for node in body.nodes:
        name = operation_name(node)
        if node.kind == "module" or not node.args or not isinstance(node.args[0], Ref):
            continue
        shape = body.tensors[node.args[0].name].shape
        if name in _SPLITS:
            _note_split(body, node, found)
        elif name in _VIEWS:
            after = body.tensors[next(iter(node.writes()))].shape
            counts = [count for count in after if isinstance(count, int) and 1 < count <= MAX_PARTS]
            for size in (size for size in shape if isinstance(size, int)):
                found.setdefault(size, {}).update((Shard(0, n), None) for n in counts if n < size and size % n == 0)
        elif name == "getitem":
            _note_slices(node, shape, ends)
    for (_, _, size), cuts in ends.items():
        sizes = tuple(stop - start for start, stop in pairwise(sorted({0, size, *cuts})))
        _note(found, sizes)
    return {size: [Shard(0), *(shard for shard in shards if shard.parts > 1)] for size, shards in found.items()}


def _note(found: dict[int, dict[Shard, None]], sizes: tuple[int, ...]) -> None:
    if 1 < len(sizes) <= MAX_PARTS:
        equal = len(set(sizes)) == 1
        found.setdefault(sum(sizes), {})[Shard(0, len(sizes), () if equal else sizes)] = None


def _note_split(body: Program, node: Node, found: dict[int, dict[Shard, None]]) -> None:
    before = body.tensors[node.args[0].name].shape
    results = [body.tensors[leaf.name].shape for leaf in leaves(node.result) if isinstance(leaf, Ref)]
    for dim, size in enumerate(before):
        sizes = [shape[dim] for shape in results if len(shape) == len(before)]
        whole = tuple(part for part in sizes if isinstance(part, int))
        if isinstance(size, int) and len(whole) == len(sizes) and sum(whole) == size:
            _note(found, whole)


def _note_slices(node: Node, shape: tuple[object, ...], ends: dict[tuple[str, int, int], set[int]]) -> None:
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    if any(item is None or isinstance(item, Ref | list) for item in index):
        return
    places = list(enumerate(index))
    if Ellipsis in index:
        at = index.index(Ellipsis)
        places = [(i if i < at else len(shape) - len(index) + i, item) for i, item in places if i != at]
    for dim, item in places:
        size = shape[dim] if dim < len(shape) else None
        plain = isinstance(item, slice) and item.step in (None, 1)
        if plain and isinstance(size, int) and all(isinstance(end, int | None) for end in (item.start, item.stop)):
            start, stop, _ = item.indices(size)
            ends.setdefault((node.args[0].name, dim, size), set()).update((start, stop))

"""Other planners' graphs as profiles: nodes become layers, with what their files tell of each. There is no model."""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import networkx as nx

from planner.arguments import BatchInt, Ref
from planner.errors import UsageError
from planner.model_profile import Edge, Layer, LayerClass, LayerCost, ModelProfile, Parameter, Provenance
from planner.program import Node, Program, Tensor
from planner.sharding import Sharding

_WIDTH = 4  # bytes of a number: their profiles are of float32
_SHARDING = "tensor"


@dataclass(frozen=True)
class NodeCost:
    """What a node takes for a minibatch: seconds forward and backward, bytes kept for backward, and of parameters."""

    forward_s: float
    backward_s: float
    kept_bytes: float
    parameter_bytes: float


@dataclass(frozen=True)
class ImportedGraph:
    """Nodes with their names, kinds and costs by tensor-parallel degree, and edges with a minibatch's bytes."""

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    costs: tuple[dict[int, NodeCost], ...]
    edges: tuple[tuple[int, int, float], ...]
    notes: tuple[str, ...] = ()


def imported_profile(graph: ImportedGraph, path: Path, *, planner: str, rows: int, gpu: str | None) -> ModelProfile:
    """Return a graph as a profile: a minibatch of theirs has `rows` rows, and times are of the GPU type `gpu`.

    UsageError where the graph has a cycle or no node.
    """
    return _Import(graph, path, rows).profile(planner, gpu)


class _Import:
    """Layers are the nodes in an order in which each comes after those it reads."""

    def __init__(self, graph: ImportedGraph, path: Path, rows: int) -> None:
        self.graph, self.path, self.rows = graph, path, rows
        ordered: nx.DiGraph[int] = nx.DiGraph()
        ordered.add_nodes_from(range(len(graph.names)))
        ordered.add_edges_from((source, target) for source, target, _ in graph.edges)
        if not graph.names or not nx.is_directed_acyclic_graph(ordered):
            what = "has a cycle" if graph.names else "has no node"
            raise UsageError(f"{path}: the graph {what}", hint="give a file as their profiler wrote it")
        self.order = list(nx.lexicographical_topological_sort(ordered))
        self.place = {node: position for position, node in enumerate(self.order)}
        self.names = _module_names(graph.names)
        # one value for each size in which a node's output crosses: what they say of an edge is kept
        self.values: dict[tuple[int, float], str] = {}
        for source, _, size in sorted(graph.edges, key=lambda edge: (self.place[edge[0]], edge[2])):
            self.values.setdefault((source, size), f"value_{len(self.values)}")

    def profile(self, planner: str, gpu: str | None) -> ModelProfile:
        """Return the profile."""
        graph, names = self.graph, self.names
        classes, class_of = self._classes()
        sizes = {node: round(graph.costs[node][1].parameter_bytes / _WIDTH) for node in self.order}
        count = sum(sizes.values())
        name = self.path.resolve().parent.name if self.path.stem == "graph" else self.path.stem
        return ModelProfile(
            name=re.sub(r"[^\w.+-]", "_", name),
            provenance=Provenance(
                model_path=str(self.path),
                model_hash=hashlib.sha256(self.path.read_bytes()).hexdigest()[:16],
                torch_version="",
                device=f"the GPUs of {planner}",
                device_type="cuda",
                gpu=gpu,
                dtype="float32",
                input_shapes={"x": (self.rows,)},
                imported_from=planner,
            ),
            param_count=count,
            trainable_param_count=count,
            forward_flops_per_row=0.0,
            parameters={
                f"{names[node]}.weight": Parameter(
                    shape=(size,), dtype="float32", num_bytes=_WIDTH * size, trainable=True
                )
                for node, size in sizes.items()
                if size
            },
            layers=tuple(
                Layer(
                    name=names[node],
                    layer_class=class_of[node],
                    module=names[node],
                    start=position,
                    stop=position + 1,
                    parameters=(f"{names[node]}.weight",) if sizes[node] else (),
                )
                for position, node in enumerate(self.order)
            ),
            layer_classes=tuple(classes),
            edges=tuple(self._edges()),
            program=self._program(),
            loss_is_known=True,
            notes=graph.notes,
        )

    def _classes(self) -> tuple[list[LayerClass], dict[int, str]]:
        """Return a class for all nodes of one kind that cost and read the same, and each node's class."""
        found: dict[Any, str] = {}
        class_of: dict[int, str] = {}
        classes: list[LayerClass] = []
        for node in self.order:
            read = sum(size for _, target, size in self.graph.edges if target == node)
            made = sum(size for source, size in self.values if source == node)
            key = (self.graph.kinds[node], tuple(sorted(self.graph.costs[node].items())), read, made)
            if key not in found:
                found[key] = f"{_class_name(self.graph.kinds[node])}_{len(found)}"
                degrees = sorted(self.graph.costs[node])
                classes.append(
                    LayerClass(
                        name=found[key],
                        module_class=_plain(self.graph.kinds[node]),
                        shardings=tuple(Sharding(name=_SHARDING, tp_degree=t) for t in degrees if t > 1),
                        costs=tuple(self._cost(self.graph.costs[node][t], t, read, made) for t in degrees),
                    )
                )
            class_of[node] = found[key]
        return classes, class_of

    def _cost(self, cost: NodeCost, degree: int, read: float, made: float) -> LayerCost:
        # what is read and made counts as kept as far as there is so much: it is kept once where layers share it
        kept_output = min(made, cost.kept_bytes)
        kept_input = min(read, cost.kept_bytes - kept_output)
        return LayerCost(
            microbatch_size=self.rows,
            tp_degree=degree,
            sharding=_SHARDING if degree > 1 else "replicated",
            forward_time_s=cost.forward_s,
            backward_input_time_s=cost.backward_s / 2,
            backward_weight_time_s=cost.backward_s / 2,
            activation_bytes=round(cost.kept_bytes - kept_output - kept_input),
            saved_input_bytes=round(kept_input),
            saved_output_bytes=round(kept_output),
            transient_bytes=0,
            param_bytes=round(cost.parameter_bytes),
            trainable_param_count=round(cost.parameter_bytes / _WIDTH),
            forward_flops=0.0,
            source="imported",
        )

    def _edges(self) -> list[Edge]:
        edges = []
        for (source, size), value in self.values.items():
            read_by = {self.place[t] for s, t, other in self.graph.edges if s == source and other == size}
            edges.append(
                Edge(
                    value=value,
                    producer=self.place[source],
                    consumers=tuple(sorted(read_by)),
                    bytes_per_row=size / self.rows,
                    needs_grad=True,
                )
            )
        return edges

    def _program(self) -> Program:
        tensors = {"x": Tensor(shape=(BatchInt(1),), dtype="float32")}
        for (_, size), value in self.values.items():
            width = max(1, round(size / _WIDTH / self.rows))
            tensors[value] = Tensor(shape=(BatchInt(1), width), dtype="float32", requires_grad=True)
        nodes = []
        for position, node in enumerate(self.order):
            read = [Ref(self.values[source, size]) for source, target, size in self.graph.edges if target == node]
            made = [Ref(value) for (source, _), value in self.values.items() if source == node]
            if not made:
                made = [Ref(f"result_{position}")]
                tensors[f"result_{position}"] = Tensor(shape=(BatchInt(1),), dtype="float32", requires_grad=True)
            nodes.append(
                Node(
                    name=f"call_{position}",
                    kind="module",
                    target=self.names[node],
                    args=tuple(read) or (Ref("x"),),
                    result=made[0] if len(made) == 1 else tuple(made),
                )
            )
        output = next(iter(nodes[-1].writes()))
        return Program(inputs=("x",), nodes=tuple(nodes), output=Ref(output), tensors=tensors)


def _class_name(kind: str) -> str:
    """Return the first word of a kind, such as 'Conv2d(3, 64)', as part of a class's name."""
    word = re.split(r"\W", kind.strip(), maxsplit=1, flags=re.ASCII)[0]
    return word if word and not word[0].isdigit() else "Node"


def _plain(text: str) -> str:
    """Return a text as a profile may hold it."""
    return re.sub(r"[\"'\\{}]|[^ -~]", "_", text)[:100] or "node"


def _module_names(names: tuple[str, ...]) -> list[str]:
    """Return names as those of modules, each once."""
    found: dict[str, int] = {}
    made = []
    for name in names:
        base = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_") or "node"
        base = f"node_{base}" if base[0].isdigit() else base
        found[base] = found.get(base, 0) + 1
        made.append(base if found[base] == 1 else f"{base}_{found[base]}")
    while len(set(made)) < len(made):  # 'a_2' may be there already
        made = [f"{name}_{position}" for position, name in enumerate(made)]
    return made

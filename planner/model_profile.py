"""What is known of a model: its layers, the values that flow between them, and what each costs.

Written by the profiler, read by the solver and the emitter. Times are for one layer and one microbatch, in seconds of
compute on one device: communication is priced by `cost`, from the bytes recorded here and a cluster.
"""

import json
from collections.abc import Container, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from planner.arguments import Ref, leaves
from planner.errors import FileFormatError
from planner.names import identifier
from planner.program import DtypeName, Encoded, Identifier, Node, PlainText, Program, QualifiedName, Tensor
from planner.records import (
    ByteCount,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Record,
    TimeSeconds,
    read_json,
    validate,
    write_text,
)
from planner.sharding import Move, Sharding
from planner.units import counted

SCHEMA_VERSION = 1

Source = Literal["measured", "scaled", "computed", "imported"]
# A number, flag or text that a model is given, as it is in a program.
Constant = (
    Annotated[bool, Field(strict=True)]
    | Annotated[int, Field(strict=True)]
    | Annotated[float, Field(strict=True, allow_inf_nan=False)]
    | PlainText
    | None
)


class Parameter(Record):
    """A parameter or buffer of the model; `tied_to` names the first of those that share its storage."""

    shape: tuple[NonNegativeInt, ...]
    dtype: DtypeName
    num_bytes: ByteCount
    trainable: bool
    buffer: bool = False
    persistent: bool = True
    tied_to: QualifiedName | None = None


def _check_known(names: Iterable[str], known: Container[str], what: str) -> None:
    """Raise ValueError for the first name that is not known."""
    for name in names:
        if name not in known:
            raise ValueError(f"{what} {name!r}, which is not listed")


def _check_moves(moves: Iterable[Move], nodes: Container[str], values: Iterable[str], where: str) -> None:
    """Raise ValueError for a move from or to what is not there, or whose name something else has."""
    known = set(values)
    for move in moves:
        if isinstance(move.source, Ref):
            _check_known([move.source.name], known, f"{where} moves value")
        _check_known(move.readers, nodes, f"{where} moves a value for node")
        _check_known([move.after] if move.after else [], nodes, f"{where} moves a value after node")
        if move.name in known:
            raise ValueError(f"{where} moves a value to {move.name!r}, which another value is named")
        known.add(move.name)


class LayerCost(Record):
    """What one layer costs for a microbatch of `microbatch_size` rows, divided by `sharding` over `tp_degree` ranks.

    `activation_bytes` is saved for backward beside the layer's own inputs and outputs; `saved_input_bytes` and
    `saved_output_bytes` are those of them that are saved too. `transient_bytes` live only while the layer runs (the
    larger of forward and backward). `launches` are kernels, of forward, input gradients and weight gradients; 0 where
    not counted. `spread_fraction` is the interquartile range over the median of the repeats.
    """

    microbatch_size: PositiveInt
    tp_degree: PositiveInt = 1
    sharding: Identifier = "replicated"
    forward_time_s: TimeSeconds
    backward_input_time_s: TimeSeconds
    backward_weight_time_s: TimeSeconds
    activation_bytes: ByteCount
    saved_input_bytes: ByteCount
    saved_output_bytes: ByteCount
    transient_bytes: ByteCount
    param_bytes: ByteCount
    trainable_param_count: NonNegativeInt
    forward_flops: NonNegativeFloat
    launches: tuple[NonNegativeInt, NonNegativeInt, NonNegativeInt] = (0, 0, 0)
    source: Source
    spread_fraction: NonNegativeFloat = 0.0
    num_repeats: NonNegativeInt = 0

    @property
    def backward_time_s(self) -> float:
        """Input and weight gradients together."""
        return self.backward_input_time_s + self.backward_weight_time_s


class WholeAt(Record):
    """Why every rank holds the whole of a layer class at a tensor-parallel degree.

    `forbidden`: no plan uses the degree, because it does not divide the heads of the layer's attention.
    """

    tp_degree: PositiveInt
    reason: str
    forbidden: bool = False


class LayerClass(Record):
    """Layers that are the same computation: measured once. `body` is the module's own forward, opened once.

    `costs` are on the GPU type of the profile, `costs_by_gpu` on others by their names, where profiles were merged.
    `signature` maps the parameters of the module's forward to the arguments it is called with, as the body's inputs.
    """

    name: Identifier
    module_class: PlainText
    body: Program | None = None
    signature: Encoded = ()
    shardings: tuple[Sharding, ...] = ()
    whole: tuple[WholeAt, ...] = ()
    costs: tuple[LayerCost, ...]
    costs_by_gpu: dict[PlainText, tuple[LayerCost, ...]] = {}

    def model_post_init(self, context: Any) -> None:
        """Refuse a signature that is none, a body that its parts do not fit, and a class without costs."""
        if not self.costs or not all(self.costs_by_gpu.values()):
            raise ValueError(f"layer class {self.name!r} has no costs; a missing number is not a zero")
        if not isinstance(self.signature, tuple) or any(
            not isinstance(pair, tuple) or len(pair) != 2 for pair in self.signature
        ):
            raise ValueError(f"layer class {self.name!r}: signature is not a tuple of pairs of name and argument")
        for parameter, _ in self.signature:
            identifier(parameter)
        if len({parameter for parameter, _ in self.signature}) != len(self.signature):
            raise ValueError(f"layer class {self.name!r}: signature lists a parameter twice")
        nodes = {node.name for node in self.body.nodes} if self.body else set()
        values = set(self.body.tensors) if self.body else set()
        for sharding in self.shardings:
            where = f"layer class {self.name!r}, sharding {sharding.name!r} of degree {sharding.tp_degree}"
            _check_known((rewrite.node for rewrite in sharding.rewrites), nodes, f"{where} rewrites node")
            _check_moves(sharding.moves, nodes, values, where)
            for module, style in sharding.styles.items():
                weight = f"{module}.weight" if module else "weight"
                if style != "vocabulary" and weight not in sharding.parameters:
                    raise ValueError(f"{where}: {module!r} is divided, but {weight!r} is not in its parameters")

    def sharding(self, name: str, tp_degree: int) -> Sharding | None:
        """Return the sharding of that name and degree, or None."""
        return next((s for s in self.shardings if s.name == name and s.tp_degree == tp_degree), None)

    def whole_at(self, tp_degree: int) -> WholeAt | None:
        """Return why the class stays whole at a degree, or None where it does not or nobody said."""
        return next((whole for whole in self.whole if whole.tp_degree == tp_degree), None)


class Layer(Record):
    """The unit that is profiled and assigned to a stage: nodes [start, stop) of the program.

    `module` is the submodule it calls (a layer may be called twice: then two layers name one module);
    `parameters` are the fully qualified names it reads, those of its module included.
    """

    name: PlainText
    layer_class: Identifier
    module: QualifiedName
    start: NonNegativeInt
    stop: NonNegativeInt
    parameters: tuple[QualifiedName, ...] = ()


class Edge(Record):
    """A value that one layer makes and later layers read; `consumers` are layer indices, ascending.

    Values computed from the model's inputs alone without parameters are made anew where they are needed: no edges.
    """

    value: Identifier
    producer: NonNegativeInt
    consumers: tuple[NonNegativeInt, ...]
    bytes_per_row: NonNegativeFloat
    fixed_bytes: ByteCount = 0
    needs_grad: bool

    def num_bytes(self, rows: int) -> int:
        """Return the bytes for a microbatch of `rows`."""
        return round(self.bytes_per_row * rows) + self.fixed_bytes


class Count(Record):
    """A value made from inputs and targets alone of which emitted code needs the whole step's: what a loss divides by.

    `over` says what it gets in place of a microbatch's own: the sum over all microbatches of the step, or their mean.
    """

    value: Identifier
    over: Literal["sum", "mean"]


class Loss(Record):
    """The loss as a program that continues the model's; the mean over microbatches of it is the whole batch's.

    `nodes` are those of loss_fn, from what the model returns and `targets` (the structure of example_target) to
    `value`; `tensors` describes their values. There are none where the user's own loss_fn does as it is.
    `degree` is 1 where the recorded loss is a sum over rows, 0 for a mean. `coupled` names what makes the loss of a row
    depend on other rows, so that microbatching changes it; `ignored` the inputs and targets that are labels, with the
    value that leaves one out.
    """

    nodes: tuple[Node, ...] = ()
    value: Encoded = None
    targets: Encoded = None
    tensors: dict[Identifier, Tensor] = {}
    counts: tuple[Count, ...] = ()
    degree: int = 0
    coupled: tuple[str, ...] = ()
    ignored: dict[Identifier, int] = {}


BATCH_NORM = "batch norm takes mean and variance over the rows of a microbatch"
BY_FREQUENCY = "divides gradients by how often a microbatch has an index"
WRITES_BUFFER = "a buffer that is written once a microbatch"
NO_LOSS = (
    "no loss was profiled, so the loss_fn of setup is averaged evenly over microbatches: it must be a mean over rows, "
    "or give the model file loss_fn(output, target) and example_target(batch_size)"
)


def coupling_notes(loss: Loss | None, *, is_known: bool = True) -> list[str]:
    """Return what people are told where microbatching changes the loss; norms and buffers have notes of their own.

    Unless the loss `is_known`, what is coupled is so in the model's output.
    """
    coupled = loss.coupled if loss is not None else ()
    shown = [text for text in coupled if not text.endswith((BATCH_NORM, WRITES_BUFFER))]
    what = "this loss" if is_known else "what the model computes"
    more = f", and {counted(len(shown) - 1, 'other place')}" if len(shown) > 1 else ""
    return [f"microbatches may change {what} (verify tells by how much): {text}{more}" for text in shown[:1]]


class Provenance(Record):
    """Where a profile comes from: measured on a CPU or CUDA `device`, or computed for the GPU type `gpu`.

    One that was `imported_from` another planner's file has no model: nothing can be emitted from it.
    """

    model_path: str
    model_hash: str
    build_function: str = "build_model"
    inputs_function: str = "example_inputs"
    torch_version: str
    device: str
    device_type: Literal["cpu", "cuda"] = "cpu"
    gpu: str | None = None
    dtype: DtypeName
    input_shapes: dict[str, tuple[NonNegativeInt, ...]]
    created: str = ""
    command: str = ""
    example_rows: PositiveInt = 1
    tokens_per_row: NonNegativeInt = 0
    tp_rules: tuple[PlainText, ...] = ()
    num_threads: NonNegativeInt = 0
    imported_from: PlainText = ""


class ModelProfile(Record):
    """A model's layers, structure and costs; see the module's docstring.

    `input_only_values` are computed from the model's inputs alone, without parameters: every stage that reads one makes
    it anew. `target_dims` are the dimensions that grow with the batch of the tensors of the loss's target, in order;
    `called_whole` are the modules whose code looks at values, which runs as it is, `drawing_outside` those of them that
    draw with Python's or numpy's generators.
    `updated_buffers` are those that a forward in training changes, each under all of its names, and
    `carried_buffers` those of them whose value of the last forward reaches what is trained on; `arguments` the model's
    in the order of positions; `constants` the numbers, flags and texts among them for which the program was recorded
    (None: computed from the rows); `input_keys` the names of inputs that no variable can have, by the program's.
    Without `loss_is_known` no loss was recorded. With fewer than `least_rows` some layer does not run in training:
    batch statistics of one value are none.
    """

    schema_version: Annotated[int, Field(ge=1, strict=True)] = SCHEMA_VERSION
    name: PlainText
    provenance: Provenance
    param_count: NonNegativeInt
    trainable_param_count: NonNegativeInt
    forward_flops_per_row: NonNegativeFloat
    parameters: dict[QualifiedName, Parameter]
    tied: tuple[tuple[QualifiedName, ...], ...] = ()
    layers: tuple[Layer, ...]
    layer_classes: tuple[LayerClass, ...]
    edges: tuple[Edge, ...] = ()
    program: Program
    updated_buffers: tuple[QualifiedName, ...] = ()
    carried_buffers: tuple[QualifiedName, ...] = ()
    called_whole: tuple[QualifiedName, ...] = ()
    drawing_outside: tuple[QualifiedName, ...] = ()
    arguments: tuple[PlainText, ...] = ()
    constants: dict[PlainText, Constant] = {}
    input_keys: dict[Identifier, PlainText] = {}
    target_dims: tuple[NonNegativeInt | None, ...] = ()
    input_only_values: tuple[Identifier, ...] = ()
    least_rows: PositiveInt = 1
    loss: Loss | None = None
    loss_is_known: bool = True
    notes: tuple[str, ...] = ()

    def model_post_init(self, context: Any) -> None:
        """Refuse profiles whose parts do not fit together."""
        if not self.layers:
            raise ValueError("a profile needs at least one layer")
        names = [layer.name for layer in self.layers]
        duplicate = next((name for name in names if names.count(name) > 1), None)
        if duplicate is not None:
            raise ValueError(f"layer {duplicate!r} is listed twice")
        classes = {layer_class.name for layer_class in self.layer_classes}
        for layer in self.layers:
            if layer.layer_class not in classes:
                raise ValueError(f"layer {layer.name!r} has class {layer.layer_class!r}, which is not listed")
        if len(classes) != len(self.layer_classes):
            raise ValueError("two layer classes have one name")
        self._check_layers()
        self._check_edges()
        for group in self.tied:
            _check_known(group, self.parameters, "tied names parameter")
        for name, parameter in self.parameters.items():
            if parameter.tied_to is not None and parameter.tied_to not in self.parameters:
                raise ValueError(f"parameter {name!r} is tied to {parameter.tied_to!r}, which is not listed")
        _check_known(self.updated_buffers, self.parameters, "updated_buffers names")
        _check_known(self.carried_buffers, self.updated_buffers, "carried_buffers names")
        _check_known(self.input_only_values, self.program.tensors, "input_only_values names")
        if self.loss is not None:
            self._check_loss(self.loss)

    def _check_loss(self, loss: Loss) -> None:
        known = {*self.program.tensors, *loss.tensors}
        _check_known((count.value for count in loss.counts), known, "the loss counts value")
        made = {leaf.name for leaf in leaves((self.program.output, loss.targets)) if isinstance(leaf, Ref)}
        made |= {count.value for count in loss.counts}
        for node in loss.nodes:
            _check_known(node.reads(), made, f"node {node.name!r} of the loss reads")
            made.update(node.writes())
        if loss.nodes:
            _check_known(made, known, "nothing is known of the loss's value")
            _check_known((leaf.name for leaf in leaves(loss.value) if isinstance(leaf, Ref)), made, "the loss is")

    def _check_layers(self) -> None:
        num_nodes = len(self.program.nodes)
        for layer in self.layers:
            if not layer.start < layer.stop <= num_nodes:
                raise ValueError(
                    f"layer {layer.name!r} is nodes [{layer.start}, {layer.stop}) of a program of {num_nodes} nodes"
                )
            _check_known(layer.parameters, self.parameters, f"layer {layer.name!r} reads parameter")
        for before, after in pairwise(self.layers):
            if after.start < before.stop:
                raise ValueError(
                    f"layer {after.name!r} starts at node {after.start}, inside {before.name!r} or before it"
                )
        params = (name for node in self.program.nodes for name in node.params())
        _check_known(params, self.parameters, "the program reads parameter")

    def _check_edges(self) -> None:
        _check_known((edge.value for edge in self.edges), self.program.tensors, "edges name value")
        for edge in self.edges:
            if not edge.consumers or edge.consumers[0] <= edge.producer or edge.consumers[-1] >= len(self.layers):
                raise ValueError(f"edge {edge.value!r} from layer {edge.producer} to {edge.consumers} is not forward")
            if any(first >= second for first, second in pairwise(edge.consumers)):
                raise ValueError(f"edge {edge.value!r}: consumers {edge.consumers} are not ascending")

    def layer_class(self, layer: int) -> LayerClass:
        """Return the class of the layer at an index."""
        name = self.layers[layer].layer_class
        return next(candidate for candidate in self.layer_classes if candidate.name == name)

    def writes_its_input(self, layer: int) -> bool:
        """Return whether the layer's module changes what it is given in place: then it can't be run a second time."""
        found = self.layers[layer]
        nodes = self.program.nodes[found.start : found.stop]
        return any(node.written for node in nodes if node.kind == "module" and node.target == found.module)

    def crossing_edges(self, cut: int) -> Iterator[Edge]:
        """Yield the edges that cross the cut before layer `cut`: made before it, read at it or after."""
        return (edge for edge in self.edges if edge.producer < cut <= edge.consumers[-1])


def read_profile(path: Path) -> ModelProfile:
    """Return the profile in a file; FileFormatError says what is wrong with it."""
    data = read_json(path, what="profile")
    version = data.get("schema_version") if isinstance(data, dict) else None
    if isinstance(version, bool) or not isinstance(version, int):
        raise FileFormatError(f"{path}: no schema_version: not a profile", hint="write one with `planner profile`")
    if version > SCHEMA_VERSION:
        raise FileFormatError(
            f"{path}: schema_version {version} is newer than {SCHEMA_VERSION}, the newest this planner reads",
            hint="upgrade planner, or profile the model again with this version",
        )
    return validate(ModelProfile, data, source=str(path))


def write_profile(profile: ModelProfile, path: Path) -> None:
    """Write a profile as JSON, whole or not at all; the same profile gives the same bytes."""
    data = profile.model_dump(mode="json", exclude_defaults=True)
    data = {"schema_version": profile.schema_version} | data  # a default, but what readers look at first
    write_text(path, json.dumps(data, indent=1, allow_nan=False) + "\n")

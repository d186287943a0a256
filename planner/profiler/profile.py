"""Profiles a model: captures it, divides it into layers, and measures or computes each layer class once."""

import platform
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from planner.cluster import Gpu, read_gpu
from planner.errors import ProfileError, UsageError
from planner.model_file import ModelFile, load_model_file, split_arguments
from planner.model_profile import (
    LayerClass,
    LayerCost,
    ModelProfile,
    Parameter,
    Provenance,
    Sharding,
    WholeAt,
    coupling_notes,
)
from planner.profiler import user_code as user
from planner.profiler.buffers import update_notes
from planner.profiler.capture import Capture, capture, input_tensors, named_tensors
from planner.profiler.class_keys import ClassKeys
from planner.profiler.classes import OpenedClass, open_class, shardings_of
from planner.profiler.degrees import check_degrees, forbidden_at, undivided_at
from planner.profiler.execute import Target, outside_results, run_derived
from planner.profiler.fake import model_dtype
from planner.profiler.hidden import called_whole
from planner.profiler.in_place import check_in_place
from planner.profiler.inputs import argument_names, input_constants
from planner.profiler.layer_cost import class_cost
from planner.profiler.layers import (
    Segment,
    build_program,
    divide,
    input_only_values,
    make_edges,
    make_layers,
    variable_names,
)
from planner.profiler.loss_record import loss_record, read_loss, target_variables
from planner.profiler.modules import ModuleSource
from planner.profiler.notes import batch_norm_notes, degree_notes, hint_notes, loss_notes, noise_notes, whole_notes
from planner.profiler.plain_tensors import plain_tensors
from planner.profiler.recorder import Call
from planner.profiler.segment import SegmentRunner
from planner.profiler.segments import divided_nodes
from planner.profiler.torch_internals import FakeTensorMode, check_torch
from planner.profiler.tp_rules import applied_rules, check_applied, rules_inside
from planner.program import Program
from planner.shrink import Shrink, shrink_model_file
from planner.tp_rules import TpRule

Progress = Callable[[str, int, int], None]

MEASURED_MICROBATCH_SIZES = (1, 2, 4, 8)
COMPUTED_MICROBATCH_SIZES = (1, 2, 4)
MEASURED_TP_DEGREES = (1, 2, 4)
COMPUTED_TP_DEGREES = (1, 2, 4, 8)


@dataclass(frozen=True)
class _Class:
    """A layer class: its first layer, the call of its module, and what it is opened into."""

    name: str
    segment: Segment
    stop: int
    call: Call
    opened: OpenedClass
    shardings: tuple[Sharding, ...]
    whole: tuple[WholeAt, ...]


def profile_model(
    model_spec: str,
    *,
    device: str | None = None,
    gpu: str | None = None,
    microbatch_sizes: tuple[int, ...] | None = None,
    tp_degrees: tuple[int, ...] | None = None,
    dtype: str | None = None,
    inputs: str | None = None,
    blocks: tuple[str, ...] = (),
    shrink: Shrink | None = None,
    refuse_degrees: bool = False,
    tp_rules: tuple[TpRule, ...] = (),
    progress: Progress = lambda text, done, total: None,
) -> ModelProfile:
    """Return the profile of the model in a file; measured on `device`, or computed for the GPU type `gpu`.

    `blocks` names the containers whose members are the layers; `shrink` profiles a smaller twin of the model;
    `tp_rules` say how named parts are divided over tensor-parallel ranks (UsageError where one can't be followed).
    With `refuse_degrees` a degree that does not divide the model's heads is a UsageError, else it is noted only.
    CaptureError names the statement that can't be recorded, ProfileError the layer that can't be run.
    """
    check_torch()
    gpu_type = read_gpu(gpu) if gpu else None
    device_name = "cpu" if gpu_type else device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device_name == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            "--device cuda: this machine has no CUDA device", hint="measure on --device cpu, or compute with --gpu NAME"
        )
    progress("capturing the model", 0, 1)
    file = shrink_model_file(load_model_file(model_spec, inputs=inputs), shrink)
    target_dtype = getattr(torch, dtype) if dtype else torch.bfloat16 if gpu_type or device_name == "cuda" else None
    captured = capture(file, dtype=target_dtype)
    captured, calls, meaning = read_loss(captured, blocks)
    input_names = variable_names(captured.inputs)
    named = {str(number): input_names[name] for name, number in captured.inputs.items()}
    program = build_program(calls, named, captured.output, captured.tensors)
    target_names = target_variables(captured, input_names.values())
    targets = {str(number): target_names[name] for name, number in captured.targets.items()}
    with_loss = build_program([*calls, *captured.loss_calls], named | targets, captured.loss, captured.tensors)
    loss = loss_record(file, captured, meaning, calls, with_loss, target_names)
    whole = called_whole(captured.calls)
    derived = input_only_values(program, captured.model, whole)
    segments = divide(program, captured.model, derived)
    check_in_place(calls, captured.output, named, captured.storages, segments)
    degrees = tp_degrees or (COMPUTED_TP_DEGREES if gpu_type else MEASURED_TP_DEGREES)
    classes, names = _classes(captured, calls, program, segments, len(with_loss.nodes), degrees, tp_rules)
    if refuse_degrees:
        check_degrees(degrees, [(item.name, item.opened, item.whole) for item in classes])
    sizes = tuple(sorted(microbatch_sizes or (COMPUTED_MICROBATCH_SIZES if gpu_type else MEASURED_MICROBATCH_SIZES)))
    real = frozenset(item.name for item in classes if _looks_at_values(item, program, whole))
    pricer = _Pricer(file, captured, with_loss, derived, gpu_type, torch.device(device_name), target_dtype, real)
    costs = pricer.price(classes, sizes, progress)
    flops = {layer_class.name: _flops_per_row(costs[layer_class.name]) for layer_class in classes}
    parameters, tied = _parameters(captured.model, with_loss)
    return ModelProfile(
        name=file.path.stem if file.path.stem != "config" else file.path.parent.name,
        provenance=_provenance(file, captured, model_spec, device_name, gpu, pricer.dtype).replace(
            tp_rules=tuple(map(str, tp_rules))
        ),
        param_count=sum(p.numel() for p in captured.model.parameters()),
        trainable_param_count=sum(p.numel() for p in captured.model.parameters() if p.requires_grad),
        forward_flops_per_row=sum(flops[name] for name in names),
        parameters=parameters,
        tied=tied,
        layers=tuple(make_layers(program, segments, names, captured.model)),
        layer_classes=tuple(
            LayerClass(
                name=item.name,
                module_class=type(captured.model.get_submodule(item.segment.module)).__name__,
                body=item.opened.body if item.shardings else None,
                signature=item.opened.signature if item.shardings else (),
                shardings=item.shardings,
                whole=item.whole,
                costs=tuple(costs[item.name]),
            )
            for item in classes
        ),
        edges=tuple(make_edges(program, segments, derived)),
        program=program,
        arguments=argument_names(captured.model),
        constants=input_constants(file, captured.model),
        updated_buffers=captured.updated_buffers,
        input_keys={variable: name for name, variable in input_names.items() if variable != name},
        target_dims=tuple(captured.tensors[str(number)].batch_dim for number in captured.targets.values()),
        input_only_values=tuple(sorted(derived - set(program.inputs))),
        loss=loss,
        least_rows=pricer.least_rows,
        notes=(
            *file.notes,
            *captured.notes,
            *whole_notes(whole),
            *batch_norm_notes(captured.model),
            *hint_notes(captured, ((item.segment.module, item.shardings) for item in classes)),
            *degree_notes(undivided for item in classes for undivided in item.whole),
            *loss_notes(captured),
            *update_notes(captured.model, captured.updated_buffers),
            *(coupling_notes(loss) if loss is not None else ()),
            *noise_notes(costs),
            *pricer.notes,
        ),
    )


def _classes(
    captured: Capture,
    calls: list[Call],
    program: Program,
    segments: list[Segment],
    end: int,
    degrees: tuple[int, ...],
    rules: tuple[TpRule, ...],
) -> tuple[list[_Class], list[str]]:
    """Return the layer classes in order of first appearance, and the class of every layer."""
    keys = ClassKeys(captured)
    known: dict[tuple[Any, ...], _Class] = {}
    taken: dict[str, int] = {}
    names: list[str] = []
    applied: set[TpRule] = set()
    for segment in segments:
        stop = end if segment is segments[-1] else segment.stop
        styles = rules_inside(captured.model.get_submodule(segment.module), segment.module, rules)
        described = keys.describe(calls[segment.start : segment.stop], segment.module)
        key = (described, segment is segments[-1], styles)
        if key not in known:
            position = next(
                i
                for i in range(segment.start, segment.stop)
                if program.nodes[i].kind == "module" and program.nodes[i].target == segment.module
            )
            base = type(captured.model.get_submodule(segment.module)).__name__
            taken[base] = taken.get(base, 0) + 1
            opened = open_class(captured, calls[position])
            read = _parameters_read_beside(program, segment)
            divided = [degree for degree in degrees if degree > 1]
            found = [forbidden_at(opened, degree, captured.model, segment.module) for degree in divided]
            whole = [item for item in found if item is not None]
            shardings = tuple(
                sharding
                for degree, forbidden in zip(divided, found, strict=True)
                if forbidden is None
                for sharding in shardings_of(
                    captured, calls[position], opened, degree, rules=rules, kept_whole=frozenset(read)
                )
            )
            usable = {sharding.tp_degree for sharding in shardings} | {item.tp_degree for item in whole}
            whole += [undivided_at(opened, degree) for degree in divided if degree not in usable]
            name = base if taken[base] == 1 else f"{base}_{taken[base]}"
            known[key] = _Class(name, segment, stop, calls[position], opened, shardings, tuple(whole))
        names.append(known[key].name)
    for item in known.values():
        applied |= applied_rules(captured, item.call, item.opened, rules)
    check_applied(rules, applied, captured.model)
    return list(known.values()), names


def _parameters_read_beside(program: Program, segment: Segment) -> set[str]:
    """Return the module's parameters that the layer's glue reads by itself (relative names): they must stay whole."""
    prefix = f"{segment.module}."
    nodes = program.nodes[segment.start : segment.stop]
    return {name.removeprefix(prefix) for node in nodes for name in node.params() if name.startswith(prefix)}


def _looks_at_values(item: _Class, program: Program, whole: Mapping[str, str]) -> bool:
    """Return whether a class calls modules of `whole`, through which fake tensors can't go."""
    nodes = program.nodes[item.segment.start : item.segment.stop]
    targets = [node.target for node in nodes if node.kind == "module"]
    return any(name == target or name.startswith(f"{target}.") for name in whole for target in targets)


class _Pricer:
    """Prices layer classes one after another, each for every microbatch size, whole and divided.

    What is computed for a GPU runs on fake tensors; the classes `real`, whose code looks at values, on the CPU.
    """

    def __init__(
        self,
        file: ModelFile,
        captured: Capture,
        program: Program,
        derived: frozenset[str],
        gpu: Gpu | None,
        device: torch.device,
        dtype: torch.dtype | None,
        real: frozenset[str],
    ) -> None:
        self._file, self._captured, self._program, self._derived, self._gpu, self._device = (
            file,
            captured,
            program,
            derived,
            gpu,
            device,
        )
        self._real = real
        self._benches = [
            (mode, ModuleSource(captured.model, device=device, dtype=dtype, fake_mode=mode))
            for mode in (FakeTensorMode(allow_non_fake_inputs=True) if gpu is not None else None, None)
        ]
        self._fake_mode, self._source = self._benches[0]
        self.dtype = dtype or model_dtype(captured.model)
        self.least_rows = 1
        self.notes: tuple[str, ...] = ()

    def price(self, classes: list[_Class], sizes: tuple[int, ...], progress: Progress) -> dict[str, list[LayerCost]]:
        """Return the costs of each class; ProfileError names the layer that fails.

        A size with which a layer fails and a larger one does not is left out: `least_rows` are those that all run with.
        """
        total = sum(len(sizes) * (1 + len(item.shardings)) for item in classes)
        costs: dict[str, list[LayerCost]] = {item.name: [] for item in classes}
        done = 0
        environments: dict[tuple[bool, int], dict[str, Any]] = {}
        for item in sorted(classes, key=lambda item: item.name in self._real):
            is_real = item.name in self._real
            self._fake_mode, self._source = self._benches[is_real]
            for rows in sizes:
                if (is_real, rows) not in environments:
                    environments[is_real, rows] = self._environment(rows)
            for sharding in (None, *item.shardings):
                self._source.release()
                if sharding is not None:
                    self._source.divide(item.segment.module, sharding)
                too_few: ProfileError | None = None
                found: list[LayerCost] = []
                for rows in sizes:
                    label = f"{item.name} rows {rows}" + (f" tp {sharding.tp_degree}" if sharding else "")
                    progress(label, done, total)
                    done += 1
                    try:
                        found.append(self._cost(item, sharding, rows, environments[is_real, rows]))
                    except ProfileError as error:
                        if found or rows == sizes[-1]:
                            raise (too_few or error) from error
                        too_few = too_few or error
                if too_few is not None and found[0].microbatch_size > self.least_rows:
                    self.least_rows = found[0].microbatch_size
                    self.notes = (f"no plan has microbatches of fewer than {self.least_rows} rows: {too_few.message}",)
                costs[item.name] += found
        self._source.release()
        progress("done", total, total)
        return {
            name: [cost for cost in listed if cost.microbatch_size >= self.least_rows] for name, listed in costs.items()
        }

    def _environment(self, rows: int) -> dict[str, Any]:
        """Return the model's inputs, targets and what is computed from them alone, for a batch of `rows`."""
        args, kwargs = split_arguments(user.example_inputs(self._file, rows))
        given = input_tensors(self._captured.model, args, kwargs)
        variables = variable_names(given)
        tensors = {variables[name]: tensor for name, tensor in given.items()}
        if self._captured.targets:
            listed = named_tensors({"target": user.example_target(self._file, rows)})
            names = target_variables(self._captured, variables.values())
            tensors |= {names[name]: tensor for name, tensor in listed}
        values = {name: self._place(tensor) for name, tensor in tensors.items()}
        target = Target(rows, self._device, self.dtype)
        with self._fake_mode or nullcontext():
            return run_derived(
                self._program,
                self._derived,
                values,
                module_call=self._source.module,
                parameter=self._source.parameter,
                target=target,
            )

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self.dtype if tensor.is_floating_point() else tensor.dtype
        if self._fake_mode is not None:
            with self._fake_mode:
                return torch.empty(tensor.shape, dtype=dtype, device=self._device)
        return tensor.detach().to(self._device, dtype)

    def _cost(self, item: _Class, sharding: Sharding | None, rows: int, environment: dict[str, Any]) -> LayerCost:
        nodes = self._program.nodes[item.segment.start : item.stop]
        if sharding is not None:
            nodes = divided_nodes(self._program, item.segment, item.stop, item.opened, sharding)
        results = outside_results(self._program, item.segment.start, item.stop)
        runner = SegmentRunner(
            item.segment.name,
            [node for node in nodes if not self._made_anew(node)],
            self._program.tensors,
            [name for name in results if name not in self._derived],
            module_call=self._source.module,
            parameter=self._source.parameter,
            target=Target(rows, self._device, self.dtype),
            environment=environment,
            fake_mode=self._fake_mode,
        )
        if sharding is None:
            return class_cost(runner, gpu=self._gpu)
        return class_cost(runner, gpu=self._gpu, tp_degree=sharding.tp_degree, sharding=sharding.name)

    def _made_anew(self, node: Any) -> bool:
        writes = list(node.writes())
        return bool(writes) and all(name in self._derived for name in writes)


def _flops_per_row(costs: list[LayerCost]) -> float:
    smallest = min((cost for cost in costs if cost.tp_degree == 1), key=lambda cost: cost.microbatch_size)
    return smallest.forward_flops / smallest.microbatch_size


def _parameters(model: nn.Module, program: Program) -> tuple[dict[str, Parameter], tuple[tuple[str, ...], ...]]:
    """Return every parameter, buffer and plain tensor that is read by name, and the groups of names that share one."""
    groups: dict[int, list[str]] = {}
    found: dict[str, Parameter] = {}
    persistent = set(model.state_dict(keep_vars=True))
    read = {name for node in program.nodes for name in node.params()}
    named: list[tuple[str, torch.Tensor, bool]] = [
        (n, p, False) for n, p in model.named_parameters(remove_duplicate=False)
    ]
    named += [(n, b, True) for n, b in model.named_buffers(remove_duplicate=False)]
    named += [(n, t, True) for n, t in plain_tensors(model).items() if n in read]
    for name, tensor, is_buffer in named:
        group = groups.setdefault(id(tensor), [])
        found[name] = Parameter(
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            num_bytes=tensor.numel() * tensor.element_size(),
            trainable=tensor.requires_grad,
            buffer=is_buffer,
            persistent=name in persistent or not is_buffer,
            tied_to=group[0] if group else None,
        )
        group.append(name)
    return found, tuple(tuple(group) for group in groups.values() if len(group) > 1)


def _provenance(
    file: ModelFile, captured: Capture, spec: str, device: str, gpu: str | None, dtype: torch.dtype
) -> Provenance:
    args, kwargs = split_arguments(user.example_inputs(file, 1))
    shapes = {name: tuple(tensor.shape) for name, tensor in input_tensors(captured.model, args, kwargs).items()}
    tokens = next((_tokens(captured, name) for name in shapes if _tokens(captured, name)), 0)
    return Provenance(
        model_path=_portable(file.path),
        model_hash=captured.model_hash,
        build_function=file.build_function,
        inputs_function=file.inputs_function,
        torch_version=torch.__version__,
        device=gpu
        or (torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()),
        device_type="cuda" if gpu or device == "cuda" else "cpu",
        gpu=gpu,
        dtype=str(dtype).removeprefix("torch."),
        input_shapes=shapes,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=f"planner profile {spec}",
        tokens_per_row=tokens,
        num_threads=torch.get_num_threads(),
    )


def _portable(path: Path) -> str:
    """Return a path relative to the current folder where it is inside: profiles and plans move with their files."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _tokens(captured: Capture, name: str) -> int:
    """Return the tokens of a row where an input holds them (an integer matrix), else 0."""
    tensor = captured.tensors[str(captured.inputs[name])]
    if len(tensor.shape) != 2 or tensor.dtype.startswith(("float", "bfloat")):
        return 0
    length = tensor.shape[0 if tensor.batch_dim == 1 else 1]
    return length if isinstance(length, int) else 0

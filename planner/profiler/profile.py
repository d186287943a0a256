"""Profiles a model: captures it, divides it into layers, and measures or computes each layer class once."""

import platform
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from planner.arguments import ParamRef, leaves
from planner.cluster import read_gpu
from planner.errors import CaptureError, UsageError
from planner.model_file import ModelFile, load_model_file, split_arguments
from planner.model_profile import LayerClass, LayerCost, ModelProfile, Parameter, Provenance, WholeAt, coupling_notes
from planner.profiler import user_code as user
from planner.profiler.autocast import asked_autocasts
from planner.profiler.buffers import update_notes
from planner.profiler.capture import Capture, capture
from planner.profiler.carried import carried_buffers, carried_notes
from planner.profiler.class_keys import ClassKeys
from planner.profiler.classes import OpenedClass, layer_body, open_class, shardings_of
from planner.profiler.degrees import allowed_by_others, check_degrees, forbidden_at, undivided_at
from planner.profiler.fake import model_dtype
from planner.profiler.hidden import called_whole, drawing_outside
from planner.profiler.in_place import check_in_place
from planner.profiler.inputs import argument_names, input_constants
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
from planner.profiler.notes import batch_norm_notes, degree_notes, hint_notes, loss_notes, noise_notes, whole_notes
from planner.profiler.one_recording import input_tensors
from planner.profiler.plain_tensors import plain_tensors
from planner.profiler.pricing import Pricer, ProfiledClass, Progress
from planner.profiler.recording import Call
from planner.profiler.resets import open_reset
from planner.profiler.scripted import unscripted_functions
from planner.profiler.torch_internals import check_torch
from planner.profiler.tp_rules import applied_rules, check_applied, rules_inside
from planner.program import Program
from planner.sharding import Sharding
from planner.shrink import Shrink, shrink_model_file
from planner.tp_rules import TpRule

MEASURED_MICROBATCH_SIZES = (1, 2, 4, 8)
COMPUTED_MICROBATCH_SIZES = (1, 2, 4)
MEASURED_TP_DEGREES = (1, 2, 4)
COMPUTED_TP_DEGREES = (1, 2, 4, 8)


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
    with asked_autocasts(), unscripted_functions():  # decorators are made as the file is imported
        file = shrink_model_file(load_model_file(model_spec, inputs=inputs), shrink)
        on_gpu = gpu_type is not None or device_name == "cuda"
        target_dtype = getattr(torch, dtype) if dtype else torch.bfloat16 if on_gpu else None
        captured, target_dtype = _capture(file, target_dtype, asked=dtype is not None)
        open_reset(file, captured, target_dtype, blocks)
    trained_on = captured.loss if captured.loss is not None else captured.output
    carried = carried_buffers(
        captured.model, [*captured.calls, *captured.loss_calls], captured.updated_buffers, trained_on
    )
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
    pricer = Pricer(file, captured, with_loss, derived, gpu_type, torch.device(device_name), target_dtype, real)
    costs = pricer.price(classes, sizes, progress)
    classes = [replace(item, shardings=pricer.usable(item)) for item in classes]
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
        carried_buffers=carried,
        called_whole=tuple(whole),
        drawing_outside=tuple(drawing_outside(captured.calls)),
        input_keys={variable: name for name, variable in input_names.items() if variable != name},
        target_dims=tuple(captured.tensors[str(number)].batch_dim for number in captured.targets.values()),
        input_only_values=tuple(sorted(derived - set(program.inputs))),
        loss=loss,
        loss_is_known=not loss_notes(captured),
        least_rows=pricer.least_rows,
        notes=(
            *file.notes,
            *captured.notes,
            *whole_notes(whole),
            *batch_norm_notes(captured.model),
            *hint_notes(captured, ((item.segment.module, item.shardings) for item in classes)),
            *degree_notes(undivided for item in classes for undivided in item.whole),
            *loss_notes(captured),
            *update_notes(captured.model, tuple(b for b in captured.updated_buffers if b not in carried)),
            *carried_notes(carried),
            *coupling_notes(loss, is_known=not loss_notes(captured)),
            *noise_notes(costs),
            *pricer.notes,
        ),
    )


def _capture(file: ModelFile, dtype: torch.dtype | None, *, asked: bool) -> tuple[Capture, torch.dtype | None]:
    """Return the capture and the dtype it is in: the one the model is built in, where a GPU's usual one fails."""
    try:
        return capture(file, dtype=dtype), dtype
    except CaptureError as error:
        if asked or dtype is None:
            raise
        try:
            captured = capture(file)
        except CaptureError:
            raise error from None
        own, usual = (str(item).removeprefix("torch.") for item in (model_dtype(captured.model), dtype))
        note = f"profiled in {own}, the dtype the model is built in, because it fails in {usual}: {error.message}"
        return replace(captured, notes=(*captured.notes, note)), None


def _classes(
    captured: Capture,
    calls: list[Call],
    program: Program,
    segments: list[Segment],
    end: int,
    degrees: tuple[int, ...],
    rules: tuple[TpRule, ...],
) -> tuple[list[ProfiledClass], list[str]]:
    """Return the layer classes in order of first appearance, and the class of every layer."""
    keys = ClassKeys(captured)
    known: dict[Any, ProfiledClass] = {}
    whole_ones: dict[Any, ProfiledClass] = {}
    applied: set[TpRule] = set()
    taken: dict[str, int] = {}
    names: list[str] = []
    for segment in segments:
        is_last = segment is segments[-1]
        members = calls[segment.start : segment.stop]
        styles = rules_inside(captured.model.get_submodule(segment.module), segment.module, rules)
        key = (keys.describe(members, segment.module), is_last, styles)
        if key not in known:
            cost_key = (keys.describe_cost(members, segment.module), is_last, styles)
            position = next(
                i
                for i in range(segment.start, segment.stop)
                if program.nodes[i].kind == "module" and program.nodes[i].target == segment.module
            )
            opened = open_class(captured, calls[position])
            applied |= applied_rules(captured, calls[position], opened, rules)
            shardings, whole = _divisions(captured, program, segment, calls[position], opened, degrees, rules)
            # Its inside is written out only where it is divided: undivided, what counts is the cost.
            alike = whole_ones.get(cost_key) if not shardings else None
            if alike is None:
                base = type(captured.model.get_submodule(segment.module)).__name__
                taken[base] = taken.get(base, 0) + 1
                name = base if taken[base] == 1 else f"{base}_{taken[base]}"
                stop = end if is_last else segment.stop
                alike = ProfiledClass(name, segment, stop, calls[position], opened, shardings, whole, cost_key)
            if not shardings:
                whole_ones[cost_key] = alike
            known[key] = alike
        names.append(known[key].name)
    check_applied(rules, applied, captured.model)
    classes = list({item.name: item for item in known.values()}.values())
    allowed = allowed_by_others([(item.opened, item.whole) for item in classes])
    return [replace(item, whole=_whole_where(item.whole, allowed)) for item in classes], names


def _whole_where(whole: tuple[WholeAt, ...], allowed: set[int]) -> tuple[WholeAt, ...]:
    return tuple(
        WholeAt(tp_degree=item.tp_degree, reason=item.reason) if item.tp_degree in allowed else item for item in whole
    )


def _divisions(
    captured: Capture,
    program: Program,
    segment: Segment,
    call: Call,
    opened: OpenedClass,
    degrees: tuple[int, ...],
    rules: tuple[TpRule, ...],
) -> tuple[tuple[Sharding, ...], tuple[WholeAt, ...]]:
    """Return the ways to divide a layer class, and for each degree without one why every rank holds the whole."""
    read = _parameters_read_beside(program, segment)
    divided = [degree for degree in degrees if degree > 1]
    found = [forbidden_at(opened, degree, captured.model, segment.module) for degree in divided]
    whole = [item for item in found if item is not None]
    shardings = tuple(
        sharding
        for degree, forbidden in zip(divided, found, strict=True)
        if forbidden is None
        for sharding in shardings_of(captured, call, opened, degree, rules=rules, kept_whole=frozenset(read))
    )
    usable = {sharding.tp_degree for sharding in shardings} | {item.tp_degree for item in whole}
    layer = layer_body(captured, call, opened, frozenset(read))
    whole += [undivided_at(opened, layer, degree) for degree in divided if degree not in usable]
    return shardings, tuple(whole)


def _parameters_read_beside(program: Program, segment: Segment) -> set[str]:
    """Return the module's parameters that the layer's glue reads by itself, or that the model returns: relative names.

    They must stay whole.
    """
    prefix = f"{segment.module}."
    read = [name for node in program.nodes[segment.start : segment.stop] for name in node.params()]
    read += [leaf.name for leaf in leaves(program.output) if isinstance(leaf, ParamRef)]
    return {name.removeprefix(prefix) for name in read if name.startswith(prefix)}


def _looks_at_values(item: ProfiledClass, program: Program, whole: Mapping[str, str]) -> bool:
    """Return whether a class calls modules of `whole`, through which fake tensors can't go."""
    nodes = program.nodes[item.segment.start : item.segment.stop]
    targets = [node.target for node in nodes if node.kind == "module"]
    return any(name == target or name.startswith(f"{target}.") for name in whole for target in targets)


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

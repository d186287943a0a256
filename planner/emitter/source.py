"""Puts plan.py together: the plan as a table and as data, the helper section, and the generated stages."""

import ast
import hashlib
import importlib.resources
import json
import pprint
from collections.abc import Iterator, Sequence
from typing import Any

from planner.emitter.check import check_generated, check_header
from planner.emitter.code import input_value, stage_code, tensor_parallel_code, tensor_parallel_name
from planner.emitter.expressions import docstring_text
from planner.emitter.layout import wrap_lines
from planner.emitter.loss_code import stage_counting
from planner.emitter.rows import name_tuple
from planner.emitter.stages import StageCode, stage_codes
from planner.errors import EmitError
from planner.graph import shared_storages
from planner.model_profile import Loss, ModelProfile
from planner.orders import profile_of_plan
from planner.plan import Plan, Stage
from planner.runnable import unrunnable
from planner.units import counted, format_bytes, format_seconds

HASH_LINE = "# plan hash: "
HELPERS = "planner.emitter.runtime"


def emit(plan: Plan, profile: ModelProfile) -> str:
    """Return the source of plan.py, the same for the same plan and profile; EmitError where it can't be written."""
    if profile.provenance.imported_from:
        raise EmitError(
            f"the profile was imported from {profile.provenance.imported_from}: there is no model to write code for",
            hint="profile the model itself: `planner profile model.py`",
        )
    if problem := unrunnable(plan):
        raise EmitError(
            f"no code can be written yet for this plan: it {problem}",
            hint="solve without --theoretical for one that can",
        )
    recorded = [layer.name for layer in profile.layers]
    profile = profile_of_plan(profile, [name for stage in plan.stages for name in stage.layers])
    stages = stage_codes(plan, profile)
    groups = tied_groups(profile)
    tied = frozenset(name for group in groups for name in group)
    imports, helpers = helper_section()
    header = [
        f'"""{docstring_text(_docstring(plan, profile, recorded))}"""',
        "",
        *imports,
        "",
        "PLAN = " + _literal(plan),
    ]
    generated = list(wrap_lines(_generated(plan, profile, stages, groups, tied, recorded)))
    check_header("\n".join(header))
    check_generated("\n".join(generated))
    lines = [
        *header,
        "",
        "",
        "# " + "-" * 100,
        "# Helpers: the same in every plan. The stages follow below.",
        "# " + "-" * 100,
        "",
        helpers,
        "",
    ]
    lines += ["", "# " + "-" * 100, "# This plan.", "# " + "-" * 100, "", ""]
    lines += generated
    text = "\n".join(lines).rstrip() + "\n"
    return f"{text}\n{HASH_LINE}{content_hash(text)}\n"


def content_hash(text: str) -> str:
    """Return a short hash of the text before its hash line: an edited file no longer matches its own."""
    body = text.partition(f"\n{HASH_LINE}")[0]
    return hashlib.sha256(body.rstrip().encode()).hexdigest()[:16]


def tied_groups(profile: ModelProfile) -> list[tuple[str, ...]]:
    """Return the names of every parameter that has several, and of every one that several layers read by one name.

    Where such a parameter lives on several stages, they sum its gradient.
    """
    groups = [group for group in profile.tied if not profile.parameters[group[0]].buffer]
    known = {name for group in groups for name in group}
    alone = [shared.name for shared in shared_storages(profile) if shared.trainable and shared.name not in known]
    return [*groups, *((name,) for name in alone)]


def _generated(
    plan: Plan,
    profile: ModelProfile,
    stages: list[StageCode],
    groups: list[tuple[str, ...]],
    tied: frozenset[str],
    recorded: Sequence[str],
) -> Iterator[str]:
    written: set[str] = set()
    for stage in stages:
        for call in stage.layers:
            if call.sharding is not None and (name := tensor_parallel_name(call)) not in written:
                written.add(name)
                yield from tensor_parallel_code(call.layer_class, call.sharding, name)
                yield ""
                yield ""
    for stage in stages:
        counting = stage_counting(stage, profile)
        yield from stage_code(stage, profile.program, tied, _stage_summary(plan, stage.index, recorded), counting)
        yield ""
        yield ""
    names = [f"Stage{stage.index}" for stage in stages]
    yield f"STAGES = ({', '.join(names)}{',' if len(names) == 1 else ''})"
    written_groups = [name_tuple(group) for group in groups]
    yield f"TIED = ({', '.join(written_groups)}{',' if len(written_groups) == 1 else ''})"
    yield "INPUTS = ("
    rows = plan.microbatch_size
    written = {name for node in profile.program.nodes for name in node.changes()}
    for name in profile.program.inputs:
        tensor, key = profile.program.tensors[name], profile.input_keys.get(name)
        yield f"    {input_value(name, tensor, rows, key, written=name in written)},"
    yield ")"
    yield from _argument_lines(profile)
    dims = profile.target_dims
    yield f"TARGET_DIMS = ({', '.join(map(str, dims))}{',' if len(dims) == 1 else ''})"
    if profile.loss is not None:
        yield "# What `planner verify` should know of the loss: see the profile's notes."
        yield f"LOSS = {_loss_literal(profile.loss)}"


def _loss_literal(loss: Loss) -> dict[str, Any]:
    return {"degree": loss.degree, "coupled": loss.coupled, "ignored": loss.ignored}


def _argument_lines(profile: ModelProfile) -> Iterator[str]:
    """Yield the lines with the model's arguments by position, up to the last that is used, and its constants."""
    keys = [profile.input_keys.get(name, name) for name in profile.program.inputs]
    used = [
        index
        for index, name in enumerate(profile.arguments)
        if any(key == name or key.startswith(f"{name}_") for key in (*keys, *profile.constants))
    ]
    yield f"ARGUMENTS = {name_tuple(profile.arguments[: max(used, default=-1) + 1])}"
    constants = ", ".join(f'"{name}": {value!r}' for name, value in profile.constants.items())
    yield f"CONSTANTS = {{{constants}}}"


def _layers_text(stage: Stage, recorded: Sequence[str]) -> str:
    """Return a stage's layers: the first and the last of neighbours in the recorded order, else each."""
    if len(stage.layers) == 1:
        return stage.layers[0]
    first = recorded.index(stage.layers[0])
    if tuple(recorded[first : first + len(stage.layers)]) != stage.layers:
        return ", ".join(stage.layers)
    return f"{stage.layers[0]} ... {stage.layers[-1]}"


def _stage_summary(plan: Plan, index: int, recorded: Sequence[str]) -> str:
    stage = plan.stages[index]
    layers = _layers_text(stage, recorded)
    gpus = ", ".join(map(str, stage.gpus[:8])) + (" ..." if len(stage.gpus) > 8 else "")
    return f"{docstring_text(layers)} on GPU{'s' if len(stage.gpus) > 1 else ''} {gpus}."


def _docstring(plan: Plan, profile: ModelProfile, recorded: Sequence[str]) -> str:
    rows = [("stage", "layers", "tp", "dp", "recomputed", "time / microbatch", "peak memory")]
    for index, stage in enumerate(plan.stages):
        predicted = plan.prediction.stages[index] if plan.prediction else None
        rows.append(
            (
                str(index),
                _layers_text(stage, recorded) + (f" ({len(stage.layers)})" if len(stage.layers) > 1 else ""),
                str(stage.tp_degree),
                str(stage.dp_degree),
                str(len(stage.recompute)),
                format_seconds(predicted.time_s) if predicted else "-",
                format_bytes(predicted.memory.peak_bytes) if predicted else "-",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = [
        "    " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    summary = (
        f"{profile.name} on {counted(plan.num_gpus, 'GPU')}: {counted(plan.pp_degree, 'stage')}, "
        f"{counted(plan.num_microbatches, 'microbatch', 'microbatches')} of {plan.microbatch_size}, "
        f"schedule {plan.schedule}, data parallel {plan.data_parallel}."
    )
    prediction = []
    if plan.prediction:
        prediction = [
            "",
            (
                f"Predicted: {format_seconds(plan.prediction.step_time_s)} a step, "
                f"{plan.prediction.samples_per_s:.4g} samples/s, "
                f"fullest GPU {format_bytes(plan.prediction.peak_bytes)}, idle {plan.prediction.bubble_fraction:.1%}."
            ),
        ]
    usage = [
        "",
        "Written by planner; read it, import it, own it. It needs torch and nothing else:",
        "",
        "    import plan",
        "    runtime = plan.setup(build_model, loss_fn)",
        "    loss = runtime.step(inputs, target)",
    ]
    return "\n".join([summary, "", *table, *prediction, *usage, ""])


def _literal(plan: Plan) -> str:
    data = json.loads(plan.model_dump_json())
    return pprint.pformat(data, width=118, compact=True, sort_dicts=False)


def helper_section() -> tuple[list[str], str]:
    """Return the merged imports and the text of the helper section, from the files of `planner/emitter/runtime`."""
    folder = importlib.resources.files("planner.emitter").joinpath("runtime")
    order = ast.literal_eval(_constant(folder.joinpath("__init__.py").read_text(encoding="utf-8"), "FILES"))
    plain: set[str] = set()
    named: dict[str, set[str]] = {}
    bodies: list[str] = []
    for stem in order:
        text = folder.joinpath(f"{stem}.py").read_text(encoding="utf-8")
        tree = ast.parse(text)
        lines = text.splitlines()
        drop: set[int] = set()
        title = ""
        for statement in tree.body:
            span = range(statement.lineno - 1, statement.end_lineno or statement.lineno)
            if isinstance(statement, ast.Import):
                plain.update(
                    f"import {alias.name}{f' as {alias.asname}' if alias.asname else ''}" for alias in statement.names
                )
            elif isinstance(statement, ast.ImportFrom):
                if statement.module is not None and not statement.module.startswith(HELPERS):
                    names = {
                        f"{alias.name}{f' as {alias.asname}' if alias.asname else ''}" for alias in statement.names
                    }
                    named.setdefault(statement.module, set()).update(names)
            elif (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and statement is tree.body[0]
            ):
                title = str(statement.value.value).strip()
            else:
                continue
            drop.update(span)
        body = "\n".join(line for number, line in enumerate(lines) if number not in drop).strip()
        comment = "\n".join(f"# {line}".rstrip() for line in title.splitlines())
        bodies.append(f"{comment}\n\n\n{body}" if comment else body)
    imports = sorted(plain) + [
        f"from {module} import {', '.join(sorted(names))}" for module, names in sorted(named.items())
    ]
    if not any(line.startswith("import torch.nn.functional as F") for line in imports):
        imports.append("import torch.nn.functional as F")
    if "import operator" not in imports:
        imports.insert(0, "import operator")
    return list(wrap_lines(_parenthesised(imports))), "\n\n\n".join(bodies)


def _parenthesised(imports: list[str]) -> Iterator[str]:
    for line in imports:
        before, found, names = line.partition(" import ")
        yield f"{before} import ({names})" if found and before.startswith("from ") and len(line) > 110 else line


def _constant(text: str, name: str) -> str:
    for statement in ast.parse(text).body:
        if (
            isinstance(statement, ast.Assign)
            and isinstance(statement.targets[0], ast.Name)
            and statement.targets[0].id == name
        ):
            return ast.unparse(statement.value)
    raise LookupError(name)

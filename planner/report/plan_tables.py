"""A plan for people: its stages, why it is this one, what the others lack. Meaning is in words, never in colour."""

import re

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.plan import Plan
from planner.prediction import MemoryUse
from planner.report.stage_rows import degrees_of, gpus_of, layers_of, span, stage_name, stage_runs
from planner.report.text import layer_ranges, percent, rank_ranges
from planner.report.timeline import timeline
from planner.solver.differences import data_parallel, microbatches
from planner.units import counted, format_bytes, format_count, format_seconds

OWNERS = tuple(MemoryUse.model_fields)
_OPERATION = re.compile(r" \(\w+\)(?=$|;)")  # which operation of the layer a reason is about


def headline(plan: Plan) -> str:
    """Return a priced plan in two lines: how fast, proven how, and its decisions."""
    prediction = plan.prediction
    if prediction is None:
        return f"{_decisions(plan)}\nnot priced"
    speed = [f"step {format_seconds(prediction.step_time_s)}", f"{prediction.samples_per_s:.3g} samples/s"]
    if prediction.tokens_per_s:
        speed.append(f"{format_count(prediction.tokens_per_s)} tokens/s")
    speed.append(f"MFU {'-' if prediction.mfu_fraction is None else percent(prediction.mfu_fraction)}")
    speed.append(proof(plan))
    return f"{', '.join(speed)}\n{_decisions(plan)}"


def proof(plan: Plan) -> str:
    """Return what the solver proved of a plan."""
    if plan.solver is None:
        return "not from the solver"
    if plan.solver.status == "optimal":
        return "proven optimal"
    return f"at most {percent(plan.solver.gap_fraction)} from the optimum"


def _decisions(plan: Plan) -> str:
    tp, dp = (_degrees({getattr(stage, key) for stage in plan.stages}) for key in ("tp_degree", "dp_degree"))
    stages = counted(len(plan.stages), "stage")
    if plan.num_chunks > 1:
        stages = f"{counted(plan.pp_degree, 'group')} of {counted(plan.num_chunks, 'stage')}"
    parts = [
        f"{stages} x tp {tp} x dp {dp} on {counted(plan.num_gpus, 'GPU')}",
        f"schedule {plan.schedule}",
        f"{microbatches(plan)} per replica",
        f"{counted(plan.global_batch_size, 'sample')} per step",
        *([f"data parallel {data_parallel(plan)}"] if plan.dp_degree > 1 else []),
        f"{plan.optimizer}, {plan.precision}",
    ]
    return ", ".join(parts)


def _degrees(found: set[int]) -> str:
    return str(*found) if len(found) == 1 else f"{min(found)}-{max(found)}"


def plan_table(plan: Plan) -> RenderableType:
    """Return the plan's headline and a row for each stage; of many stages, for each run of those that are alike."""
    table = Table(box=box.SIMPLE)
    table.add_column("stage", justify="right")
    table.add_column("layers", overflow="fold")
    table.add_column("tp x dp")
    table.add_column("GPUs")
    shown = _differing(plan)
    for name in shown:
        table.add_column(name)
    table.add_column("recomputed", justify="right")
    for name in ("forward", "backward", "peak memory"):
        table.add_column(name, justify="right")
    for run in stage_runs(plan):
        stage = plan.stages[run[0]]
        priced = [plan.prediction.stages[index] for index in run] if plan.prediction else []
        table.add_row(
            stage_name(run),
            layers_of(plan, run),
            degrees_of(plan, run),
            gpus_of(plan, run),
            *(cells[run[0]] for cells in shown.values()),
            f"{len(stage.recompute)} of {len(stage.layers)}",
            span((p.forward_time_s for p in priced), format_seconds) if priced else "-",
            span((p.backward_time_s for p in priced), format_seconds) if priced else "-",
            span((p.memory.peak_bytes for p in priced), _bytes) if priced else "-",
        )
    lines = (*sharding_lines(plan), *whole_lines(plan), *scaled_lines(plan))
    return Group(Text(headline(plan)), table, *(Text(line) for line in lines))


def _bytes(count: float) -> str:
    return format_bytes(int(count))


def _differing(plan: Plan) -> dict[str, list[str]]:
    """Return, by the name of a column, what is told of every stage only where stages differ in it."""
    columns = {
        "GPU type": [stage.gpu for stage in plan.prediction.stages] if plan.prediction else [""] * len(plan.stages),
        "rows": [str(stage.microbatch_size) for stage in plan.stages],
    }
    return {name: cells for name, cells in columns.items() if len(set(cells)) > 1 or " + " in cells[0]}


def scaled_lines(plan: Plan) -> list[str]:
    """Return a line that tells which GPU types no profile is of."""
    used = {name for stage in plan.prediction.stages for name in stage.gpu.split(" + ")} if plan.prediction else {""}
    types = ", ".join(name for name in plan.origin.scaled_gpus if name in used or "" in used)
    return [f"times on {types} are scaled by roofline from those of another GPU type"] if types else []


def sharding_lines(plan: Plan) -> list[str]:
    """Return a line for each way in which stages divide their layer classes, as the profile names it."""
    found: dict[str, list[int]] = {}
    for index, stage in enumerate(plan.stages):
        chosen = [f"{name} as {way}" for name, way in stage.shardings.items() if way != "replicated"]
        if stage.tp_degree > 1 and chosen:
            found.setdefault(", ".join(chosen), []).append(index)
    return [f"divided on stage {rank_ranges(stages)}: {text}" for text, stages in found.items()]


def whole_lines(plan: Plan) -> list[str]:
    """Return a line for each reason why every tensor-parallel rank holds something whole, with what that is."""
    alike: dict[tuple[str, tuple[str, ...], int], list[str]] = {}  # modules of the same layers, as large
    for part in plan.prediction.whole if plan.prediction else ():
        key = (_OPERATION.sub("", part.reason), part.layers, part.param_count)
        alike.setdefault(key, []).append(part.module)
    found: dict[str, list[str]] = {}
    for (reason, layers, size), modules in alike.items():
        inside = [module for module in modules if module]
        what = f"{', '.join(inside)} of {layer_ranges(layers)}" if inside else layer_ranges(layers)
        each = " each" if len(layers) * len(modules) > 1 else ""
        found.setdefault(reason, []).append(f"{what} ({format_count(size)} parameters{each})")
    return [f"whole on every tensor-parallel rank: {'; '.join(listed)}: {reason}" for reason, listed in found.items()]


def memory_table(plan: Plan) -> Table:
    """Return the peak memory of every device group's GPUs by owner; a group may hold several stages."""
    table = Table(box=box.SIMPLE, title="parameters and peak memory of one GPU, by owner", title_justify="left")
    table.add_column("stage", justify="right")
    for name in ("parameters", *OWNERS, "peak_bytes"):
        table.add_column(name.removesuffix("_bytes"), justify="right")
    assert plan.prediction is not None
    groups = {stages[0]: stages for stages in plan.groups}
    for run in stage_runs(plan):
        held = [groups[index] for index in run if index in groups]  # other stages are in the row of their group's first
        if not held:
            continue
        stages = [plan.prediction.stages[group[0]] for group in held]
        count = span((stage.param_count for stage in stages), lambda value: format_count(int(value)))
        cells = [span((getattr(stage.memory, name) for stage in stages), _bytes) for name in (*OWNERS, "peak_bytes")]
        table.add_row(rank_ranges(sorted(stage for group in held for stage in group)), count, *cells)
    return table


_TIMES = {
    "forward": "forward_time_s",
    "backward": "backward_time_s",
    "of which weights": "weight_time_s",
    "of which recompute": "recompute_time_s",
    "of which tensor parallel": "tensor_parallel_time_s",
    "send": "send_time_s",
    "data parallel / step": "data_parallel_time_s",
    "optimizer / step": "optimizer_time_s",
    "busy / step": "busy_time_s",
}


def _seconds(value: float) -> str:
    return format_seconds(value) if value else "-"


def time_table(plan: Plan) -> Table:
    """Return where every stage's time goes: per microbatch, and once per step."""
    table = Table(box=box.SIMPLE, title="time of every stage", title_justify="left")
    table.add_column("stage", justify="right")
    assert plan.prediction is not None
    split = any(stage.weight_time_s for stage in plan.prediction.stages)
    times = {label: name for label, name in _TIMES.items() if split or name != "weight_time_s"}
    for label in times:
        table.add_column(label, justify="right")
    for run in stage_runs(plan):
        stages = [plan.prediction.stages[index] for index in run]
        cells = [span((getattr(stage, name) for stage in stages), _seconds) for name in times.values()]
        table.add_row(stage_name(run), *cells)
    return table


def findings(plan: Plan) -> list[str]:
    """Return in sentences what bounds the plan: bottleneck, idle time, communication, memory, proof."""
    prediction = plan.prediction
    assert prediction is not None
    stages, step_s = prediction.stages, prediction.step_time_s
    slow = prediction.bottleneck_stage
    mean_s = sum(stage.time_s for stage in stages) / len(stages)
    over = stages[slow].time_s / mean_s - 1 if mean_s else 0.0
    full = max(range(len(stages)), key=lambda index: (stages[index].memory.peak_bytes, -index))
    owners = sorted(OWNERS, key=lambda name: -getattr(stages[full].memory, name))[:3]
    group = next(group for group in plan.groups if full in group)
    fullest = f"stage {full} is" if len(group) == 1 else f"stages {rank_ranges(group)} together are"
    exposed_s = prediction.exposed_comm_time_s
    most = [f"{name.removesuffix('_bytes')} {format_bytes(getattr(stages[full].memory, name))}" for name in owners]
    beside = f", {percent(over)} more than the average stage" if len(stages) > 1 else ""
    bottleneck = (
        f"Bottleneck: stage {slow} ({layer_ranges(plan.stages[slow].layers)}) takes "
        f"{format_seconds(stages[slow].time_s)} per microbatch{beside}."
    )
    exposed = (
        f"Exposed communication: {format_seconds(exposed_s)} of {format_seconds(step_s)} "
        f"({percent(exposed_s / step_s if step_s else 0.0)}) would be saved if communication cost nothing."
    )
    memory = (
        f"Memory: {fullest} fullest with {format_bytes(stages[full].memory.peak_bytes)} per GPU, "
        f"most of it {', '.join(most)}."
    )
    bubble = f"Bubble: the GPUs are idle {percent(prediction.bubble_fraction)} of the step."
    lines = [bottleneck, bubble, exposed, memory]
    if plan.solver is not None:
        priced = counted(plan.solver.num_priced, "plan was", "plans were")
        lines.append(
            f"Proof: {proof(plan)}; no plan takes less than {format_seconds(plan.solver.lower_bound_s)} "
            f"(gap {percent(plan.solver.gap_fraction)}){_under(plan)}; {priced} priced."
        )
    return lines


def _under(plan: Plan) -> str:
    """Return the constraints that people gave the solver, as a part of a sentence; nothing where there were none."""
    asked = plan.solver.asked if plan.solver is not None else None
    return f" under {', '.join(asked.constraints)}" if asked is not None and asked.constraints else ""


def runners_up_table(plan: Plan) -> Table:
    """Return the plans that lost, and why."""
    table = Table(box=box.SIMPLE, title="runners-up", title_justify="left")
    for name, justify in (("plan", "left"), ("step", "right"), ("peak memory", "right"), ("why it lost", "left")):
        table.add_column(name, justify="right" if justify == "right" else "left", overflow="fold")
    for other in plan.runners_up:
        unsure = f" (the best of its kind within {percent(other.gap_fraction)})" if other.gap_fraction else ""
        table.add_row(
            other.summary, format_seconds(other.step_time_s), format_bytes(other.peak_bytes), f"{other.reason}{unsure}"
        )  # fmt: skip
    return table


def explain(plan: Plan) -> tuple[RenderableType, ...]:
    """Return why this plan: stages, findings, time and memory by owner, the schedule drawn, and the runners-up."""
    if plan.prediction is None:
        return (plan_table(plan), Text("This plan carries no prediction: solve again to have it priced."))
    parts: list[RenderableType] = [
        plan_table(plan),
        Text("\n".join(findings(plan))),
        time_table(plan),
        memory_table(plan),
        Text(timeline(plan), no_wrap=True),
    ]
    if plan.runners_up:
        parts.append(runners_up_table(plan))
    return tuple(parts)

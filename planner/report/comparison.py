"""Plans side by side: what each decides and takes, and where the seconds go that set it apart from the first."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from planner.cluster import Cluster
from planner.plan import Plan
from planner.report.json_objects import plan_json
from planner.report.text import percent
from planner.solver.differences import (
    data_parallel,
    degrees,
    headroom,
    microbatches,
    num_gpus,
    parts,
    reason,
    slower_fraction,
)
from planner.units import counted, format_bytes, format_seconds

CAUSES = 3  # parts that are named as the reason

Named = tuple[str, Plan]


def comparison_table(plans: Sequence[Named], cluster: Cluster) -> tuple[RenderableType, ...]:
    """Return priced plans as columns of a table, then a sentence for each but the first: how much slower, and why."""
    step = plans[0][1]
    samples = counted(step.global_batch_size, "sample")
    title = f"on {cluster.name}, {samples} per step, {step.optimizer}, {step.precision}"
    table = Table(box=box.SIMPLE, title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for name, _ in plans:
        table.add_column(name, justify="right", overflow="fold")
    for label, cells in _rows([plan for _, plan in plans], cluster):
        table.add_row(label, *cells)
    first, one = plans[0]
    lines = [f"{name} against {first}: {reason(plan, one, most=CAUSES)}" for name, plan in plans[1:]]
    lines += [f"{name} does not fit: {_overflow(plan, cluster)}" for name, plan in plans if _spare(plan, cluster) < 0]
    return table, Text("\n".join(lines))


def _rows(plans: Sequence[Plan], cluster: Cluster) -> list[tuple[str, list[str]]]:
    predictions = [plan.prediction for plan in plans if plan.prediction is not None]
    found = [parts(plan) for plan in plans]
    against = ["-", *(f"{100 * slower_fraction(plan, plans[0]):+.3g} %" for plan in plans[1:])]
    rows: list[tuple[str, list[str]]] = [
        ("degrees", [degrees(plan) for plan in plans]),
        ("GPUs", [str(num_gpus(plan)) for plan in plans]),
        *([("GPU types of the stages", types)] if any(types := [_types(plan) for plan in plans]) else []),
        ("layers of the stages", [_sizes(plan) for plan in plans]),
        ("schedule", [plan.schedule for plan in plans]),
        ("microbatches", [microbatches(plan) for plan in plans]),
        ("data parallel", [data_parallel(plan) if plan.dp_degree > 1 else "-" for plan in plans]),
        (
            "layers recomputed",
            [f"{sum(len(stage.recompute) for stage in plan.stages)} of {len(plan.layers)}" for plan in plans],
        ),
        ("step", [format_seconds(p.step_time_s) for p in predictions]),
        ("against the first", against),
        ("samples/s", [f"{p.samples_per_s:.3g}" for p in predictions]),
        ("MFU", ["-" if p.mfu_fraction is None else percent(p.mfu_fraction) for p in predictions]),
        ("bubble", [percent(p.bubble_fraction) for p in predictions]),
        ("exposed communication", [format_seconds(p.exposed_comm_time_s) for p in predictions]),
        ("peak memory", [format_bytes(p.peak_bytes) for p in predictions]),
        ("fits", [_fits(plan, cluster) for plan in plans]),
        ("the average GPU's step:", [""] * len(plans)),
    ]
    for name in found[0]:
        cells = [format_seconds(part[name]) if part[name] else "-" for part in found]
        if any(part[name] for part in found):
            rows.append((f"  {name}", cells))
    return rows


def _sizes(plan: Plan) -> str:
    """Return how many layers the stages have: '9, 3 x 8'."""
    runs = [(size, len(list(alike))) for size, alike in groupby(len(stage.layers) for stage in plan.stages)]
    return ", ".join(f"{count} x {size}" if count > 1 else str(size) for size, count in runs)


def _types(plan: Plan) -> str:
    """Return the GPU types of the stages, in order; nothing where they are of one."""
    predicted = plan.prediction.stages if plan.prediction else ()
    return ", ".join(gpu for gpu, _ in groupby(stage.gpu for stage in predicted))


def _spare(plan: Plan, cluster: Cluster) -> int:
    return headroom(plan, cluster)[1]


def _fits(plan: Plan, cluster: Cluster) -> str:
    spare = _spare(plan, cluster)
    return f"yes, {format_bytes(spare)} free" if spare >= 0 else f"no, {format_bytes(-spare)} over"


def _overflow(plan: Plan, cluster: Cluster) -> str:
    stage, spare = headroom(plan, cluster)
    assert plan.prediction is not None
    need = plan.prediction.stages[stage].memory.peak_bytes
    return f"stage {stage} needs {format_bytes(need)} per GPU, the GPUs have {format_bytes(need + spare)}"


def comparison_json(plans: Sequence[Named], cluster: Cluster) -> dict[str, Any]:
    """Return priced plans as JSON data: each plan's object with what sets it apart from the first."""
    one = plans[0][1]
    return {
        "plans": [
            {
                "name": name,
                "num_gpus": num_gpus(plan),
                "slower_fraction": slower_fraction(plan, one),
                "reason": None if plan is one else reason(plan, one, most=CAUSES),
                "fits": _spare(plan, cluster) >= 0,
                "headroom_bytes": _spare(plan, cluster),
                "exposed_comm_time_s": None if plan.prediction is None else plan.prediction.exposed_comm_time_s,
                "parts_s": parts(plan),
                **plan_json(plan),
            }
            for name, plan in plans
        ]
    }

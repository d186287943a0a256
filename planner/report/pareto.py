"""The Pareto front of step time, memory and GPUs, for people and for scripts."""

from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.cluster import Cluster
from planner.report.text import percent
from planner.solver.differences import headroom, summary
from planner.solver.pareto import Front, Point
from planner.units import format_bytes, format_seconds


def pareto_table(front: Front, cluster: Cluster) -> RenderableType:
    """Return the points of the front as a table, the fastest first."""
    title = "step time against memory and GPUs: no plan beats one of these in all three"
    table = Table(box=box.SIMPLE, title=title, title_justify="left")
    for name in ("GPUs", "step", "slower", "GPU-s / step", "peak memory", "free"):
        table.add_column(name, justify="right")
    table.add_column("plan", overflow="fold")
    fastest = min(point.costs[1] for point in front.points)
    for point in front.points:
        gpus, step_s, peak = point.costs
        unsure = f" (at most {percent(point.gap_fraction)} from the best)" if point.gap_fraction else ""
        table.add_row(
            str(gpus),
            format_seconds(step_s),
            percent(step_s / fastest - 1) if fastest else "-",
            f"{gpus * step_s:.3g}",
            format_bytes(peak),
            format_bytes(headroom(point.plan, cluster)[1]),
            summary(point.plan) + unsure,
        )
    lines = [] if front.is_complete else [Text("ended before all points were tried")]
    return Group(table, *lines)


def pareto_json(front: Front, cluster: Cluster) -> dict[str, Any]:
    """Return the front as JSON data."""
    return {
        "is_complete": front.is_complete,
        "points": [_point_json(point, cluster) for point in front.points],
    }


def _point_json(point: Point, cluster: Cluster) -> dict[str, Any]:
    plan = point.plan
    gpus, step_s, peak = point.costs
    return {
        "num_gpus": gpus,
        "step_time_s": step_s,
        "gap_fraction": point.gap_fraction,
        "peak_bytes": peak,
        "headroom_bytes": headroom(plan, cluster)[1],
        "summary": summary(plan),
        "pp_degree": plan.pp_degree,
        "tp_degree": plan.tp_degree,
        "dp_degree": plan.dp_degree,
        "num_microbatches": plan.num_microbatches,
        "microbatch_size": plan.microbatch_size,
        "schedule": plan.schedule,
        "data_parallel": plan.data_parallel,
        "stages": [{"layers": list(stage.layers), "recompute": list(stage.recompute)} for stage in plan.stages],
    }

"""Rows of tables with a row for each stage: those of plans of many stages stand for runs of stages that are alike."""

from collections.abc import Callable, Iterable
from itertools import groupby

from planner.plan import Plan
from planner.report.text import layer_ranges, rank_ranges

MOST_ROWS = 16  # stages: beyond, one row may stand for several


def stage_runs(plan: Plan) -> list[range]:
    """Return the stages in order, neighbours that decide the same together where the plan has many."""
    if len(plan.stages) <= MOST_ROWS:
        return [range(index, index + 1) for index in range(len(plan.stages))]
    runs = []
    for _, alike in groupby(range(len(plan.stages)), key=lambda index: _decided(plan, index)):
        found = list(alike)
        runs.append(range(found[0], found[-1] + 1))
    return runs


def _decided(plan: Plan, index: int) -> tuple[object, ...]:
    stage = plan.stages[index]
    gpu = plan.prediction.stages[index].gpu if plan.prediction else ""
    shards = stage.num_shards(plan.data_parallel)
    counts = (len(stage.layers), len(stage.recompute), len(stage.gpus))
    return stage.tp_degree, stage.dp_degree, shards, stage.microbatch_size, gpu, *counts


def stage_name(run: range) -> str:
    """Return what a row is of: '3', or '3-9'."""
    return str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"


def layers_of(plan: Plan, run: range) -> str:
    """Return the layers of a run: 'layers.4-19 (2 each)'."""
    text = layer_ranges([name for index in run for name in plan.stages[index].layers])
    return text if len(run) == 1 else f"{text} ({len(plan.stages[run[0]].layers)} each)"


def gpus_of(plan: Plan, run: range) -> str:
    """Return the ranks of a run, each once."""
    text = rank_ranges(list(dict.fromkeys(rank for index in run for rank in plan.stages[index].gpus)))
    return text if len(run) == 1 else f"{text} ({len(plan.stages[run[0]].gpus)} each)"


def degrees_of(plan: Plan, run: range) -> str:
    """Return the degrees of a run: '2 x 8', and over how many replicas where it shards over a part of them."""
    stage = plan.stages[run[0]]
    shards = stage.num_shards(plan.data_parallel)
    usual = stage.dp_degree if plan.data_parallel == "sharded" else 1
    return f"{stage.tp_degree} x {stage.dp_degree}" + (f", sharded over {shards}" if shards != usual else "")


def span(values: Iterable[float], show: Callable[[float], str]) -> str:
    """Return numbers for people: the one that all are, or the least and the most of them."""
    found = list(values)
    least, most = show(min(found)), show(max(found))
    return least if least == most else f"{least} - {most}"

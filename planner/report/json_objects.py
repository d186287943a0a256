"""Plans and solutions as the JSON objects that scripts rely on."""

from typing import Any

from planner.plan import Plan
from planner.solver.solution import Solution


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return a priced plan as JSON data; keys are part of the command line's contract."""
    prediction, solver = plan.prediction, plan.solver
    return {
        "status": solver.status if solver else None,
        "step_time_s": prediction.step_time_s if prediction else None,
        "lower_bound_s": solver.lower_bound_s if solver else None,
        "gap_fraction": solver.gap_fraction if solver else None,
        "samples_per_s": prediction.samples_per_s if prediction else None,
        "tokens_per_s": prediction.tokens_per_s if prediction else None,
        "mfu_fraction": prediction.mfu_fraction if prediction else None,
        "bubble_fraction": prediction.bubble_fraction if prediction else None,
        "bottleneck_stage": prediction.bottleneck_stage if prediction else None,
        "peak_bytes": prediction.peak_bytes if prediction else None,
        "heaviest_stage": prediction.heaviest_stage if prediction else None,
        "max_param_count": max(stage.param_count for stage in prediction.stages) if prediction else None,
        "global_batch_size": plan.global_batch_size,
        "num_gpus": plan.num_gpus,
        "pp_degree": plan.pp_degree,
        "num_chunks": plan.num_chunks,
        "tp_degree": plan.tp_degree,
        "dp_degree": plan.dp_degree,
        "num_microbatches": plan.num_microbatches,
        "schedule": plan.schedule,
        "data_parallel": plan.data_parallel,
        "stages": [
            {
                "layers": list(stage.layers),
                "tp_degree": stage.tp_degree,
                "dp_degree": stage.dp_degree,
                "shard_degree": stage.num_shards(plan.data_parallel),
                "microbatch_size": stage.microbatch_size,
                "recompute": list(stage.recompute),
                "shardings": dict(stage.shardings),
                "gpus": list(stage.gpus),
                "gpu": (prediction.stages[index].gpu or None) if prediction else None,
                "param_count": prediction.stages[index].param_count if prediction else None,
                "time_s": prediction.stages[index].time_s if prediction else None,
                "peak_bytes": prediction.stages[index].memory.peak_bytes if prediction else None,
                "memory": prediction.stages[index].memory.model_dump() if prediction else None,
            }
            for index, stage in enumerate(plan.stages)
        ],
        "whole": [part.model_dump(mode="json") for part in prediction.whole] if prediction else [],
        "runners_up": [runner_up.model_dump() for runner_up in plan.runners_up],
    }


def solution_json(solution: Solution) -> dict[str, Any]:
    """Return a solution as JSON data: the plan's object, or the conflict and the repairs."""
    if solution.plan is not None:
        return plan_json(solution.plan)
    conflict = solution.conflict
    return {
        "status": solution.status,
        "conflict": None
        if conflict is None
        else {
            "constraint": conflict.constraint,
            "message": conflict.message,
            "least_peak_bytes": conflict.least_peak_bytes,
            "available_bytes": conflict.available_bytes,
            "layers": list(conflict.layers),
            "between": list(conflict.between),
        },
        "repairs": [
            {
                "description": repair.description,
                "step_time_s": repair.step_time_s,
                "gap_fraction": repair.gap_fraction,
                "summary": repair.summary,
                "instead": repair.instead,
            }
            for repair in solution.repairs
        ],
    }

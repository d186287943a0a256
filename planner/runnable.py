"""What the runtime of an emitted plan can't run yet. Such plans are priced, shown and compared; no code is written."""

from planner.plan import EMITTED_SCHEDULES, Plan


def unrunnable(plan: Plan) -> str | None:
    """Return what of a plan the runtime can't run yet, as the rest of 'the plan ...'; None where it can run it all."""
    if plan.schedule not in EMITTED_SCHEDULES:
        return f"has schedule {plan.schedule}; the runtime has {' and '.join(EMITTED_SCHEDULES)}"
    for key in ("tp_degree", "dp_degree"):
        degrees = [getattr(stage, key) for stage in plan.stages]
        if len(set(degrees)) > 1:
            other = next(index for index, degree in enumerate(degrees) if degree != degrees[0])
            return f"has stages of different degrees: {key} {degrees[0]} on stage 0, {degrees[other]} on stage {other}"
    for index, stage in enumerate(plan.stages):
        shards = stage.num_shards(plan.data_parallel)
        if shards != (stage.dp_degree if plan.data_parallel == "sharded" else 1):
            return (
                f"shards stage {index} over {shards} of {stage.dp_degree} replicas, data_parallel {plan.data_parallel}"
            )
        for key in ("expert_degree", "context_degree"):
            if getattr(stage, key) > 1:
                return f"has {key} {getattr(stage, key)} on stage {index}"
    types = dict.fromkeys(stage.gpu for stage in plan.prediction.stages) if plan.prediction else {}
    if len(types) > 1 or any(" + " in name for name in types):
        return f"runs on GPUs of several types ({', '.join(types)})"
    return None

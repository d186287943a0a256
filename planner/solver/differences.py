"""What sets plans apart: where the seconds of a step go, and in words why one plan is slower than another."""

from collections.abc import Callable

from planner.cluster import Cluster
from planner.plan import Plan, Stage
from planner.units import counted, format_seconds

SAME = 1e-6  # relative: a step that takes longer by less is as fast
LEAST_CAUSE = 0.02  # of a difference: what makes up less of it is not named
NOISE = 1e-12  # of a step: what sums of floating-point numbers differ by
WAITING = "waiting in the pipeline"


def step_time_s(plan: Plan) -> float:
    """Return the predicted step time of a priced plan."""
    assert plan.prediction is not None
    return plan.prediction.step_time_s


def num_gpus(plan: Plan) -> int:
    """Return how many GPUs a plan uses."""
    return len({gpu for stage in plan.stages for gpu in stage.gpus})


def degrees(plan: Plan) -> str:
    """Return a plan's degrees: 'pp 4 x tp 2 x dp 1-2' where stages differ."""
    chunks = len(plan.stages) // plan.pp_degree
    pp = f"pp {plan.pp_degree}" + (f" of {chunks} chunks" if chunks > 1 else "")
    return f"{pp} x tp {_span(plan, lambda s: s.tp_degree)} x dp {_span(plan, lambda s: s.dp_degree)}"


def microbatches(plan: Plan) -> str:
    """Return a plan's microbatches: '32 microbatches of 1'."""
    count = counted(plan.num_microbatches, "microbatch", "microbatches")
    return f"{count} of {_span(plan, lambda s: s.microbatch_size)}"


def _span(plan: Plan, number: Callable[[Stage], int]) -> str:
    least, most = min(map(number, plan.stages)), max(map(number, plan.stages))
    return str(least) if least == most else f"{least}-{most}"


def data_parallel(plan: Plan) -> str:
    """Return how a plan's replicas hold states: 'replicated', 'sharded', 'sharded over 8 of 64'."""
    found = [(stage.num_shards(plan.data_parallel), stage.dp_degree) for stage in plan.stages if stage.dp_degree > 1]
    if all(shards == 1 for shards, _ in found):
        return "replicated"
    if all(shards == replicas for shards, replicas in found):
        return "sharded"
    ways = dict.fromkeys(f"{shards} of {replicas}" for shards, replicas in found)
    return f"sharded over {' and '.join(ways)}" if len(ways) < 3 else "sharded over some of the replicas"


def summary(plan: Plan) -> str:
    """Return a plan's decisions in one line."""
    mode = f", {data_parallel(plan)}" if plan.dp_degree > 1 else ""
    schedule = f", {plan.schedule}" if plan.pp_degree > 1 else ""
    remade = sum(len(stage.recompute) for stage in plan.stages)
    recompute = f", {counted(remade, 'layer')} recomputed" if remade else ""
    return f"{degrees(plan)}{schedule}{mode}, {microbatches(plan)}{recompute}"


def parts(plan: Plan) -> dict[str, float]:
    """Return where the step of the average GPU goes, in seconds that sum to the step time."""
    assert plan.prediction is not None
    m = plan.num_microbatches
    found = dict.fromkeys(
        (
            "computing",
            "recomputing activations",
            "tensor-parallel communication",
            "data-parallel communication",
            "running the optimizer",
        ),
        0.0,
    )
    for stage, priced in zip(plan.stages, plan.prediction.stages, strict=True):
        share = len(stage.gpus) / num_gpus(plan)
        others = {
            "recomputing activations": m * priced.recompute_time_s,
            "tensor-parallel communication": m * priced.tensor_parallel_time_s,
            "data-parallel communication": priced.data_parallel_time_s,
            "running the optimizer": priced.optimizer_time_s,
        }
        found["computing"] += share * max(0.0, priced.busy_time_s - sum(others.values()))
        for name, seconds in others.items():
            found[name] += share * seconds
    waiting = step_time_s(plan) - sum(found.values())
    found[WAITING] = waiting if waiting > NOISE * step_time_s(plan) else 0.0
    return found


def headroom(plan: Plan, cluster: Cluster) -> tuple[int, int]:
    """Return the stage with the least memory to spare, and how many bytes per GPU: negative where it does not fit."""
    assert plan.prediction is not None
    spare = [
        min(cluster.gpu_at(rank).memory for rank in stage.gpus) - priced.memory.peak_bytes
        for stage, priced in zip(plan.stages, plan.prediction.stages, strict=True)
    ]
    return spare.index(min(spare)), min(spare)


def slower_fraction(plan: Plan, other: Plan) -> float:
    """Return by how much of its step a plan is slower than another; negative where it is faster."""
    return step_time_s(plan) / step_time_s(other) - 1 if step_time_s(other) else 0.0


def reason(plan: Plan, other: Plan, *, most: int = 1) -> str:
    """Return by how much a plan is slower or faster than another, and the `most` parts that make up most of it."""
    share = slower_fraction(plan, other)
    if abs(share) < SAME:
        return "as fast"
    sign, word, amount = (1, "slower", "more") if share > 0 else (-1, "faster", "less")
    theirs, ours = parts(plan), parts(other)
    changes = sorted(((sign * (theirs[name] - ours[name]), name) for name in theirs), reverse=True)
    least = LEAST_CAUSE * abs(step_time_s(plan) - step_time_s(other))
    causes = [f"{format_seconds(seconds)} {amount} {name}" for seconds, name in changes[:most] if seconds > least]
    text = f"{100 * abs(share):.3g} % {word}{': ' if causes else ''}{', '.join(causes)}"
    seconds, name = changes[-1]
    if most > 1 and -seconds > least:
        text += f"; but {format_seconds(-seconds)} {'less' if share > 0 else 'more'} {name}"
    return text

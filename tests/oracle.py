"""The brute force: every plan of a small problem, each priced by `cost.evaluate`. Shares no code with the solver."""

from collections.abc import Iterator
from itertools import combinations, product

from strategies import make_plan

from planner.cluster import Cluster
from planner.cost import Pricer
from planner.errors import UsageError
from planner.model_profile import ModelProfile
from planner.plan import Plan, Schedule


def all_plans(
    profile: ModelProfile,
    num_gpus: int,
    global_batch_size: int,
    *,
    pp_degrees: set[int] | None = None,
    num_microbatches: int | None = None,
    recompute: bool = True,
    fewer: bool = False,
    theoretical: bool = False,
) -> Iterator[Plan]:
    """Yield every plan on all GPUs, or on `fewer` too (adamw, fp32), in no order of merit.

    Fewer microbatches than stages where their number is given. `theoretical` yields all schedules and groups of shards.
    """
    names = [layer.name for layer in profile.layers]
    remades = subsets(names) if recompute else [()]
    for pp, tp, dp in degrees(num_gpus, fewer=fewer):
        if pp > len(names) or (pp_degrees is not None and pp not in pp_degrees):
            continue
        for m in range(1, global_batch_size + 1):
            if global_batch_size % (m * dp) or num_microbatches not in (None, m):
                continue
            for (schedule, chunks), shards, shardings, remade in product(
                schedules(pp, m, len(names), theoretical=theoretical, filled=num_microbatches is not None),
                all_shards(dp) if theoretical else ([None, dp] if dp > 1 else [None]),
                all_shardings(profile, tp),
                remades,
            ):
                for cuts in combinations(range(1, len(names)), pp * chunks - 1):
                    plan = make_plan(
                        profile,
                        cuts,
                        m=m,
                        rows=global_batch_size // m // dp,
                        tp=tp,
                        dp=dp,
                        schedule=schedule,
                        data_parallel="sharded" if shards else "replicated",
                        optimizer="adamw",
                        recompute=remade,
                        shardings=shardings,
                        groups=pp,
                    )
                    if shards not in (None, dp):
                        stages = [stage.model_copy(update={"shard_degree": shards}) for stage in plan.stages]
                        plan = plan.model_copy(update={"stages": tuple(stages)})
                    yield plan
                    if pp > 1 and dp > 1:
                        yield interleaved(plan)


def schedules(pp: int, m: int, num_layers: int, *, theoretical: bool, filled: bool) -> list[tuple[Schedule, int]]:
    """Return schedules and numbers of chunks; gpipe alone where there are fewer microbatches than stages."""
    found: list[tuple[Schedule, int]] = [("1f1b", 1), ("gpipe", 1)]
    if theoretical and pp > 1:
        found += [("interleaved-1f1b", chunks) for chunks in range(2, num_layers // pp + 1)]
        found += [("zero-bubble", chunks) for chunks in range(1, num_layers // pp + 1)]
        found += [("zbv", 2)] if 2 * pp <= num_layers else []
    return found if m >= pp or filled else [("gpipe", 1)]


def all_shards(dp: int) -> list[int | None]:
    """Return over how many replicas states are shared: none of them (None), or groups of any size."""
    return [None, *(size for size in range(2, dp + 1) if dp % size == 0)]


def interleaved(plan: Plan) -> Plan:
    """Return the plan with the stages of a replica on neighbouring GPUs instead of the replicas of a stage."""
    pp, tp = plan.pp_degree, plan.tp_degree
    stages = []
    for stage in plan.stages:
        index = stage.gpus[0] // (tp * stage.dp_degree)
        gpus = [(d * pp + index) * tp + t for d in range(stage.dp_degree) for t in range(tp)]
        stages.append(stage.model_copy(update={"gpus": tuple(gpus)}))
    return plan.model_copy(update={"stages": tuple(stages)})


def degrees(num_gpus: int, *, fewer: bool = False) -> list[tuple[int, int, int]]:
    """Return every (pp, tp, dp) that multiplies to the GPUs, or to fewer of them too."""
    counts = range(1, num_gpus + 1)
    every = [(pp, tp, dp) for pp, tp, dp in product(counts, counts, counts) if pp * tp * dp <= num_gpus]
    return [found for found in every if fewer or found[0] * found[1] * found[2] == num_gpus]


def subsets(names: list[str]) -> list[tuple[str, ...]]:
    """Return every subset."""
    return [chosen for size in range(len(names) + 1) for chosen in combinations(names, size)]


def all_shardings(profile: ModelProfile, tp: int) -> list[dict[str, str]]:
    """Return every choice per layer class; at tp > 1 one at least is divided, and opened blocks that can be."""
    if tp == 1:
        return [{}]
    tied = {name for group in profile.tied for name in group}
    shared = {layer.layer_class for layer in profile.layers if tied & set(layer.parameters)}
    options = [
        names + ([None] if layer_class.body is None or not names or layer_class.name in shared else [])
        for layer_class in profile.layer_classes
        for names in [[sharding.name for sharding in layer_class.shardings if sharding.tp_degree == tp]]
    ]
    chosen = (
        {layer_class.name: name for layer_class, name in zip(profile.layer_classes, names, strict=True) if name}
        for names in product(*options)
    )
    return [shardings for shardings in chosen if shardings]


def priced_plans(profile: ModelProfile, cluster: Cluster, plans: Iterator[Plan]) -> list[tuple[float, int]]:
    """Return (step time, peak bytes) of every plan; those that divide a shared parameter in two ways are no plans."""
    pricer = Pricer(profile, cluster)
    priced = []
    for plan in plans:
        try:
            prediction = pricer.evaluate(plan)
        except UsageError as error:
            if "divides differently" not in error.message:
                raise
            continue
        priced.append((prediction.step_time_s, prediction.peak_bytes))
    return priced


def fastest(priced: list[tuple[float, int]], memory_bytes: int) -> float:
    """Return the least step time of the plans that fit; inf where none does."""
    return min((step_s for step_s, peak in priced if peak <= memory_bytes), default=float("inf"))

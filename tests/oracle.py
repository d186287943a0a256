"""The brute force: every plan of a small problem, each priced by `cost.evaluate`. Shares no code with the solver."""

from collections.abc import Iterator
from itertools import combinations, product

from strategies import make_plan

from planner.cluster import Cluster
from planner.cost import Pricer
from planner.errors import UsageError
from planner.model_profile import ModelProfile
from planner.plan import Plan


def all_plans(
    profile: ModelProfile,
    num_gpus: int,
    global_batch_size: int,
    *,
    pp_degrees: set[int] | None = None,
    num_microbatches: int | None = None,
    recompute: bool = True,
    fewer: bool = False,
) -> Iterator[Plan]:
    """Yield every plan on all GPUs, or on `fewer` too (adamw, fp32), in no order of merit.

    Fewer microbatches than stages where their number is given.
    """
    names = [layer.name for layer in profile.layers]
    remades = subsets(names) if recompute else [()]
    for pp, tp, dp in degrees(num_gpus, fewer=fewer):
        if pp > len(names) or (pp_degrees is not None and pp not in pp_degrees):
            continue
        for m in range(1, global_batch_size + 1):
            if global_batch_size % (m * dp) or num_microbatches not in (None, m):
                continue
            for schedule, mode, shardings, cuts, remade in product(
                ("1f1b", "gpipe") if m >= pp or num_microbatches is not None else ("gpipe",),
                ("replicated", "sharded") if dp > 1 else ("replicated",),
                all_shardings(profile, tp),
                list(combinations(range(1, len(names)), pp - 1)),
                remades,
            ):
                plan = make_plan(
                    profile,
                    cuts,
                    m=m,
                    rows=global_batch_size // m // dp,
                    tp=tp,
                    dp=dp,
                    schedule=schedule,
                    data_parallel=mode,
                    optimizer="adamw",
                    recompute=remade,
                    shardings=shardings,
                )
                yield plan
                if pp > 1 and dp > 1:
                    yield interleaved(plan)


def interleaved(plan: Plan) -> Plan:
    """Return the plan with the stages of a replica on neighbouring GPUs instead of the replicas of a stage."""
    pp, tp = plan.pp_degree, plan.tp_degree
    stages = []
    for index, stage in enumerate(plan.stages):
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

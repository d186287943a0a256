"""The brute force: every plan of a small problem, each priced by `cost.evaluate`. Shares no code with the solver."""

from collections.abc import Iterator
from itertools import combinations, product

from planner.cluster import Cluster
from planner.cost import Pricer
from planner.errors import UsageError
from planner.model_profile import ModelProfile
from planner.plan import Optimizer, Plan, Precision, Stage
from strategies import ORIGIN


def all_plans(
    profile: ModelProfile,
    num_gpus: int,
    global_batch_size: int,
    *,
    optimizer: Optimizer = "adamw",
    precision: Precision = "fp32",
    pp_degrees: set[int] | None = None,
    recompute: bool = True,
) -> Iterator[Plan]:
    """Yield every plan on all GPUs, in no order of merit."""
    names = [layer.name for layer in profile.layers]
    for pp in range(1, min(num_gpus, len(names)) + 1):
        if num_gpus % pp or (pp_degrees is not None and pp not in pp_degrees):
            continue
        for tp in range(1, num_gpus // pp + 1):
            if (num_gpus // pp) % tp:
                continue
            dp = num_gpus // pp // tp
            for m in range(1, global_batch_size + 1):
                if global_batch_size % (m * dp):
                    continue
                for schedule in ("1f1b", "gpipe"):
                    if schedule == "1f1b" and m < pp:
                        continue
                    for mode in ("replicated", "sharded") if dp > 1 else ("replicated",):
                        for shardings in all_shardings(profile, tp):
                            for cuts in combinations(range(1, len(names)), pp - 1):
                                for remade in subsets(names) if recompute else [()]:
                                    bounds = (0, *cuts, len(names))
                                    yield Plan(
                                        global_batch_size=global_batch_size,
                                        num_microbatches=m,
                                        schedule=schedule,
                                        data_parallel=mode,
                                        optimizer=optimizer,
                                        precision=precision,
                                        origin=ORIGIN,
                                        stages=tuple(
                                            Stage(
                                                layers=tuple(names[first:stop]),
                                                tp_degree=tp,
                                                dp_degree=dp,
                                                microbatch_size=global_batch_size // m // dp,
                                                recompute=tuple(n for n in names[first:stop] if n in remade),
                                                shardings=shardings,
                                                gpus=tuple(range(s * tp * dp, (s + 1) * tp * dp)),
                                            )
                                            for s, (first, stop) in enumerate(zip(bounds, bounds[1:], strict=False))
                                        ),
                                    )


def subsets(names: list[str]) -> list[tuple[str, ...]]:
    """Return every subset."""
    return [chosen for size in range(len(names) + 1) for chosen in combinations(names, size)]


def all_shardings(profile: ModelProfile, tp: int) -> list[dict[str, str]]:
    """Return every choice per layer class; at tp > 1 at least one class is divided."""
    if tp == 1:
        return [{}]
    options = [
        [None, *(sharding.name for sharding in layer_class.shardings if sharding.tp_degree == tp)]
        for layer_class in profile.layer_classes
    ]
    chosen = (
        {layer_class.name: name for layer_class, name in zip(profile.layer_classes, names, strict=True) if name}
        for names in product(*options)
    )
    return [shardings for shardings in chosen if shardings]


def fits(plan: Plan, cluster: Cluster) -> bool:
    """Return whether every stage of a priced plan is within its GPUs' memory."""
    assert plan.prediction is not None
    return all(
        stage.memory.peak_bytes <= cluster.gpu_at(rank).memory
        for stage, planned in zip(plan.prediction.stages, plan.stages, strict=True)
        for rank in planned.gpus
    )


def priced_plans(profile: ModelProfile, cluster: Cluster, plans: Iterator[Plan]) -> Iterator[Plan]:
    """Yield the plans with their predictions; plans that divide a shared parameter in two ways are no plans."""
    pricer = Pricer(profile, cluster)
    for plan in plans:
        try:
            prediction = pricer.evaluate(plan)
        except UsageError as error:
            assert "divides differently" in error.message
            continue
        yield plan.model_copy(update={"prediction": prediction})


def brute_force(profile: ModelProfile, cluster: Cluster, plans: Iterator[Plan]) -> tuple[float, int]:
    """Return the least step time of the plans that fit (inf: none does), and the least peak bytes of all."""
    best, least = float("inf"), 2**62
    for plan in priced_plans(profile, cluster, plans):
        assert plan.prediction is not None
        least = min(least, plan.prediction.peak_bytes)
        if fits(plan, cluster):
            best = min(best, plan.prediction.step_time_s)
    return best, least

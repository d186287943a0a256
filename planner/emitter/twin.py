"""Makes a small plan of the same kind as a large one: what a machine too small for the large one verifies."""

import re
from itertools import pairwise

from planner.emitter.source import emit
from planner.errors import EmitError
from planner.model_profile import LayerClass, ModelProfile
from planner.plan import Plan, Stage
from planner.runnable import unrunnable

MAX_MICROBATCHES = 4
MAX_MICROBATCH_SIZE = 2


def make_twin(plan: Plan, profile: ModelProfile, num_processes: int) -> tuple[str, tuple[str, ...]]:
    """Return the source of a plan for the profiled (smaller) model on at most `num_processes`, and what it leaves open.

    Degrees are capped at two where they are more than one; the cuts are of the kinds that the plan has, as far as the
    number of stages goes. What can't be kept is listed.
    """
    if problem := unrunnable(plan):
        raise EmitError(f"no smaller plan can be made of this one: it {problem}", hint="solve without --theoretical")
    pp_degree, tp_degree, dp_degree = _degrees(plan, num_processes, len(profile.layers))
    wanted = list(dict.fromkeys(_cut_kinds([list(stage.layers) for stage in plan.stages])))
    names = [layer.name for layer in profile.layers]
    cuts = _choose_cuts(names, wanted, pp_degree)
    bounds = [0, *cuts, len(names)]
    parts = [names[start:stop] for start, stop in pairwise(bounds)]
    recomputed = {_kind(name) for stage in plan.stages for name in stage.recompute}
    shardings = {key: value for stage in plan.stages for key, value in stage.shardings.items()}
    rows = min(plan.microbatch_size, MAX_MICROBATCH_SIZE)
    num_microbatches = max(min(plan.num_microbatches, MAX_MICROBATCHES), len(parts))
    stages = []
    for index, part in enumerate(parts):
        first = index * tp_degree * dp_degree
        classes = {item.name: item for item in (profile.layer_class(names.index(name)) for name in part)}
        stages.append(
            Stage(
                layers=tuple(part),
                tp_degree=tp_degree,
                dp_degree=dp_degree,
                microbatch_size=rows,
                recompute=tuple(name for name in part if _kind(name) in recomputed),
                shardings={
                    key: way
                    for key, value in shardings.items()
                    if key in classes and tp_degree > 1 and (way := _way(classes[key], value, tp_degree))
                },
                gpus=tuple(range(first, first + tp_degree * dp_degree)),
            )
        )
    twin = Plan(
        global_batch_size=num_microbatches * rows * dp_degree,
        num_microbatches=num_microbatches,
        schedule=plan.schedule,
        data_parallel=plan.data_parallel,
        optimizer=plan.optimizer,
        precision=plan.precision,
        stages=tuple(stages),
        origin=plan.origin.replace(model_hash=profile.provenance.model_hash),
    )
    return emit(twin, profile), tuple(_left_open(plan, twin, wanted))


def _way(layer_class: LayerClass, name: str, tp_degree: int) -> str:
    """Return the sharding of a class to verify in place of one that the smaller model may not have; '' for none."""
    return next((way for way in (name, "tensor") if layer_class.sharding(way, tp_degree) is not None), "")


def _degrees(plan: Plan, num_processes: int, num_layers: int) -> tuple[int, int, int]:
    """Return degrees of at most two, and more stages while there are processes; data parallelism gives way first."""
    pp_degree, tp_degree, dp_degree = (min(degree, 2) for degree in (plan.pp_degree, plan.tp_degree, plan.dp_degree))
    if pp_degree * tp_degree * dp_degree > num_processes:
        dp_degree = 1
    if pp_degree * tp_degree > num_processes:
        pp_degree = 1
    tp_degree = min(tp_degree, num_processes)
    pp_degree = min(
        pp_degree if plan.pp_degree < 3 else num_processes // (tp_degree * dp_degree), plan.pp_degree, num_layers
    )
    return max(pp_degree, 1), tp_degree, dp_degree


def _kind(name: str) -> str:
    """Return a layer's name without its numbers: layers of one list are of one kind."""
    return re.sub(r"\d+", "*", name)


def _cut_kinds(parts: list[list[str]]) -> list[tuple[str, str]]:
    return [(_kind(before[-1]), _kind(after[0])) for before, after in pairwise(parts)]


def _choose_cuts(names: list[str], wanted: list[tuple[str, str]], pp_degree: int) -> list[int]:
    """Return where to cut: one place for each kind of cut in turn, then evenly."""
    chosen: list[int] = []
    for before, after in wanted:
        places = [i for i in range(1, len(names)) if (_kind(names[i - 1]), _kind(names[i])) == (before, after)]
        if places and len(chosen) < pp_degree - 1:
            chosen.append(next((place for place in places if place not in chosen), places[0]))
    even = [round(index * len(names) / pp_degree) for index in range(1, pp_degree)]
    for place in [*even, *range(1, len(names))]:
        if len(set(chosen)) < pp_degree - 1 and 0 < place < len(names):
            chosen.append(place)
    return sorted(set(chosen))


def _left_open(plan: Plan, twin: Plan, wanted: list[tuple[str, str]]) -> list[str]:
    left = [
        f"{name} {large}: {small} was run"
        for name, large, small in (
            ("pp_degree", plan.pp_degree, twin.pp_degree),
            ("tp_degree", plan.tp_degree, twin.tp_degree),
            ("dp_degree", plan.dp_degree, twin.dp_degree),
            ("num_microbatches", plan.num_microbatches, twin.num_microbatches),
            ("microbatch_size", plan.microbatch_size, twin.microbatch_size),
        )
        if large != small
    ]
    ran = {key: value for stage in twin.stages for key, value in stage.shardings.items()}
    wanted_ways = {key: value for stage in plan.stages for key, value in stage.shardings.items()}
    left += [
        f"{key} divided as {value}: {ran.get(key, 'whole')} was run"
        for key, value in wanted_ways.items()
        if ran.get(key) != value and twin.tp_degree > 1
    ]
    cut = _cut_kinds([list(stage.layers) for stage in twin.stages])
    left += [f"a cut between {before} and {after}" for before, after in wanted if (before, after) not in cut]
    kept = {name for stage in twin.stages for name in stage.layers}
    dropped = [name for stage in plan.stages for name in stage.layers if name not in kept]
    if dropped:
        left.append(f"{len(dropped)} layers of kinds that were run: {dropped[0]} ... {dropped[-1]}")
    return left

"""Hand-written degrees under schedules that plans are priced for and not solved for: several chunks, zero bubble."""

from planner.errors import UsageError
from planner.model_profile import ModelProfile
from planner.plan import FEWEST_CHUNKS, SCHEDULES, Plan, Schedule, Stage, group_of_stage
from planner.records import reason
from planner.solver.request import read_pins


def chunked(
    plan: Plan, profile: ModelProfile, schedule: str, num_chunks: int, cuts: str | None, recompute: str, option: str
) -> Plan:
    """Return a plan's degrees and shardings under another schedule, with `num_chunks` stages on every device group.

    Without `cuts`, stages hold equally many layers. UsageError, about `option`, where there is no such plan.
    """
    if schedule not in SCHEDULES:
        raise UsageError(f"{option}: schedule {schedule!r} is not known", hint=f"known: {', '.join(SCHEDULES)}")
    known: Schedule = next(name for name in SCHEDULES if name == schedule)
    num_groups, names = plan.pp_degree, [layer.name for layer in profile.layers]
    num_stages = num_groups * num_chunks
    if num_stages > len(names):
        raise UsageError(
            f"{option}: {num_groups} x {num_chunks} chunks = {num_stages} stages, more than the {len(names)} layers",
            hint="write fewer chunks, or a smaller pp",
        )
    pins = read_pins((("cuts", cuts),) if cuts is not None else (), profile, option)
    size, longer = divmod(len(names), num_stages)
    firsts = pins.cuts or tuple(stage * size + min(stage, longer) for stage in range(1, num_stages))
    remade = _recomputed(profile, recompute, option)
    shardings = {name: way for stage in plan.stages for name, way in stage.shardings.items()}
    stages = []
    for stage, (first, stop) in enumerate(zip((0, *firsts), (*firsts, len(names)), strict=True)):
        classes = {layer.layer_class for layer in profile.layers[first:stop]}
        like = plan.stages[group_of_stage(known, num_groups, stage)]
        stages.append(
            Stage(
                layers=tuple(names[first:stop]),
                tp_degree=like.tp_degree,
                dp_degree=like.dp_degree,
                microbatch_size=like.microbatch_size,
                recompute=tuple(name for name in names[first:stop] if name in remade),
                shardings={name: way for name, way in shardings.items() if name in classes},
                gpus=like.gpus,
            )
        )
    try:
        return plan.replace(schedule=known, stages=tuple(stages), prediction=None)
    except ValueError as error:
        raise UsageError(f"{option}: {reason(error)}", hint="write other chunks, or cuts") from None


def _recomputed(profile: ModelProfile, text: str, option: str) -> set[str]:
    pins = read_pins((("recompute", text),), profile, option)
    everything = [index for index in range(len(profile.layers)) if not profile.writes_its_input(index)]
    indices = everything if pins.recompute == "all" else pins.recomputed
    return {profile.layers[index].name for index in indices}


def least_chunks(schedule: str) -> int:
    """Return the fewest chunks of a schedule; 1 where it is not known."""
    return next((fewest for name, fewest in FEWEST_CHUNKS.items() if name == schedule), 1)

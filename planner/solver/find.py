"""One search, asked for in a line: the best plan of a space, or the proof that none is better."""

from dataclasses import dataclass

from planner.arguments import dtype_bytes
from planner.cluster import Cluster
from planner.cost.evaluate import Pricer
from planner.cost.places import Places
from planner.cost.states import WORKING_BYTES
from planner.errors import UsageError
from planner.model_profile import ModelProfile
from planner.plan import EMITTED_SCHEDULES, Origin, Plan
from planner.solver.differences import step_time_s
from planner.solver.limits import read_limits
from planner.solver.request import COUNTS, SolveRequest, described, read_pins
from planner.solver.search import Outcome, Progress, search
from planner.solver.space import Space

GAP_OF_OPTIMAL = 1e-9


class EndedError(Exception):
    """The time is up, or people want no more: what is known so far is the answer."""


def silent(label: str, done: int, total: int) -> None:
    """Show no progress."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found: `plan` is None where nothing fits, or nothing is faster than what was to beat.

    No plan that was looked for takes less than `lower_bound_s`.
    """

    plan: Plan | None
    lower_bound_s: float
    outcome: Outcome

    def was_stopped(self, max_nodes: int) -> bool:
        """Return whether the time was up or people wanted no more, rather than `max_nodes` reached or a gap left."""
        return self.outcome.was_ended and self.outcome.num_nodes <= max_nodes

    @property
    def is_proven(self) -> bool:
        """Whether the search went to its end: nothing beats the plan, or, without one, what was to beat."""
        known_s = self.outcome.incumbent.step_time_s
        return self.lower_bound_s >= known_s * (1 - GAP_OF_OPTIMAL)

    @property
    def gap_fraction(self) -> float:
        """(step time - lower bound) / lower bound; 0 where the plan is the best one."""
        if self.plan is None or not self.lower_bound_s:
            return 0.0
        gap = (step_time_s(self.plan) - self.lower_bound_s) / self.lower_bound_s
        return gap if gap > GAP_OF_OPTIMAL else 0.0


def find(
    space: Space,
    origin: Origin,
    *,
    progress: Progress = silent,
    time_limit_s: float | None = None,
    to_beat_s: float = float("inf"),
    max_nodes: int | None = None,
    any_plan: bool = False,
) -> Found:
    """Return the best plan of a space, as far as time and nodes allow; only plans faster than `to_beat_s` count.

    With `any_plan` the first plan will do.
    """
    outcome = search(
        space, origin, progress, time_limit_s, any_plan=any_plan, to_beat_s=to_beat_s, max_nodes=max_nodes
    )  # fmt: skip
    return Found(outcome.incumbent.best, outcome.lower_bound_s, outcome)


def make_space(profile: ModelProfile, cluster: Cluster, request: SolveRequest) -> Space:
    """Return the constraints; UsageError where request, profile and cluster don't fit together."""
    if request.num_gpus > cluster.num_gpus:
        raise UsageError(
            f"{request.num_gpus} GPUs are asked for, the cluster {cluster.name!r} has {cluster.num_gpus}",
            hint=f"ask for at most {cluster.num_gpus}, or give a larger cluster",
        )
    types = Places(cluster).types_of_first(request.num_gpus)
    if len(types) > 1 and not request.theoretical:
        raise UsageError(
            f"the cluster {cluster.name!r} mixes {' and '.join(types)}: no plan runs on GPUs of several types yet",
            hint="give a cluster of one GPU type, fewer --gpus, or --theoretical to plan for them all the same",
        )
    width = dtype_bytes(profile.provenance.dtype)
    if width != WORKING_BYTES[request.precision]:
        raise UsageError(
            f"precision {request.precision} computes with {WORKING_BYTES[request.precision]} bytes per number, the "
            f"profile {profile.name!r} was made in {profile.provenance.dtype} with {width}",
            hint=f"profile again with --dtype {'float32' if request.precision == 'fp32' else 'bfloat16'}",
        )
    pins = read_pins(request.pins, profile, "--pin")
    exclusions = read_pins(request.exclusions, profile, "--exclude")
    limits = read_limits(request.limits, COUNTS)
    for schedule in sorted(pins.words.get("schedule", frozenset()) - {*EMITTED_SCHEDULES}):
        if not request.theoretical:
            raise UsageError(
                f"--pin schedule={schedule}: emitted plans run {' and '.join(EMITTED_SCHEDULES)} so far",
                hint="--theoretical plans it and shows the price; no code is written",
            )
    space = Space(Pricer(profile, _limited(cluster, limits.memory_bytes)), request, pins, exclusions, limits)
    for layer, choices in zip(profile.layers, space.recompute_choices, strict=True):
        if not choices:
            given = [described(found) for found in request.constraints if found[1] == "recompute"]
            raise UsageError(
                f"{' and '.join(given)} contradict each other: layer {layer.name!r} may be neither kept nor recomputed",
                hint="leave out one of them",
            )
    return space


def _limited(cluster: Cluster, memory_bytes: int | None) -> Cluster:
    """Return the cluster with GPUs of at most so much memory."""
    if memory_bytes is None:
        return cluster
    gpus = {
        name: gpu.model_copy(update={"memory": min(gpu.memory, memory_bytes)}) for name, gpu in cluster.gpus.items()
    }
    return cluster.model_copy(update={"gpus": gpus})

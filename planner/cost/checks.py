"""What keeps a plan from being priced: hand-written ones go through here too. Memory is no reason: it is told."""

import difflib

from planner.cluster import Cluster
from planner.errors import UsageError
from planner.model_profile import ModelProfile
from planner.plan import Plan, Stage
from planner.units import counted


def check_plan(plan: Plan, profile: ModelProfile, cluster: Cluster) -> None:
    """Raise UsageError for a plan of stages that the profile or the cluster does not have, or that have no price."""
    classes = [layer_class.name for layer_class in profile.layer_classes]
    for index, stage in enumerate(plan.stages):
        _check_degrees(index, stage)
        if unknown := next((name for name in stage.shardings if name not in classes), None):
            near = difflib.get_close_matches(unknown, classes, n=1)
            raise UsageError(
                f"stage {index} divides layer class {unknown!r}, which the profile {profile.name!r} does not have",
                hint=f"did you mean {near[0]!r}?" if near else f"known: {', '.join(classes)}",
            )
        if stage.microbatch_size < profile.least_rows:
            raise UsageError(
                f"stage {index} has microbatch_size {stage.microbatch_size}; {profile.name!r} trains on at least "
                f"{counted(profile.least_rows, 'row')} at a time",
                hint="give fewer microbatches, or a smaller dp_degree",
            )
    used = {rank: index for index, stage in enumerate(plan.stages) for rank in stage.gpus}
    if len(used) > cluster.num_gpus:
        raise UsageError(
            f"the plan uses {counted(len(used), 'GPU')}, the cluster {cluster.name!r} has {cluster.num_gpus}",
            hint="give a larger cluster",
        )
    if (last := max(used)) >= cluster.num_gpus:
        raise UsageError(
            f"stage {used[last]} is on GPU {last}; the cluster {cluster.name!r} has GPUs 0 to {cluster.num_gpus - 1}",
            hint="give a larger cluster, or other `gpus`",
        )


def _check_degrees(index: int, stage: Stage) -> None:
    for key in ("expert_degree", "context_degree"):
        if getattr(stage, key) > 1:
            raise UsageError(
                f"stage {index} has {key} {getattr(stage, key)}, which has no price yet: only 1 has",
                hint=f"leave {key} out, or write 1",
            )

"""What a plan was made from: its profile and its cluster, found again."""

from collections.abc import Sequence
from pathlib import Path

from planner.cli.inputs import ProfileFile, choose_cluster, load_profile
from planner.cli.output import say
from planner.cluster import Cluster, cluster_hash, default_cluster, read_cluster
from planner.errors import UsageError
from planner.local_cluster import CPU_NAME, local_cluster
from planner.model_profile import ModelProfile
from planner.plan import Plan


def profile_of(plans: Sequence[tuple[str, Plan]], given: Path | None) -> ProfileFile:
    """Return the profile that plans, by name, were made from, or the one given, or the newest; told where it changed.

    UsageError where the plans are of different profiles, or theirs is gone.
    """
    made = [(name, plan.origin) for name, plan in plans if plan.origin.profile_path]
    if given is not None or not made:
        return load_profile(given)
    first, origin = made[0]
    for name, other in made[1:]:
        if other.profile_hash != origin.profile_hash:
            raise UsageError(
                f"{first} was made from profile {origin.profile_path} ({origin.profile_hash}), {name} from "
                f"{other.profile_path} ({other.profile_hash}): their times don't compare",
                hint="give --profile FILE to price all of them on one profile",
            )
    paths = [Path(text) for text in origin.profile_path.split(" + ")]  # see `ProfileFile.paths`
    if missing := [path for path in paths if not path.exists()]:
        raise UsageError(
            f"{first} was made from profile {str(missing[0])!r}, which is not there",
            hint="give --profile FILE, or run this where `planner solve` was run",
        )
    file = load_profile(paths)
    if file.hash != origin.profile_hash:
        say(f"warning: {file.paths} has changed since {first} was made: priced by what it holds now")
    return file


def cluster_of(
    plans: Sequence[tuple[str, Plan]], given: str | None, num_gpus: int, profile: ModelProfile
) -> Cluster:  # fmt: skip
    """Return the cluster that plans, by name, were made for, or the one given, for at least `num_gpus`.

    UsageError where the plans are for different clusters, or theirs is gone.
    """
    made = [(name, plan) for name, plan in plans if plan.origin.cluster]
    if given is not None or not made:
        return choose_cluster(given, num_gpus, profile)
    first, plan = made[0]
    for name, other in made[1:]:
        if other.origin.cluster_hash != plan.origin.cluster_hash:
            raise UsageError(
                f"{first} was made for cluster {plan.origin.cluster!r}, {name} for {other.origin.cluster!r}"
                f"{', which differ' if other.origin.cluster == plan.origin.cluster else ''}: their times don't compare",
                hint="give --cluster NAME to price all of them on one cluster",
            )
    found = _cluster_again(plan, first)
    if cluster_hash(found) != plan.origin.cluster_hash:
        say(f"warning: cluster {found.name} has changed since {first} was made: priced on what it is now")
    if found.num_gpus < num_gpus:
        raise UsageError(
            f"{num_gpus} GPUs are more than the {found.num_gpus} of cluster {found.name!r} that {first} was made for",
            hint="give --cluster NAME for a larger one",
        )
    return found


def _cluster_again(plan: Plan, name: str) -> Cluster:
    """Return the cluster of a plan: from its file, or made again from its name, 'h100-sxm x 16'."""
    origin = plan.origin
    if origin.cluster_path:
        if not Path(origin.cluster_path).exists():
            raise UsageError(
                f"{name} was made for the cluster in {origin.cluster_path!r}, which is not there",
                hint="give --cluster FILE.toml",
            )
        return read_cluster(origin.cluster_path)
    gpu, times, count = origin.cluster.rpartition(" x ")
    if times and count.isdecimal():
        return local_cluster(int(count)) if gpu == CPU_NAME else default_cluster(int(count), gpu)
    raise UsageError(
        f"{name} was made for cluster {origin.cluster!r}, which has no shipped name",
        hint="give --cluster NAME or FILE.toml",
    )

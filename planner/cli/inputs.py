"""What `solve` starts from: the newest profile, and the cluster to plan for, each told with where it comes from."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from planner import __version__
from planner.cluster import Cluster, cluster_hash, default_cluster, read_cluster, shipped_gpu
from planner.errors import UsageError
from planner.local_cluster import CPU_NAME, local_cluster
from planner.model_profile import ModelProfile, read_profile
from planner.plan import Origin, Precision
from planner.units import format_bytes, format_seconds

PROFILES_FOLDER = Path("profiles")
SAMPLES_PER_GPU = 8  # of a step, unless told otherwise


@dataclass(frozen=True, kw_only=True)
class ProfileFile:
    """A profile, its file and the `others` merged into it, with hashes, how it was chosen, and how all are told."""

    profile: ModelProfile
    path: Path
    hash: str
    chosen: str
    shown: str
    others: tuple[Path, ...] = ()

    @property
    def paths(self) -> str:
        """All files, as a plan names them."""
        return " + ".join(map(str, (self.path, *self.others)))


def load_profile(path: Path | Sequence[Path] | None) -> ProfileFile:
    """Return the profile in a file, by default the newest in profiles/; UsageError where there is none.

    Several files are profiles of one model on several GPU types: the first one's, with the others' costs beside.
    """
    chosen = ""
    paths = [path] if isinstance(path, Path) else list(path or ())
    if not paths:
        found = sorted(PROFILES_FOLDER.glob("*.json"), key=lambda file: (file.stat().st_mtime_ns, file.name))
        if not found:
            raise UsageError(
                f"no profile in {PROFILES_FOLDER}/",
                hint="make one with `planner profile MODEL`, or give --profile FILE",
            )
        paths = found[-1:]
        chosen = f"the newest in {PROFILES_FOLDER}/"
    profiles = [read_profile(file) for file in paths]
    hashes = [hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in paths]
    merged = profiles[0]
    if len(profiles) > 1:
        from planner.merged_profile import merge_profiles

        merged = merge_profiles(profiles)
    shown = ", ".join(f"{file} ({_described(profile, chosen)})" for file, profile in zip(paths, profiles, strict=True))
    return ProfileFile(
        profile=merged,
        path=paths[0],
        hash="+".join(hashes),
        chosen=chosen,
        shown=shown,
        others=tuple(paths[1:]),
    )


def _described(profile: ModelProfile, chosen: str) -> str:
    origin = profile.provenance
    how = f"computed for {origin.gpu}" if origin.gpu else f"measured on {origin.device}"
    how = f"imported from {origin.imported_from}" if origin.imported_from else how
    return ", ".join(part for part in (chosen, how, origin.dtype) if part)


def describe_profile(file: ProfileFile) -> str:
    """Return a line for people: which profile, of what, from where."""
    return f"profile: {file.shown}"


def choose_cluster(name: str | None, num_gpus: int, profile: ModelProfile) -> Cluster:
    """Return the cluster to plan for.

    A .toml path is taken as it is; a shipped name, or the GPU type of the profile, gives nodes of 8 of that type; a
    profile measured on the CPU gives processes of this machine. UsageError where the cluster is too small or unknown.
    """
    if name is not None and cluster_path(name):
        cluster = read_cluster(name)
        if cluster.num_gpus < num_gpus:
            raise UsageError(
                f"--gpus {num_gpus} is more than the {cluster.num_gpus} GPUs of cluster {cluster.name!r}",
                hint=f"raise `count` in {name}, or give --gpus {cluster.num_gpus}",
            )
        return cluster
    if local_processes(name, profile):
        return local_cluster(num_gpus)
    gpu = name or profiled_gpu(profile)
    if gpu is None or gpu.endswith(".toml"):
        raise UsageError(
            f"the profile is for {gpu or profile.provenance.device}, and no shipped cluster has such GPUs",
            hint="give --cluster FILE.toml: GPUs, links and memory reserve",
        )
    return default_cluster(num_gpus, gpu)


def local_processes(name: str | None, profile: ModelProfile) -> bool:
    """Return whether a plan is for processes of this machine: no cluster is named, and the profile is of its CPU."""
    return name is None and profile.provenance.device_type == "cpu" and profile.provenance.gpu is None


def cluster_path(name: str | None) -> str:
    """Return the path of a cluster that is given by its file; '' for a shipped name or none."""
    return name if name is not None and (name.endswith(".toml") or "/" in name) else ""


def profiled_gpu(profile: ModelProfile) -> str | None:
    """Return the name of the GPU type whose times a profile holds; None for a GPU that no file describes."""
    origin = profile.provenance
    return origin.gpu or (CPU_NAME if origin.device_type == "cpu" else shipped_gpu(origin.device))


def describe_cluster(cluster: Cluster, *, assumed: bool) -> str:
    """Return a line for people: which cluster, with which memory and links, and whether that is an assumption."""
    groups = " + ".join(f"{group.count} x {group.gpus_per_node} {group.gpu}" for group in cluster.node_groups)
    memory = ", ".join(
        f"{format_bytes(gpu.memory)} each" if len(cluster.gpus) == 1 else f"{name} {format_bytes(gpu.memory)}"
        for name, gpu in sorted(cluster.gpus.items())
    )
    links = (
        f"{cluster.intra_node.bandwidth / 1e9:g} GB/s and {format_seconds(cluster.intra_node.latency)} inside a node"
    )
    if sum(group.count for group in cluster.node_groups) > 1:
        links += (
            f", {cluster.inter_node.bandwidth / 1e9:g} GB/s and {format_seconds(cluster.inter_node.latency)} between"
        )
    for group in cluster.node_groups:
        for link, where in ((group.intra_node, "inside"), (group.inter_node, "from")):
            if link is not None:
                told = f"{link.bandwidth / 1e9:g} GB/s and {format_seconds(link.latency)}"
                links += f", {told} {where} nodes of {group.gpu}"
    kind = "cluster, assumed" if assumed else "cluster"
    return f"{kind}: {cluster.name} ({groups}, {memory}, {links}; {format_bytes(cluster.memory_reserve)} kept free)"


def device_mismatch(profile: ModelProfile, cluster: Cluster) -> str | None:
    """Return a warning where the profile's times are of another device than the cluster's; None where they agree."""
    from planner.cost.gpu_types import scaled_types

    profiled = profiled_gpu(profile) or profile.provenance.device
    planned = sorted({group.gpu for group in cluster.node_groups})
    if scaled := scaled_types(profile, cluster):
        return (
            f"times on {', '.join(scaled)} are scaled by roofline from those of {profiled}: "
            f"profile with --gpu {scaled[0]} and give both with --profile for better ones"
        )
    if planned == [profiled] or profile.layer_classes[0].costs_by_gpu:
        return None
    return (
        f"the profile's times are of {profiled}, the cluster's GPUs are {', '.join(planned)}: times are not converted"
    )


def choose_precision(profile: ModelProfile) -> Precision:
    """Return how to compute where nobody says: as the profile's times were."""
    return "bf16-mixed" if profile.provenance.dtype == "bfloat16" else "fp32"


def plan_origin(file: ProfileFile, cluster: Cluster, name: str | None) -> Origin:
    """Return what a plan is made from; `name` is the cluster's as given."""
    provenance = file.profile.provenance
    from planner.cost.gpu_types import scaled_types

    return Origin(
        model_path=provenance.model_path,
        model_hash=provenance.model_hash,
        build_function=provenance.build_function,
        inputs_function=provenance.inputs_function,
        tp_rules=provenance.tp_rules,
        profile_path=file.paths,
        profile_hash=file.hash,
        cluster=cluster.name,
        cluster_hash=cluster_hash(cluster),
        cluster_path=cluster_path(name),
        torch_version=provenance.torch_version,
        planner_version=__version__,
        scaled_gpus=scaled_types(file.profile, cluster),
    )

"""Plans that the solver makes for a profile, with parts of them pinned."""

from planner.cluster import default_cluster
from planner.local_cluster import local_cluster
from planner.model_profile import ModelProfile
from planner.plan import Origin
from planner.solver import Solution, SolveRequest, solve


def origin_of(profile: ModelProfile) -> Origin:
    """Return where a plan for the profile comes from: its model, and no files."""
    return Origin(
        model_path=profile.provenance.model_path,
        model_hash=profile.provenance.model_hash,
        profile_path="",
        profile_hash="",
        cluster="",
        cluster_hash="",
        torch_version=profile.provenance.torch_version,
        planner_version="",
    )


def solution_of(profile: ModelProfile, num_gpus: int, pins: dict[str, object], batch: int) -> Solution:
    """Return the solution for so many GPUs of the profile's kind, or processes of this machine."""
    precision = "bf16-mixed" if profile.provenance.gpu else "fp32"
    request = SolveRequest(
        num_gpus=num_gpus,
        global_batch_size=batch,
        precision=precision,  # type: ignore[arg-type]
        pins=tuple((key, str(value)) for key, value in pins.items()),
    )
    cluster = default_cluster(num_gpus, profile.provenance.gpu) if profile.provenance.gpu else local_cluster(num_gpus)
    return solve(profile, cluster, request, origin=origin_of(profile))

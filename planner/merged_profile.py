"""Profiles of one model on several GPU types as one, for clusters that mix them."""

from collections.abc import Sequence
from typing import Any

from planner.cost.gpu_types import profiled_type
from planner.errors import UsageError
from planner.model_profile import LayerClass, ModelProfile

# What may differ: where the numbers come from, and the numbers.
_OF_ONE = {"schema_version", "name", "provenance", "forward_flops_per_row", "layer_classes", "least_rows", "notes"}
_SAME_PROVENANCE = ("model_hash", "dtype", "input_shapes", "tokens_per_row")


def merge_profiles(profiles: Sequence[ModelProfile]) -> ModelProfile:
    """Return the first profile with the costs of the others on their GPU types beside its own.

    UsageError where one's type is unknown or another's, or where the profiles are not of the same model, divided in the
    same ways.
    """
    first = profiles[0]
    known: dict[str, ModelProfile] = {}
    for profile in profiles:
        gpu_type = profiled_type(profile)
        if gpu_type is None:
            raise UsageError(
                f"the profile {profile.name!r} has times of {profile.provenance.device!r}, which is no known GPU type",
                hint="give several profiles for GPU types that have a name: `planner profile --gpu NAME`",
            )
        gpu = gpu_type.name
        if gpu in known:
            raise UsageError(f"two profiles have times of {gpu}", hint="give one profile for each GPU type")
        known[gpu] = profile
        if difference := _difference(first, profile):
            raise UsageError(
                f"the profiles of {next(iter(known))} and {gpu} differ in {difference}: they are not of one model",
                hint="profile the same model file with the same options but --gpu",
            )
    classes = []
    for index, layer_class in enumerate(first.layer_classes):
        costs = {gpu: profile.layer_classes[index].costs for gpu, profile in known.items() if profile is not first}
        classes.append(layer_class.model_copy(update={"costs_by_gpu": costs}))
    notes = dict.fromkeys(note for profile in profiles for note in profile.notes)
    return first.model_copy(
        update={
            "layer_classes": tuple(classes),
            "least_rows": max(profile.least_rows for profile in profiles),
            "notes": tuple(notes),
        }
    )


def _difference(first: ModelProfile, other: ModelProfile) -> str | None:
    """Return what of two profiles differs that must not, or None."""
    for name in _SAME_PROVENANCE:
        a, b = getattr(first.provenance, name), getattr(other.provenance, name)
        if a != b:
            return f"{name} ({a} and {b})"
    for name in type(first).model_fields:
        if name not in _OF_ONE and getattr(first, name) != getattr(other, name):
            return name
    if [layer_class.name for layer_class in first.layer_classes] != [found.name for found in other.layer_classes]:
        return "layer_classes"
    for ours, theirs in zip(first.layer_classes, other.layer_classes, strict=True):
        if _structure(ours) != _structure(theirs):
            return f"layer class {ours.name!r}, or in the ways it is divided"
        ways = [{(cost.tp_degree, cost.sharding) for cost in found.costs} for found in (ours, theirs)]
        if ways[0] != ways[1]:
            return f"the degrees that layer class {ours.name!r} has costs for"
    return None


def _structure(layer_class: LayerClass) -> dict[str, Any]:
    return {name: getattr(layer_class, name) for name in type(layer_class).model_fields if not name.startswith("costs")}

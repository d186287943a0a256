"""Checks the tensor-parallel rules against what a Hugging Face model declares in its `tp_plan`: a hint, never taken."""

import re

from torch import nn

from planner.sharding import Sharding

_STYLES = {"colwise": "column", "rowwise": "row", "embedding_rowwise": "vocabulary"}


def compare_with_tp_plan(model: nn.Module, module: str, sharding: Sharding) -> list[str]:
    """Return a note for each module of a layer on which its inferred sharding and the model's own plan differ."""
    declared = getattr(model, "_tp_plan", None)
    if not isinstance(declared, dict):
        return []
    notes = []
    for name, _ in model.get_submodule(module).named_modules():
        full = ".".join(part for part in (module, name) if part)
        hint = next((style for pattern, style in declared.items() if _matches(pattern, full)), None)
        expected = _STYLES.get(str(hint).removesuffix("_rep").removesuffix("_gather_output"))
        inferred = sharding.styles.get(name)
        if expected is not None and inferred != expected:
            notes.append(
                f"{full}: the model's tp_plan divides it by {expected}, the rules by {inferred or 'nothing'} "
                f"at tp_degree {sharding.tp_degree}: {sharding.replicated.get(f'{name}.weight', 'the rules are used')}"
            )
    return notes


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name) is not None

"""Writes a plan as plain PyTorch code."""

from planner.emitter.files import check_overwrite, write_plan
from planner.emitter.source import emit
from planner.emitter.twin import make_twin

__all__ = ["check_overwrite", "emit", "make_twin", "write_plan"]

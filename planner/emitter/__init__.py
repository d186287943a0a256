"""Writes a plan as plain PyTorch code."""

from planner.emitter.files import write_plan
from planner.emitter.source import emit
from planner.emitter.twin import make_twin

__all__ = ["emit", "make_twin", "write_plan"]

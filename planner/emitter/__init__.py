"""Writes a plan as plain PyTorch code."""

from planner.emitter.files import read_plan, write_plan
from planner.emitter.source import emit

__all__ = ["emit", "read_plan", "write_plan"]

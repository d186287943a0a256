"""Profiles models: what they consist of, and what each layer costs."""

from planner.profiler.profile import profile_model

__all__ = ["profile_model"]

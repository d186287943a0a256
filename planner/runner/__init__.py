"""Running plans: a pool of processes, and `verify`, which compares a plan with one process."""

from planner.runner.verify import ParameterRow, VerifyReport, verify

__all__ = ["ParameterRow", "VerifyReport", "verify"]

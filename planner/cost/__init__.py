"""What a plan costs: `evaluate` is the only place where one is priced; every number shown comes from it."""

from planner.cost.evaluate import Pricer, evaluate, timeline
from planner.cost.step import Event

__all__ = ["Event", "Pricer", "evaluate", "timeline"]

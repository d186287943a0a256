"""What a plan costs: `evaluate` is the only place where one is priced; every number shown comes from it."""

from planner.cost.evaluate import Event, Pricer, evaluate, timeline

__all__ = ["Event", "Pricer", "evaluate", "timeline"]

"""The solver: the provably fastest plan, or why there is none. Knows profiles, clusters and plans; nothing of torch."""

from planner.solver.request import SolveRequest
from planner.solver.solution import Conflict, Repair, Solution
from planner.solver.solve import solve

__all__ = ["Conflict", "Repair", "Solution", "SolveRequest", "solve"]

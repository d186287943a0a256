"""What people and scripts are shown of profiles, plans and solutions."""

from planner.report.comparison import comparison_json, comparison_table
from planner.report.json_objects import plan_json, solution_json
from planner.report.pareto import pareto_json, pareto_table
from planner.report.plan_tables import explain, plan_table
from planner.report.profile_tables import profile_table
from planner.report.sensitivity import sensitivity_json, sensitivity_table
from planner.report.timeline import timeline
from planner.report.verify import verify_table

__all__ = [
    "comparison_json",
    "comparison_table",
    "explain",
    "pareto_json",
    "pareto_table",
    "plan_json",
    "plan_table",
    "profile_table",
    "sensitivity_json",
    "sensitivity_table",
    "solution_json",
    "timeline",
    "verify_table",
]

"""What the emitter generates beside the helper section: declared for type checkers, never written into a plan."""

from typing import Any

from planner.emitter.runtime.stage import PlanStage, Value

PLAN: dict[str, Any] = {}
STAGES: tuple[type[PlanStage], ...] = ()
TIED: tuple[tuple[str, ...], ...] = ()
INPUTS: tuple[Value | str, ...] = ()
ARGUMENTS: tuple[str, ...] = ()
CONSTANTS: dict[str, Any] = {}
TARGET_DIMS: tuple[int | None, ...] = ()

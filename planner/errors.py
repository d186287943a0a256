"""The exceptions of planner; every one carries a message and a hint.

    PlannerError                exit 1
    ├── UsageError              exit 2: the command line, or a name in it, is wrong
    ├── FileFormatError         a profile, cluster, GPU or plan file that can't be read
    ├── CaptureError            a model that can't be recorded
    ├── ProfileError            a layer that can't be measured or computed
    ├── InfeasiblePlanError     no plan satisfies the constraints
    ├── EmitError               a plan that can't be written as code
    └── VerifyError             a plan that can't be run, or a rank that failed

A bug is none of these and keeps its traceback.
"""


class PlannerError(Exception):
    """What is wrong, with both numbers and the layer's name; `hint` is the one thing to do."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(PlannerError):
    """The command line, or something named on it, is wrong."""

    exit_code = 2


class FileFormatError(PlannerError):
    """A profile, cluster, GPU or plan file that can't be read."""


class CaptureError(PlannerError):
    """A model that can't be recorded."""


class ProfileError(PlannerError):
    """A layer that can't be measured or computed."""


class InfeasiblePlanError(PlannerError):
    """No plan satisfies the constraints."""


class EmitError(PlannerError):
    """A plan that can't be written as code."""


class VerifyError(PlannerError):
    """A plan that can't be run, or a rank that failed."""

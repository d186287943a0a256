"""Refuses modules that talk to all processes by themselves: a plan runs other stages in some of them."""

from torch import nn

from planner.errors import CaptureError


def check_alone(model: nn.Module) -> None:
    """Raise CaptureError where a module joins the statistics of every process of a job."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)]
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise CaptureError(
            f"{names[0]!r}{more}: SyncBatchNorm joins the statistics of all processes, which in a plan run other "
            "stages too and wait for it forever",
            hint="build the model with nn.BatchNorm1d, 2d or 3d, which in one process is the same: each replica of a "
            "plan then has the statistics of its own microbatch",
        )

"""What the profiler uses of torch that PyTorch does not promise to keep, in one place and for one version.

Fake tensors and the switch that turns function modes off were checked with torch 2.13; another version is refused
before anything is recorded, because what has changed there may not raise.
"""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from planner.errors import UsageError

__all__ = ["FakeTensor", "FakeTensorMode", "check_torch", "quiet_fake_tensors", "unrecorded", "unset_fake_temporarily"]

TESTED_TORCH = "2.13"


def check_torch() -> None:
    """Raise UsageError for a torch other than the one this module was checked with."""
    if torch.__version__.split(".")[:2] != TESTED_TORCH.split("."):
        raise UsageError(
            f"torch {torch.__version__} is installed, and planner records models with torch {TESTED_TORCH}",
            hint=f"install torch {TESTED_TORCH}, or a planner made for {torch.__version__}",
        )


def unrecorded() -> AbstractContextManager[None]:
    """Return a context in which function modes see nothing."""
    return torch._C.DisableTorchFunction()


@contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Keep torch from logging what a fake operator refuses: the error tells it."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)

"""A small transformer as a user's model file."""

from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.models import Transformer, _ids


def build_model() -> nn.Module:
    return Transformer()


def example_inputs(batch_size: int) -> tuple[Tensor]:
    return _ids(batch_size)


def example_target(batch_size: int) -> Tensor:
    return _ids(batch_size)[0]


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())

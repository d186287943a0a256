"""Losses of every kind over one small transformer, each as a model file's functions: `write_model` writes the file.

Inputs have uneven padding where there is a mask; labels that a loss ignores are left out by `verify` itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.runner.exactness import import_plan
from planner.runner.rank import RankContext
from tests.zoo.models import Transformer

CLASSES, LENGTH = 32, 4
WEIGHTS = torch.linspace(0.5, 2.0, CLASSES)


class WithLoss(nn.Module):
    """Computes its loss itself, from labels that it shifts, as Hugging Face models do: a loss, and the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Transformer(2)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.body(ids)
        labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        return Output(loss=F.cross_entropy(logits.view(-1, CLASSES).float(), labels.view(-1)), logits=logits)


@dataclass
class Output(dict[str, Any]):
    """An output with fields that are read by key too."""

    loss: Tensor
    logits: Tensor

    def __post_init__(self) -> None:
        self.update(loss=self.loss, logits=self.logits)


class WithCriterion(nn.Module):
    """Has its criterion as a module, with weights of classes in a buffer, inside a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.judge = Transformer(2), Judge()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.judge(self.body(ids), labels)


class Judge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.criterion = nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=3)

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self.criterion(logits.flatten(0, 1), labels.flatten())


class MaskedInside(nn.Module):
    """Takes the mean over the tokens that a mask keeps, with a term that is a mean over all, written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Transformer(2)

    def forward(self, ids: Tensor, labels: Tensor, attention_mask: Tensor) -> Tensor:
        logits = self.body(ids)
        each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        loss = (each * attention_mask).sum() / attention_mask.sum().clamp(min=1)
        loss += 0.01 * logits.square().mean()
        return loss


class Untrained(nn.Module):
    """Parameters without gradients: read detached at both ends, or without gradients, or frozen, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.probe, self.unused = Transformer(2), nn.Linear(CLASSES, CLASSES), nn.Linear(2, 2)
        self.anchor, self.number = nn.Parameter(torch.ones(16)), nn.Parameter(torch.ones(()))
        self.body.blocks[0].up.bias.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.body.embed(ids) * self.anchor.detach()
        for block in self.body.blocks:
            x = block(x)
        logits = self.body.head(x * self.anchor.detach()) * self.number.detach()
        with torch.no_grad():
            scores = self.probe(logits)
        return logits + 0.1 * scores


def _ids(rows: int) -> tuple[Tensor]:
    return (torch.randint(0, CLASSES, (rows, LENGTH)),)


def _labelled(rows: int) -> dict[str, Tensor]:
    ids = torch.randint(0, CLASSES, (rows, LENGTH))
    return {"ids": ids, "labels": ids}


def _masked(rows: int) -> dict[str, Tensor]:
    return {**_labelled(rows), "attention_mask": torch.ones(rows, LENGTH, dtype=torch.long)}


def _labels(rows: int) -> Tensor:
    return torch.randint(0, CLASSES, (rows, LENGTH))


def _labels_and_mask(rows: int) -> tuple[Tensor, Tensor]:
    return _labels(rows), (torch.rand(rows, LENGTH) * torch.linspace(0.5, 1.9, rows)[:, None]).round().clamp(max=1)


def _values(rows: int) -> Tensor:
    return torch.randn(rows, LENGTH, CLASSES)


def _each(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.transpose(1, 2), target, reduction="none")


def ignored(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def weighted(output: Tensor, target: Tensor) -> Tensor:
    criterion = nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=0, label_smoothing=0.1)
    return criterion(output.flatten(0, 1), target.flatten())


def likelihood(output: Tensor, target: Tensor) -> Tensor:
    return F.nll_loss(output.log_softmax(-1).transpose(1, 2), target, ignore_index=5)


def masked(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    labels, mask = target
    return (_each(output, labels) * mask).sum() / mask.sum()


def masked_means(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    labels, mask = target
    return (_each(output, labels) * mask).mean() / (mask.float().mean() + 1e-6)


def guarded(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    labels, mask = target
    count = mask.sum()
    total = (_each(output, labels) * mask).sum()
    return torch.where(count > 0, total / count.clamp(min=1), 0.0)


def summed(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


def per_row(output: Tensor, target: Tensor) -> Tensor:
    return _each(output, target).sum() / output.shape[0]


def squares(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


def mixed(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    """A mean over tokens, a mean over everything, and a sum over rows."""
    labels, mask = target
    loss = masked(output, (labels, mask)) + 0.1 * output.square().mean()
    return loss + 0.001 * output.abs().sum() + ignored(output, labels)


def contrastive(output: Tensor) -> Tensor:
    embedded = F.normalize(output.mean(1), dim=-1)
    similar = embedded @ embedded.t() / 0.1
    return F.cross_entropy(similar, torch.arange(similar.shape[0]))


def deviation(output: Tensor) -> Tensor:
    return (output - output.mean(0)).square().mean() - output.std()


def own(output: Any) -> Tensor:
    return output.loss if hasattr(output, "loss") else output


@dataclass(frozen=True)
class Kind:
    """One kind of loss; `coupled` is part of what is told where rows depend on one another."""

    loss: Callable[..., Tensor]
    target: Callable[[int], Any] | None = None
    model: Callable[[], nn.Module] = lambda: Transformer(2)
    inputs: Callable[[int], Any] = _ids
    coupled: str = ""


KINDS = {
    "ignored labels": Kind(ignored, _labels),
    "class weights and smoothing": Kind(weighted, _labels),
    "negative log likelihood": Kind(likelihood, _labels),
    "masked mean": Kind(masked, _labels_and_mask),
    "mean of masked by mean of mask": Kind(masked_means, _labels_and_mask),
    "guarded count": Kind(guarded, _labels_and_mask),
    "sum over rows": Kind(summed, _labels),
    "sum by rows": Kind(per_row, _labels),
    "mean square": Kind(squares, _values),
    "several terms": Kind(mixed, _labels_and_mask),
    "loss in the model": Kind(own, None, WithLoss, _labelled),
    "criterion in a module": Kind(own, None, WithCriterion, _labelled),
    "masked in the model": Kind(own, None, MaskedInside, _masked),
    "contrastive": Kind(contrastive, coupled="`matmul` relates every row to every other"),
    "statistics of the batch": Kind(deviation, coupled="takes a value of the whole batch"),
}


def write_model(name: str, folder: Path) -> Path:
    """Write the model file of a kind and return its path."""
    lines = ["from tests.zoo.losses import KINDS", "", f"kind = KINDS[{name!r}]"]
    lines += ["build_model, example_inputs, loss_fn = kind.model, kind.inputs, kind.loss"]
    lines += ["example_target = kind.target"] if KINDS[name].target else []
    path = folder / "model.py"
    path.write_text("\n".join(lines) + "\n")
    return path


class Scaled(nn.Module):
    """Multiplies by a weight that starts at one: its outputs are the losses of tokens that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.scale.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(x[..., None])[..., 0]


def mean_of_valid(output: Tensor, target: Tensor) -> Tensor:
    return (output * target).sum() / target.sum()


KINDS["untrained parameters"] = Kind(ignored, _labels, Untrained)
KINDS["given losses"] = Kind(mean_of_valid, lambda n: torch.ones(n, 3), Scaled, lambda n: (torch.rand(n, 3),))


def step_of_losses(context: RankContext, plan_path: str, losses: list[list[float]]) -> tuple[float, float]:
    """Return the loss and the gradient of the weight of a step in which tokens have these losses, row by row."""
    length = max(map(len, losses))
    x = torch.tensor([row + [7.0] * (length - len(row)) for row in losses])
    valid = torch.tensor([[1.0] * len(row) + [0.0] * (length - len(row)) for row in losses])
    plan = import_plan(Path(plan_path))
    torch.manual_seed(0)
    runtime = plan.setup(Scaled, mean_of_valid, device="cpu")
    loss = runtime.step(x, valid).item()
    evaluated = runtime.evaluate(x, valid).item()
    assert evaluated == loss
    gradients = runtime.full_gradients()
    return loss, gradients["scale.weight"].item() if gradients else 0.0

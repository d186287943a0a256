"""What people should know of a profile beside its numbers."""

from collections.abc import Iterable, Mapping

from torch import nn

from planner.model_profile import NO_LOSS, LayerCost, WholeAt
from planner.profiler.capture import Capture
from planner.profiler.hints import compare_with_tp_plan
from planner.profiler.loss import loss_value
from planner.sharding import Sharding

NOISY_FRACTION = 0.5


def loss_notes(captured: Capture) -> list[str]:
    """Return a note where neither the model nor its file has a loss."""
    loss = loss_value(captured.output, captured.loss, captured.tensors)
    is_scalar = loss is not None and captured.tensors[loss].shape == ()  # what a plan takes without a loss_fn
    return [] if is_scalar or captured.loss_calls else [NO_LOSS]


def noise_notes(costs: dict[str, list[LayerCost]]) -> list[str]:
    """Return a note where measured times spread too far to be relied on."""
    noisy = {name: max(cost.spread_fraction for cost in listed) for name, listed in costs.items()}
    worst = max(noisy, key=lambda name: noisy[name])
    if noisy[worst] <= NOISY_FRACTION:
        return []
    count = sum(spread > NOISY_FRACTION for spread in noisy.values())
    return [
        (
            f"{count} of {len(noisy)} layer classes were measured with a spread over {NOISY_FRACTION:.0%} "
            f"(worst {worst}): the machine was busy; profile again when it is not"
        )
    ]


def degree_notes(whole: Iterable[WholeAt]) -> list[str]:
    """Return a note for every degree that heads forbid, with the first reason."""
    found: dict[int, str] = {}
    for item in whole:
        if item.forbidden:
            found.setdefault(item.tp_degree, f"no plan uses tp_degree {item.tp_degree}: {item.reason}")
    return [found[degree] for degree in sorted(found)]


def whole_notes(whole: Mapping[str, str]) -> list[str]:
    """Return a note for each statement that keeps modules whole; `whole` has the reason of each such module."""
    names: dict[str, list[str]] = {}
    for name, reason in whole.items():
        names.setdefault(reason.replace(f" in {name}", "").replace("\n    ", ": "), []).append(name)
    return [
        (
            f"{_and_more(listed)}: called whole, never divided, priced on random data; it must return the same shapes "
            f"for all data. {reason}"
        )
        for reason, listed in names.items()
    ]


def _and_more(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def batch_norm_notes(model: nn.Module) -> list[str]:
    """Return a note where layers normalize by the statistics of a batch: a plan's batches are microbatches."""
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training
    ]
    if not names:
        return []
    return [
        (
            f"{_and_more(names)}: normalized by the statistics of one replica's microbatch, so microbatch_size changes "
            "the gradients; running statistics move once a microbatch, and with dp_degree over 1 each replica has its "
            "own, of which the first's are saved"
        )
    ]


def hint_notes(captured: Capture, divided: Iterable[tuple[str, Iterable[Sharding]]]) -> list[str]:
    """Return notes on where the rules differ from the model's own plan; `divided` are layers and their shardings.

    Of the candidates of a degree the first is compared, which divides the most.
    """
    notes: dict[str, None] = {}
    for module, shardings in divided:
        for sharding in {sharding.tp_degree: sharding for sharding in reversed(list(shardings))}.values():
            notes.update(dict.fromkeys(compare_with_tp_plan(captured.model, module, sharding)))
    return list(notes)

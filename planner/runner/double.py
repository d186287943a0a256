"""A model made fit for an exact comparison: float64 throughout, dropout off, no gradient zero by initialisation."""

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from planner.model_file import ModelFile, user_error
from planner.recomputation import recomputed_under
from planner.runner.draws import MatchedDraws
from planner.runner.exact_job import BUILD_SEEDS
from planner.runner.grouped import grouped_product

PERTURBATION = 0.02  # standard deviation added to every parameter: the usual scale of initial weights

# Attributes of modules and configurations that hold a probability of dropping something
_DROPS = re.compile(r"dropout|pdrop|layerdrop|drop_path|drop_prob|drop_rate|_drop$", re.IGNORECASE)
# Those of a configuration that only become nn.Dropout, in heads that a model may not have
_FOR_HEADS = re.compile(r"^(summary|classifier)_")

_WIDER = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
}
_CASTS = {torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16}
_PROBABILITY_SECOND = (
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    torch.dropout,
    torch.dropout_,
    torch.alpha_dropout,
    torch.feature_dropout,
    torch.feature_alpha_dropout,
)
_DROPOUTS: dict[Any, tuple[int, str]] = {  # function: position and name of its probability
    **dict.fromkeys(_PROBABILITY_SECOND, (1, "p")),
    F.scaled_dot_product_attention: (4, "dropout_p"),
}


# Functions of losses, which may take weights of classes that loss_fn holds in float32.
_LOSSES = {
    function
    for function in vars(F).values()
    if inspect.isfunction(function) and "reduction" in inspect.signature(function).parameters
}


class ExactMode(TorchFunctionMode):
    """Makes casts to lower precision casts to float64, and every dropout probability zero, whoever wrote them.

    Models cast inside (a norm in float32, say), and the code of a plan repeats those casts: in lower precision, two
    orders of the same sum would differ by more than what is looked for. `dropped` tells whether a probability was
    more than zero.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dropped = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return what `func` gives with its arguments changed."""
        given = dict(kwargs or {})
        if func in _LOSSES:
            args = tuple(_double(value) for value in args)
            given = {name: _double(value) for name, value in given.items()}
        if func in _CASTS:
            return torch.Tensor.double(args[0])
        if func in _DROPOUTS:
            position, name = _DROPOUTS[func]
            self.dropped = self.dropped or _drops(func, args, given)
            if len(args) > position:
                args = (*args[:position], 0.0, *args[position + 1 :])
            else:
                given[name] = 0.0
        if func is torch._grouped_mm:  # torch has no kernel of it for float64
            return grouped_product(*args, **given)
        return func(
            *(_widen(value) for value in args),
            **{name: _widen(value) for name, value in given.items()},
        )


def _drops(func: Callable[..., Any], args: tuple[Any, ...], given: dict[str, Any]) -> bool:
    """Return whether a call of a dropout function would drop anything; attention has no argument for training."""
    position, name = _DROPOUTS[func]
    probability = args[position] if len(args) > position else given.get(name, 0.0)
    training = args[2] if func is not F.scaled_dot_product_attention and len(args) > 2 else True
    return bool(probability) and bool(given.get("training", given.get("train", training)))


def _double(value: Any) -> Any:
    narrow = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64
    return torch.Tensor.double(value) if narrow else value


def _widen(value: Any) -> Any:
    return _WIDER.get(value, value) if isinstance(value, torch.dtype) else value


@contextmanager
def exact_arithmetic(*, matched: bool = False) -> Iterator[ExactMode]:
    """Compute in float64 without dropout inside: tensors made without a dtype included. Yields what it met.

    `matched`: random numbers are the same in every process.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    modes = ExactMode(), MatchedDraws() if matched else nullcontext()  # type: ignore[no-untyped-call]
    try:
        with modes[0] as mode, modes[1], recomputed_under(partial(exact_arithmetic, matched=matched)):
            yield mode
    finally:
        torch.set_default_dtype(before)


def build_exact(model_file: ModelFile, seed: int = BUILD_SEEDS[0]) -> tuple[nn.Module, bool]:
    """Return the model as every process builds it, and whether it had dropout.

    It is seeded, float64, dropout off, weights perturbed; its mode is unchanged.
    """
    torch.manual_seed(seed)
    try:
        model = model_file.build()
    except Exception as error:
        raise user_error(error, model_file.path, f"{model_file.build_function}()") from error
    dropped = has_dropout(model)
    switch_off_dropout(model)
    model.double()
    model.zero_grad()  # a file that trains when it is imported leaves gradients
    perturb(model, seed)
    return model, dropped


def perturb(model: nn.Module, seed: int = BUILD_SEEDS[0]) -> None:
    """Add the same noise in every process to each floating-point parameter, tied ones once."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(noise.to(parameter.dtype), alpha=PERTURBATION)


def switch_off_dropout(model: nn.Module) -> None:
    """Set every probability of dropping something to zero, in modules and their configurations; mode unchanged."""
    for _, owner, name, value in _probabilities(model):
        setattr(owner, name, type(value)(0))


def has_dropout(model: nn.Module) -> bool:
    """Return whether a module in training mode, or its configuration, gives a probability of dropping something."""
    return any(
        value > 0 and module.training and (owner is module or not _FOR_HEADS.search(name))
        for module, owner, name, value in _probabilities(model)
    )


def _probabilities(model: nn.Module) -> Iterator[tuple[nn.Module, Any, str, float]]:
    """Yield (module, the module or its configuration, name of its attribute, value) for every probability."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            yield module, module, "p", module.p
        for owner in (module, getattr(module, "config", None)):
            for name, value in list(getattr(owner, "__dict__", {}).items()):
                if _DROPS.search(name) and isinstance(value, float | int) and not isinstance(value, bool):
                    yield module, owner, name, value

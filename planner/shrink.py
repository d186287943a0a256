"""Makes a smaller twin of a model: fewer of its repeated layers, and narrower where its configuration allows.

A twin has the same kinds of layers, ties and code; a plan that is too large for this machine is verified on it. Torch
is imported only when a model is built.
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

from planner.errors import VerifyError
from planner.model_file import ModelFile
from planner.records import PositiveInt, Record

# Configuration attributes that libraries of models use for the same things.
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads", "decoder_attention_heads", "n_heads")
_INNER = ("intermediate_size", "n_inner", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim")
_KEY_VALUE_HEADS = ("num_key_value_heads", "n_kv_heads")
_HEAD_SIZES = ("head_dim", "d_kv")

_SMALL_HEAD = 8
_SMALL_VOCABULARY = 128
_SMALL_SEQUENCE = 16


class Shrink(Record):
    """How a twin is smaller: at most `max_blocks` equal layers in a row, `narrow` dimensions."""

    max_blocks: PositiveInt
    narrow: bool = False


def shrink_model_file(file: ModelFile, shrink: Shrink | None) -> ModelFile:
    """Return a model file whose model is the smaller twin, with inputs that fit it; `None` changes nothing."""
    if shrink is None:
        return file

    def build() -> Any:
        model = _narrow(_build_without_memory(file)) if shrink.narrow else file.build()
        _drop_blocks(model, shrink.max_blocks)
        return model

    inputs: Callable[[int], Any] = file.example_inputs
    target: Callable[[int], Any] | None = file.example_target
    if shrink.narrow:
        inputs = _narrow_inputs(file.example_inputs)
        target = _narrow_inputs(file.example_target) if file.example_target else None
    return dataclasses.replace(file, build=build, example_inputs=inputs, example_target=target)


def _build_without_memory(file: ModelFile) -> Any:
    """Return the model on the meta device: only its configuration is wanted."""
    import torch

    with torch.device("meta"):
        return file.build()


def _narrow(model: Any) -> Any:
    """Return a model of the same class, built from a narrower configuration; VerifyError where there is none."""
    config = copy.deepcopy(getattr(model, "config", None))
    if not any(isinstance(getattr(config, name, None), int) for name in _HIDDEN):
        raise VerifyError(
            f"{type(model).__name__} has no configuration with a width, so no narrower twin can be built",
            hint="verify a plan for a smaller version of the model, solved with the same pins",
        )
    heads = next((getattr(config, name) for name in _HEADS if isinstance(getattr(config, name, None), int)), 4)
    groups = next((getattr(config, n) for n in _KEY_VALUE_HEADS if isinstance(getattr(config, n, None), int)), heads)
    few_groups = min(groups, 4)
    few_heads = few_groups * max(1, min(heads // groups, 4))
    changes = dict.fromkeys(_HIDDEN, few_heads * _SMALL_HEAD) | dict.fromkeys(_INNER, 2 * few_heads * _SMALL_HEAD)
    changes |= dict.fromkeys(_HEADS, few_heads) | dict.fromkeys(_KEY_VALUE_HEADS, few_groups)
    changes |= dict.fromkeys(_HEAD_SIZES, _SMALL_HEAD)
    changes["vocab_size"] = min(getattr(config, "vocab_size", 0) or _SMALL_VOCABULARY, _SMALL_VOCABULARY)
    for name, value in changes.items():
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, value)
    try:
        return type(model)(config)
    except (ValueError, RuntimeError, TypeError, AttributeError, KeyError) as error:
        raise VerifyError(
            f"{type(model).__name__} can't be built narrower for a twin: {type(error).__name__}: {error}",
            hint="verify a plan for a smaller version of the model, solved with the same pins",
        ) from error


def _narrow_inputs(make: Callable[[int], Any]) -> Callable[[int], Any]:
    """Return a function of example inputs whose token ids and sequences fit a narrow model."""
    import torch

    def shorten(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.dim() >= 2 and not value.is_floating_point():
                value = value[:, :_SMALL_SEQUENCE]
            if value.dtype == torch.int64:
                value = torch.where(value >= _SMALL_VOCABULARY, value % _SMALL_VOCABULARY, value)
            return value
        if isinstance(value, dict):
            return {key: shorten(item) for key, item in value.items()}
        if isinstance(value, tuple | list):
            return type(value)(shorten(item) for item in value)
        return value

    return lambda rows: shorten(make(rows))


def _drop_blocks(model: Any, max_blocks: int) -> None:
    """Keep the first `max_blocks` of every run of equal members of a list of composite modules."""
    from torch import nn

    def signature(module: nn.Module) -> tuple[Any, ...]:
        return type(module), tuple((name, tuple(p.shape)) for name, p in module.named_parameters())

    def visit(module: nn.Module) -> None:
        for name, child in list(module.named_children()):
            if isinstance(child, nn.ModuleList | nn.Sequential) and any(True for _ in child.children()):
                kept: list[nn.Module] = []
                run = 0
                for member in child:
                    same = (
                        bool(kept) and signature(member) == signature(kept[-1]) and any(True for _ in member.children())
                    )
                    run = run + 1 if same else 1
                    if run <= max_blocks:
                        kept.append(member)
                if len(kept) < len(child):
                    made = nn.ModuleList(kept) if isinstance(child, nn.ModuleList) else nn.Sequential(*kept)
                    setattr(module, name, made.train(child.training))
                    continue
            visit(child)

    visit(model)
    config = getattr(model, "config", None)
    for attribute in ("num_hidden_layers", "n_layer", "num_layers"):
        if isinstance(getattr(config, attribute, None), int):
            lists = [len(m) for m in model.modules() if isinstance(m, nn.ModuleList)]
            setattr(config, attribute, min(getattr(config, attribute), max(lists, default=max_blocks)))

"""Stages: a stage is an nn.Module that keeps the model's own submodules under their own names."""

from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from planner.emitter.runtime.buffers import _note_updated, _renew_buffers, _Replay
from planner.emitter.runtime.checks import PlanError
from planner.emitter.runtime.communication import _Alias, _apply
from planner.emitter.runtime.generators import _drawing_function, _seed_calls, _seeded_generators
from planner.emitter.runtime.tensor_parallel import TensorParallel


@dataclass(frozen=True)
class Value:
    """A tensor that a stage receives from stage `source`, sends to the stages `targets`, or that the model is given.

    `shape` is the one at the plan's microbatch size; `dtype` None is the stage's floating dtype, or for an input of the
    model anything. An input's rows are its dimension `batch_dim`; without rows (None) every microbatch gets all of it.
    `key` is the name by which `step` is given an input whose own name no variable can have. An input that the model has
    `written` in place is copied first: the batch stays as it was, and microbatches have nothing in common.
    """

    name: str
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    requires_grad: bool = False
    source: int | None = None
    targets: tuple[int, ...] = ()
    batch_dim: int | None = 0
    key: str = ""
    written: bool = False

    def dtype_in(self, stage_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype between stages; a model built in float64 has no narrower numbers."""
        if self.dtype is None or (stage_dtype == torch.float64 and self.dtype.is_floating_point):
            return stage_dtype
        if stage_dtype == torch.float64 and self.dtype.is_complex:
            return torch.complex128
        return self.dtype


class Output(dict[str, Any]):
    """An object with fields: read by attribute, key or position, as Hugging Face outputs are; positions and keys
    leave out what is None.
    """

    def __init__(self, **fields: Any) -> None:
        super().__init__({name: value for name, value in fields.items() if value is not None})
        vars(self).update(fields)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the output has no {name!r}, only {', '.join(vars(self))}")

    def __getitem__(self, key: Any) -> Any:
        return tuple(dict.values(self))[key] if isinstance(key, int | slice) else vars(self)[key]


def named_tuple(**fields: Any) -> Any:
    """Return a named tuple, of a class that is made once for the same names."""
    return _named_tuple_class(tuple(fields))(**fields)


@cache
def _named_tuple_class(names: tuple[str, ...]) -> Any:
    return namedtuple("NamedTuple", names)


def _map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return an output with `change` applied to its tensors."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Output):
        return Output(**{name: _map_tensors(change, item) for name, item in vars(value).items()})
    if isinstance(value, dict):
        return type(value)({key: _map_tensors(change, item) for key, item in value.items()})
    if isinstance(value, tuple | list):
        items = [_map_tensors(change, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


class PlanStage(nn.Module):
    """A part of the model: the submodules `module_names`, and the tensors `parameter_names` that its own forward reads.

    Its forward takes the model's inputs `inputs` and the values it `receives` by name, and returns the tuple of values
    it `sends`, the last stage the model's output. `updated_buffers` change in every forward. The modules
    `called_whole` look at values: which of their parameters get a gradient depends on the data. `draws` are
    functions of the model's code ("module:function") and modules that draw with Python's or numpy's generators.
    `units` are repeated layers whose parameters are gathered together.

    What a loss divides by is counted over the whole step: `count_microbatch` takes the inputs `count_inputs` and the
    target, and returns the `step_counts`, each with how it adds up, "sum" or "mean". Forward gets those in
    `forward_counts`, and `microbatch_loss` those in `loss_counts`.
    """

    module_names: ClassVar[tuple[str, ...]] = ()
    parameter_names: ClassVar[tuple[str, ...]] = ()
    updated_buffers: ClassVar[tuple[str, ...]] = ()
    called_whole: ClassVar[tuple[str, ...]] = ()
    draws: ClassVar[tuple[str, ...]] = ()
    loss_is_known: ClassVar[bool] = True  # the plan was made for the loss, which was recorded
    inputs: ClassVar[tuple[str, ...]] = ()
    receives: ClassVar[tuple[Value, ...]] = ()
    sends: ClassVar[tuple[Value, ...]] = ()
    units: ClassVar[tuple[str, ...]] = ()
    tensor_parallel: ClassVar[dict[str, TensorParallel]] = {}
    step_counts: ClassVar[dict[str, str]] = {}
    forward_counts: ClassVar[tuple[str, ...]] = ()
    loss_counts: ClassVar[tuple[str, ...]] = ()
    count_inputs: ClassVar[tuple[str, ...]] = ()

    def __init__(self, model: nn.Module, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.dtype, self.device, self.training = dtype, device, model.training
        for name in self.module_names:
            parent, _, attribute = self._parent(model, name)
            parent.add_module(attribute, model.get_submodule(name))
        for name in self.parameter_names:
            parent, owner, attribute = self._parent(model, name)
            if attribute in owner._parameters:
                parent.register_parameter(attribute, owner._parameters[attribute])
            elif attribute not in owner._buffers:  # a plain attribute: constant data, which here moves with the stage
                value = getattr(owner, attribute)
                vars(parent).pop(attribute, None)
                parent.register_buffer(attribute, value, persistent=False)
            else:
                persistent = attribute not in owner._non_persistent_buffers_set
                parent.register_buffer(attribute, owner._buffers[attribute], persistent=persistent)
        self._drawing = {name: _drawing_function(model, name) for name in self.draws if ":" in name}
        for name in self.draws:
            if ":" not in name:
                _seed_calls(self.get_submodule(name))
        _note_updated(self, self.updated_buffers)
        if self.updated_buffers:
            self.register_forward_pre_hook(lambda stage, args: _renew_buffers(stage) and None)
        # In-place operations are legal on what goes in and out, as in one process: registered before data parallelism
        # adds its own hooks around, because they return views, on which an in-place operation loses those hooks.
        self.register_forward_hook(lambda stage, args, output: _map_tensors(_own, output))
        self.register_forward_pre_hook(lambda stage, args, kw: (args, _map_tensors(_own, kw)), with_kwargs=True)

    def draw_numbers(self, name: str, *args: Any, **kwargs: Any) -> Tensor:
        """Return, as a tensor, what one of the functions `draws` returns."""
        with _seeded_generators():
            return torch.as_tensor(self._drawing[name](*args, **kwargs))

    def count_microbatch(self, *inputs: Any) -> tuple[Tensor, ...]:
        """Return what a microbatch counts, from its inputs and target."""
        return ()

    # Of a plan whose loss divides by counts: (output, target, *counts of the step) -> a microbatch's loss. The mean of
    # these losses is the loss of the whole batch.
    microbatch_loss: ClassVar[Callable[..., Tensor] | None] = None

    def _parent(self, model: nn.Module, name: str) -> tuple[nn.Module, nn.Module, str]:
        """Return the parent of `name` in the stage and in the model, and the last part of the name.

        The stage's is a copy, emptied of all parameters and modules, so that it has the class that init functions ask.
        """
        *path, attribute = name.split(".")
        if (first := name.partition(".")[0]) not in self._modules and hasattr(self, first):
            raise PlanError(f"the model calls a part {first!r}, a name that stages need\nhint: rename it in the model")
        parent, owner = cast("nn.Module", self), model
        for part in path:
            owner = owner.get_submodule(part)
            if part not in parent._modules:
                shell = object.__new__(type(owner))
                vars(shell).update(vars(owner), _non_persistent_buffers_set=set())
                vars(shell)["_apply"] = partial(nn.Module._apply, shell)  # the class's own may read what is not here
                for kind in ("_parameters", "_buffers", "_modules"):
                    vars(shell)[kind] = {key: None for key, value in vars(owner)[kind].items() if value is None}
                parent.add_module(part, shell)
            parent = parent.get_submodule(part)
        return parent, owner, attribute


def _own(x: Tensor) -> Tensor:
    return _apply(_Alias, x) if x.requires_grad else x


def layers(stage: nn.Module, prefix: str, start: int, stop: int) -> Iterator[nn.Module]:
    """Yield the submodules `prefix.start` to `prefix.stop - 1`."""
    return (stage.get_submodule(f"{prefix}.{index}") for index in range(start, stop))


def recompute(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return `function(*args, **kwargs)`, keeping none of its activations: backward computes them again."""
    if isinstance(function, nn.Module) and any("_updated" in vars(module) for module in function.modules()):
        function = _Replay(function)
    return checkpoint(function, *args, use_reentrant=False, **kwargs)

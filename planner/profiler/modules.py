"""Gives the modules of a model one at a time, ready to run: real ones with random weights, or fake ones.

Only the layer at hand is on the device, so one device profiles a model that does not fit it.
"""

import math

import torch
from torch import nn

from planner.profiler.copies import copy_module
from planner.profiler.fake import model_dtype
from planner.profiler.plain_tensors import find_tensor
from planner.profiler.torch_internals import FakeTensorMode, unset_fake_temporarily
from planner.sharding import ShardedParameter, Sharding

_WEIGHT_STD = 0.02  # small enough that activations stay finite, large enough that none is denormal


class ModuleSource:
    """Modules and parameters of a model on the meta device, by name, made on first use and kept until `release`.

    With `fake_mode` they are fake tensors, else they are on `device` with random weights. `sharding` divides the
    parameters of the module `divided`: each gets the shape that one tensor-parallel rank holds.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        device: torch.device,
        dtype: torch.dtype | None,
        fake_mode: FakeTensorMode | None = None,
    ) -> None:
        self._model = model
        self._device = device
        self._dtype = dtype or model_dtype(model)
        self._default = model_dtype(model)
        self._fake_mode = fake_mode
        self._made: dict[str, nn.Module] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._divided = ""
        self._sharding: Sharding | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the model's floating parameters take."""
        return self._dtype

    def release(self) -> None:
        """Drop every module made so far, and the division."""
        self._made.clear()
        self._tensors.clear()
        self._sharding = None

    def divide(self, module: str, sharding: Sharding) -> None:
        """Give the parameters of a module the shapes of one rank, from now until `release`."""
        self.release()
        self._divided, self._sharding = module, sharding

    def module(self, name: str) -> nn.Module:
        """Return the module of a name, made when first asked for."""
        if name not in self._made:
            with unset_fake_temporarily():
                made = _copied(self._model.get_submodule(name))
                if self._sharding is not None:
                    self._shrink(name, made)
                self._fill(made)
            self._made[name] = made
        return self._made[name]

    def parameter(self, name: str) -> torch.Tensor:
        """Return a parameter, buffer or plain tensor that no module call holds."""
        if name not in self._tensors:
            with unset_fake_temporarily():
                self._tensors[name] = self._convert(self._part(name, find_tensor(self._model, name)))
        return self._tensors[name]

    def _part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return what one rank holds of a parameter that code reads directly: its slice, where it is divided."""
        prefix = f"{self._divided}." if self._divided else ""
        if self._sharding is None or not name.startswith(prefix):
            return tensor
        division = self._sharding.parameters.get(name.removeprefix(prefix))
        if division is None:
            return tensor
        return nn.Parameter(_local(tensor, division, self._sharding.tp_degree), requires_grad=tensor.requires_grad)

    def _fill(self, module: nn.Module) -> None:
        converted: dict[int, torch.Tensor] = {}

        def convert(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in converted:
                converted[id(tensor)] = self._convert(tensor)
            return converted[id(tensor)]

        for inner in module.modules():
            for name, param in inner._parameters.items():
                if param is not None:
                    inner._parameters[name] = convert(param)  # type: ignore[assignment]
            for name, buffer in inner._buffers.items():
                if buffer is not None:
                    inner._buffers[name] = convert(buffer)

    def dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        """Return the dtype that a parameter or buffer of the model is made in."""
        return self._dtype if isinstance(tensor, nn.Parameter) and tensor.dtype == self._default else tensor.dtype

    def _convert(self, tensor: torch.Tensor) -> torch.Tensor:
        is_param = isinstance(tensor, nn.Parameter)
        dtype = self.dtype_of(tensor)
        if self._fake_mode is not None:
            with self._fake_mode:
                made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=self._device)
        elif tensor.device.type == "meta":
            made = torch.empty(tensor.shape, dtype=torch.float32 if dtype.itemsize < 2 else dtype, device=self._device)
            made = made.normal_(std=_WEIGHT_STD).to(dtype) if dtype.is_floating_point else made.zero_()
        else:
            made = tensor.detach().to(self._device, dtype)
        return nn.Parameter(made, requires_grad=tensor.requires_grad) if is_param else made

    def _shrink(self, name: str, module: nn.Module) -> None:
        """Give divided parameters their local shapes, and the modules that hold them their local sizes."""
        assert self._sharding is not None
        degree = self._sharding.tp_degree
        for local, division in self._sharding.parameters.items():
            full = f"{self._divided}.{local}" if self._divided else local
            if not full.startswith(f"{name}."):
                continue
            owner, _, last = full.removeprefix(f"{name}.").rpartition(".")
            holder = module.get_submodule(owner)
            param = holder._parameters[last]
            if param is not None:
                holder._parameters[last] = nn.Parameter(
                    _local(param, division, degree), requires_grad=param.requires_grad
                )
        for relative, style in self._sharding.styles.items():
            full = ".".join(part for part in (self._divided, relative) if part)
            if full != name and not full.startswith(f"{name}."):
                continue
            holder = module.get_submodule(full.removeprefix(name).lstrip("."))
            attributes = {
                "column": ("out_features", "nf"),
                "row": ("in_features", "nx"),
                "vocabulary": ("num_embeddings",),
            }[style]
            for attribute in attributes:
                if hasattr(holder, attribute):
                    setattr(holder, attribute, getattr(holder, attribute) // degree)
            if style == "vocabulary" and getattr(holder, "padding_idx", None) is not None:
                holder.padding_idx = None  # type: ignore[assignment]


def _copied(module: nn.Module) -> nn.Module:
    """Return a copy of a module; tensors that it computed and keeps (an older weight_norm's) lose their history."""
    values = (value for inner in module.modules() for value in vars(inner).values() if isinstance(value, torch.Tensor))
    return copy_module(module, {id(value): value.detach() for value in values if not value.is_leaf})


def _local(param: torch.Tensor, division: ShardedParameter, degree: int) -> torch.Tensor:
    shape = list(param.shape)
    shape[division.dim] //= degree
    return torch.empty(math.prod(shape), dtype=param.dtype, device="meta").reshape(shape)

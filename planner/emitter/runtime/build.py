"""Building: a stage with its own part of the model, divided, filled and tied."""

import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from planner.emitter.runtime.checks import PlanError, _check_shape
from planner.emitter.runtime.communication import _Parts
from planner.emitter.runtime.stage import PlanStage
from planner.emitter.runtime.tensor_parallel import _open_block


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Let models be built without memory for parameters: each goes to the meta device as it is registered.

    All else stays real, so that buffers have their values and code that reads them runs.
    """
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            meta = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
            vars(meta).update(vars(param))
            param = meta
        original(module, name, param)

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def _model_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of most floating parameters, by elements."""
    counts: dict[torch.dtype, int] = {}
    for param in model.parameters():
        if param.is_floating_point():
            counts[param.dtype] = counts.get(param.dtype, 0) + param.numel()
    return max(counts, key=lambda dtype: counts[dtype]) if counts else torch.get_default_dtype()


def _read_checkpoint(checkpoint: Mapping[str, Tensor] | str | os.PathLike[str] | None) -> Mapping[str, Tensor]:
    if checkpoint is None or isinstance(checkpoint, Mapping):
        return checkpoint or {}
    values: Mapping[str, Tensor] = torch.load(checkpoint, map_location="cpu", mmap=True, weights_only=True)
    return values


class _Filler:
    """Gives values to tensors on the meta device, module by module: from a checkpoint, else by the user's function."""

    def __init__(
        self,
        checkpoint: Mapping[str, Tensor],
        initialize: Callable[[nn.Module], object] | None,
        tied: tuple[tuple[str, ...], ...],
        device: torch.device,
    ) -> None:
        self.checkpoint, self.initialize, self.device = checkpoint, initialize, device
        self.aliases = {name: group for group in tied for name in group}
        self.seed = torch.initial_seed()

    def _unwritten_like(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the device that is full of a mark: NaN, or the least integer."""
        floating = tensor.is_floating_point() or tensor.is_complex()
        mark = float("nan") if floating else 0 if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).min
        return torch.full_like(tensor, mark, device=self.device, requires_grad=False)

    def _count_unwritten(self, tensor: Tensor) -> int:
        """Return how many values still are the mark; booleans have none and count as unwritten."""
        if tensor.is_floating_point() or tensor.is_complex():
            return int(tensor.isnan().sum())
        return tensor.numel() if tensor.dtype == torch.bool else int((tensor == torch.iinfo(tensor.dtype).min).sum())

    def _source(self, name: str) -> str | None:
        """Return the name by which the checkpoint has a tensor; None where it has not.

        PlanError where it has other values by another name of a parameter that is tied.
        """
        found = [other for other in self.aliases.get(name, (name,)) if other in self.checkpoint]
        first = found[0] if found else None
        for other in found[1:]:
            one, two = self.checkpoint[found[0]], self.checkpoint[other]
            if one.data_ptr() != two.data_ptr() and not torch.equal(one, two):
                raise PlanError(
                    f"the checkpoint has other values for {first!r} than for {other!r}, and the model ties them\n"
                    "hint: leave one of them out of the checkpoint, or build the model without the tie and solve again"
                )
        return first

    def _hint(self, name: str) -> str:
        """Return what to do about a name that the checkpoint has not, but maybe with a prefix more or less."""
        for given in self.checkpoint:
            if given.endswith(f".{name}"):
                return f"the checkpoint has {given!r}: take {given.removesuffix(name)!r} off its names"
            if name.endswith(f".{given}"):
                return f"the checkpoint has {given!r}: put {name.removesuffix(given)!r} before its names"
        return "let `initialize` write it, or give a checkpoint that has it"

    def fill(self, name: str, module: nn.Module) -> None:
        """Give the module's own parameters and buffers their values, on the device and whole.

        With `initialize`, numbers depend on the seed and the module's name, so every plan draws the same.
        """
        tensors: list[tuple[str, Tensor]] = [*module.named_parameters(recurse=False, remove_duplicate=False)]
        tensors += module.named_buffers(recurse=False, remove_duplicate=False)
        missing, read = [], {}
        for key, tensor in tensors:
            full_name = f"{name}.{key}" if name else key
            persistent = key not in module._non_persistent_buffers_set
            source = self._source(full_name) if persistent else None
            real = self._unwritten_like(tensor) if tensor.is_meta else tensor.detach().to(self.device)
            if source is not None:
                values, shape = self.checkpoint[source], tuple(tensor.shape)
                _check_shape(
                    f"{source!r} of the checkpoint", values, shape, "a checkpoint of the model that was profiled"
                )
                read[key] = real.copy_(self.checkpoint[source])
            elif tensor.is_meta or (persistent and self.initialize is None):
                missing.append((key, full_name))
            if key in module._parameters:
                module._parameters[key] = nn.Parameter(real, requires_grad=tensor.requires_grad)
            else:
                module._buffers[key] = real
        if self.initialize is not None and len(read) < len(tensors):
            devices = [self.device] if self.device.type == "cuda" else []
            read = {key: value.clone() for key, value in read.items()}
            with torch.random.fork_rng(devices), torch.no_grad():
                torch.manual_seed((self.seed + zlib.crc32(name.encode())) % 2**63)
                self.initialize(module)
                for key, value in read.items():
                    getattr(module, key).copy_(value)
        for key, full_name in missing:
            tensor = getattr(module, key)
            if self.initialize is None or (count := self._count_unwritten(tensor)):
                what = "is not in the checkpoint" if self.initialize is None else f"has {count} values nobody wrote"
                raise PlanError(f"{full_name!r}, shape {tuple(tensor.shape)}, {what}\nhint: {self._hint(full_name)}")


def _build_stage(stage: PlanStage, mesh: DeviceMesh | None, filler: _Filler | None) -> None:
    """Fill the stage's modules and divide them over the tensor-parallel ranks, one after another, so that no more than
    one module is whole at a time; then let opened blocks run their own code.
    """
    styles: dict[str, ParallelStyle] = {}
    for name, plan in stage.tensor_parallel.items():
        for key, style in plan.styles.items():
            styles[f"{name}.{key}" if key else name] = style
    built: dict[int, ParallelStyle | None] = {}  # a module that is shared stands in the stage by several names
    for name, module in [*stage.named_modules(remove_duplicate=False)]:
        own = styles.pop(name) if name in styles else None
        if id(module) in built:
            if own != built[id(module)]:
                raise PlanError(f"this plan divides {name!r}, a module that it has by other names too, in two ways")
            continue
        built[id(module)] = own
        if filler is not None:
            filler.fill(name, module)
        if mesh is not None and own is not None:
            parallelize_module(module, mesh, own)
    if mesh is None:
        return
    if styles:
        raise PlanError(f"this plan divides {next(iter(styles))!r}, and its stage has no such module")
    for name, plan in stage.tensor_parallel.items():
        _open_block(stage.get_submodule(name), plan, mesh)


def _tie(module: nn.Module, tied: tuple[tuple[str, ...], ...]) -> None:
    """Make every group of names that the module has one parameter again: dividing and filling untie them."""
    present = dict(module.named_parameters(remove_duplicate=False))
    for group in tied:
        first, *others = [name for name in group if name in present] or [""]
        for name in others:
            _check_shape(f"{name!r}, tied to {first!r},", present[name], tuple(present[first].shape))
            path, _, attribute = name.rpartition(".")
            module.get_submodule(path).register_parameter(attribute, present[first])


def _shard_of(module: nn.Module, name: str) -> tuple[int, _Parts] | None:
    """Return along which dimension, in how many parts, a parameter was divided; None where it is whole."""
    path, _, attribute = name.rpartition(".")
    shards: dict[str, tuple[int, _Parts]] = vars(module.get_submodule(path)).get("_shards", {})
    return shards.get(attribute)

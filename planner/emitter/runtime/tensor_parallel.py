"""Tensor parallelism: styles for `parallelize_module` that keep parameters plain tensors, each rank its own slice."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from planner.emitter.runtime.checks import PlanError
from planner.emitter.runtime.communication import _apply, _Parts, _Reduce, _shard, enter, gather_slices, on_first


def _kind(module: nn.Module) -> str:
    """Return which of the three divisible layers a module is; Hugging Face's Conv1D is a linear layer, transposed."""
    forward = type(module).forward
    if forward is nn.Linear.forward or (type(module).__name__ == "Conv1D" and hasattr(module, "nf")):
        return "linear"
    if isinstance(module, nn.Embedding):
        return "embedding"
    raise PlanError(f"{type(module).__name__} can't be divided: only nn.Linear, nn.Embedding and Conv1D can")


def _divide(module: nn.Module, name: str, dim: int, parts: _Parts, mesh: DeviceMesh) -> None:
    """Replace a parameter by this rank's slice, and note on the module how it was cut."""
    param = module.get_parameter(name)
    sizes = (param.shape[dim] // parts,) * parts if isinstance(parts, int) else parts
    if sum(sizes) != param.shape[dim] or any(size % mesh.size() for size in sizes):
        raise PlanError(
            f"dimension {dim} of {tuple(param.shape)} ({type(module).__name__}.{name}, {len(sizes)} parts) "
            f"can't be divided over {mesh.size()} ranks\nhint: solve again with another tp_degree"
        )
    local = _shard(param.detach(), dim, parts, mesh.get_local_rank(), mesh.size()).clone()
    module.register_parameter(name, nn.Parameter(local, requires_grad=param.requires_grad))
    vars(module).setdefault("_shards", {})[name] = (dim, parts)


def _resize(module: nn.Module, size: int, *names: str) -> None:
    for name in names:
        if hasattr(module, name):
            setattr(module, name, getattr(module, name) // size)


@dataclass
class Column(ParallelStyle):
    """Divides a layer's outputs: weight along `dim`, and the bias. `gather` puts the outputs together again.

    An embedding has them along dimension 1.

    In an opened block the block's own code calls `enter`; a layer of its own (`enters`) does it here.
    """

    dim: int = 0
    parts: _Parts = 1
    gather: bool = False
    enters: bool = False

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if _kind(module) == "embedding" and self.dim != 1:
            raise PlanError("Embedding can't be divided by columns along dimension 0: they are its dimension 1")
        group, forward = mesh.get_group(), module.forward
        _divide(module, "weight", self.dim, self.parts, mesh)
        if getattr(module, "bias", None) is not None:
            _divide(module, "bias", 0, self.parts, mesh)
        _resize(module, mesh.size(), "out_features", "nf", "embedding_dim")

        def run(x: Tensor) -> Tensor:
            y = forward(enter(x, group) if self.enters else x)
            return gather_slices(y, group, -1, self.parts) if self.gather else y

        if self.enters or self.gather:
            module.forward = run
        return module


@dataclass
class Row(ParallelStyle):
    """Divides a layer's inputs: weight along `dim`. The products are summed, then the whole bias is added.

    Without `reduce` they stay a partial sum, to which the first rank adds the bias.
    """

    dim: int = 1
    parts: _Parts = 1
    reduce: bool = True

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if _kind(module) != "linear":
            raise PlanError(f"{type(module).__name__} can't be divided by rows: only nn.Linear and Conv1D can")
        group, transposed = mesh.get_group(), hasattr(module, "nf")
        _divide(module, "weight", self.dim, self.parts, mesh)
        _resize(module, mesh.size(), "in_features", "nx")

        def run(x: Tensor) -> Tensor:
            weight = module.get_parameter("weight")
            y = x @ weight if transposed else F.linear(x, weight)
            y = _apply(_Reduce, y, group) if self.reduce else y
            if module.bias is None:
                return y
            bias = module.get_parameter("bias")
            return y + (bias if self.reduce else on_first(bias, group))

        module.forward = run
        return module


@dataclass
class Vocabulary(ParallelStyle):
    """Divides an embedding's rows: every rank looks up the rows it has, and the results are summed.

    Without `reduce` they stay a partial sum.
    """

    reduce: bool = True

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Embedding):
            raise PlanError(f"{type(module).__name__} has no vocabulary to divide: only nn.Embedding has")
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            raise PlanError("an embedding with max_norm, scale_grad_by_freq or sparse gradients can't be divided")
        group, forward = mesh.get_group(), module.forward
        _divide(module, "weight", 0, 1, mesh)
        _resize(module, mesh.size(), "num_embeddings")
        start, count = mesh.get_local_rank() * module.num_embeddings, module.num_embeddings
        if module.padding_idx is not None:
            padding = module.padding_idx - start
            module.padding_idx = padding if 0 <= padding < count else None

        def run(ids: Tensor) -> Tensor:
            elsewhere = (ids < start) | (ids >= start + count)
            rows = forward((ids - start).masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(-1), 0)
            return _apply(_Reduce, rows, group) if self.reduce else rows

        module.forward = run  # type: ignore[method-assign, assignment]
        return module


@dataclass
class Slices(ParallelStyle):
    """Divides parameters that code reads directly: each name has its dimension and the parts of that."""

    cuts: dict[str, tuple[int, _Parts]]

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for name, (dim, parts) in self.cuts.items():
            _divide(module, name, dim, parts, mesh)
        return module


@dataclass(frozen=True)
class TensorParallel:
    """How one module is divided: the styles of its parts ('' is the module itself), and the code that takes the place
    of its forward where that has numbers to change. The gradients of `partial_gradients` are summed over the group.
    """

    styles: dict[str, ParallelStyle] = field(default_factory=dict)
    forward: Callable[..., Any] | None = None
    partial_gradients: tuple[str, ...] = ()


def _open_block(module: nn.Module, plan: TensorParallel, mesh: DeviceMesh) -> None:
    """Let `plan.forward` take the place of the module's; it finds `tp_group` on the module."""
    vars(module)["tp_group"] = mesh.get_group()
    if plan.forward is not None:
        module.forward = MethodType(plan.forward, module)


@contextmanager
def draws_apart(group: dist.ProcessGroup) -> Iterator[None]:
    """Let each rank of a group draw its own random numbers inside: what it computes there is a part of its own.

    The seed comes from the state that the ranks share, so a part that is computed again draws the same again.
    """
    seed = int(torch.randint(2**62, ())) + dist.get_rank(group)
    with torch.random.fork_rng([torch.cuda.current_device()] if dist.get_backend(group) == "nccl" else []):
        torch.manual_seed(seed)
        yield

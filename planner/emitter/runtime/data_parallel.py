"""Data parallelism: composable `replicate` or `fully_shard`; gradients are averaged once a step."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate

from planner.emitter.runtime.stage import PlanStage


def _distribute(stage: PlanStage, group: dist.ProcessGroup, mode: str, *, mixed: bool) -> None:
    """Wrap the stage's units, then the stage; parameters become DTensors that stay whole from first forward to last
    backward. `mixed`: computed in bfloat16, gradients summed in float32. `_Numbers` has those without dimensions.
    """
    mesh = DeviceMesh.from_group(group, stage.device.type, mesh_dim_names=("dp",))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
    wrap: Any
    if mode == "sharded":
        wrap = partial(fully_shard, reshard_after_forward=False)
    else:
        from torch.distributed._composable.replicate_with_fsdp import replicate

        wrap = replicate
    wrap = partial(wrap, mesh=mesh, mp_policy=policy, ignored_params={p for p in stage.parameters() if p.dim() == 0})
    for param in stage.parameters():  # kept transposed or channels last, which these can't hold
        param.data = param.data.contiguous()
    for unit in stage.units:
        wrap(stage.get_submodule(unit))
    wrap(stage)


class _Numbers:
    """Parameters without dimensions, which `replicate` and `fully_shard` can't hold: plain tensors inside the stage.

    `outer` are DTensors on the same memory, for optimizers; `average` brings them their gradients.
    """

    def __init__(self, stage: PlanStage, group: dist.ProcessGroup) -> None:
        self.group = group
        self.mesh = DeviceMesh.from_group(group, stage.device.type, mesh_dim_names=("dp",))
        self.inner = {name: param for name, param in stage.named_parameters() if param.dim() == 0}
        self.outer: dict[str, nn.Parameter] = {}
        for name, param in self.inner.items():
            whole = DTensor.from_local(param.detach(), self.mesh, [Replicate()], run_check=False)
            self.outer[name] = nn.Parameter(whole, requires_grad=param.requires_grad)

    def average(self) -> None:
        """Add the mean of the replicas' gradients to the outer parameters'; one that no replica has stays none."""
        trained = [name for name, param in self.inner.items() if param.requires_grad]
        if not trained:
            return
        given = [self.inner[name].grad for name in trained]
        zero = torch.zeros_like(self.inner[trained[0]])
        flat = torch.stack([zero if gradient is None else gradient for gradient in given])
        counts = torch.tensor([float(gradient is not None) for gradient in given], device=flat.device)
        dist.all_reduce(flat, group=self.group)
        dist.all_reduce(counts, group=self.group)
        flat /= dist.get_world_size(self.group)
        for name, gradient, count in zip(trained, flat, counts.tolist(), strict=True):
            self.inner[name].grad = None
            outer = self.outer[name]
            if count:
                mean = DTensor.from_local(gradient, self.mesh, [Replicate()], run_check=False)
                outer.grad = mean if outer.grad is None else outer.grad + mean


class _Touched:
    """The parameters of modules called whole that get a gradient in this step, on this replica.

    Which do depends on the data: an expert may be idle on one replica alone. Replicas sum gradients in one message, so
    where one has a gradient all need one, be it zero; what no replica has touched gets none, as in one process.
    """

    def __init__(self, stage: PlanStage) -> None:
        self.stage = stage
        self.watched: set[int] = set()
        self.touched: set[str] = set()
        self.empty: list[str] = []

    def _parameters(self) -> dict[str, nn.Parameter]:
        found = {}
        for name in self.stage.called_whole:
            for key, param in self.stage.get_submodule(name).named_parameters():
                if param.requires_grad and param.dim():
                    found[f"{name}.{key}"] = param
        return found

    def begin(self) -> None:
        """Start a step."""
        self.touched.clear()
        self.empty = [name for name, param in self._parameters().items() if param.grad is None]

    def before_backward(self, last: bool) -> None:
        """Watch the gathered parameters; before the last backward, give each a gradient to be summed."""
        if not isinstance(self.stage, FSDPModule):
            return
        for name, param in self._parameters().items():
            if id(param) not in self.watched:
                self.watched.add(id(param))
                watch: Any = param.register_post_accumulate_grad_hook
                watch(partial(self._touch, name))
            if last and param.grad is None:
                param.grad = torch.zeros_like(param)

    def _touch(self, name: str, param: Tensor) -> None:
        self.touched.add(name)

    def end(self, group: dist.ProcessGroup) -> None:
        """Take back the gradients of parameters that no replica has touched."""
        if not isinstance(self.stage, FSDPModule) or not self.stage.called_whole:
            return
        parameters = self._parameters()
        flags = torch.tensor([float(name in self.touched) for name in parameters], device=self.stage.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
        for (name, param), touched in zip(parameters.items(), flags.tolist(), strict=True):
            if not touched and name in self.empty:
                param.grad = None


def _set_last_backward(stage: nn.Module, last: bool) -> None:
    """Tell data parallelism whether the next backward is the step's last, which averages gradients."""
    if isinstance(stage, FSDPModule):
        stage.set_is_last_backward(last)
        stage.set_reshard_after_backward(last)
        stage.set_requires_gradient_sync(last)


def _release(stage: nn.Module) -> None:
    """Give back the gathered parameters, which a forward without backward leaves: they'd miss later updates."""
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(tensor: Tensor) -> Tensor:
    """Return the tensor gathered over the data-parallel ranks, all of which must call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _norm(tensors: list[Tensor]) -> Tensor:
    """Return the 2-norm of tensors of one device together, in float32 at least."""
    wide = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors, 2, dtype=wide)))
    return norm


def _scale(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply tensors of one device in place."""
    if tensors:
        torch._foreach_mul_(tensors, factor)

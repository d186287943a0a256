"""Communication: gradients through a tensor-parallel group, and the values that cross from stage to stage."""

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def _alias(x: Tensor) -> Tensor:
    """Return a tensor on the storage of `x` that autograd takes for no view, so that in-place operations are legal."""
    x = x.detach()
    alias: Tensor = torch.empty(0, dtype=x.dtype, device=x.device).set_(x)  # type: ignore[call-overload]
    return alias


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    result: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return result


class _Alias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _alias(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _alias(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone(memory_format=torch.contiguous_format)  # others may hold the tensor
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=group)  # in place: right after a product, which saves its inputs, not its result
        return _alias(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, parts: int) -> Tensor:
        ctx.group, ctx.parts = group, parts
        shards = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
        dist.all_gather(shards, x.contiguous(), group=group)
        return _join(shards, dim=-1, parts=parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        rank, size = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        return _shard(gradient, -1, ctx.parts, rank, size), None, None  # behind the gather every rank has all of it


def enter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return `x` for a computation that is divided over `group`: backward sums the gradients of its ranks."""
    return _apply(_Enter, x, group)


def _shard(tensor: Tensor, dim: int, parts: int, rank: int, size: int) -> Tensor:
    """Return a rank's slice of dimension `dim`, taken from each of `parts` equal parts (q, k and v in one weight)."""
    slices = [part.tensor_split(size, dim)[rank] for part in tensor.tensor_split(parts, dim)]
    return torch.cat(slices, dim) if parts > 1 else slices[0].contiguous()


def _join(shards: list[Tensor], dim: int, parts: int) -> Tensor:
    """Return the tensor whose `_shard`s these are."""
    split = [shard.tensor_split(parts, dim) for shard in shards]
    return torch.cat([slices[part] for part in range(parts) for slices in split], dim)


class _Channel:
    """The values that go from one rank to another, one list per microbatch, in one direction and in order.

    A process group of its own for each pair of stages and direction keeps the order under NCCL too.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int, values: dict[str, Tensor]) -> None:
        self.group, self.peer = group, peer
        self.values = values  # on the meta device: shape and dtype of each
        self.posted: deque[tuple[dict[str, Tensor], list[Any]]] = deque()
        self.sent: deque[tuple[Any, Tensor]] = deque()

    def open(self, device: torch.device, *, sends: bool) -> None:
        """Connect: NCCL does so at the first message, waiting for the other side, which must not be in mid-step."""
        token = torch.zeros(1, device=device)
        (dist.send if sends else dist.recv)(token, self.peer, group=self.group)

    def post(self, device: torch.device) -> None:
        """Start to receive the next microbatch's values."""
        buffers = {name: torch.empty_like(value, device=device) for name, value in self.values.items()}
        works = [dist.irecv(buffer, src=self.peer, group=self.group) for buffer in buffers.values()]
        self.posted.append((buffers, works))

    def receive(self) -> dict[str, Tensor]:
        """Return the values of the microbatch that was posted first, when they are here."""
        buffers, works = self.posted.popleft()
        for work in works:
            work.wait()
        return buffers

    def send(self, values: dict[str, Tensor]) -> None:
        """Start to send a microbatch's values; each is kept until it has left."""
        while self.sent and self.sent[0][0].is_completed():
            self.sent.popleft()[0].wait()
        for name in self.values:
            value = values[name].detach().contiguous()
            self.sent.append((dist.isend(value, dst=self.peer, group=self.group), value))

    def flush(self) -> None:
        """Wait until everything has left."""
        while self.sent:
            self.sent.popleft()[0].wait()

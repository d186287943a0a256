"""Communication: gradients through a tensor-parallel group, and the values that cross from stage to stage."""

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_Parts = int | tuple[int, ...]  # equal parts of a dimension by their number, others by their whole sizes


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
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int, parts: _Parts, entered: bool) -> Tensor:
        ctx.group, ctx.dim, ctx.parts, ctx.entered = group, dim, parts, entered
        return _all_gather(x, group, dim, parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        if ctx.entered:
            return _reduce_scatter(gradient, ctx.group, ctx.dim, ctx.parts), None, None, None, None
        rank, size = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)  # behind it every rank has all of it
        return _shard(gradient, ctx.dim, ctx.parts, rank, size), None, None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _reduce_scatter(x, group, dim, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _all_gather(gradient, ctx.group, ctx.dim, 1), None, None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int, parts: _Parts, entered: bool) -> Tensor:
        ctx.group, ctx.dim, ctx.parts, ctx.entered = group, dim, parts, entered
        return _shard(x, dim, parts, dist.get_rank(group), dist.get_world_size(group)).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        if not ctx.entered:
            return _all_gather(gradient, ctx.group, ctx.dim, ctx.parts), None, None, None, None
        shards = [torch.zeros_like(gradient) for _ in range(dist.get_world_size(ctx.group))]
        shards[dist.get_rank(ctx.group)] = gradient
        return _join(shards, ctx.dim, ctx.parts), None, None, None, None


class _OnFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return x.clone() if dist.get_rank(group) == 0 else torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def enter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return `x` for a computation that is divided over `group`: backward sums the gradients of its ranks."""
    return _apply(_Enter, x, group)


def sum_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of what the ranks have."""
    return _apply(_Reduce, x.clone(), group)


def scatter_sum(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """Return this rank's slice of the sum of what the ranks have."""
    return _apply(_Scatter, x, group, dim)


def gather_slices(x: Tensor, group: dist.ProcessGroup, dim: int, parts: _Parts = 1, *, entered: bool = False) -> Tensor:
    """Return the whole of the ranks' slices; `entered`: for a divided computation, whose gradients backward sums."""
    return _apply(_Gather, x, group, dim, parts, entered)


def take_slice(x: Tensor, group: dist.ProcessGroup, dim: int, parts: _Parts = 1, *, entered: bool = False) -> Tensor:
    """Return this rank's slice; backward gathers the gradient, of an `entered` value it leaves zeros elsewhere."""
    return _apply(_Take, x, group, dim, parts, entered)


def on_first(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return `x` on the first rank and zeros elsewhere: a term of a sum over ranks."""
    return _apply(_OnFirst, x, group)


def _all_gather(x: Tensor, group: dist.ProcessGroup, dim: int, parts: _Parts) -> Tensor:
    shards = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, x.contiguous(), group=group)
    return _join(shards, dim, parts)


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup, dim: int, parts: _Parts) -> Tensor:
    size = dist.get_world_size(group)
    shards = [_shard(x, dim, parts, rank, size).contiguous() for rank in range(size)]
    result = torch.empty_like(shards[0])
    dist.reduce_scatter(result, shards, group=group)
    return result


def _split(tensor: Tensor, dim: int, parts: _Parts, size: int = 1) -> tuple[Tensor, ...]:
    """Return the parts of a dimension: so many equal ones, or of given sizes, of which there is 1 / `size` here."""
    if isinstance(parts, int):
        return tuple(tensor.tensor_split(parts, dim))
    return torch.split_with_sizes(tensor, [part // size for part in parts], dim)


def _shard(tensor: Tensor, dim: int, parts: _Parts, rank: int, size: int) -> Tensor:
    """Return a rank's slice of dimension `dim`, taken from each of its parts (q, k and v in one weight)."""
    slices = [part.tensor_split(size, dim)[rank] for part in _split(tensor, dim, parts)]
    return torch.cat(slices, dim) if len(slices) > 1 else slices[0].contiguous()


def _join(shards: list[Tensor], dim: int, parts: _Parts) -> Tensor:
    """Return the tensor whose `_shard`s these are."""
    split = [_split(shard, dim, parts, len(shards)) for shard in shards]
    return torch.cat([slices[part] for part in range(len(split[0])) for slices in split], dim)


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

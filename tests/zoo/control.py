"""Models whose Python code looks at values: some keep it inside a block, which is then called whole, some can't be."""

from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 8


def inputs(rows: int) -> tuple[Tensor]:
    return (torch.randn(rows, 4, WIDTH),)


def loss_fn(output: Any) -> Tensor:
    """Return the mean square of every output together."""
    tensors = [output] if isinstance(output, Tensor) else list(output)
    return torch.stack([(tensor.double() ** 2).mean() for tensor in tensors]).sum()


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Experts(nn.Module):
    """A mixture of experts as often written: a loop over the experts, each of which takes the rows it was sent."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(Mlp() for _ in range(experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.reshape(-1, WIDTH)
        weights = torch.softmax(self.router(flat), -1)
        chosen, index = weights.topk(2, dim=-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, slot = torch.where(index == number)
            if rows.numel() == 0:
                continue
            out.index_add_(0, rows, expert(flat[rows]) * chosen[rows, slot].unsqueeze(-1))
        return out.view_as(x), weights.square().mean()


class ExpertBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.experts, self.out = nn.LayerNorm(WIDTH), Experts(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, loss = self.experts(self.norm(x))
        return x + self.out(y), loss


class Mixture(nn.Module):
    """Data-dependent routing inside every block, with a loss from each."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(ExpertBlock() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, losses = self.first(x), []
        for block in self.blocks:
            x, loss = block(x)
            losses.append(loss)
        return self.head(x), torch.stack(losses).mean()


class SparseExperts(Experts):
    """Every token goes to one of eight experts, so that some are idle, on one replica or on all."""

    def __init__(self) -> None:
        super().__init__(experts=8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.reshape(-1, WIDTH)
        chosen, index = torch.softmax(self.router(flat), -1).max(-1)
        out = torch.zeros_like(flat)
        for number in index.unique().tolist():
            rows = (index == number).nonzero().squeeze(-1)
            out[rows] = self.experts[number](flat[rows]) * chosen[rows].unsqueeze(-1)
        return out.view_as(x), chosen.mean()


class SparseMixture(Mixture):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.experts = SparseExperts()


class StackedExperts(nn.Module):
    """Experts whose weights are one parameter of three dimensions; every token goes through all of them, weighted."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts)
        self.up = nn.Parameter(0.1 * torch.randn(experts, WIDTH, 2 * WIDTH))
        self.down = nn.Parameter(0.1 * torch.randn(experts, 2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.router(x), -1)
        hidden = torch.tanh(torch.einsum("btd,edh->beth", x, self.up))
        return x + torch.einsum("beth,ehd,bte->btd", hidden, self.down, weights)


class DenseMixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(StackedExperts() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Gated(nn.Module):
    """A branch on a value, inside a block: the part it takes may differ from batch to batch."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.other = Mlp(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max() > 1e9:
            x = torch.nan_to_num(x)
        return self.mlp(x) if bool((x.mean() > 0).item()) else self.mlp(x) + self.other(x)


class BranchInBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Gated() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Unrolled(nn.Module):
    """Recursion, and one block applied again and again by a Python loop."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Mlp(), nn.Linear(WIDTH, WIDTH)

    def halves(self, x: Tensor) -> Tensor:
        if x.shape[1] == 1:
            return self.block(x)
        left, right = x.chunk(2, dim=1)
        return torch.cat([self.halves(left), self.halves(right)], 1) + self.block(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.halves(x))


class EncoderDecoder(nn.Module):
    """torch's own encoder and decoder: what the encoder makes is read by every layer of the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Transformer(WIDTH, 2, 2, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x, torch.flip(x, (1,))))


class TwoLayers(nn.Module):
    """What the models below add a statement to: none of them can be recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)))

    def between(self, x: Tensor) -> Tensor:
        return x


class EarlyExit(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.norm() < 1:  # EarlyExit
            return x
        return self.second(x)


class AnyInMask(TwoLayers):
    def between(self, x: Tensor) -> Tensor:
        mask = x > 3
        if mask.any():  # AnyInMask
            x = x.masked_fill(mask, 0.0)
        return x


class Asserted(TwoLayers):
    def between(self, x: Tensor) -> Tensor:
        assert (x < 1e9).all()  # Asserted
        return x


class UntilSmall(TwoLayers):
    def between(self, x: Tensor) -> Tensor:
        while x.abs().max() > 1:  # UntilSmall
            x = x / 2
        return x


class TensorIndex(TwoLayers):
    def between(self, x: Tensor) -> Tensor:
        last = int(x.argmax())  # TensorIndex
        return x[:, : last % 4 + 1]


class ToNumpy(TwoLayers):
    def between(self, x: Tensor) -> Tensor:
        return x * float(x.detach().numpy().max())  # ToNumpy


class Selected(TwoLayers):
    def between(self, x: Tensor) -> Tensor:
        return x[x > 0].unsqueeze(-1).expand(-1, WIDTH)  # Selected


build_mixture = Mixture
build_sparse_mixture = SparseMixture
build_dense_mixture = DenseMixture
build_branch_in_block = BranchInBlock
build_unrolled = Unrolled
build_encoder_decoder = EncoderDecoder
build_early_exit = EarlyExit
build_any_in_mask = AnyInMask
build_asserted = Asserted
build_until_small = UntilSmall
build_tensor_index = TensorIndex
build_to_numpy = ToNumpy
build_selected = Selected

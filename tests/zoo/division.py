"""Blocks of every kind that tensor parallelism must divide rightly; most sizes are 4: nothing is told by values."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, SIZE, LENGTH = 16, 4, 4, 4


def inputs(rows: int) -> tuple[Tensor]:
    return (torch.randint(0, 32, (rows, LENGTH)),)


def loss_fn(output: Tensor) -> Tensor:
    return (output.double() ** 2).mean()


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return attention of values (rows, length, heads, size), put together again as (rows, length, heads * size)."""
    y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
    return y.transpose(1, 2).reshape(q.shape[0], q.shape[1], -1)


class RmsNorm(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Swiglu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 24, bias=False), nn.Linear(WIDTH, 24, bias=False)
        self.down = nn.Linear(24, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class FusedSwiglu(nn.Module):
    """Gate and up in one weight, halves of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(WIDTH, 48), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Gqa(nn.Module):
    """Fewer key-value heads, repeated by expanding; rotary embedding and a norm of each head's query."""

    def __init__(self, kv_heads: int = 4, heads: int = 8) -> None:
        super().__init__()
        self.heads, self.kv = heads, kv_heads
        self.q, self.k = nn.Linear(WIDTH, heads * SIZE), nn.Linear(WIDTH, kv_heads * SIZE)
        self.v, self.o = nn.Linear(WIDTH, kv_heads * SIZE), nn.Linear(heads * SIZE, WIDTH)
        self.q_norm = RmsNorm(SIZE)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q = self.q_norm(self.q(x).view(rows, length, self.heads, SIZE))
        angle = torch.arange(length, device=x.device)[:, None, None] * torch.ones(SIZE, device=x.device)
        first, second = q.chunk(2, dim=-1)
        q = q * angle.cos() + torch.cat((-second, first), dim=-1) * angle.sin()
        k, v = (f(x).view(rows, length, self.kv, SIZE) for f in (self.k, self.v))
        repeats = self.heads // self.kv
        k, v = (
            z[:, :, :, None].expand(rows, length, self.kv, repeats, SIZE).reshape(rows, length, self.heads, SIZE)
            for z in (k, v)
        )
        return self.o(attend(q, k, v))


class FusedGqa(nn.Module):
    """Queries of four heads, keys and values of two in one weight: parts of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).split([16, 8, 8], dim=-1)
        k, v = (z.view(rows, length, 2, SIZE).repeat_interleave(2, dim=2) for z in (k, v))
        return self.o(attend(q.view(rows, length, HEADS, SIZE), k, v))


class SlicedGqa(nn.Module):
    """The same, the parts taken by slices."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        y = self.qkv(x)
        q, k, v = y[..., :16], y[..., 16:24], y[..., 24:]
        k, v = (z.view(rows, length, 2, SIZE).repeat_interleave(2, dim=2) for z in (k, v))
        return self.o(attend(q.view(rows, length, HEADS, SIZE), k, v))


class Interleaved(nn.Module):
    """Query, key and value of each head side by side in one weight, as in GPT-NeoX."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).view(rows, length, HEADS, 3 * SIZE).chunk(3, dim=-1)
        return self.o(attend(q, k, v))


class Latent(nn.Module):
    """Multi-head latent attention: low-rank projections with norms between, one rotary key for all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q_a, self.q_norm, self.q_b = nn.Linear(WIDTH, 8), RmsNorm(8), nn.Linear(8, HEADS * 8)
        self.kv_a, self.kv_norm, self.kv_b = nn.Linear(WIDTH, 8 + SIZE), RmsNorm(8), nn.Linear(8, HEADS * 8)
        self.o = nn.Linear(HEADS * SIZE, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q = self.q_b(self.q_norm(self.q_a(x))).view(rows, length, HEADS, 8)
        latent, rotary = self.kv_a(x).split([8, SIZE], dim=-1)
        key, value = self.kv_b(self.kv_norm(latent)).view(rows, length, HEADS, 8).split([4, 4], dim=-1)
        rotary = rotary.view(rows, length, 1, SIZE).expand(-1, -1, HEADS, -1)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), torch.cat((key, rotary), dim=-1).transpose(1, 2), value.transpose(1, 2), is_causal=True
        )
        return self.o(y.transpose(1, 2).reshape(rows, length, HEADS * SIZE))


class Functional(nn.Module):
    """Weights that the block reads itself, without modules: as functions, products and einsum take them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.up_bias = nn.Parameter(torch.randn(32, WIDTH) / 4), nn.Parameter(torch.zeros(32))
        self.down, self.bias = nn.Parameter(torch.randn(WIDTH, 32) / 4), nn.Parameter(torch.zeros(WIDTH))
        self.wide, self.narrow = nn.Parameter(torch.randn(WIDTH, 24) / 4), nn.Parameter(torch.randn(24, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.linear(F.gelu(F.linear(x, self.up, self.up_bias)), self.down, self.bias)
        return torch.einsum("btf,fd->btd", torch.tanh(x @ self.wide), self.narrow)


class Experts(nn.Module):
    """A mixture of experts with parameters of three dimensions: every token's experts' weights are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.gate_up = nn.Parameter(torch.randn(4, 16, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(4, WIDTH, 8) / 4)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        tokens = x.reshape(-1, width)
        weights, chosen = self.router(tokens).softmax(-1).topk(2, dim=-1)
        spread = tokens[:, None, :].expand(-1, 2, -1).reshape(-1, width)
        gate_up = self.gate_up[chosen.reshape(-1)]
        gate, up = torch.bmm(gate_up, spread.unsqueeze(-1)).squeeze(-1).chunk(2, dim=-1)
        down = self.down[chosen.reshape(-1)]
        out = torch.bmm(down, (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1) * weights.reshape(-1, 1)
        return out.view(-1, 2, width).sum(dim=1).view(rows, length, width)


class Biased(nn.Module):
    """Attention written out, with a learned bias for each head and a fixed slope, as T5 and ALiBi have."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o, self.table = nn.Linear(WIDTH, WIDTH), nn.Embedding(LENGTH, HEADS)
        self.register_buffer("slopes", torch.linspace(0.1, 0.5, HEADS))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (f(x).view(rows, length, HEADS, SIZE).transpose(1, 2) for f in (self.q, self.k, self.v))
        place = torch.arange(length, device=x.device)
        distance = (place[:, None] - place[None, :]).abs()
        bias = self.table(distance).permute(2, 0, 1)[None] - self.slopes[:, None, None] * distance
        scores = (q @ k.transpose(-1, -2) / SIZE**0.5 + bias).softmax(-1)
        return self.o((scores @ v).transpose(1, 2).reshape(rows, length, WIDTH))


class Sequential(nn.Module):
    """A pre-norm block: attention, then an MLP."""

    def __init__(self, attention: Callable[[], nn.Module], mlp: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm_1, self.attention, self.norm_2, self.mlp = RmsNorm(), attention(), nn.LayerNorm(WIDTH), mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attention(self.norm_1(x)), 0.1, self.training)
        return x + self.mlp(self.norm_2(x))


class Parallel(nn.Module):
    """Attention and MLP side by side on one norm (GPT-J), or each with its own (GPT-NeoX), added in either order."""

    def __init__(self, norms: int, residual_first: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(norms))
        self.attention, self.mlp, self.residual_first = Interleaved(), FusedSwiglu(), residual_first

    def forward(self, x: Tensor) -> Tensor:
        attended, mixed = self.attention(self.norms[0](x)), self.mlp(self.norms[-1](x))
        return (x + attended) + mixed if self.residual_first else attended + mixed + x


class Decoder(nn.Module):
    """Three blocks between an embedding and its tied head."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(32, WIDTH), nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Scaled(nn.Embedding):
    """Scales what it looks up by a buffer and a number, as Gemma's and BART's do."""

    def __init__(self) -> None:
        super().__init__(32, WIDTH, padding_idx=0)
        self.register_buffer("factor", torch.tensor(WIDTH**0.5), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.factor.to(self.weight.dtype) / 2.0


class Placed(nn.Embedding):
    """Adds something to what it looks up that depends on the place: no rank could do that by itself."""

    def __init__(self) -> None:
        super().__init__(32, WIDTH)
        self.register_buffer("places", torch.linspace(-1, 1, LENGTH)[:, None])

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + self.places


class Embedded(Decoder):
    """A decoder with an embedding of another class."""

    def __init__(self, embedding: Callable[[], nn.Embedding], *, tied: bool) -> None:
        super().__init__(BLOCKS["mqa"])
        self.embed = embedding()
        self.head.weight = self.embed.weight if tied else nn.Parameter(self.head.weight.detach().clone())


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "swiglu_gqa": lambda: Sequential(Gqa, Swiglu),
    "mqa": lambda: Sequential(partial(Gqa, 1), FusedSwiglu),
    "fused_gqa": lambda: Sequential(FusedGqa, FusedSwiglu),
    "sliced_gqa": lambda: Sequential(SlicedGqa, Functional),
    "interleaved": lambda: Sequential(Interleaved, Functional),
    "latent_experts": lambda: Sequential(Latent, Experts),
    "biased": lambda: Sequential(Biased, Swiglu),
    "gpt_j": lambda: Parallel(1, residual_first=False),
    "gpt_neox": lambda: Parallel(2, residual_first=False),
    "palm": lambda: Parallel(1, residual_first=True),
}


build_swiglu_gqa = partial(Decoder, BLOCKS["swiglu_gqa"])
build_mqa = partial(Decoder, BLOCKS["mqa"])
build_fused_gqa = partial(Decoder, BLOCKS["fused_gqa"])
build_sliced_gqa = partial(Decoder, BLOCKS["sliced_gqa"])
build_interleaved = partial(Decoder, BLOCKS["interleaved"])
build_latent_experts = partial(Decoder, BLOCKS["latent_experts"])
build_biased = partial(Decoder, BLOCKS["biased"])
build_gpt_j = partial(Decoder, BLOCKS["gpt_j"])
build_gpt_neox = partial(Decoder, BLOCKS["gpt_neox"])
build_palm = partial(Decoder, BLOCKS["palm"])
build_scaled, build_placed = partial(Embedded, Scaled, tied=True), partial(Embedded, Placed, tied=False)

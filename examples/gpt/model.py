"""A GPT-2-style language model over bytes, in plain PyTorch: what a user of planner hands in.

`build_model` and `example_inputs` are what planner needs; `loss_fn` and `example_target` let it run the loss too.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256  # every byte
CONTEXT = 64  # bytes the model sees
WIDTH = 384
NUM_LAYERS = 6
NUM_HEADS = 8


class Attention(nn.Module):
    """Causal self-attention with q, k and v in one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).split(width, dim=2)
        q = q.view(batch, length, NUM_HEADS, width // NUM_HEADS).transpose(1, 2)
        k = k.view(batch, length, NUM_HEADS, width // NUM_HEADS).transpose(1, 2)
        v = v.view(batch, length, NUM_HEADS, width // NUM_HEADS).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.projection(y.transpose(1, 2).reshape(batch, length, width))


class Mlp(nn.Module):
    """Two linear layers with a GELU between."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """Attention and MLP, each after a norm and beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Gpt(nn.Module):
    """Bytes in, a score for every possible next byte out; the head's weight is the byte embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.byte_embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position_embedding = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.apply(_initialize)
        self.head.weight = self.byte_embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.byte_embedding(ids) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def build_model() -> nn.Module:
    return Gpt()


def example_inputs(batch_size: int) -> tuple[Tensor]:
    return (torch.randint(0, VOCABULARY, (batch_size, CONTEXT)),)


def example_target(batch_size: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch_size, CONTEXT))


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())

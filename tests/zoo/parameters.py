"""Models whose parameters are shared, named twice, read at several places, frozen, or of no dimension."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.exact import loss_fn as loss_fn  # the loss of a model file
from tests.zoo.models import WIDTH, Block
from tests.zoo.values import Mixer, _floats


def _ids(rows: int) -> tuple[Tensor]:
    return (torch.randint(0, 32, (rows, 4)),)


class FourTied(nn.Module):
    """One weight under four names at both ends and in the middle: two embeddings, a head, and a function."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.again = nn.Embedding(32, 16), nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.side, self.head = nn.Linear(16, 32, bias=False), nn.Linear(16, 32)
        self.again.weight = self.side.weight = self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](self.embed(ids)))
        guess = self.side(x).softmax(-1)
        x = self.blocks[2](x + self.again(guess.argmax(-1)) + guess @ self.embed.weight)
        return self.head(x)


class Transposed(nn.Module):
    """An autoencoder whose decoder reads the encoder's weights transposed, and whose biases are tied in pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.between = Mixer()
        self.decode = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        for first, second in zip(self.encode, reversed(self.decode), strict=True):
            second.bias = first.bias

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.encode:
            x = torch.tanh(layer(x))
        x = self.between(x)
        for layer, second in zip(reversed(self.encode), self.decode, strict=True):
            x = torch.tanh(F.linear(x, layer.weight.t()) + second(x))
        return x


class Recycled(nn.Module):
    """One block called for every layer (as ALBERT does), with a scale of its own for each call."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(32, 16), Block()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(16)) for _ in range(4))
        self.head = nn.Linear(16, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for scale in self.scales:
            x = self.block(x * scale)
        return self.head(x)


class SharedParts(nn.Module):
    """Blocks that share one feed-forward module and, in pairs, one attention-like module, each under its own name."""

    def __init__(self) -> None:
        super().__init__()
        shared, even, odd = Mixer(), Mixer(), Mixer()
        self.blocks = nn.ModuleList(SharingBlock(shared, odd if index % 2 else even) for index in range(4))
        self.tail = shared
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.tail(x))


class Outsiders(nn.Module):
    """Blocks that keep modules and parameters of the model in a list, where it doesn't count them as theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.common = nn.Linear(WIDTH, WIDTH), Mixer()
        self.blocks = nn.ModuleList(OutsideBlock(self.common, self.stem) for _ in range(3))
        self.head = OutsideHead(self.stem)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class OutsideBlock(nn.Module):
    def __init__(self, common: nn.Module, stem: nn.Linear) -> None:
        super().__init__()
        self.own, self.others = Mixer(), [common, stem]

    def forward(self, x: Tensor) -> Tensor:
        common, stem = self.others
        return self.own(common(x)) * stem.bias


class OutsideHead(nn.Module):
    def __init__(self, stem: nn.Linear) -> None:
        super().__init__()
        self.others = (stem,)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.others[0].weight)


class SharingBlock(nn.Module):
    def __init__(self, shared: nn.Module, pair: nn.Module) -> None:
        super().__init__()
        self.norm, self.shared, self.pair = nn.LayerNorm(WIDTH), shared, pair

    def forward(self, x: Tensor) -> Tensor:
        return self.pair(self.shared(self.norm(x)))


class Rooted(nn.Module):
    """Parameters of the root (a token that is repeated for every row, positions, a number) read on every stage."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        self.places = nn.Parameter(torch.randn(1, 5, 16))
        self.temperature = nn.Parameter(torch.ones(()))
        self.stem = nn.Linear(WIDTH, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(x.size(0), -1, -1), self.stem(x)], dim=1) + self.places
        for block in self.blocks:
            x = block(x + self.token) * self.temperature
        return self.head((x + self.places)[:, 0]) / self.temperature


class Numbers(nn.Module):
    """Every block has a gain of no dimension, and the model one that several stages read."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.stem = nn.Parameter(torch.tensor(0.5)), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(GainBlock() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) * self.gain
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.gain


class GainBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.gain, self.frozen = Mixer(), nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.tensor(2.0))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.mix(x) * self.frozen


class Unread(nn.Module):
    """Parameters that nothing reads: a whole layer, one of the root, one of a block; and one read without effect."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.never, self.spare = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3), nn.Parameter(torch.ones(3))
        self.blocks = nn.ModuleList(UnreadBlock() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("unread", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        self.head(x.detach())
        return x


class UnreadBlock(Mixer):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.ones(WIDTH))


class Frozen(nn.Module):
    """A transformer with chosen parameters frozen: `frozen(name)` tells which."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(16, 32, bias=False)
        for name, parameter in self.named_parameters():
            block = int(name.split(".")[1]) if name.startswith("blocks") else -1
            trained = {
                "first_half": name.startswith("head") or block >= 2,
                "last_half": name.startswith("embed") or 0 <= block < 2,
                "alternate": block % 2 == 0,
                "norms_only": "norm" in name,
                "biases_only": "bias" in name,
                "one_in_the_middle": name == "blocks.1.up.weight",
            }[kind]
            parameter.requires_grad_(trained)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class LowRank(nn.Module):
    """A frozen linear layer with a trained product of two small ones beside it."""

    def __init__(self, inner: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Linear(inner.in_features, rank, bias=False)
        self.up = nn.Linear(rank, inner.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 2.0 * self.up(self.down(x))


class Adapted(nn.Module):
    """A frozen transformer with low-rank adapters in every block, and a frozen embedding tied to the frozen head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight
        self.requires_grad_(False)
        for block in self.blocks:
            block.qkv, block.down = LowRank(block.qkv), LowRank(block.down)  # type: ignore[assignment]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class HalfTied(nn.Module):
    """The trained head reads the embedding's weight, which is detached (frozen) where the model begins."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).detach()
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build_first_half() -> nn.Module:
    return Frozen("first_half")


def build_last_half() -> nn.Module:
    return Frozen("last_half")


def build_alternate() -> nn.Module:
    return Frozen("alternate")


class Returned(nn.Module):
    """Returns a parameter and a buffer of its own, and a weight that the first layer has: only the loss reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixer() for _ in range(4))
        self.log_sigma = nn.Parameter(torch.zeros(3))
        self.register_buffer("prior", torch.linspace(0.5, 1.5, 3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        weight = next(p for p in self.layers[0].parameters() if p.dim() > 1)
        return {"x": x, "log_sigma": self.log_sigma, "prior": self.prior, "weight": weight}


def build_norms_only() -> nn.Module:
    return Frozen("norms_only")


def build_one_in_the_middle() -> nn.Module:
    return Frozen("one_in_the_middle")


def _rows(rows: int) -> tuple[Tensor]:
    return (torch.randn(rows, 4, WIDTH),)


NAMES = (
    "four_tied",
    "transposed",
    "recycled",
    "shared_parts",
    "outsiders",
    "rooted",
    "numbers",
    "unread",
    "first_half",
    "last_half",
    "alternate",
    "norms_only",
    "one_in_the_middle",
    "adapted",
    "half_tied",
    "returned",
)
inputs_first_half = inputs_last_half = inputs_alternate = inputs_norms_only = inputs_one_in_the_middle = _ids
build_four_tied, inputs_four_tied = FourTied, _ids
build_transposed, inputs_transposed = Transposed, _floats
build_recycled, inputs_recycled = Recycled, _ids
build_shared_parts, inputs_shared_parts = SharedParts, _floats
build_outsiders, inputs_outsiders = Outsiders, _floats
build_rooted, inputs_rooted = Rooted, _rows
build_numbers, inputs_numbers = Numbers, _floats
build_unread, inputs_unread = Unread, _floats
build_adapted, inputs_adapted = Adapted, _ids
build_half_tied, inputs_half_tied = HalfTied, _ids
build_returned, inputs_returned = Returned, _floats

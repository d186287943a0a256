"""Layers that read attributes which the model's forward sets on them: states that it resets, and plain settings."""

import torch
from torch import Tensor, nn

WIDTH, STEPS = 8, 3


def inputs(rows: int) -> tuple[Tensor]:
    return (torch.randn(rows, STEPS, WIDTH),)


def loss_fn(output: Tensor) -> Tensor:
    return output.double().square().mean()


class Neuron(nn.Module):
    """Leaks, and fires by the level that its last call left; `cut` keeps that without its gradient."""

    def __init__(self, cut: bool) -> None:
        super().__init__()
        self.leak, self.cut = nn.Parameter(torch.tensor(0.9)), cut
        self.level: Tensor | None = None

    def reset(self) -> None:
        self.level = None

    def forward(self, x: Tensor) -> Tensor:
        level = torch.zeros_like(x) if self.level is None else self.level
        self.level = self.leak * (level.detach() if self.cut else level) + x
        return torch.sigmoid(self.level)


class Spiking(nn.Module):
    def __init__(self, cut: bool) -> None:
        super().__init__()
        self.mix, self.neuron = nn.Linear(WIDTH, WIDTH), Neuron(cut)

    def forward(self, x: Tensor) -> Tensor:
        return self.neuron(self.mix(x))


class Spikes(nn.Module):
    """A spiking network: the model resets all states, then calls its layers once for each step of time."""

    cut = False

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Spiking(self.cut) for _ in range(4))

    def reset(self) -> None:
        for module in self.modules():
            if isinstance(module, Neuron):
                module.reset()

    def forward(self, x: Tensor) -> Tensor:
        self.reset()
        steps = []
        for step in range(STEPS):
            level = x[:, step]
            for layer in self.layers:
                level = layer(level)
            steps.append(level)
        return torch.stack(steps, 1)


class CutSpikes(Spikes):
    """Without gradients through time, so that nothing but other numbers would tell a state that was not reset."""

    cut = True


class ResetLast(CutSpikes):
    """The same, reset when all is done: the states are nothing again when a forward ends."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.mean(1)
        for layer in self.layers:
            x = layer(layer(x))
        self.reset()
        return x


class ResetInside(nn.Module):
    """Each block resets its own neuron: it is called whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(OwnReset() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class OwnReset(Spiking):
    def __init__(self) -> None:
        super().__init__(cut=True)
        self.back = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.neuron.reset()
        return x + self.back(self.neuron(self.neuron(self.mix(x))))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.strength = nn.Linear(WIDTH, WIDTH), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.strength * torch.tanh(self.mix(x))


class Settings(nn.Module):
    """The model gives every layer another number than it was built with."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scaled() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            layer.strength = 1 / (index + 2)
            x = layer(x)
        return x


class Softened(nn.Module):
    """Changes a module of torch's, into which no recording looks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LeakyReLU()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            layer[1].negative_slope = 0.5
            x = layer(x)
        return x


class Frozen(nn.Module):
    """Puts a norm in evaluation mode where it uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(STEPS)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            layer[1].eval()
            x = layer(x)
        return x


class Looking(Neuron):
    """A neuron that looks at values, so that no program can hold what it does."""

    def __init__(self) -> None:
        super().__init__(cut=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if bool((x > 0).any()) else -x)


class LookingSpikes(Spikes):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.neuron = Looking()


class LookingAndReset(LookingSpikes):
    """The same, reset as soon as a step is done."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.mean(1)
        for layer in self.layers:
            x = layer(x)
            layer.neuron.reset()
        return x


NAMES = ("spikes", "cut_spikes", "reset_last", "reset_inside", "settings")
build_spikes = Spikes
build_cut_spikes = CutSpikes
build_reset_last = ResetLast
build_reset_inside = ResetInside
build_settings = Settings
build_softened = Softened
build_frozen = Frozen
build_looking_spikes = LookingSpikes
build_looking_and_reset = LookingAndReset

"""Models built without their weights: nothing large is made, whatever the constructor does; what it reads is right."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from planner.errors import CaptureError
from planner.profiler import meta_build
from planner.profiler.meta_build import build_meta

HUGE = 2**21  # a square of it takes 16 TiB in float32: made for real, it is an error on any machine


class Holder(nn.Module):
    """A module with one parameter, and a buffer where one is given."""

    def __init__(self, weight: torch.Tensor, buffer: torch.Tensor | None = None) -> None:
        super().__init__()
        self.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight)
        self.register_buffer("table", buffer)


def _normalised() -> nn.Module:
    return parametrizations.weight_norm(nn.Linear(HUGE, HUGE))


def _in_place() -> nn.Module:
    model = nn.Linear(HUGE, HUGE)
    with torch.no_grad():
        model.weight.normal_(0, 0.02).mul_(torch.tensor(2.0))
        model.weight[: HUGE // 2] = torch.randn(HUGE)
    nn.init.trunc_normal_(model.weight, std=0.02)
    return model


def _loaded() -> nn.Module:
    first, second = nn.Linear(HUGE, HUGE), nn.Linear(HUGE, HUGE)
    second.load_state_dict(first.state_dict())
    return second


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Linear(HUGE, HUGE),
        lambda: nn.Linear(HUGE, HUGE, dtype=torch.bfloat16),
        lambda: nn.Linear(HUGE, HUGE, device="cpu").to("cpu").to(torch.float16).requires_grad_(False),
        lambda: nn.Linear(HUGE, HUGE, device="meta").to_empty(device="cpu"),
        lambda: Holder(torch.randn(HUGE, HUGE) * 0.02),
        lambda: Holder(torch.stack([torch.randn(HUGE, HUGE // 4) for _ in range(4)])),
        lambda: Holder(torch.zeros(1, HUGE).repeat(HUGE, 1)),
        lambda: Holder(torch.ones(HUGE).outer(torch.arange(HUGE) / HUGE)),
        lambda: Holder(torch.zeros(2), torch.ones(HUGE, HUGE).tril()),
        lambda: copy.deepcopy(nn.Sequential(nn.Linear(HUGE, HUGE), nn.LayerNorm(HUGE))),
        _normalised,
        _in_place,
        _loaded,
    ],
)
def test_what_is_large_is_never_made(build: Callable[[], nn.Module]) -> None:
    model = build_meta(build)
    assert {param.device.type for param in model.parameters()} == {"meta"}
    sizes = [tensor.numel() for tensor in (*model.parameters(), *model.buffers())]
    assert max(sizes) == HUGE * HUGE


def test_a_constructor_reads_small_values_as_they_are() -> None:
    rates: list[float] = []

    def build() -> nn.Module:
        rates.extend(rate.item() for rate in torch.linspace(0, 0.3, 4))
        mask = torch.full((1024, 1024), 1.0).triu(1)
        assert mask.sum() == 1024 * 1023 / 2
        return Holder(torch.randn(HUGE, HUGE), mask)

    model = build_meta(build)
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert model.table.device.type == "cpu"


def test_one_parameter_under_two_names_stays_one() -> None:
    model = build_meta(lambda: _tied(64))
    assert model[0].weight is model[1].weight
    assert model[0].weight.kept == "attributes are kept"
    assert model[0].weight.device.type == "meta"


def _tied(size: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(size, size), nn.Linear(size, size))
    weight = nn.Parameter(torch.randn(size, size))
    weight.kept = "attributes are kept"  # type: ignore[attr-defined]
    model[0].weight = model[1].weight = weight
    return model


def _reads_parameters(size: int) -> nn.Module:
    model = nn.Linear(size, size)
    if not torch.isfinite(model.weight).all():
        raise ValueError("the weights are not finite")
    return model


def _reads_what_was_written(size: int) -> nn.Module:
    scale = torch.zeros(())
    scale.copy_(torch.ones(size, size).mean())  # a small tensor, with a value that a large one gives
    return nn.Linear(size, round(float(scale.view(1)[0]) * 3))


@pytest.mark.parametrize("build", [_reads_parameters, _reads_what_was_written])
def test_a_constructor_that_reads_large_values_is_built_with_them(
    build: Callable[[int], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meta_build, "LARGE_BYTES", 1000)
    model = build_meta(lambda: build(64))
    assert model.weight.device.type == "meta"
    assert model.weight.shape == (64 if build is _reads_parameters else 3, 64)


@pytest.mark.parametrize("build", [_reads_parameters, _reads_what_was_written])
def test_but_never_beyond_the_memory_that_is_free(build: Callable[[int], nn.Module]) -> None:
    with pytest.raises(
        CaptureError, match=r"test_meta_build.py:\d+: .* takes more than .* half of the memory"
    ) as raised:
        build_meta(lambda: build(HUGE))
    assert raised.value.hint


def test_an_error_of_the_constructors_own_is_not_tried_again() -> None:
    tries = []

    def build() -> nn.Module:
        tries.append(1)
        raise ValueError("no such size")

    with pytest.raises(ValueError, match="no such size"):
        build_meta(build)
    assert len(tries) == 1

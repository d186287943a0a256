"""Times scaled from one GPU type to another against times that the profiler computes for the other."""

from typing import Any

import pytest
from test_profiler_numbers import GPU, block_runner, embedding_runner

from planner.cluster import Gpu
from planner.cost.gpu_types import Rescaling
from planner.profiler.layer_cost import class_cost
from planner.profiler.roofline import compute_numbers

NAMES = ("forward_time_s", "backward_input_time_s", "backward_weight_time_s")


def changed(**values: Any) -> Gpu:
    return GPU.model_copy(update=values)


def fast(**values: Any) -> Gpu:
    """Return a GPU where nothing takes time but for what is told."""
    return changed(**{"peak_flops": {"float32": 1e24}, "memory_bandwidth": 1e24, "launch_overhead": 0.0} | values)


@pytest.mark.parametrize("runner", [block_runner, embedding_runner])
@pytest.mark.parametrize(
    ("own", "other"),
    [
        (GPU, changed(launch_overhead=9e-6)),
        (GPU, changed(launch_overhead=0.0)),
        (fast(memory_bandwidth=1e9), fast(memory_bandwidth=4e8)),
        (fast(peak_flops={"float32": 1e9}), fast(peak_flops={"float32": 7e9})),
        (
            changed(peak_flops={"float32": 3e9}, memory_bandwidth=2e9),
            changed(peak_flops={"float32": 3e10}, memory_bandwidth=2e10, launch_overhead=1e-6),
        ),
    ],
    ids=["slower launches", "free launches", "memory alone", "computing alone", "everything"],
)
def test_scaled_times_are_those_of_the_other_type(runner: Any, own: Gpu, other: Gpu) -> None:
    scaled = Rescaling.of(own, other, "float32").scale(class_cost(runner(fake=True, rows=4), gpu=own))
    computed = class_cost(runner(fake=True, rows=4), gpu=other)
    assert [getattr(scaled, name) for name in NAMES] == pytest.approx([getattr(computed, name) for name in NAMES])
    assert (scaled.source, computed.source) == ("scaled", "computed")


def test_launches_are_counted_by_part() -> None:
    found = compute_numbers(block_runner(fake=True, rows=2), GPU)
    assert found.launches[0] == 5  # norm, two products with their bias, gelu, addition
    slower = compute_numbers(block_runner(fake=True, rows=2), changed(launch_overhead=GPU.launch_overhead + 1e-6))
    more = [getattr(slower, name) - getattr(found, name) for name in NAMES]
    assert more == pytest.approx([count * 1e-6 for count in found.launches])

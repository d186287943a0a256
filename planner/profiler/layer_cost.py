"""Turns a layer that is ready to run into a `LayerCost`, measured or computed: the two have the same fields."""

from planner.cluster import Gpu
from planner.model_profile import LayerCost
from planner.profiler.measure import DEFAULT_REPEATS, Repeats, measure_numbers
from planner.profiler.memory import tensor_bytes
from planner.profiler.roofline import compute_numbers
from planner.profiler.segment import SegmentRunner


def class_cost(
    runner: SegmentRunner,
    *,
    gpu: Gpu | None = None,
    tp_degree: int = 1,
    sharding: str = "replicated",
    repeats: Repeats = DEFAULT_REPEATS,
) -> LayerCost:
    """Return what the layer in `runner` costs: computed for `gpu` on fake tensors, or measured on the runner's device.

    At a tensor-parallel degree the runner holds one rank's part: local parameters and constants, no communication.
    `param_bytes` counts parameters and buffers, those that share storage once.
    """
    param_bytes = tensor_bytes([*runner.parameters, *runner.buffers])
    trainable = sum(param.numel() for param in runner.trainable)
    if gpu is not None:
        computed = compute_numbers(runner, gpu)
        return LayerCost(
            microbatch_size=runner.target.rows,
            tp_degree=tp_degree,
            sharding=sharding,
            forward_time_s=computed.forward_time_s,
            backward_input_time_s=computed.backward_input_time_s,
            backward_weight_time_s=computed.backward_weight_time_s,
            activation_bytes=computed.memory.activation_bytes,
            saved_input_bytes=computed.memory.saved_input_bytes,
            saved_output_bytes=computed.memory.saved_output_bytes,
            transient_bytes=computed.memory.transient_bytes,
            param_bytes=param_bytes,
            trainable_param_count=trainable,
            forward_flops=computed.forward_flops,
            launches=computed.launches,
            source="computed",
        )
    measured = measure_numbers(runner, repeats)
    return LayerCost(
        microbatch_size=runner.target.rows,
        tp_degree=tp_degree,
        sharding=sharding,
        forward_time_s=measured.times.forward_s,
        backward_input_time_s=measured.times.backward_input_s,
        backward_weight_time_s=measured.times.backward_weight_s,
        activation_bytes=measured.memory.activation_bytes,
        saved_input_bytes=measured.memory.saved_input_bytes,
        saved_output_bytes=measured.memory.saved_output_bytes,
        transient_bytes=measured.memory.transient_bytes,
        param_bytes=param_bytes,
        trainable_param_count=trainable,
        forward_flops=measured.forward_flops,
        source="measured",
        spread_fraction=measured.times.spread_fraction,
        num_repeats=measured.times.num_repeats,
    )

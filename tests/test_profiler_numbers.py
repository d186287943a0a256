"""The numbers of a layer: FLOPs and bytes against counts by hand, fake tensors against real ones, times with spread."""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from planner.arguments import BatchInt, Constant, Device, Dtype, Fields, ParamRef, Ref, TrainingValue
from planner.cluster import Gpu
from planner.errors import ProfileError
from planner.model_profile import LayerCost
from planner.profiler.arguments import Target
from planner.profiler.execute import outside_reads, outside_results, run_derived, run_nodes
from planner.profiler.flops import count_flops
from planner.profiler.gpu_kernels import GpuKernels
from planner.profiler.layer_cost import class_cost
from planner.profiler.measure import Repeats, measure_times, spread
from planner.profiler.memory import LiveBytes, follow_memory
from planner.profiler.roofline import PricedOperators, compute_numbers
from planner.profiler.segment import SegmentRunner
from planner.program import Node, Program, Tensor

CPU = torch.device("cpu")
GPU = Gpu(
    name="test",
    memory="80GB",
    memory_bandwidth="1TB/s",
    peak_flops={"float32": "1TFLOP/s", "bfloat16": "2TFLOP/s"},
    matmul_efficiency=0.5,
    memory_efficiency=0.25,
    launch_overhead="3us",
    source="round numbers",
)
QUICK = Repeats(warm_up=1, least=3, most=3, budget_s=0.0)


def tensor(*shape: Any, dtype: str = "float32", grad: bool = True) -> Tensor:
    floating = "float" in dtype
    return Tensor(shape=shape, dtype=dtype, requires_grad=grad and floating, follows_model_dtype=floating)


def call(name: str, kind: str, target: str = "", *args: Any, result: Any = None, **fields: Any) -> Node:
    return Node(name=name, kind=kind, target=target, args=args, result=result or Ref(name), **fields)  # type: ignore[arg-type]


def runner_of(
    model: Callable[[], nn.Module],
    nodes: Sequence[Node],
    tensors: dict[str, Tensor],
    results: Sequence[str],
    *,
    fake: bool = False,
    rows: int = 2,
    dtype: torch.dtype = torch.float32,
    environment: dict[str, Any] | None = None,
) -> SegmentRunner:
    mode = FakeTensorMode() if fake else None
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        if mode is None:
            module = model()
        else:
            with mode:
                module = model()
                environment = {k: torch.empty(v.shape, dtype=v.dtype) for k, v in (environment or {}).items()}
    finally:
        torch.set_default_dtype(default)
    named = dict([*module.named_parameters(), *module.named_buffers()])
    return SegmentRunner(
        "layers.3",
        nodes,
        tensors,
        results,
        module_call=module.get_submodule,
        parameter=named.__getitem__,
        target=Target(rows, CPU, dtype),
        environment=environment,
        fake_mode=mode,
    )


def linear_runner(**options: Any) -> SegmentRunner:
    tensors = {"x": tensor(BatchInt(1), 5, 6), "y": tensor(BatchInt(1), 5, 8)}
    return runner_of(
        lambda: nn.ModuleDict({"fc": nn.Linear(6, 8)}), [call("y", "module", "fc", Ref("x"))], tensors, ["y"], **options
    )


class Block(nn.Module):
    def __init__(self, width: int = 8, hidden: int = 32) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def block_runner(**options: Any) -> SegmentRunner:
    """The block opened: modules, a function of torch and an addition between them."""
    tensors = {name: tensor(BatchInt(1), 5, 8) for name in ("x", "norm", "down", "y")}
    tensors |= {name: tensor(BatchInt(1), 5, 32) for name in ("up", "act")}
    nodes = [
        call("norm", "module", "norm", Ref("x")),
        call("up", "module", "up", Ref("norm")),
        call("act", "function", "torch.nn.functional.gelu", Ref("up")),
        call("down", "module", "down", Ref("act")),
        call("y", "function", "operator.add", Ref("x"), Ref("down")),
    ]
    return runner_of(Block, nodes, tensors, ["y"], **options)


def embedding_runner(**options: Any) -> SegmentRunner:
    tensors = {"ids": tensor(BatchInt(1), 5, dtype="int64"), "y": tensor(BatchInt(1), 5, 8)}
    ids = torch.arange(10).view(2, 5)
    return runner_of(
        lambda: nn.ModuleDict({"wte": nn.Embedding(11, 8)}),
        [call("y", "module", "wte", Ref("ids"))],
        tensors,
        ["y"],
        environment={"ids": ids},
        **options,
    )


def conv_runner(**options: Any) -> SegmentRunner:
    tensors = {"x": tensor(BatchInt(1), 3, 8, 8), "y": tensor(BatchInt(1), 4, 8, 8), "z": tensor(BatchInt(1), 4, 8, 8)}
    nodes = [call("y", "module", "conv", Ref("x")), call("z", "function", "torch.relu", Ref("y"))]
    return runner_of(
        lambda: nn.ModuleDict({"conv": nn.Conv2d(3, 4, 3, padding=1, bias=False)}), nodes, tensors, ["z"], **options
    )


def attention_runner(masked: bool, *, causal: bool = False, **options: Any) -> SegmentRunner:
    tensors = {name: tensor(BatchInt(1), 4, 64, 16) for name in ("q", "k", "v", "y")}
    environment = {"mask": torch.ones(64, 64, dtype=torch.bool)} if masked else {}
    node = call(
        "y",
        "function",
        "torch.nn.functional.scaled_dot_product_attention",
        *(Ref("q"), Ref("k"), Ref("v")),
        kwargs={
            "attn_mask": Ref("mask") if masked else None,
            "dropout_p": TrainingValue(0.1, 0.0),
            "is_causal": causal,
        },
    )
    return runner_of(nn.Identity, [node], tensors, ["y"], environment=environment, **options)


RUNNERS = {"linear": linear_runner, "block": block_runner, "embedding": embedding_runner, "conv": conv_runner}


def computed(runner: SegmentRunner, gpu: Gpu = GPU) -> LayerCost:
    return class_cost(runner, gpu=gpu)


# -- FLOPs and bytes by hand -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("linear", 2 * (2 * 5) * 6 * 8),
        ("block", 2 * (2 * 2 * 5 * 8 * 32)),
        ("embedding", 0),
        ("conv", 2 * (2 * 8 * 8) * 4 * 3 * 9),
    ],
)
def test_forward_flops_are_exact_measured_and_computed(name: str, flops: int) -> None:
    assert class_cost(RUNNERS[name](), repeats=QUICK).forward_flops == flops
    assert computed(RUNNERS[name](fake=True)).forward_flops == flops


def test_attention_counts_as_two_matrix_products_however_it_is_computed() -> None:
    by_hand = 2 * (2 * 2 * 4 * 64 * 64 * 16)
    for masked in (False, True):
        assert class_cost(attention_runner(masked), repeats=QUICK).forward_flops == by_hand
        for dtype in (torch.float32, torch.bfloat16):
            assert computed(attention_runner(masked, fake=True, dtype=dtype)).forward_flops == by_hand


def test_backward_of_attention_counts_five_products() -> None:
    q = torch.empty(2, 4, 64, 16, device="meta")
    packet = torch.ops.aten._scaled_dot_product_flash_attention_backward
    assert count_flops(packet.default, (q, q, q, q), {}, (q, q, q)) == 5 * 2 * 2 * 4 * 64 * 64 * 16


def gates(batch: int, steps: int, num_gates: int, width: int, *inputs: int) -> int:
    """Return the FLOPs of recurrent layers, one direction each, by the widths of what they read."""
    return sum(2 * steps * batch * num_gates * width * (size + width) for size in inputs)


B, T, D, H = 2, 9, 6, 7
TWICE = (D, D, 2 * H, 2 * H)  # two layers of two directions
RECURRENT = {
    "lstm": (lambda: nn.LSTM(D, H), gates(B, T, 4, H, D)),
    "lstm-batch-first": (lambda: nn.LSTM(D, H, batch_first=True), gates(B, T, 4, H, D)),
    "lstm-2": (lambda: nn.LSTM(D, H, 2), gates(B, T, 4, H, D, H)),
    "lstm-2-both": (lambda: nn.LSTM(D, H, 2, bidirectional=True, batch_first=True), gates(B, T, 4, H, *TWICE)),
    "lstm-plain": (lambda: nn.LSTM(D, H, bias=False), gates(B, T, 4, H, D)),
    # gates read the projection of width 3, and the projection reads the hidden state
    "lstm-projected": (lambda: nn.LSTM(D, H, proj_size=3), 2 * T * B * (4 * H * (D + 3) + H * 3)),
    "gru": (lambda: nn.GRU(D, H), gates(B, T, 3, H, D)),
    "gru-2-both": (lambda: nn.GRU(D, H, 2, bidirectional=True, batch_first=True), gates(B, T, 3, H, *TWICE)),
    "tanh": (lambda: nn.RNN(D, H), gates(B, T, 1, H, D)),
    "relu-2": (lambda: nn.RNN(D, H, 2, nonlinearity="relu", batch_first=True), gates(B, T, 1, H, D, H)),
}


def recurrent_runner(make: Callable[[], nn.RNNBase], **options: Any) -> SegmentRunner:
    """The layer with states of its own, as glue passes them on: gradients flow to all that it reads."""
    like = make()
    directions = 2 if like.bidirectional else 1
    rows = BatchInt(1)
    order = (rows, T) if like.batch_first else (T, rows)
    out = like.proj_size or H
    tensors = {"x": tensor(*order, D), "y": tensor(*order, directions * out)}
    tensors |= {name: tensor(directions * like.num_layers, rows, out) for name in ("h", "last_h")}
    tensors |= {name: tensor(directions * like.num_layers, rows, H) for name in ("c", "last_c")}
    lstm = isinstance(like, nn.LSTM)
    state, last = ((Ref("h"), Ref("c")), (Ref("last_h"), Ref("last_c"))) if lstm else (Ref("h"), Ref("last_h"))
    node = call("y", "module", "rnn", Ref("x"), state, result=(Ref("y"), last))
    return runner_of(lambda: nn.ModuleDict({"rnn": make()}), [node], tensors, ["y"], **options)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_flops_are_exact_measured_and_computed(name: str) -> None:
    make, by_hand = RECURRENT[name]
    for dtype in (torch.float32, torch.bfloat16):
        assert computed(recurrent_runner(make, fake=True, dtype=dtype)).forward_flops == by_hand
    for dtype in (torch.float32, torch.float64):  # whole layers in one operator, and every product by itself
        assert class_cost(recurrent_runner(make, dtype=dtype), repeats=QUICK).forward_flops == by_hand


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("name", RECURRENT)
def test_backward_of_recurrent_layers_counts_twice_the_forward(name: str) -> None:
    make, by_hand = RECURRENT[name]
    for dtype in (torch.float32, torch.float64):
        assert backward_flops(recurrent_runner(make, dtype=dtype)) == 2 * by_hand
    fake = recurrent_runner(make, fake=True)
    assert backward_flops(fake) == 2 * by_hand
    for weight in fake.trainable:
        weight.requires_grad_(False)
    assert backward_flops(fake) == by_hand


def backward_flops(runner: SegmentRunner) -> int:
    """Return the FLOPs of a layer's backward: on a GPU's operators where tensors are fake, else on those of the CPU."""
    priced = PricedOperators(GPU.model_copy(update={"peak_flops": {"float32": 1e12, "float64": 1e12}}))
    forward: list[tuple[float, int]] = []
    kernels = GpuKernels() if runner.fake_mode else contextlib.nullcontext()
    with kernels:
        follow_memory(runner, priced, lambda seed: forward.append(priced.take()))
    return priced.take()[1]


def test_a_recurrent_layer_waits_for_every_step() -> None:
    """Two kernels a step and layer follow each other; where the products are large they take over."""
    launch = 3e-6
    for name, num_layers in (("lstm", 1), ("lstm-2-both", 2), ("gru-2-both", 2), ("tanh", 1)):
        cost = computed(recurrent_runner(RECURRENT[name][0], fake=True))
        assert cost.forward_time_s == pytest.approx(2 * T * num_layers * launch, rel=1e-9)
        assert cost.backward_input_time_s == pytest.approx(2 * T * num_layers * launch, rel=1e-9)
    slow = GPU.model_copy(update={"peak_flops": {"float32": 1e6}, "matmul_efficiency": 1.0})
    make, by_hand = RECURRENT["lstm-2-both"]
    cost = computed(recurrent_runner(make, fake=True), slow)
    assert cost.forward_time_s == pytest.approx(by_hand / 1e6 + launch, rel=1e-9)
    assert cost.backward_input_time_s == pytest.approx(by_hand / 1e6 + launch, rel=1e-9)
    assert cost.backward_time_s == pytest.approx(
        2 * by_hand / 1e6 + launch + 16 * launch, rel=1e-3
    )  # 16 gradients added


def test_a_recurrent_layer_on_a_gpu_keeps_its_gates_and_cells() -> None:
    """An LSTM four gates and a cell state, a GRU three gates and a part of one; inner layers their outputs too."""
    for name, kept in (("lstm", 5 * H), ("gru", 4 * H), ("tanh", 0), ("lstm-2-both", 4 * 5 * H + 2 * H)):
        cost = computed(recurrent_runner(RECURRENT[name][0], fake=True))
        assert cost.activation_bytes == T * B * kept * 4
        assert cost.saved_output_bytes > 0


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_flops_of_convolutions(dims: int, transposed: bool, groups: int) -> None:
    """Each place of the output (the input where transposed) meets every weight, of one group."""
    make = getattr(nn, f"Conv{'Transpose' if transposed else ''}{dims}d")
    before, after = (9,) * dims, (19 if transposed else 4,) * dims
    tensors = {"x": tensor(BatchInt(1), 4, *before), "y": tensor(BatchInt(1), 6, *after)}
    nodes = [call("y", "module", "conv", Ref("x"))]

    def runner(**options: Any) -> SegmentRunner:
        return runner_of(
            lambda: nn.ModuleDict({"conv": make(4, 6, 3, stride=2, groups=groups)}), nodes, tensors, ["y"], **options
        )

    by_hand = 2 * 2 * (9 if transposed else 4) ** dims * 4 * 6 * 3**dims // groups
    assert computed(runner(fake=True)).forward_flops == by_hand
    assert class_cost(runner(), repeats=QUICK).forward_flops == by_hand
    assert backward_flops(runner(fake=True)) == backward_flops(runner()) == 2 * by_hand


@pytest.mark.parametrize("need_weights", [False, True])
def test_flops_of_torchs_attention_module(need_weights: bool) -> None:
    """Four projections and two products of all pairs of positions, whether its weights are returned or not."""
    length, width = 5, 8
    tensors = {"x": tensor(BatchInt(1), length, width), "y": tensor(BatchInt(1), length, width)}
    tensors["w"] = tensor(BatchInt(1), length, length)
    node = call(
        "y", "module", "attn", *(Ref("x"),) * 3, kwargs={"need_weights": need_weights},
        result=(Ref("y"), Ref("w") if need_weights else None),
    )  # fmt: skip

    def runner(**options: Any) -> SegmentRunner:
        model = lambda: nn.ModuleDict({"attn": nn.MultiheadAttention(width, 2, batch_first=True)})  # noqa: E731
        return runner_of(model, [node], tensors, ["y"], **options)

    by_hand = 4 * (2 * 2 * length * width * width) + 2 * (2 * 2 * length * length * width)
    assert computed(runner(fake=True)).forward_flops == by_hand
    assert class_cost(runner(), repeats=QUICK).forward_flops == by_hand


@pytest.mark.parametrize(
    ("equation", "shapes", "flops"),
    [
        ("bij,bjk->bik", ((3, 4), (4, 5)), 2 * 2 * 3 * 4 * 5),
        ("bqhd,bkhd->bhqk", ((3, 4, 5), (6, 4, 5)), 2 * 2 * 4 * 3 * 6 * 5),
        ("bi,bi->b", ((3,), (3,)), 2 * 2 * 3),
        ("bi,bij,bj->b", ((3,), (3, 4), (4,)), 2 * 2 * 3 * 4 + 2 * 2 * 4),
    ],
)
def test_flops_of_einsum(equation: str, shapes: tuple[tuple[int, ...], ...], flops: int) -> None:
    tensors = {f"x{index}": tensor(BatchInt(1), *shape) for index, shape in enumerate(shapes)}
    tensors["y"] = tensor(BatchInt(1))
    node = call("y", "function", "torch.einsum", equation, *(Ref(f"x{index}") for index in range(len(shapes))))
    assert computed(runner_of(nn.Identity, [node], tensors, ["y"], fake=True)).forward_flops == flops
    assert class_cost(runner_of(nn.Identity, [node], tensors, ["y"]), repeats=QUICK).forward_flops == flops


# saved: what autograd keeps beside the input x and the output; rows 2, length 5, float32
@pytest.mark.parametrize(
    ("name", "activation", "saved_input", "saved_output"),
    [
        ("linear", 0, 2 * 5 * 6 * 4, 0),
        # norm: x, and a mean and deviation for each row; up: the norm's output; gelu and down: their inputs
        ("block", (2 * 2 * 5 + 2 * 5 * 8 + 2 * (2 * 5 * 32)) * 4, 2 * 5 * 8 * 4, 0),
        ("embedding", 0, 0, 0),  # the ids are the model's input: no layer's memory
        ("conv", 0, 2 * 3 * 8 * 8 * 4, 2 * 4 * 8 * 8 * 4),  # relu keeps its result, which is the output
    ],
)
def test_saved_bytes_are_those_counted_by_hand(name: str, activation: int, saved_input: int, saved_output: int) -> None:
    for cost in (class_cost(RUNNERS[name](), repeats=QUICK), computed(RUNNERS[name](fake=True))):
        assert (cost.activation_bytes, cost.saved_input_bytes, cost.saved_output_bytes) == (
            activation,
            saved_input,
            saved_output,
        )


@pytest.mark.parametrize("name", RUNNERS)
def test_fake_and_real_tensors_give_the_same_bytes(name: str) -> None:
    real, fake = RUNNERS[name](), RUNNERS[name](fake=True)
    with real.active():
        expected = follow_memory(real, LiveBytes())
    assert follow_memory(fake, LiveBytes()) == expected
    assert expected.transient_bytes > 0


def test_transient_bytes_of_a_linear_are_those_of_its_backward() -> None:
    """The gradients of output, input, weight and bias, the last two before they are added to what there is."""
    expected = (2 * 5 * 8 + 2 * 5 * 6 + 6 * 8 + 8) * 4
    assert class_cost(linear_runner(), repeats=QUICK).transient_bytes == expected
    assert computed(linear_runner(fake=True)).transient_bytes == expected


def test_what_stays_after_the_forward_is_what_is_saved_and_the_results() -> None:
    runner, live = block_runner(), LiveBytes()
    with live:
        outputs = runner.forward()
        kept = live.live
    saved = follow_memory(block_runner(), LiveBytes())
    assert kept == saved.activation_bytes + sum(out.numel() * 4 for out in outputs)


def test_values_are_freed_after_their_last_use() -> None:
    """A chain without gradients keeps two tensors at a time, not all of them."""
    tensors = {f"v{i}": tensor(BatchInt(1), 256, grad=False) for i in range(9)}
    nodes = [call(f"v{i + 1}", "function", "torch.exp", Ref(f"v{i}")) for i in range(8)]
    runner, live = runner_of(nn.Identity, nodes, tensors, ["v8"]), LiveBytes()
    with torch.no_grad(), live:
        runner.forward()
    assert live.peak == 2 * 2 * 256 * 4


def test_parameters_and_buffers_are_counted_once() -> None:
    def tied() -> nn.Module:
        model = nn.ModuleDict({"a": nn.Linear(6, 6, bias=False), "b": nn.Linear(6, 6, bias=False)})
        model["b"].weight = model["a"].weight
        model["a"].register_buffer("scale", torch.ones(6))
        return model

    tensors = {name: tensor(BatchInt(1), 6) for name in ("x", "y", "z", "w")}
    nodes = [
        call("y", "module", "a", Ref("x")),
        call("z", "module", "b", Ref("y")),
        call("w", "function", "operator.mul", Ref("z"), ParamRef("a.scale")),
    ]
    cost = class_cost(runner_of(tied, nodes, tensors, ["w"]), repeats=QUICK)
    assert cost.param_bytes == (36 + 6) * 4
    assert cost.trainable_param_count == 36


# -- computing for a GPU ---------------------------------------------------------------------------------------------


def test_roofline_of_a_linear_is_the_formula() -> None:
    rows, width, out = 2 * 5, 6, 8
    second_per_byte, second_per_flop, launch = 1 / (1e12 * 0.25), 1 / (1e12 * 0.5), 3e-6

    def kernel(flops: float, elements: float) -> float:
        return max(flops * second_per_flop, 4 * elements * second_per_byte) + launch

    product = 2 * rows * width * out
    sizes = (rows * width, width * out, rows * out)
    forward = kernel(product, sum(sizes) + out)
    grad_input = kernel(product, sum(sizes))
    grad_weight = kernel(product, sum(sizes))
    grad_bias = kernel(0, rows * out + out)
    accumulate = kernel(0, 3 * width * out) + kernel(0, 3 * out)
    cost = computed(linear_runner(fake=True))
    assert cost.forward_time_s == pytest.approx(forward, rel=1e-9)
    assert cost.backward_input_time_s == pytest.approx(grad_input, rel=1e-9)
    assert cost.backward_weight_time_s == pytest.approx(grad_weight + grad_bias + accumulate, rel=1e-9)
    assert (cost.source, cost.num_repeats, cost.spread_fraction) == ("computed", 0, 0.0)


def test_roofline_is_bound_by_flops_where_the_products_are_large() -> None:
    tensors = {"x": tensor(BatchInt(1), 4096), "y": tensor(BatchInt(1), 4096)}
    nodes = [call("y", "module", "fc", Ref("x"))]
    model = lambda: nn.ModuleDict({"fc": nn.Linear(4096, 4096, bias=False)})  # noqa: E731
    runner = runner_of(model, nodes, tensors, ["y"], fake=True, rows=4096, dtype=torch.bfloat16)
    assert computed(runner).forward_time_s == pytest.approx(2 * 4096**3 / (2e12 * 0.5) + 3e-6, rel=1e-9)


def test_views_are_free() -> None:
    tensors = {"x": tensor(BatchInt(1), 4, 6), "y": tensor(6, 4, BatchInt(1)), "z": tensor(BatchInt(1), 4, 6)}
    nodes = [
        call("y", "method", "permute", Ref("x"), 2, 1, 0),
        call("z", "method", "permute", Ref("y"), 2, 1, 0),
    ]
    cost = computed(runner_of(nn.Identity, nodes, tensors, ["z"], fake=True))
    assert (cost.forward_time_s, cost.backward_time_s, cost.activation_bytes) == (0.0, 0.0, 0)


def test_attention_on_a_gpu_keeps_no_matrix_of_scores() -> None:
    scores = 2 * 4 * 64 * 64
    for dtype in (torch.float32, torch.bfloat16):  # the CPU's own choice, with dropout, would be matrix products
        cost = computed(attention_runner(False, fake=True, dtype=dtype))
        row_sums, seeds = 2 * 4 * 64 * 4, 64
        assert cost.saved_output_bytes == 2 * 4 * 64 * 16 * dtype.itemsize
        assert cost.saved_input_bytes == 3 * cost.saved_output_bytes
        assert row_sums <= cost.activation_bytes <= row_sums + seeds < scores
    masked = computed(attention_runner(True, fake=True, dtype=torch.bfloat16))
    assert masked.activation_bytes >= 64 * 64 * 2  # the mask as numbers, once for all heads
    assert masked.activation_bytes < scores


def test_dropout_on_a_gpu_keeps_one_byte_an_element() -> None:
    tensors = {name: tensor(BatchInt(1), 128) for name in ("x", "y")}
    nodes = [call("y", "module", "drop", Ref("x"))]
    cost = computed(runner_of(lambda: nn.ModuleDict({"drop": nn.Dropout(0.1)}), nodes, tensors, ["y"], fake=True))
    assert cost.activation_bytes == 2 * 128


def test_causal_attention_takes_half_the_time_and_counts_the_same_flops() -> None:
    slow = GPU.model_copy(update={"peak_flops": {"bfloat16": 1e6}, "launch_overhead": 0.0})  # all time is products
    whole, causal = (
        computed(attention_runner(False, causal=causal, fake=True, dtype=torch.bfloat16), slow)
        for causal in (False, True)
    )
    assert causal.forward_flops == whole.forward_flops
    assert causal.forward_time_s == pytest.approx(whole.forward_time_s / 2)
    assert causal.backward_time_s == pytest.approx(whole.backward_time_s / 2)
    assert whole.backward_time_s == pytest.approx(whole.forward_time_s * 5 / 2)


def test_computing_is_deterministic() -> None:
    assert computed(block_runner(fake=True)) == computed(block_runner(fake=True))


def test_attention_inside_torchs_own_module_takes_the_kernel_of_a_gpu() -> None:
    tensors = {name: tensor(BatchInt(1), 64, 32) for name in ("x", "y")}
    nodes = [
        call("y", "module", "attn", *(Ref("x"),) * 3, kwargs={"need_weights": False}, result=(Ref("y"), None)),
    ]
    model = lambda: nn.ModuleDict({"attn": nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True)})  # noqa: E731
    cost = computed(runner_of(model, nodes, tensors, ["y"], fake=True))
    assert cost.activation_bytes < 2 * 4 * 64 * 64 * 4  # less than one matrix of scores


def test_a_dtype_without_a_peak_is_an_error_that_names_it() -> None:
    with pytest.raises(ProfileError) as caught:
        computed(linear_runner(fake=True, dtype=torch.float16))
    assert "float16" in caught.value.message
    assert "bfloat16, float32" in caught.value.message
    assert caught.value.hint


def test_layers_without_input_gradients_have_no_input_time() -> None:
    for cost in (computed(embedding_runner(fake=True)), class_cost(embedding_runner(), repeats=QUICK)):
        assert cost.backward_input_time_s == 0.0
        assert cost.backward_weight_time_s > 0.0


def test_layers_without_parameters_have_no_weight_time() -> None:
    for cost in (
        computed(attention_runner(False, fake=True)),
        class_cost(attention_runner(False), repeats=QUICK),
    ):
        assert cost.backward_weight_time_s == 0.0
        assert cost.backward_input_time_s > 0.0


def test_layers_without_gradients_have_no_backward() -> None:
    tensors = {"x": tensor(BatchInt(1), 6, grad=False), "y": tensor(BatchInt(1), 6, grad=False)}
    nodes = [call("y", "function", "torch.exp", Ref("x"))]
    for cost in (
        computed(runner_of(nn.Identity, nodes, tensors, ["y"], fake=True)),
        class_cost(runner_of(nn.Identity, nodes, tensors, ["y"]), repeats=QUICK),
    ):
        assert cost.forward_time_s > 0
        assert (cost.backward_time_s, cost.activation_bytes) == (0.0, 0)


# -- measuring -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RUNNERS)
def test_measured_times_are_positive_and_their_spread_recorded(name: str) -> None:
    cost = class_cost(RUNNERS[name](), tp_degree=2, sharding="column", repeats=Repeats(budget_s=0.05))
    assert cost.source == "measured"
    assert (cost.tp_degree, cost.sharding, cost.microbatch_size) == (2, "column", 2)
    assert cost.forward_time_s > 0
    assert cost.backward_time_s > 0
    assert 5 <= cost.num_repeats <= 30
    assert cost.spread_fraction > 0


def test_repeats_stop_at_the_most_and_at_the_budget() -> None:
    assert measure_times(linear_runner(), Repeats(least=2, most=4, budget_s=60.0)).num_repeats == 4
    assert measure_times(linear_runner(), Repeats(least=2, most=1000, budget_s=0.0)).num_repeats == 2


def test_spread_is_the_interquartile_range_over_the_median() -> None:
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2 / 3)
    assert spread([4.0]) == 0.0
    assert spread([2.0] * 7) == 0.0


def test_measuring_leaves_gradients_as_they_were() -> None:
    runner = linear_runner()
    weight = runner.trainable[0]
    weight.grad = torch.full_like(weight, 7.0)
    class_cost(runner, repeats=QUICK)
    assert torch.equal(weight.grad, torch.full_like(weight, 7.0))
    assert runner.trainable[1].grad is None


# -- running nodes ---------------------------------------------------------------------------------------------------


def test_run_nodes_computes_what_the_module_computes() -> None:
    block = Block()
    runner = SegmentRunner(
        "block",
        block_runner()._nodes,
        {"x": tensor(BatchInt(1), 5, 8)},
        ["y"],
        module_call=block.get_submodule,
        parameter=block.get_parameter,
        target=Target(3, CPU, torch.float32),
    )
    (result,) = runner.forward()
    assert torch.equal(result, block(runner.inputs["x"]))
    assert result.shape == (3, 5, 8)


def test_run_nodes_resolves_every_kind_of_node_and_argument() -> None:
    scale = torch.full((4,), 2.0)
    nodes = [
        call(
            "zeros",
            "function",
            "torch.zeros",
            (BatchInt(2, 1), 4),
            kwargs={"dtype": Dtype("model"), "device": Device()},
        ),
        call("part", "getitem", "", Ref("zeros"), (slice(None, BatchInt(1), None), slice(None))),
        call("set", "setitem", "", Ref("zeros"), 0, ParamRef("scale"), result=Ref("zeros"), in_place=True),
        call(
            "long",
            "method",
            "to",
            Ref("zeros"),
            Dtype("float64"),
            kwargs={"memory_format": Constant("contiguous_format")},
        ),
        call("turned", "attribute", "T", Ref("long")),
        call(
            "pair",
            "function",
            "torch.max",
            Ref("turned"),
            TrainingValue(1, 0),
            result=Fields((("values", Ref("best")), ("indices", Ref("where")))),
        ),
        call("kept", "function", "operator.mul", ParamRef("weight"), 3.0, no_grad=True),
    ]
    environment: dict[str, Any] = {}
    weight = torch.ones(2, requires_grad=True)
    run_nodes(
        nodes,
        environment,
        module_call=nn.Identity().get_submodule,
        parameter={"scale": scale, "weight": weight}.__getitem__,
        rows=3,
        device=CPU,
        dtype=torch.bfloat16,
    )
    assert environment["zeros"].shape == (7, 4)
    assert environment["zeros"].dtype == torch.bfloat16
    assert environment["part"].shape == (3, 4)
    assert torch.equal(environment["part"][0], scale.bfloat16())
    assert environment["turned"].dtype == torch.float64
    assert environment["best"].tolist() == [2.0] * 4
    assert environment["where"].tolist() == [0] * 4
    assert not environment["kept"].requires_grad


def test_a_node_that_fails_names_the_layer_and_the_node() -> None:
    tensors = {"x": tensor(BatchInt(1), 7), "y": tensor(BatchInt(1), 8)}
    runner = runner_of(
        lambda: nn.ModuleDict({"fc": nn.Linear(6, 8)}), [call("y", "module", "fc", Ref("x"))], tensors, ["y"]
    )
    with pytest.raises(ProfileError) as caught:
        class_cost(runner, repeats=QUICK)
    assert "layers.3" in caught.value.message
    assert "'fc'" in caught.value.message
    assert caught.value.hint


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such kernel")


class FailsBackward(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Failing.apply(x)


class TooLarge(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("tried to allocate 9 GiB")


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize(
    ("module", "message"),
    [
        (FailsBackward, "can't be run forward and backward: RuntimeError: no such kernel"),
        (TooLarge, "with 2 rows doesn't fit"),
    ],
)
def test_what_fails_on_the_device_names_the_layer(module: type[nn.Module], message: str, fake: bool) -> None:
    tensors = {"x": tensor(BatchInt(1), 6), "y": tensor(BatchInt(1), 6)}
    nodes = [call("y", "module", "inner", Ref("x"))]
    runner = runner_of(lambda: nn.ModuleDict({"inner": module()}), nodes, tensors, ["y"], fake=fake)
    with pytest.raises(ProfileError) as caught:
        class_cost(runner, gpu=GPU if fake else None, repeats=QUICK)
    assert caught.value.message.startswith("layer 'layers.3'")
    assert message in caught.value.message
    assert caught.value.hint


def test_a_layer_may_write_its_input_in_place() -> None:
    tensors = {"x": tensor(BatchInt(1), 6), "y": tensor(BatchInt(1), 6)}
    nodes = [
        call("relu", "function", "torch.relu_", Ref("x"), result=Ref("x"), in_place=True),
        call("y", "module", "fc", Ref("x")),
    ]
    model = lambda: nn.ModuleDict({"fc": nn.Linear(6, 6)})  # noqa: E731
    measured = class_cost(runner_of(model, nodes, tensors, ["y"]), repeats=QUICK)
    assert measured.saved_input_bytes == 2 * 6 * 4
    assert computed(runner_of(model, nodes, tensors, ["y"], fake=True)).saved_input_bytes == 2 * 6 * 4


def test_parameters_without_values_are_refused() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"fc": nn.Linear(6, 8)})
    with pytest.raises(ProfileError) as caught:
        runner_of(lambda: model, [call("y", "module", "fc", Ref("x"))], {"x": tensor(BatchInt(1), 6)}, ["y"])
    assert "layers.3" in caught.value.message
    assert "meta device" in caught.value.message


def test_inputs_are_like_the_recorded_ones() -> None:
    tensors = {
        "x": tensor(BatchInt(1), 5, 6),
        "island": Tensor(shape=(3,), dtype="float64"),
        "count": tensor(2, dtype="int64"),
        "mask": tensor(BatchInt(1), 5, dtype="bool"),
    }
    nodes = [
        call("a", "function", "operator.mul", Ref("x"), 2.0),
        call("b", "function", "torch.cat", [Ref("island"), Ref("island")]),
        call("c", "function", "operator.add", Ref("count"), 1),
        call("d", "function", "operator.invert", Ref("mask")),
    ]
    inputs = runner_of(nn.Identity, nodes, tensors, ["a"], dtype=torch.bfloat16, rows=4).inputs
    assert inputs["x"].shape == (4, 5, 6)
    assert inputs["x"].dtype == torch.bfloat16
    assert inputs["x"].requires_grad
    assert 0.5 < inputs["x"].float().std().item() < 1.5
    assert inputs["island"].dtype == torch.float64
    assert not inputs["island"].requires_grad
    assert inputs["count"].tolist() == [0, 0]
    assert inputs["mask"].dtype == torch.bool
    assert not inputs["mask"].any()


def test_glue_from_inputs_alone_is_run_for_real() -> None:
    program = Program(
        inputs=("ids",),
        nodes=(
            call("positions", "function", "torch.cumsum", Ref("ids"), 1),
            call("h", "module", "wte", Ref("ids")),
            call("mask", "function", "operator.gt", Ref("positions"), 2),
            call("y", "function", "torch.where", Ref("mask"), Ref("h"), 0.0),
        ),
        output=Ref("y"),
        tensors={name: tensor(BatchInt(1), 3, dtype="int64") for name in ("ids", "positions", "h", "mask", "y")},
    )
    environment = run_derived(
        program,
        {"positions", "mask"},
        {"ids": torch.ones(2, 3, dtype=torch.int64)},
        module_call=nn.Identity().get_submodule,
        parameter=nn.Identity().get_parameter,
        target=Target(2, CPU, torch.float32),
    )
    assert set(environment) == {"ids", "positions", "mask"}
    assert environment["mask"].tolist() == [[False, False, True]] * 2
    assert outside_reads(program.nodes[2:]) == ("positions", "h")
    assert outside_results(program, 0, 3) == ("h", "mask")
    assert outside_results(program, 3, 4) == ("y",)


def test_numbers_grow_in_proportion_to_the_rows() -> None:
    one, four = (compute_numbers(block_runner(fake=True, rows=rows), GPU) for rows in (1, 4))
    assert four.forward_flops == 4 * one.forward_flops
    assert four.memory.activation_bytes == 4 * one.memory.activation_bytes
    assert math.isclose(four.memory.saved_input_bytes, 4 * one.memory.saved_input_bytes)

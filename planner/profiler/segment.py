"""A layer ready to be run by itself, for real or on fake tensors: nodes, parameters, and inputs like the real ones."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from planner.errors import ProfileError
from planner.profiler.arguments import Environment, Target, find_dtype
from planner.profiler.conversions import converted_modules
from planner.profiler.execute import RUN_ERRORS, last_reads, node_error, outside_reads, prepare_node
from planner.profiler.free_memory import free_bytes, is_out_of_memory
from planner.profiler.functions import checkpoints_not_reentrant
from planner.profiler.torch_internals import FakeTensorMode
from planner.program import Node, Tensor
from planner.units import format_bytes

_SEED = 0
_FAKE_HINT = "an operator that fake tensors can't run can be measured: leave out --gpu, on a machine with the device"


class _Alias(torch.autograd.Function):
    """The same storage as no leaf and no view, so that a layer may write its input in place as it does in the model."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        empty = torch.empty(0, dtype=value.dtype, device=value.device)
        return empty.set_(value.untyped_storage(), value.storage_offset(), value.size(), value.stride())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def synthetic_value(tensor: Tensor, target: Target) -> torch.Tensor:
    """Return a tensor like the recorded one: normal random where it is floating, else zeros.

    A float64 or float32 island keeps its dtype; what follows the model's dtype takes that of `target`. Gradients are
    required as recorded. Under a fake-tensor mode the result is fake.
    """
    dtype = target.dtype if tensor.follows_model_dtype else find_dtype(tensor.dtype, target.dtype)
    sizes = tensor.sizes(target.rows)
    if dtype.is_floating_point or dtype.is_complex:
        value = torch.empty(sizes, dtype=dtype, device=target.device)
        if dtype.itemsize > 1:  # eight-bit floats have no random fill
            value.normal_(generator=torch.Generator(target.device).manual_seed(_SEED))
        else:
            value.zero_()
        return value.requires_grad_(tensor.requires_grad)
    return torch.zeros(sizes, dtype=dtype, device=target.device)


def does_not_fit(
    layer: str, rows: int, device: torch.device, param_bytes: int, error: BaseException | None = None
) -> ProfileError:
    """Return the error of a layer that does not fit the device by itself."""
    reason = f" ({str(error).splitlines()[0]})" if error is not None and str(error) else ""
    held = f"its parameters take {format_bytes(param_bytes)}, their gradients as much again"
    return ProfileError(
        f"layer {layer!r} with {rows} rows doesn't fit {device} by itself: "
        f"{held if param_bytes else 'it has no parameters'}, and {format_bytes(free_bytes(device))} are free{reason}",
        hint="compute for a GPU without running the layers (--gpu NAME), or profile smaller microbatches "
        "(--microbatch-sizes)",
    )


class SegmentRunner:
    """A layer's nodes, to be run again and again.

    `tensors` describes the program's values; `results` names those that later layers read. `environment` holds the
    model's inputs and the values computed from them alone (`run_derived`): they are used as they are, and count as no
    layer's memory, because a stage makes them once for all its layers. Every other value that the nodes read from
    outside is made by `synthetic_value`.

    `module_call` and `parameter` give modules and parameters by name: on `target.device`, or fake ones of `fake_mode`.
    """

    def __init__(
        self,
        name: str,
        nodes: Sequence[Node],
        tensors: Mapping[str, Tensor],
        results: Sequence[str],
        *,
        module_call: Callable[[str], nn.Module],
        parameter: Callable[[str], torch.Tensor],
        target: Target,
        environment: Environment | None = None,
        fake_mode: FakeTensorMode | None = None,
    ) -> None:
        given = environment or {}
        self.name = name
        self.target = target
        self.fake_mode = fake_mode
        self.results = tuple(results)
        self._nodes = tuple(node for node in nodes if node.kind != "draw")  # whose results count as given
        self._alias = False
        self._dead = last_reads(self._nodes, self.results)
        reads = outside_reads(self._nodes)
        self.shared: Environment = {value: given[value] for value in reads if value in given}
        with self.active():
            self._steps = [prepare_node(node, module_call, parameter, target) for node in self._nodes]
            self.inputs: dict[str, torch.Tensor] = {
                value: synthetic_value(tensors[value], target) for value in reads if value not in given
            }
        self.parameters, self.buffers = _state(self._nodes, module_call, parameter)
        self._check()

    def _check(self) -> None:
        for tensor in (*self.parameters, *self.buffers):
            if tensor.device.type == "meta":
                raise ProfileError(
                    f"layer {self.name!r} has parameters on the meta device, which can't be run",
                    hint="give real parameters, or fake ones (planner.profiler.fake.make_fake)",
                )

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Run what is inside under the fake-tensor mode, if there is one."""
        with self.fake_mode or contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def named_errors(self) -> Iterator[None]:
        """Turn errors of torch inside into ProfileErrors that name the layer: no memory, or a backward that fails."""
        try:
            with checkpoints_not_reentrant(), converted_modules(lambda old, new: None):
                yield
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                held = sum(param.numel() * param.itemsize for param in self.parameters)
                raise does_not_fit(self.name, self.target.rows, self.target.device, held, error) from error
            raise ProfileError(
                f"layer {self.name!r} can't be run forward and backward: {type(error).__name__}: {error}",
                hint="check that the model trains on this device, in this dtype"
                if self.fake_mode is None
                else _FAKE_HINT,
            ) from error

    @property
    def grad_inputs(self) -> list[torch.Tensor]:
        """The inputs from earlier layers that gradients flow to."""
        return [value for value in self.inputs.values() if value.requires_grad]

    @property
    def trainable(self) -> list[torch.Tensor]:
        """The parameters that gradients flow to."""
        return [param for param in self.parameters if param.requires_grad]

    def forward(self) -> tuple[torch.Tensor, ...]:
        """Return the results of running the layer; what it doesn't need any more is freed as it goes.

        ProfileError names the layer and the node that fails. Call it inside `active()`.
        """
        try:
            return self._run()
        except ProfileError as error:
            if self._alias or "leaf Variable" not in error.message:
                raise
        self._alias = True  # the layer writes its input in place
        return self._run()

    def _run(self) -> tuple[torch.Tensor, ...]:
        environment: Environment = self.shared | self.inputs
        if self._alias:
            for name, value in self.inputs.items():
                if value.requires_grad:
                    environment[name] = _Alias.apply(value)  # type: ignore[no-untyped-call]
        for node, step, dead in zip(self._nodes, self._steps, self._dead, strict=True):
            try:
                step(environment)
            except RUN_ERRORS as error:
                if is_out_of_memory(error):
                    raise  # told by `named_errors`: the node is not at fault
                failure = node_error(node, error)
                hint = _FAKE_HINT if self.fake_mode is not None else failure.hint
                raise ProfileError(f"layer {self.name!r}: {failure.message}", hint=hint) from error
            for name in dead:
                environment.pop(name, None)
        results = tuple(environment[name] for name in self.results)
        return tuple(value for value in results if isinstance(value, torch.Tensor))


def _state(
    nodes: Sequence[Node], module_call: Callable[[str], nn.Module], parameter: Callable[[str], torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the parameters and the buffers that nodes read, each once however many names it has."""
    parameters: dict[int, torch.Tensor] = {}
    buffers: dict[int, torch.Tensor] = {}
    for node in nodes:
        if node.kind == "module":
            module = module_call(node.target)
            parameters |= {id(param): param for param in module.parameters()}
            buffers |= {id(buffer): buffer for buffer in module.buffers()}
        for name in node.params():
            tensor = parameter(name)
            found = parameters if isinstance(tensor, nn.Parameter) else buffers
            found[id(tensor)] = tensor
    return list(parameters.values()), list(buffers.values())

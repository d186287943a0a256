"""The runtime: `setup` builds this rank's part of the model, `Runtime` trains it."""

import hashlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from planner.emitter.runtime.build import (
    _build_stage,
    _Filler,
    _model_dtype,
    _parameters_on_meta,
    _read_checkpoint,
    _shard_of,
    _tie,
)
from planner.emitter.runtime.checks import (
    PlanError,
    _check_layers,
    _check_model,
    _check_shape,
    _check_stages,
    _check_torch,
)
from planner.emitter.runtime.communication import _join
from planner.emitter.runtime.data_parallel import _distribute, _local, _norm, _Numbers, _scale, _whole
from planner.emitter.runtime.executor import _Executor, stage_actions
from planner.emitter.runtime.generated import INPUTS, PLAN, STAGES, TARGET_DIMS, TIED
from planner.emitter.runtime.inputs import _named_inputs
from planner.emitter.runtime.ranks import _first_held, _holds, _Ranks
from planner.emitter.runtime.stage import PlanStage, Value, _map_tensors

_OfMicrobatch = Callable[[int], tuple[dict[str, Any], Any]]


def setup(
    build_model: Callable[[], nn.Module],
    loss_fn: Callable[..., Tensor] | None = None,
    *,
    device: torch.device | str | None = None,
    checkpoint: Mapping[str, Tensor] | str | os.PathLike[str] | None = None,
    initialize: Callable[[nn.Module], object] | None = None,
    precision: str | None = None,
) -> "Runtime":
    """Join the processes and return this rank's runtime; every rank calls it, with the same random seed.

    The loss of a microbatch is `loss_fn(output)` or `loss_fn(output, target)`, without loss_fn the
    output itself, or its `loss`.
    Every rank builds the model and keeps its part, bit for bit what one process has. With `checkpoint` (tensors by
    name, or the path of a torch.save file) or `initialize` (called with each module that has tensors of its own, as
    `model.apply` does) parameters are built without memory, and this rank's are filled, one module at a time.
    `precision` takes the place of the plan's: "fp32" computes in the dtype that the model is built in.
    """
    _check_torch()
    _check_layers(PLAN)
    _check_stages(PLAN, STAGES)
    ranks = _Ranks(device)
    precision = precision or PLAN["precision"]
    random_state = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:8]
    ranks.check_same("random state", f"{torch.initial_seed()} {random_state}")
    seed, default = torch.initial_seed(), torch.get_default_dtype()
    with ranks.together():
        filler = None
        if checkpoint is not None or initialize is not None:
            filler = _Filler(_read_checkpoint(checkpoint), initialize, TIED, ranks.device)
        try:
            if precision == "bf16":
                torch.set_default_dtype(torch.bfloat16)
            with _parameters_on_meta() if filler is not None else nullcontext():
                model = build_model()
        finally:
            torch.set_default_dtype(default)
        _check_model(model, PLAN["origin"]["model_hash"])
        mixed = precision == "bf16-mixed"
        dtype = torch.bfloat16 if mixed else _model_dtype(model)
        stage = STAGES[ranks.stage](model, dtype=dtype, device=ranks.device)
        del model
        tp_mesh = DeviceMesh.from_group(ranks.tp_group, ranks.device.type) if ranks.tp_degree > 1 else None
        _build_stage(stage, tp_mesh, filler)
        _tie(stage, TIED)
        stage.to(ranks.device)
    ties = ranks.tie_groups()
    for names, source, group in ties if initialize is not None else ():
        dist.broadcast(stage.get_parameter(_first_held(stage, names)).detach(), source, group=group)
    numbers = None
    if ranks.dp_degree > 1 or mixed:
        numbers = _Numbers(stage, ranks.dp_group)
        _distribute(stage, ranks.dp_group, PLAN["data_parallel"], mixed=mixed)
    is_last = ranks.stage == len(STAGES) - 1
    if loss_fn is not None and not stage.loss_is_known and PLAN["num_microbatches"] * ranks.dp_degree > 1:
        what = "the plan was made without a loss: loss_fn is averaged evenly over microbatches"
        warnings.warn(f"{what}, so it must be a mean over rows", stacklevel=2)
    executor = _Executor(
        stage,
        loss_fn,
        is_last=is_last,
        num_microbatches=PLAN["num_microbatches"],
        mixed=mixed,
        dp_group=ranks.dp_group,
        dp_degree=ranks.dp_degree,
    )
    ranks.connect(executor, dtype)
    return Runtime(stage, ranks, executor, ties, seed, numbers)


class Runtime:
    """This rank's part of the training, made by `setup`. `modules` has its stage; `check_finite` refuses NaN losses."""

    def __init__(
        self,
        stage: PlanStage,
        ranks: _Ranks,
        executor: _Executor,
        ties: list[tuple[tuple[str, ...], int, dist.ProcessGroup]],
        seed: int,
        numbers: _Numbers | None = None,
    ) -> None:
        self.modules: list[nn.Module] = [stage]
        self.check_finite = True
        self._stage, self._ranks, self._executor = stage, ranks, executor
        self._named = dict(stage.named_parameters())
        self._numbers = numbers
        if numbers is not None:
            self._named |= numbers.outer
        self._divided = {name: _shard_of(stage, name) for name in self._named}
        self._first_name = {name: group[0] for group in TIED for name in group}
        self._num_microbatches: int = PLAN["num_microbatches"]
        self._rows: int = PLAN["stages"][ranks.stage]["microbatch_size"]
        self._actions = stage_actions(PLAN["schedule"], ranks.stage, len(STAGES), self._num_microbatches)
        # Dropout is the same on tensor-parallel ranks, which share activations, and differs elsewhere; the random
        # state outside stays the user's, so that data drawn there is the same on every rank.
        self._random_seed = (seed + 1 + ranks.stage * ranks.dp_degree + ranks.replica) % 2**63
        self._random: list[Tensor] = []
        # Parameters whose gradient is summed over a group after the backwards, because its parts are on several ranks.
        self._summed: list[tuple[list[nn.Parameter], dist.ProcessGroup]] = []
        partial = [f"{name}.{key}" for name, tp in stage.tensor_parallel.items() for key in tp.partial_gradients]
        if partial and ranks.tp_degree > 1:
            self._summed.append(([stage.get_parameter(name) for name in partial], ranks.tp_group))
        for names, _, group in ties:
            self._summed.append(([stage.get_parameter(_first_held(stage, names))], group))

    @property
    def rows(self) -> tuple[slice, ...]:
        """The rows of the global batch that this rank reads, one slice for each microbatch in order."""
        size, ranks = self._rows, self._ranks
        starts = [(index * ranks.dp_degree + ranks.replica) * size for index in range(self._num_microbatches)]
        return tuple(slice(start, start + size) for start in starts)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield this rank's parameters, for an optimizer: all plain tensors, or all DTensors under data parallelism."""
        return iter(self._named.values())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters by the model's own names."""
        return iter(self._named.items())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, or make those that there are zero."""
        for param in self.parameters():
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()

    def step(self, inputs: Any, target: Any = None, *, local: bool = False) -> Tensor:
        """Add a global batch's gradients and return its loss, on every rank: both what one process has for all rows.

        `inputs` (tensor, tuple by position or dict by name) and `target` hold the global batch on every rank, or with
        `local` only this rank's `rows`, in that order.
        """
        microbatch, counted = self._microbatches(inputs, target, local)
        aside = [(param, param.grad) for params, _ in self._summed for param in params]
        for param, _ in aside:
            param.grad = None  # what earlier steps left is summed already
        with self._own_random_state():
            losses = self._executor.run(self._actions, microbatch, counted)
        for params, group in self._summed:
            _sum_gradients([param for param in params if param.requires_grad], group)
        for param, earlier in aside:
            if earlier is not None:
                param.grad = earlier if param.grad is None else earlier + param.grad
        if self._numbers is not None:
            self._numbers.average()
        return self._mean(losses)

    def evaluate(self, inputs: Any, target: Any = None, *, local: bool = False) -> Tensor:
        """Return a global batch's mean loss on every rank, in evaluation mode and without gradients."""
        microbatch, counted = self._microbatches(inputs, target, local)
        modes = [(module, module.training) for module in self._stage.modules()]
        self._stage.eval()
        try:
            with torch.no_grad(), self._own_random_state():
                forwards = [action for action in self._actions if action[0] == "F"]
                losses = self._executor.run(forwards, microbatch, counted)
        finally:
            for module, training in modes:
                module.training = training
        return self._mean(losses)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm over all ranks is `max_norm` at most; returns the norm before."""
        ranks, counted = self._ranks, []
        for name, param in self._named.items():
            group = next((names for names in TIED if name in names), (name,))
            first = next(index for index, stage in enumerate(STAGES) if any(_holds(stage, other) for other in group))
            whole_here = self._divided[name] is None and ranks.shard > 0
            whole_on_replicas = PLAN["data_parallel"] == "replicated" or param.dim() == 0
            replica_here = whole_on_replicas and ranks.replica > 0
            if param.grad is not None and first == ranks.stage and not whole_here and not replica_here:
                counted.append(_local(param.grad))
        square = torch.zeros((), dtype=torch.float64, device=ranks.device)
        if counted:
            square += _norm(counted) ** 2
        dist.all_reduce(square, group=ranks.world)
        norm = square.sqrt()
        gradients = [_local(param.grad) for param in self.parameters() if param.grad is not None]
        _scale(gradients, (max_norm / (norm + 1e-6)).clamp(max=1))
        return norm

    def full_parameters(self) -> dict[str, Tensor] | None:
        """Return every parameter of the model, whole, on the CPU of rank 0 (None elsewhere); all ranks call it.

        Tied parameters stand under the first of their names.
        """
        return self._collect({name: param.detach() for name, param in self._named.items()})

    def full_gradients(self) -> dict[str, Tensor] | None:
        """Return the gradients that there are, as `full_parameters` does the parameters."""
        return self._collect({name: param.grad for name, param in self._named.items() if param.grad is not None})

    def full_buffers(self) -> dict[str, Tensor] | None:
        """Return every buffer of the stages, as `full_parameters` does the parameters; of replicas the first's."""
        return self._collect(dict(self._stage.named_buffers()))

    def close(self) -> None:
        """Leave the job: the process groups are no more."""
        dist.destroy_process_group()

    def _collect(self, tensors: dict[str, Tensor]) -> dict[str, Tensor] | None:
        """Bring tensors together on rank 0, one at a time."""
        ranks = self._ranks
        listed: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(listed, list(tensors), group=ranks.world)
        result: dict[str, Tensor] = {}
        for gpus in ranks.gpus:
            for name in listed[gpus[0]]:
                tensor = torch.empty(0)
                if ranks.rank in gpus:
                    tensor = _whole(tensors[name])
                    if (cut := self._divided.get(name)) is not None:
                        shards = [torch.empty_like(tensor) for _ in range(ranks.tp_degree)]
                        dist.all_gather(shards, tensor.contiguous(), group=ranks.tp_group)
                        tensor = _join(shards, *cut)
                if gpus[0] != 0 and ranks.rank in (0, gpus[0]):
                    tensor = ranks.send_to_first(tensor, gpus[0])
                if ranks.rank == 0:
                    result.setdefault(self._first_name.get(name, name), tensor.detach().cpu().clone())
        return result if ranks.rank == 0 else None

    def _microbatches(self, inputs: Any, target: Any, local: bool) -> tuple[_OfMicrobatch, _OfMicrobatch]:
        """Return the functions that cut a microbatch's rows out of a batch, when all of its shapes are right.

        The first gives what the stage's forward takes, the second what it counts, in the dtypes that were given.
        """
        listed = [Value(item) if isinstance(item, str) else item for item in INPUTS]
        specs = {spec.key or spec.name: spec for spec in listed}
        given = _named_inputs(inputs)
        read = {name for stage in STAGES for name in (*stage.inputs, *stage.count_inputs)}
        required = {key for key, spec in specs.items() if spec.name in read}
        if wrong := (required - set(given)) or (set(given) - set(specs)):
            problem = "is missing" if wrong <= required else "is not one that this plan's model was profiled with"
            raise PlanError(f"input {min(wrong)!r} {problem}\nhint: this plan's inputs are {', '.join(specs)}")
        dp_degree, size = self._ranks.dp_degree, self._rows
        factors = [self._num_microbatches, size] if local else [self._num_microbatches, size, dp_degree]
        names = ["num_microbatches", "microbatch_size", "dp_degree"]
        num_rows = self._num_microbatches * size * (1 if local else dp_degree)

        def check(what: str, tensor: Tensor, dim: int | None) -> None:
            if dim is None:
                return
            found = tensor.shape[dim] if tensor.dim() > dim else "no"
            if found != num_rows:
                unit = "rank" if local else "step"
                product = " x ".join(f"{name} {factor}" for name, factor in zip(names, factors, strict=False))
                raise PlanError(
                    f"{what} has {found} rows, and a {unit} of this plan takes {num_rows} ({product})\n"
                    "hint: give batches of that many rows, or solve again with another --global-batch-size"
                )

        for name, value in given.items():
            spec = specs[name]
            check(f"input {name!r}", value, spec.batch_dim)
            if spec.shape is not None:
                shape = [num_rows if dim == spec.batch_dim else dim_size for dim, dim_size in enumerate(spec.shape)]
                _check_shape(f"input {name!r}", value, tuple(shape))
        for tensor, dim in _with_dims(target):
            check("the target", tensor, dim)
        slices = [slice(i * size, (i + 1) * size) for i in range(self._num_microbatches)] if local else self.rows

        def place(tensor: Tensor) -> Tensor:
            cast = self._executor.mixed and tensor.is_floating_point()
            return tensor.to(self._ranks.device, self._stage.dtype if cast else None, non_blocking=True)

        def of_target(rows: slice) -> Any:
            if not self._executor.is_last:
                return None
            cut = iter([_cut(tensor, rows, dim) for tensor, dim in _with_dims(target)])
            return _map_tensors(lambda _: next(cut).to(self._ranks.device, non_blocking=True), target)

        def take(index: int, names: tuple[str, ...], place: Callable[[Tensor], Tensor]) -> tuple[dict[str, Any], Any]:
            rows = slices[index]
            taken = {}
            for key, spec in specs.items():
                if spec.name in names:
                    value = place(_cut(given[key], rows, spec.batch_dim))
                    taken[spec.name] = value.clone() if spec.written else value
            return taken, of_target(rows)

        def microbatch(index: int) -> tuple[dict[str, Any], Any]:
            return take(index, self._stage.inputs, place)

        def counted(index: int) -> tuple[dict[str, Any], Any]:
            return take(index, self._stage.count_inputs, lambda x: x.to(self._ranks.device, non_blocking=True))

        return microbatch, counted

    def _mean(self, losses: list[Tensor]) -> Tensor:
        """Return the mean over microbatches and replicas of the losses that the last stage has."""
        ranks = self._ranks
        shared = torch.zeros(self._num_microbatches, dtype=torch.float64, device=ranks.device)
        if losses and ranks.shard == 0:
            shared += torch.stack(losses).to(shared.dtype) / ranks.dp_degree
        dist.all_reduce(shared, group=ranks.world)
        if self.check_finite and not shared.isfinite().all():
            worst = int((~shared.isfinite()).nonzero()[0])
            raise PlanError(
                f"the loss of microbatch {worst} is {shared[worst].item()}\n"
                "hint: lower the learning rate or clip gradients; runtime.check_finite = False to go on"
            )
        return shared.mean()

    @contextmanager
    def _own_random_state(self) -> Iterator[None]:
        """Draw random numbers from this rank's own state, and leave the one outside as it was."""
        cuda = [self._ranks.device] if self._ranks.device.type == "cuda" else []
        with torch.random.fork_rng(cuda):
            if self._random:
                torch.set_rng_state(self._random[0])
                for device, state in zip(cuda, self._random[1:], strict=True):
                    torch.cuda.set_rng_state(state, device)
            else:
                torch.manual_seed(self._random_seed)
            try:
                yield
            finally:
                self._random = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in cuda)]


def _cut(tensor: Tensor, rows: slice, dim: int | None) -> Tensor:
    """Return the rows of a tensor that has them along `dim`, or all of it."""
    return tensor if dim is None else tensor.narrow(dim, rows.start, rows.stop - rows.start)


def _with_dims(target: Any) -> list[tuple[Tensor, int | None]]:
    """Return the tensors of a target, each with the dimension of its rows."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _map_tensors(keep, target)
    dims = TARGET_DIMS if len(TARGET_DIMS) == len(found) else (0,) * len(found)
    return list(zip(found, dims, strict=True))


def _sum_gradients(params: list[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Replace gradients by their sums over a group, all in one message; one that no rank has stays none."""
    if not params:
        return
    given = [param.grad is not None for param in params]
    for param in params:
        param.grad = torch.zeros_like(param) if param.grad is None else param.grad
    gradients = [_local(param.grad) for param in params if param.grad is not None]
    flat = torch.cat([*(gradient.reshape(-1) for gradient in gradients), torch.tensor(given).to(gradients[0])])
    dist.all_reduce(flat, group=group)
    *sums, holders = flat.split_with_sizes([*(gradient.numel() for gradient in gradients), len(params)])
    for gradient, total in zip(gradients, sums, strict=True):
        gradient.copy_(total.view_as(gradient))
    if not all(given):
        for param, count in zip(params, holders.tolist(), strict=True):
            param.grad = param.grad if count else None

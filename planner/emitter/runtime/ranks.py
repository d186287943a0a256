"""Ranks: where each process stands in the plan, and the process groups between them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from planner.emitter.runtime.checks import PlanError
from planner.emitter.runtime.communication import _Channel
from planner.emitter.runtime.executor import _Executor
from planner.emitter.runtime.generated import PLAN, STAGES, TIED
from planner.emitter.runtime.stage import PlanStage


def _holds(stage: type[PlanStage], name: str) -> bool:
    return name in stage.parameter_names or any(name.startswith(f"{module}.") for module in stage.module_names)


def _first_held(stage: PlanStage, names: tuple[str, ...]) -> str:
    return next(name for name in names if _holds(type(stage), name))


class _Ranks:
    """This process's place: its `stage`, its `index` in it, and of that its `replica` and tensor-parallel `shard`.

    Groups are made by all processes together, in one order.
    """

    def __init__(self, device: torch.device | str | None) -> None:
        self.gpus: list[list[int]] = [list(stage["gpus"]) for stage in PLAN["stages"]]
        self.timeout = timedelta(seconds=float(os.environ.get("PLANNER_TIMEOUT_S", "600")))
        if device is None:
            on_gpu = torch.cuda.is_available()
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
        self.device = torch.device(device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.backend = "nccl" if self.device.type == "cuda" else "gloo"
        self._join()
        self.rank = dist.get_rank()
        self.stage = next(index for index, gpus in enumerate(self.gpus) if self.rank in gpus)
        self.index = self.gpus[self.stage].index(self.rank)
        self.tp_degree, self.dp_degree = (PLAN["stages"][self.stage][key] for key in ("tp_degree", "dp_degree"))
        self.replica, self.shard = divmod(self.index, self.tp_degree)
        self.world = dist.new_group(timeout=self.timeout, backend=self.backend)
        self.tp_group = self.dp_group = self.world
        for gpus, stage in zip(self.gpus, PLAN["stages"], strict=True):
            tp_degree = stage["tp_degree"]
            for start in range(0, len(gpus), tp_degree):
                self.tp_group = self._group(gpus[start : start + tp_degree]) or self.tp_group
            for start in range(tp_degree):
                self.dp_group = self._group(gpus[start::tp_degree]) or self.dp_group

    def _join(self) -> None:
        """Make this process one of the job's, where the training script has not done so."""
        expected = sum(len(gpus) for gpus in self.gpus)
        found = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        if found != expected:
            degrees = " + ".join(f"tp {stage['tp_degree']} x dp {stage['dp_degree']}" for stage in PLAN["stages"])
            raise PlanError(
                f"this plan uses {expected} processes ({degrees}), and {found} run\n"
                f"hint: torchrun --nproc-per-node {expected} SCRIPT (times --nnodes on several machines)"
            )
        if sorted(rank for gpus in self.gpus for rank in gpus) != list(range(expected)):
            raise PlanError(f"the plan's gpus {self.gpus} are not the ranks 0 to {expected - 1}, each once")
        if any(gpus != sorted(gpus) for gpus in self.gpus):  # a process group counts its ranks in ascending order
            raise PlanError(f"the plan's gpus {self.gpus} must ascend within a stage")
        if not dist.is_initialized() and "RANK" in os.environ:
            dist.init_process_group(self.backend, timeout=self.timeout)
        elif not dist.is_initialized():
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(self.backend, store=store, rank=0, world_size=1, timeout=self.timeout)

    def _group(self, ranks: list[int]) -> dist.ProcessGroup | None:
        group = dist.new_group(ranks, timeout=self.timeout, backend=self.backend)
        return group if self.rank in ranks else None

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise on every rank what the block raised on one: none is left waiting for another that has stopped."""
        try:
            yield
        except Exception as error:  # whatever it is: raised again, when the others know
            self._gather(f"{type(error).__name__}: {error}")
            raise
        problems = self._gather("")
        if failed := [rank for rank, problem in enumerate(problems) if problem]:
            raise PlanError(f"rank {failed[0]} could not be set up: {problems[failed[0]]}")

    def _gather(self, value: str) -> list[str]:
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self.world)
        return values

    def check_same(self, what: str, value: str) -> None:
        """Raise on every rank where the ranks' values differ."""
        values = self._gather(value)
        if different := [rank for rank, other in enumerate(values) if other != values[0]]:
            raise PlanError(
                f"rank {different[0]} has another {what} than rank 0: {values[different[0]]}, not {values[0]}\n"
                "hint: every rank must do the same before setup, torch.manual_seed included"
            )

    def send_to_first(self, tensor: Tensor, source: int) -> Tensor:
        """Return on rank 0 the tensor that rank `source` gives; the two call it."""
        described = [(tuple(tensor.shape), tensor.dtype)]
        if self.rank == source:
            dist.send_object_list(described, 0, group=self.world, device=self.device)
            dist.send(tensor.contiguous(), 0, group=self.world)
            return tensor
        dist.recv_object_list(described, source, group=self.world, device=self.device)
        shape, dtype = described[0]
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        dist.recv(tensor, source, group=self.world)
        return tensor

    def connect(self, executor: _Executor, dtype: torch.dtype) -> None:
        """Give the executor its channels: one for each pair of stages and direction."""
        for target, stage in enumerate(STAGES):
            for source in sorted({value.source for value in stage.receives if value.source is not None}):
                values = [value for value in stage.receives if value.source == source]
                for backward in (False, True):
                    crossing: dict[str, Tensor] = {
                        value.name: torch.empty(value.shape or (), dtype=value.dtype_in(dtype), device="meta")
                        for value in values
                        if value.requires_grad or not backward
                    }
                    if not crossing:
                        continue
                    group = self._group([*self.gpus[source], *self.gpus[target]])
                    start, end = (target, source) if backward else (source, target)
                    if group is None or self.stage not in (start, end):
                        continue
                    sends = self.stage == start
                    channel = _Channel(group, self.gpus[end if sends else start][self.index], crossing)
                    channel.open(self.device, sends=sends)
                    if backward:
                        (executor.back if sends else executor.returned).append(channel)
                    else:
                        (executor.sent if sends else executor.received).append(channel)

    def tie_groups(self) -> list[tuple[tuple[str, ...], int, dist.ProcessGroup]]:
        """Return for every parameter of this rank that lives on several stages: its names, the rank that has the first
        of them, and the group of the ranks that hold the same slice of it.
        """
        found = []
        for names in TIED:
            holders = [index for index, stage in enumerate(STAGES) if any(_holds(stage, name) for name in names)]
            for index in range(len(self.gpus[holders[0]])) if len(holders) > 1 else ():
                group = self._group([self.gpus[holder][index] for holder in holders])
                if group is not None:
                    # no stage may read the first name (a module registered twice): then the next one
                    read = next(name for name in names if any(_holds(STAGES[holder], name) for holder in holders))
                    first = next(holder for holder in holders if _holds(STAGES[holder], read))
                    found.append((names, self.gpus[first][index], group))
        return found

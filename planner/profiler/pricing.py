"""Prices the layer classes of a model one after another: only the one at hand has parameters on the device."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from planner.cluster import Gpu
from planner.errors import ProfileError
from planner.model_file import ModelFile, split_arguments
from planner.model_profile import LayerCost, WholeAt
from planner.profiler import user_code as user
from planner.profiler.capture import Capture
from planner.profiler.classes import OpenedClass
from planner.profiler.execute import Target, outside_results, run_derived
from planner.profiler.fake import model_dtype
from planner.profiler.free_memory import free_bytes, give_back, is_out_of_memory
from planner.profiler.layer_cost import class_cost
from planner.profiler.layers import Segment, variable_names
from planner.profiler.loss_record import target_variables
from planner.profiler.modules import ModuleSource
from planner.profiler.one_recording import input_tensors, named_tensors
from planner.profiler.plain_tensors import find_tensor
from planner.profiler.recording import Call
from planner.profiler.segment import SegmentRunner, does_not_fit
from planner.profiler.segments import divided_nodes
from planner.profiler.torch_internals import FakeTensorMode
from planner.program import Program
from planner.sharding import Sharding

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class ProfiledClass:
    """A layer class: its first layer, and what that one's module is opened into.

    `cost_key` is equal for classes that cost the same: those that differ in names and in what they multiply by.
    """

    name: str
    segment: Segment
    stop: int
    call: Call
    opened: OpenedClass
    shardings: tuple[Sharding, ...]
    whole: tuple[WholeAt, ...]
    cost_key: Any


class Pricer:
    """Prices layer classes one after another, each for every microbatch size, whole and divided.

    What is computed for a GPU runs on fake tensors; the classes `real`, whose code looks at values, on the CPU.
    """

    def __init__(
        self,
        file: ModelFile,
        captured: Capture,
        program: Program,
        derived: frozenset[str],
        gpu: Gpu | None,
        device: torch.device,
        dtype: torch.dtype | None,
        real: frozenset[str],
    ) -> None:
        self._file, self._captured, self._program, self._derived, self._gpu, self._device = (
            file,
            captured,
            program,
            derived,
            gpu,
            device,
        )
        self._real = real
        self._benches = [
            (mode, ModuleSource(captured.model, device=device, dtype=dtype, fake_mode=mode))
            for mode in (FakeTensorMode(allow_non_fake_inputs=True) if gpu is not None else None, None)
        ]
        self._fake_mode, self._source = self._benches[0]
        self.dtype = dtype or model_dtype(captured.model)
        self.least_rows = 1
        self.notes: tuple[str, ...] = ()
        # (class, tp_degree, name) of the ways to divide that can't be run: rules that were wrong about some operation
        self.unusable: set[tuple[str, int, str]] = set()

    def price(
        self, classes: list[ProfiledClass], sizes: tuple[int, ...], progress: Progress
    ) -> dict[str, list[LayerCost]]:
        """Return the costs of each class; ProfileError names the layer that fails.

        A size with which a layer fails and a larger one does not is left out: `least_rows` are those that all run with.
        A way to divide a layer that can't be run, where the whole layer can, is `unusable`, and noted.
        Classes that cost the same are priced once.
        """
        total = sum(len(sizes) * (1 + len(item.shardings)) for item in classes)
        costs: dict[str, list[LayerCost]] = {}
        alike: dict[Any, str] = {}
        done = 0
        environments: dict[tuple[bool, int], dict[str, Any]] = {}
        for item in sorted(classes, key=lambda item: item.name in self._real):
            is_real = item.name in self._real
            self._fake_mode, self._source = self._benches[is_real]
            for rows in sizes:
                if (is_real, rows) not in environments:
                    environments[is_real, rows] = self._environment(rows)
            price_key = item.name if is_real else (item.cost_key, tuple(map(_division, item.shardings)))
            same = alike.setdefault(price_key, item.name)
            self.unusable |= {(item.name, degree, kind) for name, degree, kind in self.unusable if name == same}
            costs[item.name] = list(costs.get(same, ()))
            if costs[item.name]:
                done += len(sizes) * (1 + len(item.shardings))
                continue
            for sharding in (None, *item.shardings):
                self._source.release()
                if sharding is not None:
                    self._source.divide(item.segment.module, sharding)
                too_few: ProfileError | None = None
                found: list[LayerCost] = []
                for rows in sizes:
                    label = f"{item.name} rows {rows}" + (f" tp {sharding.tp_degree}" if sharding else "")
                    progress(label, done, total)
                    done += 1
                    try:
                        found.append(self._cost(item, sharding, rows, environments[is_real, rows]))
                    except ProfileError as error:
                        again = bool(found) and self._fake_mode is not None  # not for lack of memory
                        if sharding is not None and (again or (not found and rows >= self.least_rows)):
                            found.clear()
                            self.unusable.add((item.name, sharding.tp_degree, sharding.name))
                            self.notes = (*self.notes, f"not divided by tp {sharding.tp_degree}: {error.message}")
                            break
                        if found or rows == sizes[-1]:
                            raise (too_few or error) from error
                        too_few = too_few or error
                if too_few is not None and found and found[0].microbatch_size > self.least_rows:
                    self.least_rows = found[0].microbatch_size
                    told = f"no plan has microbatches of fewer than {self.least_rows} rows: {too_few.message}"
                    self.notes = (*(note for note in self.notes if not note.startswith("no plan has")), told)
                costs[item.name] += found
        self._source.release()
        progress("done", total, total)
        return {
            name: [cost for cost in listed if cost.microbatch_size >= self.least_rows] for name, listed in costs.items()
        }

    def usable(self, item: ProfiledClass) -> tuple[Sharding, ...]:
        """Return the ways to divide a class that can be run."""
        found = (s for s in item.shardings if (item.name, s.tp_degree, s.name) not in self.unusable)
        return tuple(found)

    def _environment(self, rows: int) -> dict[str, Any]:
        """Return the model's inputs, targets and what is computed from them alone, for a batch of `rows`."""
        args, kwargs = split_arguments(user.example_inputs(self._file, rows))
        given = input_tensors(self._captured.model, args, kwargs)
        variables = variable_names(given)
        tensors = {variables[name]: tensor for name, tensor in given.items()}
        if self._captured.targets:
            listed = named_tensors({"target": user.example_target(self._file, rows)})
            names = target_variables(self._captured, variables.values())
            tensors |= {names[name]: tensor for name, tensor in listed}
        values = {name: self._place(tensor) for name, tensor in tensors.items()}
        target = Target(rows, self._device, self.dtype)
        with self._fake_mode or nullcontext():
            return run_derived(
                self._program,
                self._derived,
                values,
                module_call=self._source.module,
                parameter=self._source.parameter,
                target=target,
            )

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self.dtype if tensor.is_floating_point() else tensor.dtype
        if self._fake_mode is not None:
            with self._fake_mode:
                return torch.empty(tensor.shape, dtype=dtype, device=self._device)
        return tensor.detach().to(self._device, dtype)

    def _cost(
        self, item: ProfiledClass, sharding: Sharding | None, rows: int, environment: dict[str, Any]
    ) -> LayerCost:
        nodes = self._program.nodes[item.segment.start : item.stop]
        if sharding is not None:
            nodes = divided_nodes(self._program, item.segment, item.stop, item.opened, sharding)
        results = outside_results(self._program, item.segment.start, item.stop)
        if self._fake_mode is None:
            self._check_fit(item, rows)
        try:
            runner = SegmentRunner(
                item.segment.name,
                [node for node in nodes if not self._made_anew(node)],
                self._program.tensors,
                [name for name in results if name not in self._derived],
                module_call=self._source.module,
                parameter=self._source.parameter,
                target=Target(rows, self._device, self.dtype),
                environment=environment,
                fake_mode=self._fake_mode,
            )
        except (RuntimeError, MemoryError) as error:  # its parameters are made there
            if not is_out_of_memory(error):
                raise
            raise does_not_fit(item.segment.name, rows, self._device, self._param_bytes(item)[0], error) from error
        if sharding is None:
            return class_cost(runner, gpu=self._gpu)
        return class_cost(runner, gpu=self._gpu, tp_degree=sharding.tp_degree, sharding=sharding.name)

    def _check_fit(self, item: ProfiledClass, rows: int) -> None:
        """Refuse a layer whose parameters alone don't fit: a CPU's memory is promised first, and missed later."""
        held, with_gradients = self._param_bytes(item)
        if with_gradients > free_bytes(self._device):
            give_back()
        if with_gradients > free_bytes(self._device):
            raise does_not_fit(item.segment.name, rows, self._device, held)

    def _param_bytes(self, item: ProfiledClass) -> tuple[int, int]:
        """Return the bytes of the parameters that a layer reads, alone and with what a backward needs beside them: the
        sum of their gradients, and the largest gradient that is about to be added to it."""
        model = self._captured.model
        read: dict[int, torch.Tensor] = {}
        for node in self._program.nodes[item.segment.start : item.stop]:
            tensors = [find_tensor(model, name) for name in node.params()]
            if node.kind == "module":
                tensors += model.get_submodule(node.target).parameters()
            read |= {id(tensor): tensor for tensor in tensors}
        sizes = [tensor.numel() * self._source.dtype_of(tensor).itemsize for tensor in read.values()]
        gradients = [size for size, t in zip(sizes, read.values(), strict=True) if t.requires_grad]
        return sum(sizes), sum(sizes) + sum(gradients) + max(gradients, default=0)

    def _made_anew(self, node: Any) -> bool:
        writes = list(node.writes())
        return bool(writes) and all(name in self._derived for name in writes)


def _division(sharding: Sharding) -> Any:
    """Return what a sharding divides and moves, names aside."""
    styles = sorted(sharding.styles.values())
    parameters = sorted((item.dim, item.parts) for item in sharding.parameters.values())
    moves = [(move.kind, move.dim) for move in sharding.moves]
    return sharding.name, sharding.tp_degree, repr((styles, parameters, moves, sharding.collectives))

"""A plan: which layers run where, divided how, in what order; `prediction` holds what that is predicted to cost."""

import ast
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from planner.errors import FileFormatError
from planner.prediction import Prediction
from planner.program import Identifier
from planner.records import NonNegativeFloat, NonNegativeInt, PositiveInt, Record, read_text, validate
from planner.units import counted

PLAN_VERSION = 1

Schedule = Literal["1f1b", "gpipe", "interleaved-1f1b", "zero-bubble", "zbv"]
DataParallel = Literal["replicated", "sharded"]
Optimizer = Literal["adamw", "adam", "sgd", "sgd-momentum"]
Precision = Literal["fp32", "bf16-mixed", "bf16"]
Status = Literal["optimal", "feasible", "infeasible"]

SCHEDULES: tuple[Schedule, ...] = ("1f1b", "gpipe", "interleaved-1f1b", "zero-bubble", "zbv")
"""From regular to irregular."""
EMITTED_SCHEDULES: tuple[Schedule, ...] = ("1f1b", "gpipe")
"""What an emitted plan can run; the others are priced, and solved for with `--theoretical`."""
SPLIT_SCHEDULES: tuple[Schedule, ...] = ("zero-bubble", "zbv")
"""Backwards are split in two: the gradient of inputs, which other stages wait for, and that of weights."""
FEWEST_CHUNKS: dict[Schedule, int] = {"1f1b": 1, "gpipe": 1, "interleaved-1f1b": 2, "zero-bubble": 1, "zbv": 2}
MOST_CHUNKS: dict[Schedule, int] = {"1f1b": 1, "gpipe": 1, "zbv": 2}
"""Stages on one device group; as many as one likes where a schedule is left out."""
DATA_PARALLEL_MODES: tuple[DataParallel, ...] = ("replicated", "sharded")


def _is_none(value: object) -> bool:
    return value is None


def _is_empty(value: tuple[str, ...]) -> bool:
    return not value


def _is_one(value: object) -> bool:
    return value == 1


class Stage(Record):
    """The layers [first_layer, last_layer] on one device group; `recompute` names layers whose activations are remade.

    `shardings` maps layer classes to the name of the sharding used at `tp_degree`; classes left out are replicated.
    `gpus` are the ranks of the stage, tensor-parallel index fastest: `gpus[d * tp_degree + t]`.
    `shard_degree` replicas, neighbours in `gpus`, share one copy of parameters, gradients and optimizer states; None is
    what the plan's `data_parallel` says: all replicas, or each its own. `context_degree` ranks share the sequence of
    every row (they are counted beside tensor and data parallelism), and the experts of a layer are divided over
    `expert_degree` of the stage's ranks: both have their place here, and no price yet where they are more than 1.
    """

    layers: tuple[str, ...]
    tp_degree: PositiveInt = 1
    dp_degree: PositiveInt = 1
    microbatch_size: PositiveInt
    recompute: tuple[str, ...] = ()
    shardings: dict[Identifier, Identifier] = {}
    gpus: tuple[NonNegativeInt, ...]
    shard_degree: PositiveInt | None = Field(default=None, exclude_if=_is_none)
    expert_degree: PositiveInt = Field(default=1, exclude_if=_is_one)
    context_degree: PositiveInt = Field(default=1, exclude_if=_is_one)

    def model_post_init(self, context: Any) -> None:
        """Check the degrees against the GPUs."""
        if not self.layers:
            raise ValueError("a stage needs at least one layer")
        ranks = self.tp_degree * self.dp_degree * self.context_degree
        if len(self.gpus) != ranks:
            context = f" x context_degree {self.context_degree}" if self.context_degree > 1 else ""
            raise ValueError(
                f"stage from {self.layers[0]!r}: tp_degree {self.tp_degree} x dp_degree {self.dp_degree}{context} = "
                f"{ranks} GPUs, but {len(self.gpus)} are listed"
            )
        if self.dp_degree % (self.shard_degree or 1):
            raise ValueError(
                f"stage from {self.layers[0]!r}: shard_degree {self.shard_degree} does not divide dp_degree "
                f"{self.dp_degree}"
            )
        if ranks % self.expert_degree:
            raise ValueError(
                f"stage from {self.layers[0]!r}: expert_degree {self.expert_degree} does not divide its {ranks} GPUs"
            )
        if unknown := set(self.recompute) - set(self.layers):
            raise ValueError(f"recompute names {sorted(unknown)[0]!r}, which is not a layer of the stage")

    def num_shards(self, data_parallel: DataParallel) -> int:
        """Return over how many replicas parameters, gradients and optimizer states are sharded."""
        if self.shard_degree is not None:
            return self.shard_degree
        return self.dp_degree if data_parallel == "sharded" else 1


class Origin(Record):
    """Paths and hashes of what a plan was made from; `scaled_gpus` are types whose times no profile has."""

    model_path: str
    model_hash: str
    build_function: str = "build_model"
    inputs_function: str = "example_inputs"
    tp_rules: tuple[str, ...] = ()
    profile_path: str
    profile_hash: str
    cluster: str
    cluster_hash: str
    cluster_path: str = ""
    torch_version: str
    planner_version: str
    scaled_gpus: tuple[str, ...] = Field(default=(), exclude_if=_is_empty)


class Asked(Record):
    """What the solver was asked for beside the step: GPUs given, and constraints as (key, value) texts."""

    num_gpus: PositiveInt
    pins: tuple[tuple[str, str], ...] = ()
    exclusions: tuple[tuple[str, str], ...] = ()
    limits: tuple[tuple[str, str], ...] = ()
    theoretical: bool = False

    @property
    def constraints(self) -> tuple[str, ...]:
        """The constraints as they are written on the command line."""
        options = (("--pin", self.pins), ("--exclude", self.exclusions), ("--limit", self.limits))
        return tuple(f"{option} {key}={value}" for option, pairs in options for key, value in pairs)


class SolverReport(Record):
    """How good the plan is, proven: `gap_fraction = (step time - lower bound) / lower bound`.

    The proof is about the plans that what was `asked` leaves.
    """

    status: Status
    lower_bound_s: NonNegativeFloat
    gap_fraction: NonNegativeFloat
    num_priced: NonNegativeInt = 0
    asked: Asked | None = None


class RunnerUp(Record):
    """The best plan of other decisions, by how much it may be from that, and why it lost to the plan itself."""

    summary: str
    pp_degree: PositiveInt
    num_chunks: PositiveInt = Field(default=1, exclude_if=_is_one)
    tp_degree: PositiveInt
    dp_degree: PositiveInt
    microbatch_size: PositiveInt
    num_microbatches: PositiveInt
    schedule: Schedule
    data_parallel: DataParallel
    step_time_s: NonNegativeFloat
    gap_fraction: NonNegativeFloat = 0.0
    peak_bytes: NonNegativeInt
    reason: str


def group_of_stage(schedule: Schedule, num_groups: int, stage: int) -> int:
    """Return the device group of a stage: the groups in turn, but there and back again (a V) for zbv."""
    turn, place = divmod(stage, num_groups)
    return num_groups - 1 - place if schedule == "zbv" and turn % 2 else place


def _grouping_problem(schedule: Schedule, stages: Sequence[Stage]) -> str | None:
    """Return what keeps stages from being placed as the schedule needs it, or None."""
    groups = list(dict.fromkeys(stage.gpus for stage in stages))
    owner: dict[int, int] = {}
    for index, gpus in enumerate(groups):
        if len(set(gpus)) != len(gpus):
            return f"GPU {next(gpu for gpu in gpus if gpus.count(gpu) > 1)} is in a stage twice"
        for gpu in gpus:
            if owner.setdefault(gpu, index) != index:
                return f"GPU {gpu} is in two stages"
    count, chunks = len(stages), len(stages) // len(groups)
    fewest, most = FEWEST_CHUNKS[schedule], MOST_CHUNKS.get(schedule, len(stages))
    if not fewest <= chunks <= most or chunks * len(groups) != count:
        if most == 1:
            twice = next(gpu for index, stage in enumerate(stages) for gpu in stage.gpus if index >= len(groups))
            return f"GPU {twice} is in two stages, and schedule {schedule!r} runs one stage on each GPU"
        needs = f"{fewest}" if fewest == most else f"{fewest} or more"
        return (
            f"schedule {schedule!r} needs {needs} stages on every device group, equally many on each; "
            f"{count} stages are on {counted(len(groups), 'group')}"
        )
    for index, stage in enumerate(stages):
        group = group_of_stage(schedule, len(groups), index)
        first = stages[group]
        if stage.gpus != groups[group]:
            shape = "there and back again" if schedule == "zbv" else "the groups in turn"
            return (
                f"stage {index} is on GPU {stage.gpus[0]} ..., and schedule {schedule!r} places stages on {shape}: "
                f"this one belongs to GPU {groups[group][0]} ..., beside stage {group}"
            )
        for key in ("tp_degree", "dp_degree", "shard_degree", "expert_degree", "context_degree"):
            if getattr(stage, key) != getattr(first, key):
                return (
                    f"stages {group} and {index} share GPUs, but not {key}: {getattr(first, key)} and "
                    f"{getattr(stage, key)}"
                )
    return None


def coverage_problem(found: Sequence[str], layers: Sequence[str]) -> str | None:
    """Return what keeps the stages' layers `found` from being the model's `layers`, each once and in order; or None."""
    count = counted(len(layers), "layer")
    if missing := [name for name in layers if name not in set(found)]:
        return f"its stages leave out {_some(missing)} ({len(missing)} of {count})"
    if unknown := [name for name in found if name not in set(layers)]:
        return f"its stages have {_some(unknown)}, which {'are' if len(unknown) > 1 else 'is'} none of its {count}"
    if len(found) != len(layers):
        twice = next(name for name in found if found.count(name) > 1)
        return f"its stages have layer {twice!r} twice"
    wrong = next((pair for pair in zip(found, layers, strict=True) if pair[0] != pair[1]), None)
    return f"its stages have {wrong[0]!r} where {wrong[1]!r} comes next in the model" if wrong else None


def _some(names: Sequence[str], most: int = 8) -> str:
    """Return names, the first ones of many."""
    shown = ", ".join(repr(name) for name in names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


class Plan(Record):
    """A whole plan; valid once built.

    `stages` are in the order of the model. A schedule with several chunks has as many stages on every device group:
    stages of the same `gpus`, the group's chunks. See `group_of_stage` for which.

    `layers` are all layers of the model in their order, taken from the stages where it is left out: a plan edited by
    hand that lost one of them is refused, by name.
    """

    plan_version: int = PLAN_VERSION
    global_batch_size: PositiveInt
    num_microbatches: PositiveInt
    schedule: Schedule
    data_parallel: DataParallel
    optimizer: Optimizer
    precision: Precision
    stages: tuple[Stage, ...]
    layers: tuple[str, ...] = ()
    origin: Origin
    prediction: Prediction | None = None
    solver: SolverReport | None = None
    runners_up: tuple[RunnerUp, ...] = ()

    def model_post_init(self, context: Any) -> None:
        """Check the arithmetic of the batch and that every layer and GPU is used once."""
        if not self.stages:
            raise ValueError("a plan needs at least one stage")
        for index, stage in enumerate(self.stages):
            rows = self.num_microbatches * stage.microbatch_size * stage.dp_degree
            if rows != self.global_batch_size:
                raise ValueError(
                    f"stage {index}: num_microbatches {self.num_microbatches} x microbatch_size "
                    f"{stage.microbatch_size} x dp_degree {stage.dp_degree} = {rows}, not global_batch_size "
                    f"{self.global_batch_size}"
                )
        names = [name for stage in self.stages for name in stage.layers]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"layer {twice!r} is in two stages")
        if problem := _grouping_problem(self.schedule, self.stages):
            raise ValueError(problem)
        if not self.layers:
            object.__setattr__(self, "layers", tuple(names))
        if problem := coverage_problem(names, self.layers):
            raise ValueError(f"the plan does not have every layer once: {problem}")

    @property
    def pp_degree(self) -> int:
        """The number of device groups: of stages, where each group holds one."""
        return len({stage.gpus for stage in self.stages})

    @property
    def num_chunks(self) -> int:
        """Stages on each device group."""
        return len(self.stages) // self.pp_degree

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The indices of the stages of every device group, in the order in which the first stages are placed."""
        found: dict[tuple[int, ...], list[int]] = {}
        for index, stage in enumerate(self.stages):
            found.setdefault(stage.gpus, []).append(index)
        return tuple(map(tuple, found.values()))

    @property
    def num_gpus(self) -> int:
        """GPUs used."""
        return sum(len(self.stages[stages[0]].gpus) for stages in self.groups)

    @property
    def tp_degree(self) -> int:
        """The largest tensor-parallel degree of a stage."""
        return max(stage.tp_degree for stage in self.stages)

    @property
    def dp_degree(self) -> int:
        """The largest data-parallel degree of a stage."""
        return max(stage.dp_degree for stage in self.stages)

    @property
    def microbatch_size(self) -> int:
        """The smallest microbatch of a stage: rows of one replica at a time."""
        return min(stage.microbatch_size for stage in self.stages)


def greatest_common_rows(plan: Plan) -> int:
    """Return the rows of the largest block that no stage's microbatch splits: the one process's microbatch."""
    return math.gcd(*(stage.microbatch_size for stage in plan.stages))


def read_plan(path: Path) -> Plan:
    """Return the plan in a plan.py from its `PLAN = {...}` literal; the file is never run.

    FileFormatError says what is wrong with it, UsageError that there is no such file.
    """
    return validate(Plan, read_plan_data(path), source=str(path))


def read_plan_data(path: Path) -> Any:
    """Return the `PLAN = {...}` literal of a plan.py, of a version that is known; errors are those of `read_plan`."""
    try:
        body = ast.parse(read_text(path, what="plan")).body
    except (SyntaxError, ValueError) as error:
        raise FileFormatError(f"{path}: not Python: {error}", hint="solve again, or undo the last edit") from None
    for node in body:
        if not isinstance(node, ast.Assign) or ast.unparse(node.targets[0]) != "PLAN":
            continue
        try:
            data = ast.literal_eval(node.value)
        except (ValueError, TypeError, SyntaxError):
            raise FileFormatError(
                f"{path}: PLAN is not a literal", hint="PLAN is data: write values, no calls or names"
            ) from None
        break
    else:
        raise FileFormatError(f"{path}: no PLAN = {{...}}: not a plan", hint="write one with `planner solve`")
    version = data.get("plan_version", PLAN_VERSION) if isinstance(data, dict) else None
    if isinstance(version, int) and version > PLAN_VERSION:
        raise FileFormatError(
            f"{path}: plan_version {version} is newer than {PLAN_VERSION}, the newest this planner reads",
            hint="upgrade planner, or solve again with this version",
        )
    return data

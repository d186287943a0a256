"""What `verify` runs: the plan itself, or a smaller twin where this machine is too small for it."""

import ast
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from planner.errors import PlannerError, UsageError, VerifyError
from planner.model_file import split_spec
from planner.plan import Plan, read_plan
from planner.records import write_text
from planner.runner.pool import MAX_PROCESSES
from planner.shrink import Shrink
from planner.units import counted, format_bytes

# (plan, at most so many processes, how the model shrinks) -> source of plan.py and what that leaves open, or None
MakeTwin = Callable[[Plan, int, Shrink | None], tuple[str, tuple[str, ...]] | None]
CountElements = Callable[[Shrink | None], int]

# Smaller and smaller models, tried in turn: all layers, few of each kind, and those narrow.
_SHRINKS = (None, Shrink(max_blocks=4), Shrink(max_blocks=4, narrow=True))

# Bytes per element of the model, in float64: what every rank builds before it keeps its part (in float32 first);
# parameter, gradient and two optimizer states; what one process keeps beside those (initial values, two gradients).
_BUILD_BYTES = 4 + 8
_TRAIN_BYTES = 4 * 8
_KEPT_BYTES = 3 * 8
_LIBRARIES = ("torchvision", "transformers", "timm", "diffusers", "torchaudio", "einops")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The plan that is run, and what running it leaves open."""

    plan: Plan
    path: Path
    shrink: Shrink | None = None
    not_proved: tuple[str, ...] = ()


def choose_subject(
    plan: Plan,
    path: Path,
    count_elements: CountElements,
    free_bytes: int | None,
    make_twin: MakeTwin | None,
    scratch: Path,
) -> Subject:
    """Return the plan, or the largest twin that this machine can run; VerifyError with both numbers if there is none.

    `count_elements` gives those of the model, or of a smaller one; `free_bytes` None means unknown. A twin is written
    into the folder `scratch`.
    """
    needed = memory_bytes(plan, count_elements(None))
    fits = free_bytes is None or needed <= free_bytes
    if plan.num_gpus <= MAX_PROCESSES and fits:
        return Subject(plan=plan, path=path)
    too_large = (
        f"the plan needs {counted(plan.num_gpus, 'process', 'processes')}, and at most {MAX_PROCESSES} are run here"
        if fits
        else f"the plan needs {counted(plan.num_gpus, 'process', 'processes')} and at least {format_bytes(needed)} in "
        f"float64, and {format_bytes(free_bytes or 0)} are free"
    )
    failure: PlannerError | None = None
    for shrink in _SHRINKS if make_twin is not None else ():
        try:
            num_elements = count_elements(shrink)
            # A narrow model is built small; one with fewer layers is built whole first, on every rank.
            num_built = num_elements if shrink is None or shrink.narrow else count_elements(None)
            num_processes = min(plan.num_gpus, MAX_PROCESSES)
            while make_twin is not None and num_processes >= 1:
                enough = free_bytes is None or _least_bytes(num_elements, num_built, num_processes) <= free_bytes
                made = make_twin(plan, num_processes, shrink) if enough else None
                if made is not None:
                    twin = _write_twin(made[0], scratch, num_processes)
                    if free_bytes is None or memory_bytes(twin, num_elements) <= free_bytes:
                        left = (f"{too_large}: a twin was run", *made[1])
                        return Subject(plan=twin, path=scratch / "plan.py", shrink=shrink, not_proved=left)
                num_processes //= 2
        except PlannerError as error:  # this twin can't be made; the next, smaller one may
            failure = error
    detail = f" ({failure.message})" if failure is not None else ""
    raise VerifyError(
        f"{too_large}; no smaller plan of the same kind fits{detail}",
        hint="verify a plan for a smaller version of the model, solved with the same pins",
    )


def _write_twin(source: str, scratch: Path, num_processes: int) -> Plan:
    path = scratch / "plan.py"
    write_text(path, source)
    twin = read_plan(path)
    if twin.num_gpus > num_processes:
        raise VerifyError(
            f"the twin needs {twin.num_gpus} processes, not the {num_processes} asked",
            hint="report this: the twin was made wrong",
        )
    return twin


def _least_bytes(num_elements: int, num_built: int, num_processes: int) -> int:
    """Return a lower bound of the bytes that any plan on so many processes takes, `num_built` elements built first."""
    return num_elements * (_TRAIN_BYTES + _KEPT_BYTES) + num_built * _BUILD_BYTES * num_processes


def memory_bytes(plan: Plan, num_elements: int) -> int:
    """Return the least bytes that running a plan takes, activations left out: one process alone, then all the ranks."""
    one_process = num_elements * (_TRAIN_BYTES + _KEPT_BYTES)
    ranks = num_elements * (_BUILD_BYTES * plan.num_gpus + _TRAIN_BYTES * plan.dp_degree + _KEPT_BYTES)
    return max(one_process, ranks)


def available_bytes() -> int | None:
    """Return the memory that new processes may take, or None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024
    except (OSError, StopIteration, ValueError):
        return None
    try:  # a container may allow less than the machine has
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        return free if limit == "max" else min(free, int(limit) - used)
    except (OSError, ValueError):
        return free


def find_model(plan: Plan, plan_path: Path, model: str | None) -> str:
    """Return the model to load, as `load_model_file` takes it: the one given, else the plan's own.

    The plan's path is tried from the current folder, then from the plan's folder and every folder above it.
    UsageError if it is gone.
    """
    function = plan.origin.build_function
    if model is not None:
        path, name = split_spec(model)
        if name == "build_model":  # not named: the plan knows
            name = function
    else:
        recorded, home = Path(plan.origin.model_path), plan_path.resolve().parent
        folders = [Path(), home, *home.parents]  # an absolute path is the same from every folder
        found = next((folder / recorded for folder in folders if (folder / recorded).exists()), None)
        if found is None:
            where = f"looked in {Path.cwd()}, in {home}, and in every folder above that"
            raise UsageError(
                f"the model file {plan.origin.model_path!r} of {plan_path.name} is gone"
                + ("" if recorded.is_absolute() else f"; {where}"),
                hint="say where it is now with --model FILE",
            )
        path, name = found.resolve(), function
    return str(path) if path.is_dir() or path.suffix == ".json" else f"{path}:{name}"


def packages_to_preload(spec: str) -> tuple[str, ...]:
    """Return installed libraries of models, and their classes, that a model file imports at its top ('package:Class').

    Only libraries known to be safe to import before a fork: they start no threads.
    """
    path, _ = split_spec(spec)
    if path.is_dir() or path.suffix == ".json":
        try:
            data = json.loads((path / "config.json" if path.is_dir() else path).read_bytes())
            names = [name for name in data.get("architectures") or () if isinstance(name, str)]
        except (OSError, ValueError, AttributeError):  # the loader tells what is wrong
            names = []
        return ("transformers", *(f"transformers:{name}" for name in names))
    try:
        source = path.read_bytes()
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError):
        return ()
    found: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in _LIBRARIES]
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in _LIBRARIES:
            found += [node.module, *(f"{node.module}:{alias.name}" for alias in node.names)]
    if b"Library(" in source:
        return ()  # it declares operators, perhaps those of torchvision, before it imports what needs them
    return tuple(found)


def plan_summary(plan: Plan) -> str:
    """Return a plan in a line for people."""
    degrees = f"pp {plan.pp_degree} x tp {plan.tp_degree} x dp {plan.dp_degree}"
    mode = f" ({plan.data_parallel})" if plan.dp_degree > 1 else ""
    batch = f"{counted(plan.num_microbatches, 'microbatch', 'microbatches')} of {counted(plan.microbatch_size, 'row')}"
    recomputed = sum(len(stage.recompute) for stage in plan.stages)
    extra = f", {counted(recomputed, 'layer')} recomputed" if recomputed else ""
    return f"{degrees}{mode}, {plan.schedule}, {batch}{extra}"

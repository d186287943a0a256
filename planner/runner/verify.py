"""That an emitted plan computes what one process computes: loss and every gradient, on CPU processes under gloo."""

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from planner.errors import VerifyError
from planner.plan import Plan, greatest_common_rows, read_plan
from planner.records import NonNegativeFloat, NonNegativeInt, PositiveInt, Record
from planner.runnable import unrunnable
from planner.runner.exact_job import BUILD_SEEDS, EQUAL_VERDICTS, TOLERANCE, ExactJob, Outcome, Reference
from planner.runner.pool import WorkerPool
from planner.runner.subject import (
    MakeTwin,
    available_bytes,
    choose_subject,
    find_model,
    packages_to_preload,
    plan_summary,
)
from planner.shrink import Shrink
from planner.units import counted

Progress = Callable[[str, int, int], None]

_NUM_PHASES = 5


class ParameterRow(Record):
    """One parameter, at the step where it differs most: norm(g - g_one) / norm(g_one), and what that means.

    `verdict` is 'equal', 'no gradient' (none in one process, none in the plan), 'unused' (no gradient in one process,
    and not in the plan: as good as equal), 'differs', 'missing', 'unexpected' or 'zero, not none' (a gradient where one
    process has none), 'starts otherwise' (the value after setup), 'not set up', 'not finite', or the wrong shape.
    `step` is 0 for the value after setup.
    """

    name: str
    shape: tuple[NonNegativeInt, ...]
    gradient_difference: NonNegativeFloat
    gradient_norm: NonNegativeFloat
    step: NonNegativeInt
    verdict: str

    @property
    def is_equal(self) -> bool:
        """Whether the plan does with this parameter what one process does."""
        return self.verdict in EQUAL_VERDICTS


class VerifyReport(Record):
    """What `verify` found; `rows` are sorted worst first.

    `loss_difference` is the larger of two steps, relative where the loss is above 1. `clip_difference` is that of the
    norm that clips gradients, `buffer_difference` the largest of a buffer after the steps, both relative.

    `whole_batch_difference` is the largest difference, of the loss or relative of a gradient, from one process that
    takes the whole batch at once; None where that did not fit here. `coupled` says what explains one.
    """

    ok: bool
    loss_difference: NonNegativeFloat
    max_gradient_difference: NonNegativeFloat
    worst_parameter: str
    whole_batch_difference: NonNegativeFloat | None = None
    clip_difference: NonNegativeFloat = 0.0
    buffer_difference: NonNegativeFloat = 0.0
    coupled: tuple[str, ...] = ()
    not_proved: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    rows: tuple[ParameterRow, ...]
    num_processes: PositiveInt
    plan_summary: str
    tolerance: NonNegativeFloat


def verify(
    plan_path: Path,
    *,
    model: str | None = None,
    timeout_s: float = 600.0,
    progress: Progress | None = None,
    make_twin: MakeTwin | None = None,
    pool: WorkerPool | None = None,
) -> VerifyReport:
    """Return how far the plan in a file is from one process, per parameter.

    `model` is the model file where the path in the plan is gone. `make_twin(plan, num_processes, shrink)` gives the
    source of a smaller plan and what that does not prove, for plans that need more than this machine has. A given
    `pool` is used and left open: starting one costs seconds. VerifyError where the plan can't be run, or a rank fails
    or does not answer within `timeout_s` in all.
    """
    plan_path = plan_path.resolve()
    plan = read_plan(plan_path)
    _check_runs(plan, plan_path)
    spec = find_model(plan, plan_path, model)
    deadline_s = time.monotonic() + timeout_s

    def left() -> float:
        return max(1.0, deadline_s - time.monotonic())

    def tell(text: str, done: int) -> None:
        if progress is not None:
            progress(text, done, _NUM_PHASES)

    with tempfile.TemporaryDirectory(prefix="planner-verify-") as scratch, ExitStack() as stack:
        if pool is None:
            pool = stack.enter_context(WorkerPool())
        tell("the model", 0)
        running = pool

        def inspect(shrink: Shrink | None) -> tuple[str, int]:
            [found] = running.run(
                "planner.runner.exactness:inspect_model",
                spec,
                plan.origin.inputs_function,
                shrink,
                process_group=False,
                timeout_s=left(),
                preload=packages_to_preload(spec),
            )
            return str(found[0]), int(found[1])

        found_hash, num_elements = inspect(None)
        if found_hash != plan.origin.model_hash:
            raise VerifyError(
                f"the model of {spec} has hash {found_hash}, the plan was made for {plan.origin.model_hash}",
                hint="profile and solve again for this model, or give the plan's own model file with --model",
            )
        subject = choose_subject(
            plan,
            plan_path,
            lambda shrink: num_elements if shrink is None else inspect(shrink)[1],
            available_bytes(),
            make_twin,
            Path(scratch),
        )
        job = ExactJob(
            plan_path=subject.path,
            model_spec=spec,
            inputs_function=plan.origin.inputs_function,
            shrink=subject.shrink,
            global_batch_size=subject.plan.global_batch_size,
            microbatch_size=greatest_common_rows(subject.plan),
            same_microbatches=all(
                stage.dp_degree == 1 and stage.microbatch_size == subject.plan.microbatch_size
                for stage in subject.plan.stages
            ),
            reference_path=Path(scratch) / "reference.pt",
        )
        tell("one process", 1)
        one: Reference
        for seed in BUILD_SEEDS:
            job = replace(job, seed=seed)
            [one] = pool.run(
                "planner.runner.exactness:run_reference",
                job,
                process_group=False,
                timeout_s=left(),
                on_progress=lambda _, text: tell(text, 2),
            )
            if one.has_gradients:
                break
        else:
            raise VerifyError(
                "no parameter of one process has a gradient other than zero, with weights of "
                f"{len(BUILD_SEEDS)} seeds: there is nothing to compare",
                hint=_about_rows(job.microbatch_size)
                if one.coupled
                else "check that loss_fn depends on the model's output and that parameters require gradients",
            )
        num_processes = subject.plan.num_gpus
        tell(f"the plan on {counted(num_processes, 'process', 'processes')}", 3)
        results = pool.run(
            "planner.runner.exactness:run_plan",
            job,
            num_processes=num_processes,
            timeout_s=left(),
            on_progress=lambda _, text: tell(text, 4),
        )
    outcome: Outcome = results[0]
    loss_difference, whole = outcome.loss_difference, outcome.whole_batch_difference
    rows = tuple(
        ParameterRow(
            name=item.name,
            shape=item.shape,
            gradient_difference=item.difference,
            gradient_norm=item.norm,
            step=item.step,
            verdict=item.verdict,
        )
        for item in sorted(
            outcome.comparisons, key=lambda item: (item.verdict in EQUAL_VERDICTS, -item.difference, item.name)
        )
    )
    tell("done", _NUM_PHASES)
    notes = list(one.notes)
    if unused := [row.name for row in rows if row.verdict == "unused"]:
        example = repr(unused[0]) if len(unused) == 1 else f"{unused[0]!r} and others"
        notes.append(f"{counted(len(unused), 'parameter')} that nothing reads, not in the plan: {example}")
    if untrained := [row.name for row in rows if row.verdict == "no gradient"]:
        example = repr(untrained[0]) if len(untrained) == 1 else f"{untrained[0]!r} and others"
        notes.append(f"{counted(len(untrained), 'parameter')} without gradient, as in one process: {example}")
    if subject.plan.precision != "fp32":
        notes.append(f"the plan's precision is {subject.plan.precision}; it was compared in float64")
    replicas = max(stage.dp_degree for stage in subject.plan.stages)
    if one.carried and replicas > 1 and not all(row.is_equal for row in rows):
        example = repr(one.carried[0]) + (" and others" if one.carried[1:] else "")
        notes.append(
            f"forward reads buffers that it updates ({example}), and "
            f"with dp_degree {replicas} every replica updates its own from its own rows alone: no such plan computes "
            "what one process computes. Solve again with --pin dp_degree=1"
        )
    if job.seed != BUILD_SEEDS[0]:
        tried = counted(BUILD_SEEDS.index(job.seed), "seed")
        notes.append(f"with weights of {tried} every gradient of one process was zero: another was taken")
    buffer = max(outcome.buffers, key=lambda name: outcome.buffers[name], default="")
    buffer_difference = outcome.buffers.get(buffer, 0.0)
    if outcome.clip_difference > TOLERANCE:
        notes.append(
            f"clip_grad_norm_ is off: the norm of all gradients, or what it leaves of it, differs by "
            f"{outcome.clip_difference:.1e} from one process's"
        )
    if buffer_difference > TOLERANCE:
        notes.append(f"after the steps buffer {buffer!r} differs by {buffer_difference:.1e} from one process's")
    adds_up = whole is None or whole <= TOLERANCE
    if not adds_up and one.coupled:
        notes.append(
            f"microbatches change this loss: one process on the whole batch differs by {whole:.1e}, because of "
            + "; ".join(one.coupled)
        )
    return VerifyReport(
        ok=max(loss_difference, outcome.clip_difference, buffer_difference) <= TOLERANCE
        and all(row.is_equal for row in rows)
        and (adds_up or bool(one.coupled)),
        loss_difference=loss_difference,
        max_gradient_difference=max(row.gradient_difference for row in rows),
        worst_parameter=rows[0].name,
        whole_batch_difference=whole,
        clip_difference=outcome.clip_difference,
        buffer_difference=buffer_difference,
        coupled=one.coupled,
        not_proved=(*subject.not_proved, *one.not_proved),
        notes=tuple(notes),
        rows=rows,
        num_processes=num_processes,
        plan_summary=plan_summary(subject.plan),
        tolerance=TOLERANCE,
    )


def _about_rows(rows: int) -> str:
    """Return what to do where rows depend on one another, and those of a microbatch leave nothing to train."""
    return (
        f"rows depend on one another here, and a microbatch has {counted(rows, 'row')}: solve with more, as with "
        f"--pin microbatch_size={2 * rows}"
    )


def _check_runs(plan: Plan, path: Path) -> None:
    """Raise VerifyError unless the runtime runs such plans: on ranks 0 to n - 1, ascending in every stage."""
    if problem := unrunnable(plan):
        raise VerifyError(
            f"{path.name} can't be run yet: it {problem}", hint="undo the edit of the plan, or solve again"
        )
    ranks = sorted(rank for stage in plan.stages for rank in stage.gpus)
    ascend = all(stage.gpus == tuple(sorted(stage.gpus)) for stage in plan.stages)
    if not ascend or ranks != list(range(len(ranks))):
        listed = "; ".join(f"stage {index}: {list(stage.gpus)}" for index, stage in enumerate(plan.stages))
        raise VerifyError(
            f"{path.name}: the ranks of its stages are not 0 to {len(ranks) - 1}, ascending in each ({listed})",
            hint="undo the edit of `gpus` in the plan, or solve again",
        )

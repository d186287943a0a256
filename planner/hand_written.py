"""Plans that people write by hand: `PLAN = {...}` with what can be told from the rest left out."""

from pathlib import Path
from typing import Any

from planner.plan import Plan, read_plan_data
from planner.records import validate

TAKEN = ("global_batch_size", "optimizer", "precision", "schedule", "data_parallel", "num_microbatches")
NO_ORIGIN = dict.fromkeys(
    (
        "model_path",
        "model_hash",
        "profile_path",
        "profile_hash",
        "cluster",
        "cluster_hash",
        "torch_version",
        "planner_version",
    ),
    "",
)


def read_written_plan(path: Path, like: Plan | None = None) -> Plan:
    """Return the plan in a file as `read_plan` does, but one of few words too.

    The step, schedule and origin that it leaves out are those of the plan it is put beside, `like`; microbatch sizes
    follow from the batch, and GPUs are numbered stage after stage. Its prediction is not kept: it is to be priced.
    """
    data = read_plan_data(path)
    return validate(Plan, _completed(data, like) if isinstance(data, dict) else data, source=str(path))


def _completed(data: dict[str, Any], like: Plan | None) -> dict[str, Any]:
    known = {} if like is None else {name: getattr(like, name) for name in TAKEN}
    origin = NO_ORIGIN if like is None else like.origin.model_dump()
    found = known | {"origin": origin} | {name: value for name, value in data.items() if name != "prediction"}
    stages = found.get("stages")
    if isinstance(stages, list | tuple) and all(isinstance(stage, dict) for stage in stages):
        first, completed = 0, []
        for stage in stages:
            degrees = [stage.get(name, 1) for name in ("tp_degree", "dp_degree")]
            numbers = [*degrees, found.get("global_batch_size"), found.get("num_microbatches")]
            if all(isinstance(number, int) and number > 0 for number in numbers):
                tp, dp, batch, count = numbers
                rows = max(1, batch // (dp * count))
                given = {"gpus": tuple(range(first, first + tp * dp)), "microbatch_size": rows} | stage
                first += tp * dp
                completed.append(given)
            else:  # the record says what is wrong with it
                completed.append(stage)
        found["stages"] = tuple(completed)
    return found

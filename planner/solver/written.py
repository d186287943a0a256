"""Degrees that people write by hand, completed to a plan: 'pp=4,tp=2,dp=2,m=8'.

What is left out is regular: stages of equally many layers, 1f1b, nothing recomputed, dp_degree from the GPUs. What is
neither regular nor written (sharding, microbatches, data parallelism) is solved for, within memory where that can be.
"""

from dataclasses import dataclass, replace

from planner.cluster import Cluster
from planner.errors import UsageError
from planner.model_profile import ModelProfile
from planner.plan import EMITTED_SCHEDULES, Origin, Plan
from planner.solver.chunked import chunked, least_chunks
from planner.solver.find import find, make_space
from planner.solver.infeasible import find_conflict
from planner.solver.request import WORDS, SolveRequest

OPTION = "--degrees"
EXAMPLE = f"write it like {OPTION} pp=4,tp=2,dp=2,m=8,schedule=1f1b"
SHORT = {
    "pp": "pp_degree",
    "tp": "tp_degree",
    "dp": "dp_degree",
    "m": "num_microbatches",
    "rows": "microbatch_size",
    "chunks": "num_chunks",
    "data": "data_parallel",
}
LISTS = ("cuts", "recompute")
MAX_NODES = 2000
ROOMY_BYTES = 2**60
FIT, BEST = "fit", "best"  # recompute as needed within memory; cuts as the solver chooses them


@dataclass(frozen=True, slots=True)
class Written:
    """Degrees as written: pins by key."""

    text: str
    pins: dict[str, str]

    def count(self, key: str, default: int) -> int:
        """Return a count that is written, or the default; UsageError where it is none."""
        text = self.pins.get(key, str(default))
        if not text.isdecimal() or not int(text[:18]) > 0 or len(text) > 18:
            raise UsageError(f"{OPTION} {self.text!r}: {key} is {text[:18]!r}, no count of at least 1", hint=EXAMPLE)
        return int(text)


def read_degrees(text: str) -> Written:
    """Return degrees by key; a list of layers goes on to the next KEY=. UsageError names what is not known."""
    pins: dict[str, str] = {}
    key = ""
    for part in (part.strip() for part in text.split(",")):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if equals:
            key = SHORT.get(name, name)
            if key not in (*SHORT.values(), *WORDS, *LISTS):
                raise UsageError(
                    f"{OPTION} {text!r}: unknown key {name!r}",
                    hint=f"known: {', '.join(SHORT)}, schedule, cuts, recompute",
                )
            if key in pins or not value:
                problem = "is given twice" if value else "has no value"
                raise UsageError(f"{OPTION} {text!r}: {name!r} {problem}", hint=EXAMPLE)
            pins[key] = value
        elif key in LISTS and part:
            pins[key] += f",{part}"
        else:
            raise UsageError(f"{OPTION} {text!r}: {part!r} is not KEY=VALUE", hint=EXAMPLE)
    return Written(text, pins)


def written_gpus(written: Written, available: int) -> int:
    """Return how many GPUs the degrees use; without dp_degree, all that pp_degree x tp_degree divides."""
    pp = written.count("pp_degree", _num_cuts(written) + 1)
    tp = written.count("tp_degree", 1)
    if "dp_degree" not in written.pins and available % (pp * tp):
        raise UsageError(
            f"{OPTION} {written.text!r}: pp {pp} x tp {tp} = {pp * tp} does not divide {available} GPUs",
            hint="write dp= too, or other degrees",
        )
    return pp * tp * written.count("dp_degree", available // (pp * tp))


def _num_cuts(written: Written) -> int:
    cuts = written.pins.get("cuts", BEST)
    return 0 if cuts == BEST else len(cuts.split(","))


def complete(
    written: Written, profile: ModelProfile, cluster: Cluster, step: SolveRequest, *, origin: Origin
) -> Plan:  # fmt: skip
    """Return the plan of hand-written degrees for the batch, optimizer and precision of `step`, to be priced.

    It may not fit into memory. UsageError where there is no such plan.
    """
    schedule = written.pins.get("schedule", WORDS["schedule"][0])
    num_chunks = written.count("num_chunks", least_chunks(schedule))
    if schedule not in WORDS["schedule"] or num_chunks > 1:
        return _chunked(written, schedule, num_chunks, profile, cluster, step, origin)
    num_gpus = written_gpus(written, step.num_gpus)
    pins = {key: value for key, value in written.pins.items() if key != "num_chunks"}
    pp = num_stages = written.count("pp_degree", _num_cuts(written) + 1)
    names = [layer.name for layer in profile.layers]
    pins.setdefault("dp_degree", str(num_gpus // pp // written.count("tp_degree", 1)))
    for key, value in (("pp_degree", str(pp)), ("tp_degree", "1"), ("schedule", "1f1b"), ("recompute", "none")):
        pins.setdefault(key, value)
    if "cuts" not in pins and 1 < num_stages <= len(names):
        size, longer = divmod(len(names), num_stages)
        firsts = [stage * size + min(stage, longer) for stage in range(1, num_stages)]
        pins["cuts"] = ",".join(names[first] for first in firsts)
    chosen = {key for key, value in (("cuts", BEST), ("recompute", FIT)) if pins.get(key) == value}
    request = replace(
        step,
        num_gpus=num_gpus,
        pins=tuple((key, value) for key, value in pins.items() if key not in chosen),
        exclusions=(),
        limits=(),
        top=0,
        theoretical=written.count("tp_degree", 1) > cluster.gpus_per_node or pins["schedule"] not in EMITTED_SCHEDULES,
    )
    roomy = _roomy(cluster)
    attempts = [(cluster, request), (roomy, request)]
    if "recompute" in chosen:
        attempts[1] = (roomy, replace(request, pins=(*request.pins, ("recompute", "all"))))
    try:
        for place, asked in attempts:
            found = find(make_space(profile, place, asked), origin, max_nodes=MAX_NODES)
            if found.plan is not None:
                return found.plan
        conflict = find_conflict(make_space(profile, roomy, attempts[1][1]), origin)
    except UsageError as error:
        message = error.message.replace("--pin", f"{OPTION} {written.text!r}:")
        raise UsageError(message, hint=error.hint) from None
    raise UsageError(f"{OPTION} {written.text!r}: no such plan: {conflict}", hint=EXAMPLE)


def _chunked(
    written: Written,
    schedule: str,
    num_chunks: int,
    profile: ModelProfile,
    cluster: Cluster,
    step: SolveRequest,
    origin: Origin,
) -> Plan:
    """Return the plan of degrees under a schedule that is not solved for: what is not written is as under 1f1b."""
    option = f"{OPTION} {written.text!r}"
    cuts, recompute = written.pins.get("cuts"), written.pins.get("recompute", "none")
    if cuts == BEST or recompute == FIT:
        raise UsageError(
            f"{option}: cuts={BEST} and recompute={FIT} are for schedule {' and '.join(WORDS['schedule'])}",
            hint="write cuts and recomputed layers, or leave them out",
        )
    if "pp_degree" not in written.pins:
        raise UsageError(f"{option}: stages in {num_chunks} chunks need pp", hint="write pp=, the device groups")
    alike = {key: value for key, value in written.pins.items() if key not in ("schedule", "num_chunks", *LISTS)}
    plan = complete(Written(written.text, alike), profile, cluster, step, origin=origin)
    return chunked(plan, profile, schedule, num_chunks, cuts, recompute, option)


def _roomy(cluster: Cluster) -> Cluster:
    """Return the cluster with more memory than any plan needs."""
    gpus = {name: gpu.model_copy(update={"memory": ROOMY_BYTES}) for name, gpu in cluster.gpus.items()}
    return cluster.model_copy(update={"gpus": gpus})

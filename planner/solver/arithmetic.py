"""Why degrees and batch leave no setting at all: the first constraint of `space` that they break, with both numbers."""

from dataclasses import replace

from planner.solver.request import described
from planner.solver.solution import Conflict
from planner.solver.space import Space, divisors
from planner.units import counted

SHOWN_COUNTS = 8


def arithmetic_conflict(space: Space) -> Conflict:
    """Return the constraint that leaves `space` without settings."""
    return _pinned_conflict(space) or _combined_conflict(space)


def _listed(numbers: "list[int] | set[int]") -> str:
    return ", ".join(map(str, sorted(numbers)))


def _under(space: Space, *keys: str) -> str:
    """Return the constraints on some decisions, or on all, as a part of a sentence; nothing where there are none."""
    found = [described(one) for one in space.request.constraints if not keys or one[1] in keys]
    return f", under {', '.join(found)}" if found else ""


def _gpus(space: Space) -> str:
    """Return which numbers of GPUs a plan may use."""
    counts = space.gpu_counts
    shown = _listed(counts) if len(counts) <= SHOWN_COUNTS else f"{min(counts)} to {max(counts)}"
    return f"{shown} GPUs"


def _filling(space: Space, key: str, pp: int | None) -> str:
    """Return which numbers of microbatches fill the pinned stages under 1f1b, as a part of a sentence."""
    stages = len(space.pins.cuts) + 1 if space.pins.cuts is not None else pp
    batch = space.request.global_batch_size
    if key != "num_microbatches" or stages is None or stages == 1 or not space.admits("schedule", "1f1b"):
        return ""
    filling = [count for count in divisors(batch) if count >= stages]
    which = f"{_listed(filling)} fill" if filling else "none of them fills"
    return f", of which {which} {stages} stages under 1f1b"


def _pinned_conflict(space: Space) -> Conflict | None:
    """Return the conflict of pins with the problem; None where none is at fault alone."""
    pins, request, profile = space.pins, space.request, space.pricer.profile
    num_layers, per_node, batch = len(profile.layers), space.pricer.cluster.gpus_per_node, request.global_batch_size
    pinned = {key: next(iter(values)) for key, values in pins.values.items()}
    tp, pp = pinned.get("tp_degree"), pinned.get("pp_degree")
    if not space.gpu_counts:
        return Conflict(
            constraint="gpus",
            message=f"no number of GPUs from 1 to {request.num_gpus} is left{_under(space, 'num_gpus')}",
        )
    allowed = [degree for degree in space.tp_degrees if space.forbidden(degree) is None]
    if tp is not None and (found := space.forbidden(tp)):
        return Conflict(
            constraint="heads",
            message=(
                f"tp_degree {tp} does not divide layer class {found[0]!r}: {found[1]}; "
                f"the profile's degrees that do are {_listed(allowed)}"
            ),
        )
    if tp is not None and tp not in space.tp_degrees:
        return Conflict(
            constraint="sharding",
            message=(
                f"no layer of {profile.name!r} can be divided over tp_degree {tp}; "
                f"the profile has costs for {_listed(allowed)}"
            ),
        )
    if tp is not None and tp > per_node and not request.theoretical:
        return Conflict(constraint="node", message=f"tp_degree {tp} is more than the {per_node} GPUs of a node")
    if (dp := pinned.get("dp_degree", 1)) > 1 and space.carried is not None:
        return Conflict(constraint="buffers", message=f"dp_degree {dp} is more than 1: {_going_on(space.carried)}")
    if pp is not None and pp > num_layers:
        return Conflict(constraint="layers", message=f"pp_degree {pp} is more than the {num_layers} layers")
    if pins.cuts is not None and pp is not None and pp != len(pins.cuts) + 1:
        count = len(pins.cuts)
        return Conflict(constraint="pins", message=f"{count} cuts make {count + 1} stages, not pp_degree {pp}")
    if pins.cuts is not None and len(pins.cuts) + 1 > request.num_gpus:
        count = len(pins.cuts)
        return Conflict(
            constraint="pins", message=f"{count} cuts make {count + 1} stages, more than the {request.num_gpus} GPUs"
        )
    if pins.stages:
        most = max((pp for pp, _, _ in replace(space, pins=replace(pins, stages=())).degrees()), default=0)
        layer, stage = max(pins.stages, key=lambda pin: pin[1])
        if 0 < most <= stage:
            name = profile.layers[layer].name
            return Conflict(
                constraint="pins",
                message=f"layer {name!r} is pinned to stage {stage}, of at most {counted(most, 'stage')} (from 0)",
            )
    product = (pp or 1) * (tp or 1) * pinned.get("dp_degree", 1)
    everything = all(key in pinned for key in ("pp_degree", "tp_degree", "dp_degree"))
    if all(count % product or (everything and product != count) for count in space.gpu_counts):
        factors = " x ".join(key for key in ("pp_degree", "tp_degree", "dp_degree") if key in pinned)
        return Conflict(
            constraint="gpus", message=f"{factors} is pinned to {product}, which does not make {_gpus(space)}"
        )
    for key in ("num_microbatches", "microbatch_size", "dp_degree"):
        if key in pinned and batch % pinned[key]:
            return Conflict(
                constraint="batch",
                message=(
                    f"global_batch_size {batch} is not divisible by {key} {pinned[key]}; "
                    f"valid are {_listed(divisors(batch))}" + _filling(space, key, pp)
                ),
            )
    return None


def _going_on(buffer: str) -> str:
    return (
        f"forward updates buffer {buffer!r}, and what is trained on reads it, so every replica would go on from "
        "one of its own (--theoretical plans it all the same)"
    )


def _divisions(space: Space, tp_degree: int) -> bool:
    route = space.pricer.tensor_route(range(tp_degree), tp_degree)
    return bool(space.combinations(tp_degree, 1, (route,))[0])


def _dp_degrees(space: Space) -> set[int]:
    """Return the dp_degrees that make a number of GPUs which is left, whatever the batch."""
    found = set()
    for count in space.gpu_counts[:SHOWN_COUNTS]:
        for dp in divisors(count):
            asked = replace(space.request, global_batch_size=dp)
            found |= {dp for _, _, of in replace(space, request=asked).degrees() if of == dp}
    return found


def _combined_conflict(space: Space) -> Conflict:
    """Return the conflict of everything together, where no single pin is at fault."""
    request, num_layers = space.request, len(space.pricer.profile.layers)
    batch, degrees = request.global_batch_size, list(space.degrees())
    theirs = [one for one in space.request.constraints if one[1] in ("num_chunks", "shard_degree")]
    if theirs and degrees:
        why = "no schedule and data_parallel mode goes with it"
        if not request.theoretical:
            why = "emitted plans run one stage a device group, and shard over all replicas or none, so far"
        hint = "" if request.theoretical else " (--theoretical plans others)"
        return Conflict(constraint="runtime", message=f"{', '.join(map(described, theirs))}: {why}{hint}")
    allowed = [degree for degree in space.tp_degrees if space.forbidden(degree) is None]
    if not degrees and space.carried is not None:
        return Conflict(
            constraint="buffers",
            message=(
                f"no pp_degree x tp_degree makes {_gpus(space)} with at most {num_layers} stages, tp_degree "
                f"one of {_listed(allowed)}{_under(space)}; dp_degree is 1: {_going_on(space.carried)}"
            ),
        )
    if not degrees and (undivided := _dp_degrees(space)):
        return Conflict(
            constraint="batch",
            message=(
                f"global_batch_size {batch} is not divisible by any dp_degree that makes {_gpus(space)}: "
                f"{_listed(undivided)}{_under(space)}"
            ),
        )
    if not degrees:
        return Conflict(
            constraint="gpus",
            message=(
                f"no pp_degree x tp_degree x dp_degree makes {_gpus(space)} with at most {num_layers} "
                f"stages ({num_layers} layers), tp_degree one of {_listed(allowed)}{_under(space)}"
            ),
        )
    fitting = [(pp, dp) for pp, _, dp in degrees]
    whole = [tp for _, tp, _ in degrees if not _divisions(space, tp)]
    if len(whole) == len(fitting):
        return Conflict(
            constraint="sharding",
            message=(
                f"at tp_degree {_listed(set(whole))} every way to divide layers divides a parameter that two of them "
                "share in two ways"
            ),
        )
    admitted = [
        (pp, batch // dp // rows, rows)
        for pp, dp in fitting
        for rows in divisors(batch // dp)
        if space.admits("microbatch_size", rows) and space.admits("num_microbatches", batch // dp // rows)
    ]
    least = space.pricer.profile.least_rows
    counts = [(pp, m) for pp, m, rows in admitted if rows >= least]
    if admitted and not counts:
        most = max(rows for _, _, rows in admitted)
        return Conflict(
            constraint="least-rows",
            message=(
                f"a layer needs {least} rows in a microbatch (see the profile's notes), and global_batch_size {batch} "
                f"with dp_degree {_listed({dp for _, dp in fitting})} leaves at most {most}{_under(space)}"
            ),
        )
    if counts and space.admits("schedule", "1f1b"):
        pp, m = max(counts, key=lambda pair: pair[1] - pair[0])
        return Conflict(
            constraint="warm-up",
            message=(
                f"1f1b needs as many microbatches as stages; pp_degree {pp} leaves at most {m} microbatches"
                f"{_under(space)}"
            ),
        )
    if counts:
        return Conflict(constraint="pins", message=f"no schedule and data_parallel mode is left{_under(space)}")
    return Conflict(
        constraint="batch",
        message=(
            f"no microbatch_size x num_microbatches x dp_degree makes global_batch_size {batch} with dp_degree "
            f"{_listed({dp for _, dp in fitting})}{_under(space)}"
        ),
    )

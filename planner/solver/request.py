"""What is asked of the solver: the step to plan for, and the decisions people have taken already (pins, exclusions)."""

import difflib
import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from planner.errors import UsageError
from planner.model_profile import ModelProfile
from planner.plan import DATA_PARALLEL_MODES, SCHEDULES, Optimizer, Precision

COUNTS = (
    "pp_degree",
    "tp_degree",
    "dp_degree",
    "microbatch_size",
    "num_microbatches",
    "num_gpus",
    "num_chunks",
    "shard_degree",
)
WORDS: dict[str, tuple[str, ...]] = {"schedule": SCHEDULES, "data_parallel": DATA_PARALLEL_MODES}
MAX_NUM_GPUS = 1_000_000
MAX_GLOBAL_BATCH_SIZE = 1_000_000_000
MAX_DIGITS = 18  # of a count: no pin is larger, and Python converts no text of thousands of digits
KEYS = (*COUNTS, *WORDS, "recompute", "cuts", "together", "stage:LAYER")
WILD = "*?["

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveRequest:
    """The problem: GPUs, the optimizer step, and constraints as (key, value) texts.

    Keys: pp_degree, num_chunks (stages of a device group), tp_degree, dp_degree, shard_degree (replicas that share
    their states), microbatch_size, num_microbatches, num_gpus (used, of those given), schedule, data_parallel,
    recompute ('none', 'all' that can be, or layers separated by commas), cuts (the first layers of all stages but the
    first), together (layers of one stage; may be pinned several times), stage:LAYER (the index of the stage that holds
    the layer). Lists of layers take patterns ('layers.*') and, but for cuts, modules that hold layers.
    An exclusion rules its value out; `recompute` and `cuts` then rule out every layer named, `together` that one stage
    has all of them. `limits` give counts, memory and recomputation a range, see `limits`. `theoretical` lifts
    tp_degree <= GPUs per node, what buffers that forward updates and reads rule out of dp_degree, and what emitted
    plans can't run yet.
    """

    num_gpus: int
    global_batch_size: int
    optimizer: Optimizer = "adamw"
    precision: Precision = "fp32"
    pins: tuple[Pair, ...] = ()
    exclusions: tuple[Pair, ...] = ()
    limits: tuple[Pair, ...] = ()
    top: int = 3
    time_limit_s: float | None = None
    theoretical: bool = False

    def __post_init__(self) -> None:
        for name in ("num_gpus", "global_batch_size"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}, less than 1", hint="give a positive number")
        check_size("num_gpus", self.num_gpus, MAX_NUM_GPUS)
        check_size("global_batch_size", self.global_batch_size, MAX_GLOBAL_BATCH_SIZE)

    @property
    def constraints(self) -> tuple[tuple[str, str, str], ...]:
        """What people fixed, ruled out and limited, as (option, key, value)."""
        options = (("--pin", self.pins), ("--exclude", self.exclusions), ("--limit", self.limits))
        return tuple((option, key, value) for option, pairs in options for key, value in pairs)

    def without(self, *dropped: tuple[str, str, str]) -> "SolveRequest":
        """Return the request without some of its constraints."""
        kept = [constraint for constraint in self.constraints if constraint not in dropped]
        pins, exclusions, limits = (
            tuple((key, value) for option, key, value in kept if option == wanted)
            for wanted in ("--pin", "--exclude", "--limit")
        )
        return replace(self, pins=pins, exclusions=exclusions, limits=limits)


def described(constraint: tuple[str, str, str]) -> str:
    """Return a constraint as it is written on the command line."""
    option, key, value = constraint
    return f"{option} {key}={value}"


def check_size(name: str, value: int, most: int) -> None:
    """Raise UsageError where a number is larger than any that is searched for."""
    if value > most:
        digits = value.bit_length() * 3 // 10  # about log10(2) each; printing thousands of them is refused by Python
        shown = str(value) if digits <= MAX_DIGITS else f"a number of about {digits} digits"
        raise UsageError(f"{name} is {shown}, more than {most}", hint=f"give at most {most}")


@dataclass(frozen=True, slots=True)
class Pins:
    """Pins or exclusions, read: values by key, layers by index."""

    values: dict[str, frozenset[int]] = field(default_factory=dict)
    words: dict[str, frozenset[str]] = field(default_factory=dict)
    recompute: Literal["free", "none", "all", "named"] = "free"
    recomputed: frozenset[int] = frozenset()
    cuts: tuple[int, ...] | None = None
    stages: tuple[tuple[int, int], ...] = ()
    together: tuple[tuple[int, int], ...] = ()
    """(first, last) layer of those that share a stage"""


def _nearest(name: str, known: Sequence[str]) -> str:
    near = [other for other in known if other.endswith(f".{name}")]  # the model's names have a prefix more
    near = near or difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known[:12])}" + (", ..." * (len(known) > 12))


def _layers(profile: ModelProfile, text: str, what: str, *, modules: bool = True) -> list[int]:
    """Return the layers of a list of names, patterns and, if `modules`, modules that hold layers."""
    names = [layer.name for layer in profile.layers]
    found: list[int] = []
    for part in (part.strip() for part in text.split(",")):
        if any(mark in part for mark in WILD):
            matching = [index for index, name in enumerate(names) if fnmatch.fnmatchcase(name, part)]
            if not matching:
                raise UsageError(
                    f"{what}: no layer of {profile.name!r} matches {part!r}", hint=_nearest(part.rstrip(".*"), names)
                )
            found += matching
        else:
            inside = [index for index, name in enumerate(names) if name.startswith(f"{part}.")]
            found += inside if modules and inside and part not in names else [_layer(profile, part, what)]
    return found


def _layer(profile: ModelProfile, name: str, what: str) -> int:
    names = [layer.name for layer in profile.layers]
    if name not in names:
        inside = [other for other in names if other.startswith(f"{name}.")]
        if len(inside) > 1:
            raise UsageError(
                f"{what} names {name!r}, which is no layer of {profile.name!r} but holds {len(inside)}: "
                f"{inside[0]!r} to {inside[-1]!r}",
                hint=f"name one of them, or {name + '.*'!r} where a list is taken",
            )
        if (holder := _holder(profile, name)) is not None:
            raise UsageError(
                f"{what} names {name!r}, which is no layer of {profile.name!r} but a part of its layer {holder!r}",
                hint="a layer begins with a module that has parameters; what follows until the next belongs to it",
            )
        raise UsageError(
            f"{what} names layer {name!r}, which {profile.name!r} does not have", hint=_nearest(name, names)
        )
    return names.index(name)


def _holder(profile: ModelProfile, module: str) -> str | None:
    """Return the layer that calls a module of that name, or holds it; None where no layer does."""
    for layer in profile.layers:
        nodes = profile.program.nodes[layer.start : layer.stop]
        targets = [node.target for node in nodes if node.kind == "module"]
        read = [name for name in layer.parameters if name.startswith(f"{module}.")]
        if module in targets or read:
            return layer.name
    return None


def _count(text: str, what: str, least: int = 1) -> int:
    if len(text) > MAX_DIGITS:
        raise UsageError(f"{what} is longer than {MAX_DIGITS} digits: {text[:MAX_DIGITS]}...", hint="give a count")
    if not text.isdecimal() or int(text) < least:
        raise UsageError(f"{what}={text} is no count of at least {least}", hint=f"write it like {what}={max(least, 2)}")
    return int(text)


def read_pins(pairs: Sequence[Pair], profile: ModelProfile, option: str) -> Pins:
    """Return constraints by meaning; UsageError names an unknown key, value or layer and the nearest known one.

    A pin is given once, but for `together`; an exclusion rules out a value more every time.
    """
    values: dict[str, frozenset[int]] = {}
    words: dict[str, frozenset[str]] = {}
    recompute: Literal["free", "none", "all", "named"] = "free"
    recomputed: frozenset[int] = frozenset()
    cuts: tuple[int, ...] | None = None
    stages: list[tuple[int, int]] = []
    together: list[tuple[int, int]] = []
    for position, (key, value) in enumerate(pairs):
        what = f"{option} {key}"
        earlier = next((other for before, other in pairs[:position] if before == key), None)
        if option == "--pin" and earlier is not None and key != "together":
            raise UsageError(f"{what} is given twice, as {earlier} and {value}", hint="give it once")
        if key in COUNTS:
            values[key] = values.get(key, frozenset()) | {_count(value, what)}
        elif key in WORDS:
            if value not in WORDS[key]:
                raise UsageError(f"{what}={value} is not known", hint=_nearest(value, WORDS[key]))
            words[key] = words.get(key, frozenset()) | {value}
        elif key == "recompute" and value in ("none", "all"):
            recompute = "none" if value == "none" else "all"
        elif key == "recompute":
            recompute = "named"
            named = set(_layers(profile, value, what))
            written = [layer for layer in sorted(named) if profile.writes_its_input(layer)]
            if written and option == "--pin":
                name = profile.layers[written[0]].name
                raise UsageError(
                    f"{what} names layer {name!r}, which writes over its own input in place: "
                    "its forward can't be run again",
                    hint="leave it out of the list, or use no in-place operation on the layer's input",
                )
            recomputed |= named
        elif key == "cuts":
            indices = _layers(profile, value, what, modules=False)
            for place, index in enumerate(indices):
                name = profile.layers[index].name
                if index == 0 and option == "--pin":
                    raise UsageError(
                        f"{what} names {name!r}, the first layer: stage 0 would be empty",
                        hint="a cut names the first layer of a later stage",
                    )
                if index in indices[:place]:
                    raise UsageError(
                        f"{what}: duplicate cut {name!r} would make an empty stage",
                        hint="name each first layer once",
                    )
            cuts = tuple(sorted({*(cuts or ()), *indices}))
        elif key == "together":
            named = set(_layers(profile, value, what))
            if len(named) < 2:
                raise UsageError(
                    f"{what}={value} names one layer, which is in one stage anyway",
                    hint="name two layers or more, or a pattern that matches them",
                )
            together.append((min(named), max(named)))
        elif key.startswith("stage:"):
            layer = _layer(profile, key.removeprefix("stage:"), what)
            stages.append((layer, _count(value, what, least=0)))
        else:
            raise UsageError(f"{option} {key}={value}: unknown key {key!r}", hint=_nearest(key, KEYS))
    return Pins(values, words, recompute, recomputed, cuts, tuple(stages), tuple(together))

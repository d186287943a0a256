"""The ways to divide a layer that are worth profiling: two or three per degree, none that another one beats.

tensor             the most parameters divided, then the fewest bytes communicated
tensor_PART        the most parameters divided with fewer bytes than that, such as `tensor_mlp`: named by what is
tensor_sequence    as `tensor`, and activations between divided parts sliced along the sequence: reduce-scatter and
                   all-gather take the place of all-reduce, for less memory and, where layers meet, more bytes
"""

from collections.abc import Sequence

from planner.sharding import Sharding
from planner.tp_rules.integer_program import Choice, Problem
from planner.tp_rules.layer import LayerBody, Tables
from planner.tp_rules.overrides import StyleRule, restrict
from planner.tp_rules.sharding import make_sharding
from planner.tp_rules.state import ENTERED, Shard
from planner.tp_rules.tables import build_tables
from planner.units import format_bytes

MIN_DIVIDED_FRACTION = 0.25  # of what `tensor` divides: less is not worth a profile of its own
MAX_FEWER_FRACTION = 2 / 3  # of the bytes that `tensor` communicates: less of a saving is not worth another way
MAX_ACTIVATION_FRACTION = 0.97  # of those of `tensor`: slices that save less are not worth theirs
MAX_COMMUNICATION_FRACTION = 1.25
MAX_NAMED_PARTS = 3


def find_shardings(layer: LayerBody, degree: int, rules: Sequence[StyleRule] = ()) -> tuple[Sharding, ...]:
    """Return the shardings of a layer for a degree, best first; empty where nothing can be divided.

    `rules` are the user's, by names relative to the layer; a UsageError names the one that can't be followed.
    """
    tables = build_tables(layer, degree)
    if not rules and not any(isinstance(s, Shard) for states in tables.states.values() for s in states):
        return ()
    gathers, first = restrict(tables, rules)
    if first is None or not first.values["divided"]:
        return ()
    found = [("tensor", first)]
    fewer = _fewer_bytes(tables, rules, first, gathers=gathers)
    if fewer is not None:
        found.append((_part_name(tables, fewer), fewer))
    sequence = _on_sequence(tables, rules, first, gathers=gathers)
    if sequence is not None:
        found.append(("tensor_sequence", sequence))
    return tuple(make_sharding(tables, choice, name, _reasons(tables, choice, first)) for name, choice in found)


def refusals(layer: LayerBody, degree: int) -> dict[str, str]:
    """Return why parameters of a layer can't be divided over a degree, those of which that is known."""
    return build_tables(layer, degree).errors


def _problem(tables: Tables, rules: Sequence[StyleRule], *, gathers: bool) -> Problem:
    problem = Problem(tables, gathers=gathers)
    for rule in rules:
        rule.apply(problem, tables)
    return problem


def _fewer_bytes(tables: Tables, rules: Sequence[StyleRule], first: Choice, *, gathers: bool) -> Choice | None:
    problem = _problem(tables, rules, gathers=gathers)
    problem.without_sequences()
    problem.bound("communicated", most=int(MAX_FEWER_FRACTION * first.values["communicated"]))
    problem.bound("divided", least=max(1, round(MIN_DIVIDED_FRACTION * first.values["divided"])))
    return problem.best(("divided", True), ("communicated", False), ("untidiness", False))


def _on_sequence(tables: Tables, rules: Sequence[StyleRule], first: Choice, *, gathers: bool) -> Choice | None:
    problem = _problem(tables, rules, gathers=gathers)
    problem.bound("divided", least=first.values["divided"])
    problem.bound("communicated", most=round(MAX_COMMUNICATION_FRACTION * first.values["communicated"]))
    problem.bound("activations", most=round(MAX_ACTIVATION_FRACTION * first.values["activations"]))
    found = problem.best(("activations", False), ("communicated", False), ("untidiness", False))
    along = found is not None and any(isinstance(s.target, Shard) and s.target.sequence for s in found.moves)
    return found if along else None


def _part_name(tables: Tables, choice: Choice) -> str:
    """Return a name that says which parts of the layer are divided: its own submodules or parameters."""
    parts = dict.fromkeys(
        name.partition(".")[0] for name, state in choice.parameters.items() if isinstance(state, Shard)
    )
    fits = len(parts) <= MAX_NAMED_PARTS and all(part.isidentifier() for part in parts)
    return "_".join(["tensor", *parts]) if fits else "tensor_fewer"


def _reasons(tables: Tables, choice: Choice, first: Choice) -> dict[str, str]:
    """Return why each parameter that is not divided isn't."""
    kinds = {
        f"{target}.{name}" if target else name: info.kind
        for target, info in tables.layer.modules.items()
        for name in info.parameters
    }
    reasons = {}
    for name, state in choice.parameters.items():
        if isinstance(state, Shard):
            continue
        kind = kinds.get(name)
        owner = name.rpartition(".")[0]
        weight = choice.parameters.get(f"{owner}.weight" if owner else "weight")
        if isinstance(first.parameters.get(name), Shard):
            fewer, most = (format_bytes(found.values["communicated"]) for found in (choice, first))
            reasons[name] = f"whole to communicate {fewer} per row of the batch instead of {most}"
        elif kind == "linear" and name.endswith("bias") and isinstance(weight, Shard):
            reasons[name] = "added once, to the sum over the ranks"
        elif kind == "linear" and name.endswith("bias") and f"{owner}.weight".lstrip(".") in reasons:
            reasons[name] = reasons[f"{owner}.weight".lstrip(".")]
        elif name in tables.errors:
            reasons[name] = tables.errors[name]
        elif kind == "linear" and name.endswith("bias"):
            reasons[name] = tables.errors.get(f"{owner}.weight" if owner else "weight", _NOT_WITH_OTHERS)
        elif kind in ("normalization", "opaque", "recorded", "elementwise"):
            reasons[name] = f"its module is of a kind ({kind}) that is not divided"
        elif name in tables.layer.buffers:
            reasons[name] = "a buffer"
        else:
            reasons[name] = _NOT_WITH_OTHERS
        if state == ENTERED:
            reasons[name] += "; its gradient is summed over the ranks"
    return reasons


_NOT_WITH_OTHERS = "no division of it goes together with those of the others"

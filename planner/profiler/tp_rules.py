"""The user's tensor-parallel rules against a model: which layers they tell apart, and that each of them is used."""

import difflib

from torch import nn

from planner.errors import UsageError
from planner.profiler.capture import Capture
from planner.profiler.classes import OpenedClass, layer_body
from planner.profiler.recording import Call
from planner.tp_rules import OPTION, TpRule, layer_rules


def rules_inside(module: nn.Module, prefix: str, rules: tuple[TpRule, ...]) -> tuple[tuple[str, str], ...]:
    """Return the styles that rules ask for inside a module, by relative names: layers that differ are two classes."""
    found = []
    for name, _ in module.named_parameters(remove_duplicate=False) if rules else ():
        full = f"{prefix}.{name}" if prefix else name
        owner = full.rpartition(".")[0]
        found += [(name, rule.style) for rule in rules if rule.matches(owner, full)]
    return tuple(found)


def applied_rules(captured: Capture, call: Call, opened: OpenedClass, rules: tuple[TpRule, ...]) -> set[TpRule]:
    """Return the rules that name something in a layer."""
    if not rules:
        return set()
    return {found.rule for found in layer_rules(layer_body(captured, call, opened), call.target, rules)}


def check_applied(rules: tuple[TpRule, ...], applied: set[TpRule], model: nn.Module) -> None:
    """Raise UsageError for the first rule that names nothing which can be divided."""
    for rule in rules:
        if rule not in applied:
            names = [name for name, _ in model.named_modules() if name]
            inside = next((name for name in names if rule.matches(name, f"{name}.weight")), None)
            close = difflib.get_close_matches(rule.pattern, names, n=3, cutoff=0.4)
            raise UsageError(
                f"{OPTION} '{rule}' matches none of the linear and embedding layers and parameters read by layers"
                + (f"; it matches {inside!r}, which is none of these" if inside else ""),
                hint=f"name its parts, like {OPTION} '{rule.pattern}.*={rule.style}'"
                if inside
                else f"close names are {', '.join(close)}"
                if close
                else "give a module's full name as model.named_modules() has it, `*` for anything",
            )

"""The user's rules: which style a linear or embedding layer, or a parameter, is to have."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, get_args

from planner.errors import UsageError
from planner.tp_rules.integer_program import Choice, Problem
from planner.tp_rules.layer import LayerBody, Tables
from planner.tp_rules.state import ModuleInfo, Shard, State

RuleStyle = Literal["column", "row", "vocabulary", "replicated"]
STYLES: tuple[RuleStyle, ...] = get_args(RuleStyle)
OPTION = "--tp-rule"


@dataclass(frozen=True)
class TpRule:
    """`pattern=style` as the user gave it; `*` in the pattern stands for anything in a module's or parameter's name."""

    pattern: str
    style: RuleStyle

    def __str__(self) -> str:
        return f"{self.pattern}={self.style}"

    def matches(self, module: str, weight: str) -> bool:
        """Return whether the rule is for a module, by its name or that of its weight."""
        return fnmatchcase(module, self.pattern) or fnmatchcase(weight, self.pattern)


@dataclass(frozen=True)
class StyleRule:
    """A rule as it applies to one weight of a layer; `module` is its full name, for messages."""

    rule: TpRule
    module: str
    weight: str

    def apply(self, problem: Problem, tables: Tables) -> None:
        """Leave the weight only the states of the style."""
        dim = style_dim(tables.layer, self.weight, self.rule.style)
        problem.restrict(self.weight, lambda state: _fits(state, dim))


def _fits(state: State, dim: int | None) -> bool:
    return not isinstance(state, Shard) if dim is None else isinstance(state, Shard) and state.dim == dim


def style_dim(layer: LayerBody, weight: str, style: RuleStyle) -> int | None:
    """Return the dimension of a weight that a style divides, None for replicated; UsageError where it has none."""
    if style == "replicated":
        return None
    target = weight.rpartition(".")[0]
    info = layer.modules.get(target)
    kind = info.kind if isinstance(info, ModuleInfo) and f"{target}.weight".lstrip(".") == weight else "parameter"
    if kind == "linear" and info is not None and style in ("column", "row"):
        return info.weight_out_dim if style == "column" else 1 - info.weight_out_dim
    if kind == "embedding" and style in ("vocabulary", "column"):
        return 0 if style == "vocabulary" else 1
    if kind == "parameter" and style in ("column", "row") and len(layer.parameter_shapes.get(weight, ())) == 2:
        return 0 if style == "column" else 1
    raise UsageError(
        f"a {kind} can't be divided by {style}",
        hint={
            "linear": "column, row and replicated are the styles of a linear layer",
            "embedding": "vocabulary, column and replicated are the styles of an embedding",
        }.get(kind, "replicated, and of a matrix column and row, are the styles of a parameter"),
    )


def parse_rules(texts: Sequence[str]) -> tuple[TpRule, ...]:
    """Return rules given as 'layers.*.mlp.up=column'; UsageError for what is none."""
    rules = []
    for text in texts:
        pattern, equals, style = (part.strip() for part in text.partition("="))
        known = next((name for name in STYLES if name == style), None)
        if not (pattern and equals) or known is None:
            raise UsageError(
                f"{OPTION} {text!r} is not NAME=STYLE with a style of {', '.join(STYLES)}",
                hint=f"write it like {OPTION} 'layers.*.mlp.up=column'",
            )
        rules.append(TpRule(pattern, known))
    return tuple(rules)


def layer_rules(layer: LayerBody, prefix: str, rules: Sequence[TpRule]) -> tuple[StyleRule, ...]:
    """Return the rules that name something in a layer, whose own full name is `prefix`.

    UsageError where two ask for different styles, or one for a style that the thing doesn't have.
    """
    found: dict[str, StyleRule] = {}
    for weight, module in _weights(layer).items():
        full, full_weight = (".".join(part for part in (prefix, name) if part) for name in (module, weight))
        for rule in rules:
            if not rule.matches(full, full_weight):
                continue
            other = found.get(weight)
            if other is not None and other.rule.style != rule.style:
                raise UsageError(
                    f"{OPTION} '{other.rule}' and {OPTION} '{rule}' ask for two styles of {full!r}",
                    hint="leave one of them out, or make its pattern narrower",
                )
            try:
                style_dim(layer, weight, rule.style)
            except UsageError as error:
                raise UsageError(f"{OPTION} '{rule}': {full!r}: {error.message}", hint=error.hint) from None
            found[weight] = StyleRule(rule, full, weight)
    return tuple(found.values())


def _weights(layer: LayerBody) -> dict[str, str]:
    """Return the weights that rules can name, each with its module: of linear and embedding layers, or read by code."""
    weights = {}
    for target, info in layer.modules.items():
        if info.kind in ("linear", "embedding"):
            weights[f"{target}.weight" if target else "weight"] = target
    for node in layer.body.nodes:
        for name in node.params():
            if name not in layer.buffers:
                weights.setdefault(name, name)
    return weights


def restrict(tables: Tables, rules: Sequence[StyleRule]) -> tuple[bool, Choice | None]:
    """Return whether features must be gathered inside the layer for the rules' sake, and the best solution.

    UsageError names the first rule that no solution follows.
    """
    goal = (("divided", True), ("communicated", False), ("untidiness", False))
    for gathers in (False, True) if rules else (False,):
        problem = Problem(tables, gathers=gathers)
        for rule in rules:
            rule.apply(problem, tables)
        problem.without_sequences()
        choice = problem.best(*goal)
        if choice is not None or not rules:
            return gathers, choice
    raise _refusal(tables, rules)


def _refusal(tables: Tables, rules: Sequence[StyleRule]) -> UsageError:
    """Return the error that names the first rule which can't be followed beside those before it."""
    problem = Problem(tables, gathers=True)
    for index, rule in enumerate(rules):
        rule.apply(problem, tables)
        if problem.best(("untidiness", False)) is None:
            others = any(earlier.rule != rule.rule for earlier in rules[:index])
            alone = "it does not go together with the other rules" if others else "no way to divide the layer has it so"
            reason = tables.errors.get(rule.weight, alone)
            return UsageError(
                f"{OPTION} '{rule.rule}': {rule.module!r} can't be {_told(rule.rule.style)} over "
                f"tp_degree {tables.degree}: {reason}",
                hint="leave the rule out, or profile with --tp and degrees that it can be followed at",
            )
    raise AssertionError("every rule can be followed by itself and beside the others")


def _told(style: RuleStyle) -> str:
    return "left whole" if style == "replicated" else f"divided by {style}"

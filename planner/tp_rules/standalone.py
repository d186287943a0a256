"""The division of a layer that is one linear or embedding module by itself."""

from collections.abc import Sequence

from planner.errors import UsageError
from planner.program import Tensor
from planner.sharding import ShardedParameter, Sharding
from planner.tp_rules.modules import features
from planner.tp_rules.overrides import OPTION, StyleRule
from planner.tp_rules.sharding import collective
from planner.tp_rules.state import IllegalShardingError, ModuleInfo, divided


def standalone_sharding(
    info: ModuleInfo, inputs: tuple[Tensor, ...], output: Tensor, degree: int, rules: Sequence[StyleRule] = ()
) -> tuple[Sharding, ...]:
    """Return the sharding of a layer that is one linear or embedding module by itself; empty where it does not divide.

    A linear layer is divided by columns and its output gathered; an embedding by vocabulary, which a tied head divides
    alike. A UsageError names a rule that can't be followed.
    """
    natural = {"linear": "column", "embedding": "vocabulary"}.get(info.kind)
    rule = next(iter(rules), None)
    if natural is None or (rule is not None and rule.rule.style == "replicated"):
        return ()
    try:
        divided(features(info)[0], degree)
        if rule is not None and rule.rule.style != natural:
            raise IllegalShardingError(f"a layer of its own is divided by {natural} or not at all")
    except IllegalShardingError as error:
        if rule is None:
            return ()
        raise UsageError(
            f"{OPTION} '{rule.rule}': {rule.module!r} can't be divided by {rule.rule.style} over tp_degree {degree}: "
            f"{error}",
            hint="leave the rule out, or profile with --tp and degrees that it can be followed at",
        ) from None
    if info.kind == "embedding":
        return (
            Sharding(
                name="tensor",
                tp_degree=degree,
                styles={"": "vocabulary"},
                parameters={"weight": ShardedParameter(dim=0)},
                collectives=(collective("all_reduce", output, "forward"),),
            ),
        )
    dims = {"weight": info.weight_out_dim} | ({"bias": 0} if "bias" in info.parameters else {})
    calls = [collective("all_gather", output, "forward")]
    calls += [collective("all_reduce", tensor, "backward") for tensor in inputs if tensor.requires_grad]
    return (
        Sharding(
            name="tensor",
            tp_degree=degree,
            styles={"": "column"},
            parameters={name: ShardedParameter(dim=dim) for name, dim in dims.items()},
            gather=("",),
            collectives=tuple(calls),
        ),
    )

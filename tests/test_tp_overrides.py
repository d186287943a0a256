"""`--tp-rule NAME=STYLE`: what it changes, and what is refused."""

from pathlib import Path

import pytest

from planner.emitter import emit, write_plan
from planner.errors import UsageError
from planner.model_profile import ModelProfile
from planner.profiler import profile_model
from planner.runner import verify
from planner.sharding import Sharding
from planner.tp_rules import parse_rules
from tests.zoo.plans import even_plan

ZOO = Path(__file__).parent / "zoo" / "transformer.py"


def profiled(*rules: str, degrees: tuple[int, ...] = (1, 2)) -> ModelProfile:
    return profile_model(
        str(ZOO),
        gpu="h100-sxm",
        dtype="float32",
        microbatch_sizes=(1,),
        tp_degrees=degrees,
        tp_rules=parse_rules(rules),
    )


def best(profile: ModelProfile, name: str) -> Sharding:
    layer_class = next(item for item in profile.layer_classes if item.name == name)
    return layer_class.shardings[0]


def test_a_rule_is_followed_and_kept() -> None:
    profile = profiled("blocks.*.qkv=replicated", "blocks.*.up.weight=column")
    assert profile.provenance.tp_rules == ("blocks.*.qkv=replicated", "blocks.*.up.weight=column")
    assert best(profile, "Block").styles == {"up": "column", "down": "row"}
    for item in profile.layer_classes:
        for sharding in item.shardings:
            assert "qkv" not in sharding.styles


def test_a_rule_for_some_layers_makes_them_a_class_of_their_own() -> None:
    profile = profiled("blocks.1.down=replicated")
    classes = [layer.layer_class for layer in profile.layers]
    assert classes == ["Embedding", "Block", "Block_2", "Block", "Block", "Linear"]
    assert best(profile, "Block").styles["down"] == "row"
    assert "down" not in best(profile, "Block_2").styles


def test_features_are_gathered_where_a_rule_leaves_no_other_way(tmp_path: Path) -> None:
    profile = profiled("blocks.*.up=column", "blocks.*.down=column")
    sharding = best(profile, "Block")
    assert (sharding.styles["up"], sharding.styles["down"]) == ("column", "column")
    assert sum(move.kind.startswith("gather") for move in sharding.moves) == 2
    assert [call.kind for call in sharding.collectives].count("all_gather") == 2
    path = tmp_path / "plan.py"
    write_plan(emit(even_plan(profile, tp_degree=2, num_microbatches=2), profile), path)
    report = verify(path, timeout_s=120)
    assert report.ok, report.rows[:3]


def test_a_layer_of_its_own_can_be_kept_whole() -> None:
    profile = profiled("head=replicated")
    assert not next(item for item in profile.layer_classes if item.name == "Linear").shardings


@pytest.mark.parametrize(
    ("rules", "message", "hint"),
    [
        (["up"], "--tp-rule 'up' is not NAME=STYLE", "--tp-rule 'layers.*.mlp.up=column'"),
        (["up=diagonal"], "column, row, vocabulary, replicated", "'layers.*.mlp.up=column'"),
        (["blocks.*.upp=column"], "'blocks.*.upp=column' matches none", "close names are blocks."),
        (["blocks.*.norm=replicated"], "it matches 'blocks.0.norm', which is none of these", "blocks.*.norm.*"),
        (["blocks.0.up=column", "*.up=row"], "ask for two styles of 'blocks.0.up'", "leave one of them out"),
        (["*.up=vocabulary"], "'blocks.0.up': a linear can't be divided by vocabulary", "column, row and replicated"),
        (["embed=row"], "'embed': a embedding can't be divided by row", "vocabulary, column and replicated"),
        (["blocks.*.up=row"], "over tp_degree 2: no way to divide the layer has it so", "leave the rule out"),
        (["head=row"], "'head' can't be divided by row over tp_degree 2", "leave the rule out"),
    ],
)
def test_what_is_no_rule_is_one_clear_error(rules: list[str], message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        profiled(*rules)
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_a_style_that_does_not_divide_names_both_numbers() -> None:
    with pytest.raises(UsageError) as caught:
        profiled("blocks.*.up=column", degrees=(1, 3))
    assert "'blocks.*.up=column': 'blocks.0.up' can't be divided by column over tp_degree 3" in caught.value.message
    assert "dimension 64 does not divide by 3" in caught.value.message
    assert "--tp" in caught.value.hint

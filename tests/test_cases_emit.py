"""Cases whose models are emitted and run: what the file prints for one process, on several, and proven exact."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from planner.cost import evaluate
from planner.emitter import emit, write_plan
from planner.graph import cut_bytes, shared_storages
from planner.model_profile import ModelProfile
from planner.plan import Plan, read_plan
from planner.prediction import Prediction
from planner.profiler import profile_model
from planner.runner import verify
from planner.runner.pool import WorkerPool
from tests.case_files import case_path
from tests.case_job import import_case, one_process, run_case
from tests.strategies import make_cluster
from tests.zoo.plans import even_plan


def profile_case(number: int) -> ModelProfile:
    return profile_model(
        f"{case_path(number, 'py')}:model",
        inputs="inputs",
        gpu="h100-sxm",
        dtype="float32",
        microbatch_sizes=(1, 2),
        tp_degrees=(1, 2),
    )


def cut(plan: Plan, *firsts: str) -> Plan:
    """Return the plan with its stages cut before the layers named, on one GPU each."""
    stages: list[list[str]] = [[]]
    for name in plan.layers:
        if name in firsts:
            stages.append([])
        stages[-1].append(name)
    made = [
        plan.stages[0].replace(layers=tuple(layers), gpus=(index,), recompute=()) for index, layers in enumerate(stages)
    ]
    return plan.replace(stages=tuple(made))


@dataclass(frozen=True)
class Ran:
    """A case in one process and on the plan's processes (`ranks`), and the plan's price."""

    profile: ModelProfile
    plan: Plan
    price: Prediction
    one: dict[str, Any]
    ranks: list[dict[str, Any]]

    @property
    def outputs(self) -> list[Any]:
        return list(self.ranks[-1]["outputs"])

    @property
    def output(self) -> Tensor:
        return torch.cat(self.outputs)


def run(
    number: int, pool: WorkerPool, folder: Path, plan: Plan | None = None, loss: str = "squares", **layout: Any
) -> Ran:
    """Emit a case, prove it exact, run it on its own batch, and compare what both must share."""
    profile = profile_case(number)
    layout = {"pp_degree": 2, "microbatch_size": 1, "num_microbatches": 2} | layout
    plan = plan or even_plan(profile, **layout)
    path = folder / "plan.py"
    write_plan(emit(plan, profile), path, force=True)
    report = verify(path, pool=pool, timeout_s=120)
    assert report.ok, report.rows[:3]
    is_sum = loss != "next token"
    ranks = pool.run(run_case, path, case_path(number, "py"), loss, is_sum, num_processes=plan.num_gpus, timeout_s=120)
    one = one_process(case_path(number, "py"), loss)
    price = evaluate(plan, profile, make_cluster(plan.num_gpus))
    for name, gradient in one["gradients"].items():
        assert torch.allclose(ranks[0]["gradients"][name], gradient, rtol=1e-5, atol=1e-6), name
    assert set(ranks[0]["gradients"]) == set(one["gradients"])
    for name, parameter in one["parameters"].items():
        assert torch.allclose(ranks[0]["parameters"][name], parameter, rtol=1e-5, atol=1e-6), name
    for rank in ranks:
        assert rank["loss"] == pytest.approx(one["loss"], rel=1e-5)
    for index, stage in enumerate(plan.stages):  # what is predicted is what the ranks hold
        assert {ranks[gpu]["held"] for gpu in stage.gpus} == {price.stages[index].param_count}
    return Ran(profile, plan, price, one, ranks)


def printed(number: int) -> list[str]:
    """Return the lines that the case's text says its file prints."""
    text = case_path(number, "md").read_text()
    return text.rpartition("```\n")[0].rpartition("```\n")[2].splitlines()


def test_09_a_stage_of_the_head_alone_runs(pool: WorkerPool, folder: Path) -> None:
    model = Path(__file__).parent / "zoo" / "transformer.py"
    profile = profile_model(str(model), gpu="h100-sxm", dtype="float32", microbatch_sizes=(1,), tp_degrees=(1,))
    plan = cut(even_plan(profile, microbatch_size=1, num_microbatches=4), "blocks.1", "blocks.3", "head")
    assert plan.stages[-1].layers == ("head",)
    path = folder / "plan.py"
    write_plan(emit(plan, profile), path)
    report = verify(path, pool=pool, timeout_s=120)
    assert report.ok, report.rows[:3]
    last = path.read_text().rpartition("class Stage3")[2]
    assert re.search(r"def forward\(self, blocks_3\)", last), last[:600]  # hidden states in
    [edge] = profile.crossing_edges(len(profile.layers) - 1)
    assert profile.program.tensors[edge.value].sizes(1) == (1, 4, 16)
    [output] = [leaf for leaf in [profile.program.output] if leaf is not None]
    assert profile.program.tensors[output.name].sizes(1) == (1, 4, 32)  # logits out


def test_20_an_odd_vocabulary_stays_whole_with_a_note(pool: WorkerPool, folder: Path) -> None:
    found = run(20, pool, folder, loss="next token", pp_degree=1, tp_degree=2)
    assert printed(20) == ["params 600 loss 3.479032"]
    assert found.profile.param_count == 600
    assert found.one["loss"] == pytest.approx(3.479032, abs=1e-6)
    assert found.ranks[0]["loss"] == pytest.approx(3.479032, abs=1e-5)
    for name in ("tok.weight", "head.weight"):
        assert found.profile.parameters[name].shape == (33, 8)
        assert found.ranks[0]["parameters"][name].shape == (33, 8)
    assert [part.layers for part in found.price.whole] == [("tok",), ("head",)]
    assert [part.reason for part in found.price.whole] == [
        "its 33 rows do not divide by 2",
        "its 33 output features do not divide by 2",
    ]
    assert all(stage["local"]["tok.weight"].shape[0] == 33 for stage in found.ranks)


def test_21_a_fused_projection_is_divided_by_its_parts(pool: WorkerPool, folder: Path) -> None:
    found = run(21, pool, folder, loss="sum", pp_degree=1, tp_degree=2)
    assert printed(21) == ["params 2176 sum 0.76745"]
    assert found.profile.param_count == 2176
    assert found.output.sum().item() == pytest.approx(0.76745, abs=1e-4)
    assert (found.output - found.one["output"]).abs().max() < 1e-5
    rule = found.profile.layer_class(0).sharding("tensor", 2)
    assert rule is not None
    assert rule.parameters["qkv.weight"].parts == 3
    assert found.ranks[0]["local"]["0.qkv.weight"].shape == (24, 16)


def test_23_layers_without_a_rule_are_told_and_counted_whole(pool: WorkerPool, folder: Path) -> None:
    found = run(23, pool, folder, loss="sum", pp_degree=1, tp_degree=2)
    model = import_case(case_path(23, "py")).model()
    assert [sum(p.numel() for p in block.parameters()) for block in model] == [296, 296, 296, 552]
    [stage] = found.price.stages
    shardings = found.plan.stages[0].shardings
    recurrent = {found.profile.layers[index].layer_class for index in range(3)}
    if not recurrent & set(shardings):  # no rule divides them
        assert [part.layers for part in found.price.whole if not part.module] == [("0", "1", "2")]
    else:  # a rule was found: leave them whole, as a plan may
        kept = {name: sharding for name, sharding in shardings.items() if name not in recurrent}
        plan = found.plan.replace(stages=(found.plan.stages[0].replace(shardings=kept),))
        whole = evaluate(plan, found.profile, make_cluster(2))
        [part] = whole.whole
        assert part.layers == ("0", "1", "2")
        assert part.param_count == 296
        assert part.reason
        [stage] = whole.stages
    assert stage.param_count == 3 * 296 + 280 == 1168
    assert stage.param_count != 1440 // 2
    assert stage.memory.param_bytes == 4 * stage.param_count


def test_25_a_tie_survives_two_stages(pool: WorkerPool, folder: Path) -> None:
    found = run(25, pool, folder, loss="next token")
    assert printed(25) == ["unique params 204 grad norm 0.76004 after 11.328698"]
    assert found.profile.param_count == 204
    assert found.profile.tied == (("emb.weight", "head.weight"),)
    assert found.ranks[0]["gradients"]["emb.weight"].norm().item() == pytest.approx(0.76004, abs=1e-5)
    first, last = found.ranks[0]["local"]["emb.weight"], found.ranks[1]["local"]["head.weight"]
    assert torch.equal(first, last)
    assert first.norm().item() == pytest.approx(11.328698, abs=1e-5)


def test_27_a_tie_of_names_with_a_common_prefix(pool: WorkerPool, folder: Path) -> None:
    found = run(27, pool, folder, loss="sum")
    assert printed(27)[0].startswith("50 ")
    assert found.profile.param_count == 50
    assert found.profile.tied == (("compute.weight", "compute.weight_peek.parameter"),)
    assert [stage.layers for stage in found.plan.stages] == [("compute",), ("weight",)]
    assert shared_storages(found.profile) == ()  # no tie crosses the cut
    assert [stage.param_count for stage in found.price.stages] == [32, 18]


def test_29_buffers_go_with_their_blocks(pool: WorkerPool, folder: Path) -> None:
    found = run(29, pool, folder, loss="sum")
    model = import_case(case_path(29, "py")).model()
    assert found.profile.param_count == 80
    buffers = {name: parameter for name, parameter in found.profile.parameters.items() if parameter.buffer}
    assert sum(parameter.shape[0] for parameter in buffers.values()) == 12
    assert sum(parameter.shape[0] for parameter in buffers.values() if parameter.persistent) == 4
    keys = [key for rank in found.ranks for key in rank["state"]]
    assert sorted(keys) == sorted(model.state_dict())
    assert len(keys) == 12
    gains = [rank["buffers"][name].item() for rank in found.ranks for name in rank["buffers"] if "gain" in name]
    assert gains == [1.0, 2.0, 3.0, 4.0]
    for rank in found.ranks:
        assert sum("scratch" in name for name in rank["buffers"]) == 2
        assert all(bool((rank["buffers"][name] == 0).all()) for name in rank["buffers"] if "scratch" in name)


@pytest.mark.parametrize("first", ["1", "2"])
def test_31_cuts_are_between_blocks_with_one_tensor(pool: WorkerPool, folder: Path, first: str) -> None:
    profile = profile_case(31)
    plan = cut(even_plan(profile, microbatch_size=1, num_microbatches=2), first)
    found = run(31, pool, folder, plan, loss="sum")
    assert printed(31) == ["1656 -7.34646"]
    assert [layer.name for layer in profile.layers] == ["0", "1", "2"]  # nowhere inside a block
    assert [stage.param_count for stage in found.price.stages] == ([552, 1104] if first == "1" else [1104, 552])
    [edge] = profile.crossing_edges(int(first))
    assert profile.program.tensors[edge.value].sizes(2) == (2, 8)
    assert found.output.sum().item() == pytest.approx(-7.34646, abs=1e-4)


def test_32_a_skip_goes_over_a_stage(pool: WorkerPool, folder: Path) -> None:
    profile = profile_case(32)
    plan = cut(even_plan(profile, microbatch_size=1, num_microbatches=2), "b", "c")
    assert [stage.layers for stage in plan.stages] == [("emb", "a"), ("b",), ("c",)]
    found = run(32, pool, folder, plan)
    assert printed(32) == ["186 10.696684"]
    assert profile.param_count == 186
    for index in (2, 3):
        crossing = list(profile.crossing_edges(index))
        assert [profile.program.tensors[edge.value].sizes(2) for edge in crossing] == [(2, 2, 6)] * 2
        assert cut_bytes(profile, index, 2) == 2 * 2 * 2 * 6 * 4 == 192
    assert found.ranks[0]["gradients"]["emb.weight"].norm().item() == pytest.approx(10.696684, abs=1e-4)


def test_36_a_mask_reaches_every_stage_and_none_comes_out(pool: WorkerPool, folder: Path) -> None:
    found = run(36, pool, folder, loss="sum", microbatch_size=2)
    assert printed(36) == ["80 -12.74012 -35.68536"]
    assert found.profile.param_count == 80
    for stage in (0, 1):
        assert '"mask"' in re.search(rf"class Stage{stage}.*?inputs = \(([^)]*)\)", emitted(folder), re.S)[1]  # type: ignore[index]
    assert "0.5" in emitted(folder)  # the constant
    assert all(set(output) == {"out", "aux"} and output["aux"] is None for output in found.outputs)
    out = torch.cat([output["out"] for output in found.outputs])
    assert out.shape == (4, 3, 4)
    assert out.sum().item() == pytest.approx(-12.74012, abs=1e-4)
    case = import_case(case_path(36, "py"))
    assert case.model()(*case.inputs()[0])["out"].sum().item() == pytest.approx(-35.68536, abs=1e-4)  # without the mask


def emitted(folder: Path) -> str:
    return (folder / "plan.py").read_text().partition("\n# This plan.\n")[2]


def test_38_a_frozen_first_half_has_no_backward(pool: WorkerPool, folder: Path) -> None:
    found = run(38, pool, folder, loss="squares", microbatch_size=2)
    assert printed(38) == ["80 40 1.512847"]
    assert (found.profile.param_count, found.profile.trainable_param_count) == (80, 40)
    assert [stage.layers for stage in found.plan.stages] == [("0", "1"), ("2", "3")]
    assert found.ranks[0]["gradients"]["2.weight"].norm().item() == pytest.approx(1.512847, abs=1e-5)
    frozen, trained = found.ranks
    assert frozen["num_saved"] == 0
    assert frozen["optimizer_elements"] == 0
    assert frozen["gradient_messages"] == [0, 0]
    assert trained["gradient_messages"] == [0, 0]
    assert trained["num_saved"] > 0
    plan = found.plan.replace(optimizer="adamw")
    memory = [stage.memory for stage in evaluate(plan, found.profile, make_cluster(2)).stages]
    assert (memory[0].optimizer_bytes, memory[0].grad_bytes) == (0, 0)
    assert memory[1].optimizer_bytes == 2 * 4 * 40
    kept = {cost.activation_bytes + cost.saved_input_bytes + cost.saved_output_bytes for cost in costs(found, 0)}
    assert kept == {0}
    assert memory[0].activation_bytes == 0
    for layer in (0, 1):
        assert all(cost.backward_time_s == 0 for cost in costs(found, layer))
    for cost in costs(found, 2):  # nobody asks for the gradient of its input
        assert cost.backward_input_time_s == 0
        assert cost.backward_weight_time_s > 0
    for cost in costs(found, 3):
        assert cost.backward_input_time_s > 0


def costs(found: Ran, layer: int) -> list[Any]:
    return [cost for cost in found.profile.layer_class(layer).costs if cost.tp_degree == 1]


def test_41_in_place_operations_at_a_cut(pool: WorkerPool, folder: Path) -> None:
    found = run(41, pool, folder, loss="sum", num_microbatches=3)
    assert printed(41) == ["True 1.90802"]
    assert [stage.layers for stage in found.plan.stages] == [("0",), ("2",)]
    assert all(rank["inputs_kept"] for rank in found.ranks)
    assert found.output.sum().item() == pytest.approx(1.90802, abs=1e-5)


def test_42_a_shared_linear_is_one_on_every_stage(pool: WorkerPool, folder: Path) -> None:
    found = run(42, pool, folder, loss="sum", microbatch_size=1, num_microbatches=1)
    assert [stage.param_count for stage in found.price.stages] == [10100, 10100]
    assert read_plan(folder / "plan.py").layers == ("p", "q", "r")

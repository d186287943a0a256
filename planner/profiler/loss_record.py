"""The loss of a capture as the profile keeps it: changed so that microbatches add up, and what is to be told of it."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from planner.arguments import Ref, leaves
from planner.model_file import ModelFile
from planner.model_profile import Count, Loss
from planner.profiler import user_code as user
from planner.profiler.blocks import find_blocks, select_calls
from planner.profiler.capture import Capture
from planner.profiler.loss import Meaning, read_meaning
from planner.profiler.one_recording import map_tensors, named_tensors
from planner.profiler.recording import Call
from planner.profiler.row_numbers import row_number_couplings
from planner.program import Program


def read_loss(captured: Capture, blocks: tuple[str, ...]) -> tuple[Capture, list[Call], Meaning]:
    """Return the capture with the calls of its loss changed, the calls of the model's program, and what was found.

    Modules inside which a loss divides by a count are opened, but for blocks: there it is told.
    """
    sources = {str(number): name for name, number in [*captured.inputs.items(), *captured.targets.items()]}
    select_calls(captured.model, captured.calls, blocks)  # tells which of them is no module
    kept = set(find_blocks(captured.model))
    kept |= {f"{name}.{child}" for name in blocks for child, _ in captured.model.get_submodule(name).named_children()}
    kept |= {name for name, m in captured.model.named_modules() if m._forward_hooks or m._forward_pre_hooks}
    opened: frozenset[str] = frozenset()
    while True:
        calls = select_calls(captured.model, captured.calls, blocks, opened)
        meaning = read_meaning(
            captured.model,
            calls,
            list(captured.loss_calls),
            captured.output,
            captured.loss,
            captured.tensors,
            sources,
        )
        more = meaning.inside - kept - opened
        if not more:
            break
        opened |= more
    if closed := sorted(meaning.inside - opened):
        text = f"{closed[0]}: divides by a count of the batch inside a block, which stays one call"
        meaning = replace(meaning, coupled=(*meaning.coupled, text))
    if numbered := row_number_couplings(captured.calls, captured.tensors):
        meaning = replace(meaning, coupled=(*meaning.coupled, *numbered))
    changed = replace(
        captured,
        loss_calls=tuple(meaning.loss_calls),
        output=meaning.output,
        loss=meaning.loss,
        tensors=meaning.tensors,
    )
    return changed, meaning.calls, meaning


def target_variables(captured: Capture, taken: Iterable[str]) -> dict[str, str]:
    """Return for each name of a tensor of the target the variable that stands for it, none of the model's inputs'."""
    taken = set(taken)
    return {name: f"loss_{name}" if name in taken else name for name in captured.targets}


def loss_record(
    file: ModelFile,
    captured: Capture,
    meaning: Meaning,
    calls: list[Call],
    with_loss: Program,
    target_names: Mapping[str, str],
) -> Loss | None:
    """Return what the profile keeps of the loss, None where nothing was found; `with_loss` is built from all calls."""
    names: dict[str, str] = {}
    for call, node in zip([*calls, *captured.loss_calls], with_loss.nodes, strict=True):
        made, named = leaves(call.result), leaves(node.result)
        names.update({a.name: b.name for a, b in zip(made, named, strict=True) if isinstance(a, Ref)})
    counts = tuple(Count(value=names[number], over=over) for number, over in meaning.counts.items())
    if not (counts or meaning.coupled or meaning.ignored or meaning.degree):
        return None
    nodes = with_loss.nodes[len(calls) :] if meaning.rewrites_loss else ()
    targets = None
    if nodes and captured.targets:
        target = user.example_target(file, 2)
        order = iter(target_names[name] for name, _ in named_tensors({"target": target}))
        targets = map_tensors(target, lambda _: Ref(next(order)))
    used = {name for node in nodes for name in (*node.reads(), *node.writes())} | set(target_names.values())
    return Loss(
        nodes=nodes,
        value=with_loss.output if nodes else None,
        targets=targets,
        tensors={name: tensor for name, tensor in with_loss.tensors.items() if name in used} if nodes else {},
        counts=counts,
        degree=meaning.degree,
        coupled=meaning.coupled,
        ignored=meaning.ignored,
    )

"""A schedule as a text picture: one line per device group, time to the right.

    stage 0  |F0..F1..        B0::::::F2..B1::::::B2::::::|
    stage 1  |    F0..B0::::::F1..B1::::::F2..B2::::::    |

A forward is drawn with dots, a backward with colons, the gradients of weights, where they run apart, with dashes; idle
time is blank. Where a group holds several stages, each action begins with its stage: '2F0.'. Widths follow the stages'
predicted times; messages between stages are left out.
"""

from planner.cost.simulation import Message, play
from planner.plan import SPLIT_SCHEDULES, Plan
from planner.report.text import rank_ranges
from planner.schedule import Action, group_actions

WIDTH = 100
FILL = {"F": ".", "B": ":", "I": ":", "W": "-"}
LEAST_SHOWN = 8  # microbatches, or twice the stages: beyond, the picture shows the beginning only


def timeline(plan: Plan, *, width: int = WIDTH) -> str:
    """Return the picture of a priced plan's schedule; its beginning where the whole has too many actions."""
    assert plan.prediction is not None
    stages, groups = plan.prediction.stages, plan.groups
    shown = min(plan.num_microbatches, max(2 * plan.pp_degree, LEAST_SHOWN))
    actions = group_actions(plan.schedule, len(groups), shown, plan.num_chunks)
    played = play(
        actions,
        [stage.forward_time_s for stage in stages],
        [stage.backward_time_s for stage in stages],
        [Message(s, s + 1, 0.0, 0.0) for s in range(len(stages) - 1) if plan.stages[s].gpus != plan.stages[s + 1].gpus],
        [0.0] * len(groups),
        [stage.backward_time_s - stage.weight_time_s for stage in stages],
        [stage.weight_time_s for stage in stages],
    )
    end = max(played.group_ends_s)
    names = [f"stage {group[0]:<3}" if len(group) == 1 else f"stages {rank_ranges(group)} " for group in groups]
    margin = max(map(len, names))
    lines = []
    for group, todo in enumerate(actions):
        cells = [" "] * width
        for action, start, stop in zip(todo, played.starts_s[group], played.ends_s[group], strict=True):
            first = round(start / end * width) if end else 0
            last = max(first, round(stop / end * width) - 1) if end else 0
            cells[first : last + 1] = _box(action, last + 1 - first, with_stage=plan.num_chunks > 1)
        lines.append(f"{names[group]:<{margin}}|{''.join(cells[:width])}|")
    more = f"; the first {shown} of {plan.num_microbatches} microbatches" if shown < plan.num_microbatches else ""
    kinds = "F: forward '.', B: backward ':'"
    if plan.schedule in SPLIT_SCHEDULES:
        kinds = "F: forward '.', I: gradients of inputs ':', W: of weights '-'"
    each = "with its stage and microbatch" if plan.num_chunks > 1 else "with its microbatch"
    lines.append(f"{kinds}, each {each}; blank: idle{more}")
    return "\n".join(lines)


def _box(action: Action, width: int, *, with_stage: bool) -> list[str]:
    """Return an action drawn over `width` characters, as 'F3...' or '2F3..'; less of it where there is no room."""
    labels = [*([str(action)] if with_stage else []), f"{action.kind}{action.microbatch}", action.kind]
    label = next((label for label in labels if len(label) <= width), action.kind)
    return list(label.ljust(width, FILL[action.kind])[:width])

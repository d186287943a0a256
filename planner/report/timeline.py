"""A schedule as a text picture: one line per stage, time to the right.

    stage 0  |F0..F1..        B0::::::F2..B1::::::B2::::::|
    stage 1  |    F0..B0::::::F1..B1::::::F2..B2::::::    |

A forward is drawn with dots, a backward with colons, idle time is blank. Widths follow the stages' predicted times;
messages between stages are left out.
"""

from planner.cost.simulation import Message, play
from planner.plan import Plan
from planner.schedule import group_actions

WIDTH = 100
LEAST_SHOWN = 8  # microbatches, or twice the stages: beyond, the picture shows the beginning only


def timeline(plan: Plan, *, width: int = WIDTH) -> str:
    """Return the picture of a priced plan's schedule; its beginning where the whole has too many actions."""
    assert plan.prediction is not None
    stages = plan.prediction.stages
    shown = min(plan.num_microbatches, max(2 * plan.pp_degree, LEAST_SHOWN))
    actions = group_actions(plan.schedule, plan.pp_degree, shown)
    played = play(
        actions,
        [stage.forward_time_s for stage in stages],
        [stage.backward_time_s for stage in stages],
        [Message(s, s + 1, 0.0, 0.0) for s in range(plan.pp_degree - 1)],
        [0.0] * plan.pp_degree,
    )
    end = max(played.group_ends_s)
    lines = []
    for s, todo in enumerate(actions):
        cells = [" "] * width
        for action, start, stop in zip(todo, played.starts_s[s], played.ends_s[s], strict=True):
            first = round(start / end * width) if end else 0
            last = max(first, round(stop / end * width) - 1) if end else 0
            cells[first : last + 1] = _box(action.kind, action.microbatch, last + 1 - first)
        lines.append(f"stage {s:<3}|{''.join(cells[:width])}|")
    more = f"; the first {shown} of {plan.num_microbatches} microbatches" if shown < plan.num_microbatches else ""
    lines.append(f"F: forward '.', B: backward ':', each with its microbatch; blank: idle{more}")
    return "\n".join(lines)


def _box(kind: str, microbatch: int, width: int) -> list[str]:
    """Return an action drawn over `width` characters: 'F3...' or 'B3:::'; the kind alone where there is no room."""
    label = f"{kind}{microbatch}"
    if len(label) > width:
        label = kind
    return list(label.ljust(width, "." if kind == "F" else ":")[:width])

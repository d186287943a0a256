"""Drawn schedules, and the messages of their chains of stages."""

from hypothesis import strategies as st

from planner.cost.simulation import Message
from planner.plan import FEWEST_CHUNKS, MOST_CHUNKS, SCHEDULES, Schedule, group_of_stage


@st.composite
def schedule_cases(
    draw: st.DrawFn, *, max_groups: int, max_microbatches: int, max_chunks: int
) -> tuple[Schedule, int, int, int]:
    """Draw (schedule, groups, microbatches, chunks): the arguments of `schedule.group_actions`."""
    schedule = draw(st.sampled_from(SCHEDULES))
    fewest, most = FEWEST_CHUNKS[schedule], MOST_CHUNKS.get(schedule, max_chunks)
    groups, microbatches = draw(st.integers(1, max_groups)), draw(st.integers(1, max_microbatches))
    return schedule, groups, microbatches, draw(st.integers(fewest, most))


def chain_messages(schedule: Schedule, groups: int, chunks: int) -> list[Message]:
    """Return messages that take no time, from every stage to the next one, where that is on another group."""
    on = [group_of_stage(schedule, groups, stage) for stage in range(groups * chunks)]
    return [Message(s, s + 1, 0.0, 0.0) for s in range(len(on) - 1) if on[s] != on[s + 1]]

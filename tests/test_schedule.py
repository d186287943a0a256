"""The action lists, drawn, and what every schedule keeps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.plan import SCHEDULES, Schedule
from planner.schedule import Action, num_in_flight, stage_actions

GRIDS = {
    ("gpipe", 2, 3): """
        0F0 0F1 0F2 0B0 0B1 0B2
        1F0 1F1 1F2 1B0 1B1 1B2
    """,
    ("1f1b", 2, 3): """
        0F0 0F1 0B0 0F2 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2
    """,
    ("1f1b", 4, 6): """
        0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0B3 0B4 0B5
        1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5
        2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2B5
        3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5
    """,
    ("1f1b", 3, 2): """
        0F0 0F1 0B0 0B1
        1F0 1F1 1B0 1B1
        2F0 2B0 2F1 2B1
    """,
    ("1f1b", 1, 2): "0F0 0B0 0F1 0B1",
}


@pytest.mark.parametrize(("case", "grid"), GRIDS.items(), ids=str)
def test_actions_are_as_drawn(case: tuple[Schedule, int, int], grid: str) -> None:
    drawn = [line.split() for line in grid.strip().splitlines()]
    assert [[str(action) for action in actions] for actions in stage_actions(*case)] == drawn


@given(st.sampled_from(SCHEDULES), st.integers(1, 9), st.integers(1, 12))
def test_every_microbatch_runs_once_and_forward_first(schedule: Schedule, stages: int, microbatches: int) -> None:
    for stage, actions in enumerate(stage_actions(schedule, stages, microbatches)):
        for kind in ("F", "B"):
            assert [a.microbatch for a in actions if a.kind == kind] == list(range(microbatches))
        held = most = 0
        for action in actions:
            held += 1 if action.kind == "F" else -1
            assert held >= 0
            most = max(most, held)
        assert most == num_in_flight(schedule, stages, microbatches, stage)


@given(st.sampled_from("FB"), st.integers(0, 99), st.integers(0, 999))
def test_actions_read_back(kind: str, stage: int, microbatch: int) -> None:
    action = Action("F" if kind == "F" else "B", stage, microbatch)
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", ["", "F0", "0F", "0W1", "0F1 ", "-1F0"])
def test_other_text_is_no_action(text: str) -> None:
    with pytest.raises(ValueError, match="is no action"):
        Action.parse(text)

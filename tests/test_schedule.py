"""The action lists, drawn, and what every schedule keeps."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import chain_messages, schedule_cases

from planner.cost.simulation import Played, play
from planner.plan import SPLIT_SCHEDULES, Schedule
from planner.schedule import Action, group_actions, held_at_once, num_in_flight, stages_of_group

Case = tuple[Schedule, int, int, int]

# (schedule, groups, microbatches, chunks). 1F1B and interleaved 1F1B are figures 3 and 4 of Narayanan et al. (2021),
# "Efficient Large-Scale Language Model Training"; zero-bubble is ZB-H1, figure 3 of Qi et al. (2023); zbv is V-ZB of
# Qi et al. (2024).
GRIDS: dict[Case, str] = {
    ("gpipe", 2, 3, 1): """
        0F0 0F1 0F2 0B0 0B1 0B2
        1F0 1F1 1F2 1B0 1B1 1B2
    """,
    ("1f1b", 2, 3, 1): """
        0F0 0F1 0B0 0F2 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2
    """,
    ("1f1b", 4, 6, 1): """
        0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0B3 0B4 0B5
        1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5
        2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2B5
        3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5
    """,
    ("1f1b", 3, 2, 1): """
        0F0 0F1 0B0 0B1
        1F0 1F1 1B0 1B1
        2F0 2B0 2F1 2B1
    """,
    ("1f1b", 1, 2, 1): "0F0 0B0 0F1 0B1",
    ("interleaved-1f1b", 2, 2, 2): """
        0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """,
    ("interleaved-1f1b", 2, 4, 2): """
        0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
        1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
    """,
    # Of four microbatches' list the last is left out.
    ("interleaved-1f1b", 2, 3, 2): """
        0F0 0F1 2F0 2F1 0F2 2B0 2B1 2F2 0B0 0B1 2B2 0B2
        1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1B1 3F2 3B2 1B2
    """,
    ("interleaved-1f1b", 4, 2, 2): """
        0F0 0F1 4F0 4F1 4B0 4B1 0B0 0B1
        1F0 1F1 5F0 5F1 5B0 5B1 1B0 1B1
        2F0 2F1 6F0 6F1 6B0 6B1 2B0 2B1
        3F0 3F1 7F0 7B0 7F1 7B1 3B0 3B1
    """,
    ("zero-bubble", 4, 8, 1): """
        0F0 0F1 0F2 0F3 0I0 0W0 0F4 0I1 0W1 0F5 0I2 0W2 0F6 0I3 0W3 0F7 0I4 0W4 0I5 0W5 0I6 0W6 0I7 0W7
        1F0 1F1 1F2 1I0 1F3 1I1 1W0 1F4 1I2 1W1 1F5 1I3 1W2 1F6 1I4 1W3 1F7 1I5 1W4 1I6 1W5 1I7 1W6 1W7
        2F0 2F1 2I0 2F2 2I1 2F3 2I2 2W0 2F4 2I3 2W1 2F5 2I4 2W2 2F6 2I5 2W3 2F7 2I6 2W4 2I7 2W5 2W6 2W7
        3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3W0 3F4 3I4 3W1 3F5 3I5 3W2 3F6 3I6 3W3 3F7 3I7 3W4 3W5 3W6 3W7
    """,
    ("zero-bubble", 2, 2, 2): """
        0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
        1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1
    """,
    ("zbv", 2, 3, 2): """
        0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
        1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
    """,
    ("zbv", 3, 6, 2): """
        0F0 0F1 0F2 0F3 0F4 5F0 5I0 5W0 5F1 5I1 5W1 5F2 5I2 5W2 0F5 0I0 0W0 5F3 5I3 5W3 0I1 0W1 5F4 5I4 5W4 0I2 0W2 5F5 5I5 5W5 0I3 0W3 0I4 0W4 0I5 0W5
        1F0 1F1 1F2 4F0 1F3 4F1 4I0 4W0 4F2 4I1 4W1 1F4 1I0 1W0 4F3 4I2 4W2 1F5 1I1 1W1 4F4 4I3 4W3 1I2 1W2 4F5 4I4 4W4 1I3 4I5 1I4 1W3 1I5 4W5 1W4 1W5
        2F0 3F0 2F1 3F1 2F2 3F2 3I0 3W0 2F3 2I0 2W0 3F3 3I1 3W1 2F4 2I1 2W1 3F4 3I2 3W2 2F5 2I2 2W2 3F5 3I3 3W3 2I3 3I4 2I4 3I5 2I5 2W3 3W4 2W4 3W5 2W5
    """,  # noqa: E501
}  # fmt: skip


def equal_turns(case: Case) -> Played:
    """Return a step in which every action takes a second and messages none."""
    schedule, groups, _, chunks = case
    stages = groups * chunks
    seconds = [1.0] * stages
    actions = group_actions(*case)
    return play(actions, seconds, seconds, chain_messages(schedule, groups, chunks), [0.0] * groups, seconds, seconds)


@pytest.mark.parametrize(("case", "grid"), GRIDS.items(), ids=str)
def test_actions_are_as_drawn(case: Case, grid: str) -> None:
    drawn = [line.split() for line in grid.strip().splitlines()]
    assert [[str(action) for action in actions] for actions in group_actions(*case)] == drawn


@given(schedule_cases(max_groups=8, max_microbatches=12, max_chunks=4))
@settings(max_examples=200)
def test_every_microbatch_runs_once_and_nothing_waits_for_ever(case: Case) -> None:
    schedule, groups, microbatches, chunks = case
    equal_turns(case)
    kinds = ("F", "I", "W") if schedule in SPLIT_SCHEDULES else ("F", "B")
    for group, actions in enumerate(group_actions(*case)):
        own = stages_of_group(schedule, groups, chunks, group)
        for stage in own:
            for kind in kinds:
                found = [a.microbatch for a in actions if (a.stage, a.kind) == (stage, kind)]
                assert found == list(range(microbatches))
        assert len(actions) == len(own) * microbatches * len(kinds)
        position = {(a.kind, a.stage, a.microbatch): index for index, a in enumerate(actions)}
        for microbatch in range(microbatches):
            for stage in own:  # forward before backward before weights
                order = [position[kind, stage, microbatch] for kind in kinds]
                assert order == sorted(order)
            # Between stages of one group no message says when: the list does.
            for kind in kinds[:2]:
                order = [position[kind, stage, microbatch] for stage in own]
                assert order == sorted(order, reverse=kind != "F")


@given(schedule_cases(max_groups=6, max_microbatches=12, max_chunks=3))
def test_what_is_held_at_once_follows_the_lists(case: Case) -> None:
    schedule, groups, microbatches, chunks = case
    for group, actions in enumerate(group_actions(*case)):
        own = stages_of_group(schedule, groups, chunks, group)
        held = {(stage, kind): 0 for stage in own for kind in ("before", "after")}
        states, most = set(), dict.fromkeys(own, 0)
        for action in actions:
            if action.kind == "F":
                held[action.stage, "before"] += 1
            elif action.kind == "W":
                held[action.stage, "after"] -= 1
            else:
                held[action.stage, "before"] -= 1
                held[action.stage, "after"] += action.kind == "I"
            assert min(held.values()) >= 0
            kinds = ("before", "after") if schedule in SPLIT_SCHEDULES else ("before",)
            states.add(tuple(held[stage, kind] for kind in kinds for stage in own))
            for stage in own:
                most[stage] = max(most[stage], held[stage, "before"] + held[stage, "after"])
        rows = {tuple(row) for row in held_at_once(*case)[group].tolist()}
        assert rows == states or (schedule in ("1f1b", "gpipe") and rows == {max(states)})
        for chunk, stage in enumerate(own):
            assert most[stage] == num_in_flight(schedule, groups, microbatches, group, chunks, chunk)


@pytest.mark.parametrize("groups", [1, 2, 4, 7])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_bubbles_are_as_published(groups: int, chunks: int) -> None:
    m = 2 * groups
    if chunks == 1:
        assert max(equal_turns(("1f1b", groups, m, 1)).group_ends_s) == 2 * m + 2 * (groups - 1)
    else:  # (p - 1) / chunks of a stage's forward and backward
        assert max(equal_turns(("interleaved-1f1b", groups, m, chunks)).group_ends_s) == 2 * m * chunks + 2 * groups - 2
    # ZB-H1: (p - 1) * (F + I - W), a third of 1F1B's (p - 1) * (F + I + W)
    assert max(equal_turns(("zero-bubble", groups, m, chunks)).group_ends_s) == 3 * m * chunks + groups - 1
    played = equal_turns(("zbv", groups, m, 2))
    for group in range(groups):  # no bubble but at the start, of half stages
        assert played.starts_s[group][0] == group
        assert played.ends_s[group][-1] - played.starts_s[group][0] == 6 * m


@given(schedule_cases(max_groups=8, max_microbatches=24, max_chunks=4))
def test_zero_bubbles_hold_what_1f1b_holds_at_most(case: Case) -> None:
    schedule, groups, _, chunks = case
    most = [int(rows.sum(axis=1).max()) for rows in held_at_once(*case)]
    if schedule in SPLIT_SCHEDULES:  # chunks are that much smaller
        assert max(most) <= groups * chunks
    if schedule == "interleaved-1f1b":
        assert all(held <= (chunks - 1) * groups + 2 * (groups - g) - 1 for g, held in enumerate(most))


@given(st.sampled_from("FBIW"), st.integers(0, 99), st.integers(0, 999))
def test_actions_read_back(kind: str, stage: int, microbatch: int) -> None:
    text = f"{stage}{kind}{microbatch}"
    action = Action.parse(text)
    assert (action.kind, action.stage, action.microbatch) == (kind, stage, microbatch)
    assert str(action) == text


@pytest.mark.parametrize("text", ["", "F0", "0F", "0X1", "0F1 ", "-1F0"])
def test_other_text_is_no_action(text: str) -> None:
    with pytest.raises(ValueError, match="is no action"):
        Action.parse(text)


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 2), ("gpipe", 2), ("interleaved-1f1b", 1), ("zbv", 1)])
def test_schedules_have_their_numbers_of_chunks(schedule: Schedule, chunks: int) -> None:
    with pytest.raises(ValueError, match=f"num_chunks {chunks}"):
        group_actions(schedule, 2, 4, chunks)

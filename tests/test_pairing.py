"""Who sends what to whom between stages that are divided differently: drawn, and for every pair of small degrees."""

from collections import Counter
from itertools import product

import pytest

from planner.pairing import Layout, Slice, parameter_slices, row_slices, slices

DEGREES = [(tp, dp) for tp, dp in product((1, 2, 3, 4), (1, 2, 3, 4, 6))]


def drawn(found: tuple[Slice, ...]) -> str:
    """Return who sends which rows to whom: '0>1:2-3' is row 2, from position 0 to position 1."""
    return " ".join(f"{piece.source}>{piece.target}:{piece.start}-{piece.stop}" for piece in found)


@pytest.mark.parametrize(
    ("degrees", "rows", "picture"),
    [
        ((1, 1, 1, 1), 4, "0>0:0-4"),
        ((2, 2, 2, 2), 4, "0>0:0-2 1>1:0-2 2>2:2-4 3>3:2-4"),
        ((2, 1, 1, 1), 4, "0>0:0-4"),
        ((1, 1, 2, 1), 4, "0>0:0-4 0>1:0-4"),
        ((1, 2, 1, 1), 4, "0>0:0-2 1>0:2-4"),
        ((1, 1, 1, 2), 4, "0>0:0-2 0>1:2-4"),
        ((1, 2, 1, 3), 6, "0>0:0-2 0>1:2-3 1>1:3-4 1>2:4-6"),
        ((1, 1, 1, 3), 6, "0>0:0-2 0>1:2-4 0>2:4-6"),
        ((2, 1, 1, 2), 4, "0>0:0-2 1>1:2-4"),  # each of the two ranks that have the rows serves one replica
        ((1, 2, 2, 1), 4, "0>0:0-2 0>1:0-2 1>0:2-4 1>1:2-4"),
        ((4, 1, 2, 2), 4, "0>0:0-2 1>1:0-2 2>2:2-4 3>3:2-4"),
    ],
)
def test_row_slices_as_drawn(degrees: tuple[int, int, int, int], rows: int, picture: str) -> None:
    assert drawn(row_slices(*degrees, rows)) == picture


@pytest.mark.parametrize(("source", "target"), list(product(DEGREES, DEGREES)))
def test_every_rank_gets_the_rows_of_its_replica_once_from_a_rank_that_has_them(
    source: tuple[int, int], target: tuple[int, int]
) -> None:
    (tp_a, dp_a), (tp_b, dp_b) = source, target
    rows = 12
    received: dict[int, list[int]] = {position: [] for position in range(tp_b * dp_b)}
    served: Counter[int] = Counter()
    for piece in row_slices(tp_a, dp_a, tp_b, dp_b, rows):
        first = piece.source // tp_a * (rows // dp_a)  # the sender's replica has these rows
        assert first <= piece.start < piece.stop <= first + rows // dp_a
        received[piece.target] += range(piece.start, piece.stop)
        served[piece.source] += 1
    for position, got in received.items():
        own = position // tp_b * (rows // dp_b)
        assert got == list(range(own, own + rows // dp_b))
    for replica in range(dp_a):
        counts = [served[replica * tp_a + index] for index in range(tp_a)]
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(("tp", "dp"), DEGREES)
def test_equal_stages_talk_position_to_position(tp: int, dp: int) -> None:
    pairs = [(piece.source, piece.target) for piece in row_slices(tp, dp, tp, dp)]
    assert pairs == [(position, position) for position in range(tp * dp)]


def test_rows_that_do_not_divide_are_no_slices() -> None:
    with pytest.raises(ValueError, match="4 is not divided by 1 and by 3 pieces"):
        row_slices(1, 1, 1, 3, 4)
    with pytest.raises(ValueError, match="5 is not divided by 2 and by 1 pieces"):
        slices([[0], [1]], [[0]], 5)


LAYOUTS = [
    Layout(tp, dp, shard, divided)
    for tp, dp, divided in product((1, 2, 4), (1, 2, 4), (False, True))
    for shard in (1, 2, 4)
    if dp % shard == 0
]


def test_neighbouring_replicas_share_one_copy() -> None:
    assert Layout(1, 4, 2, divided=False).holders == [[0, 2], [1, 3]]
    assert Layout(2, 2, 2, divided=True).holders == [[0], [2], [1], [3]]
    assert Layout(2, 2, 1, divided=True).holders == [[0, 2], [1, 3]]
    assert Layout(2, 2, 1, divided=False).holders == [[0, 1, 2, 3]]


@pytest.mark.parametrize("source", LAYOUTS)
def test_every_gpu_gets_the_parts_of_a_parameter_that_it_holds(source: Layout) -> None:
    for target in LAYOUTS:
        found = parameter_slices(source, target)
        length = max(piece.stop for piece in found)
        held = {p: index for index, holders in enumerate(source.holders) for p in holders}
        wanted = {p: index for index, holders in enumerate(target.holders) for p in holders}
        assert sorted(wanted) == list(range(target.tp_degree * target.dp_degree))
        received: dict[int, list[int]] = {position: [] for position in wanted}
        for piece in found:
            size = length // source.num_pieces
            assert held[piece.source] * size <= piece.start < piece.stop <= (held[piece.source] + 1) * size
            received[piece.target] += range(piece.start, piece.stop)
        size = length // target.num_pieces
        for position, got in received.items():
            assert got == list(range(wanted[position] * size, (wanted[position] + 1) * size))
        if source == target:
            assert all(piece.source == piece.target for piece in found)

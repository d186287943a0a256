"""Bounds of pipelines whose stages have their own degrees, against every such pipeline played by the cost model."""

import random
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, product

import numpy as np
import pytest
from numpy.typing import NDArray

from planner.cost.simulation import Message, play
from planner.schedule import group_actions
from planner.solver.core.pipeline import Chain, Option, Piece
from planner.solver.core.pipelines import Pipelines

Floats = NDArray[np.float64]


class DrawnRemaking:
    """Recomputation that grows with the microbatches in flight, and is impossible for long stages."""

    def __init__(self, draw: random.Random, num_layers: int, num_options: int) -> None:
        self.rate = draw.choice([0.0, 0.0, 0.3])
        self.most = [draw.randint(1, num_layers) * draw.choice([1, 100]) for _ in range(num_options)]

    def one(self, option: int, in_flight: int, first: int, stop: int) -> float:
        held = (stop - first) * min(in_flight, 3)
        return float("inf") if held > 3 * self.most[option] else self.rate * held

    def seconds(self, option: int, in_flight: int, firsts: NDArray[np.int64], stops: NDArray[np.int64]) -> Floats:
        return np.array([self.one(option, in_flight, a, b) for a, b in zip(firsts, stops, strict=True)], dtype=float)


def over_stages(values: Sequence[float]) -> Floats:
    sums = np.concatenate(([0.0], np.cumsum(values)))
    return np.asarray(sums[None, :] - sums[:, None], dtype=np.float64)


def draw_chain(seed: int) -> Chain:
    """Return a problem of a few layers: times, degrees, messages, and what is done once a step are drawn."""
    draw = random.Random(seed)
    count, gpus, schedule = draw.randint(2, 5), draw.randint(1, 5), draw.choice(("1f1b", "1f1b", "gpipe"))
    forward = [draw.choice([0.0, draw.uniform(0.1, 3.0)]) for _ in range(count)]
    backward = [draw.uniform(0.0, 5.0) for _ in range(count)]
    options = []
    message = draw.choice([0.0, 2.0])
    for _ in range(draw.randint(1, 3)):
        size = draw.randint(1, 3)
        speed, once = size * draw.uniform(0.6, 1.0), draw.choice([0.0, 2.0])
        options.append(
            Option(
                gpus=size,
                forward=over_stages([f / speed for f in forward]),
                backward=over_stages([b / speed for b in backward]),
                layer_forward=np.array(forward) / speed,
                layer_backward=np.array(backward) / speed,
                ready=over_stages([once * draw.random() for _ in range(count)]),
                tail=over_stages([once * draw.random() for _ in range(count)]),
                arrive=np.array([message * draw.random() for _ in range(count + 1)]),
                back=np.array([message * draw.random() for _ in range(count + 1)]),
            )
        )
    m = draw.randint(1, 7)
    return Chain(
        num_layers=count,
        num_gpus=gpus,
        num_microbatches=m,
        schedule=schedule,
        options=options,
        remaking=DrawnRemaking(draw, count, len(options)),
        latency_s=draw.choice([0.0, 0.1]),
        stage_counts=frozenset(range(1, (m if schedule == "1f1b" else count) + 1)),
        linked=draw.random() < 0.9,
    )


def all_pieces(chain: Chain) -> Iterator[list[Piece]]:
    for stages in range(1, chain.num_layers + 1):
        if stages not in chain.stage_counts:
            continue
        for cuts in combinations(range(1, chain.num_layers), stages - 1):
            for chosen in product(range(len(chain.options)), repeat=stages):
                if sum(chain.options[k].gpus for k in chosen) <= chain.num_gpus:
                    spans = pairwise([0, *cuts, chain.num_layers])
                    yield [Piece(a, b, k) for (a, b), k in zip(spans, chosen, strict=True)]


def step_s(chain: Chain, pieces: Sequence[Piece]) -> float:
    """Return the step time as `cost` plays it; inf where a stage does not fit."""
    stages = len(pieces)
    forward, backward, ready, tail = [], [], [], []
    for s, piece in enumerate(pieces):
        option, span = chain.options[piece.option], (piece.first, piece.stop)
        in_flight = chain.num_microbatches if chain.schedule == "gpipe" else min(chain.num_microbatches, stages - s)
        assert isinstance(chain.remaking, DrawnRemaking)
        remade = chain.remaking.one(piece.option, in_flight, piece.first, piece.stop)
        if remade == float("inf"):
            return remade
        forward.append(float(option.forward[span]))
        backward.append(float(option.backward[span]) + remade)
        ready.append(float(option.ready[span]))
        tail.append(float(option.tail[span]))
    messages = []
    for s, (piece, later) in enumerate(pairwise(pieces)):
        there = float(chain.options[later.option].arrive[piece.stop])
        back = float(chain.options[piece.option].back[piece.stop])
        messages.append(Message(s, s + 1, there, chain.latency_s, back, chain.latency_s, has_gradient=chain.linked))
    if not chain.linked:
        messages = []
    played = play(group_actions(chain.schedule, stages, chain.num_microbatches), forward, backward, messages, ready)
    return max(end + own for end, own in zip(played.group_ends_s, tail, strict=True))


@pytest.mark.parametrize("block", range(6))
def test_what_is_refuted_has_no_plan(block: int) -> None:
    """What `decide` refutes is below the best plan; and a limit that is no less than the best plan is not refuted."""
    refuted, near = 0, 0
    for seed in range(60 * block, 60 * block + 60):
        chain = draw_chain(seed)
        best = min((step_s(chain, pieces) for pieces in all_pieces(chain)), default=float("inf"))
        pipelines = Pipelines(chain)
        if best == float("inf"):
            assert pipelines.decide(1e6, 1e3), seed
            continue
        assert not pipelines.decide(best * (1 + 1e-9), 1e-3 * best), seed
        for share in (0.5, 0.8, 0.95, 0.99):
            if pipelines.decide(share * best, 1e-3 * best):
                refuted += 1
                near += share >= 0.95
    assert refuted > 120
    assert near > 30, "the bound is near to the best plan in many cases"


@pytest.mark.parametrize("seed", range(40))
def test_stages_found_keep_to_the_bound(seed: int) -> None:
    chain = draw_chain(seed)
    pipelines = Pipelines(chain)
    known = [pieces for pieces in all_pieces(chain) if step_s(chain, pieces) < float("inf")]
    if not known:
        return
    for pieces in known:
        assert pipelines.station_s(pieces) <= step_s(chain, pieces) * (1 + 1e-9)
    limit = 1.1 * min(step_s(chain, pieces) for pieces in known)
    found = pipelines.find(limit, 0.0, limit)
    assert found is not None
    assert found in known
    assert pipelines.total_s(found) <= limit * (1 + 1e-9)

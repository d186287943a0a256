"""The integer program of a layer against brute force: every assignment of rows, priced by rules written here anew."""

from collections.abc import Iterator
from math import prod

import pytest
from torch import nn
from torch.nn import functional as F

from planner.arguments import ParamRef, Ref, leaves
from planner.profiler.blocks import select_calls
from planner.profiler.capture import capture
from planner.profiler.classes import layer_body, open_class
from planner.tp_rules.integer_program import Problem
from planner.tp_rules.layer import Row, Tables
from planner.tp_rules.state import ENTERED, PARTIAL, WHOLE, Shard, State
from planner.tp_rules.tables import build_tables
from tests.zoo import models

WIDTH = 8


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Gated(nn.Module):
    """Two ways in, one out; the second half of the sum is not divided."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 12), nn.Linear(WIDTH, 12)
        self.down = nn.Linear(12, WIDTH, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Side(nn.Module):
    """Two divided parts whose sums meet, and a product in the way of one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.b(self.a(x).tanh()) + self.c(x) * 2 + x


class Chain(nn.Module):
    """An odd size between: what does not divide stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(WIDTH, 5), nn.Linear(5, 6), nn.Linear(6, WIDTH)

    def forward(self, x):
        return self.c(self.b(self.a(x).relu()).relu())


LAYERS = (Mlp, Gated, Side, Chain)


def tables_of(layer: type[nn.Module], degree: int = 2) -> Tables:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(layer() for _ in range(2))

        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            return x

    models.INPUTS[Model] = models._floats
    captured = capture(models.model_file(Model))
    call = next(c for c in select_calls(captured.model, captured.calls) if c.target == "blocks.0")
    return build_tables(layer_body(captured, call, open_class(captured, call)), degree)


def assignments(tables: Tables) -> Iterator[dict[str, Row]]:
    """Yield every choice of rows by which each parameter has one state."""
    names = [node.name for node in tables.nodes]

    def extend(position: int, chosen: dict[str, Row], kept: dict[str, State]) -> Iterator[dict[str, Row]]:
        if position == len(names):
            yield dict(chosen)
            return
        for row in tables.rows[names[position]]:
            own = {operand.name: state for operand, state in row.needs if isinstance(operand, ParamRef)}
            if all(kept.get(name, state) == state for name, state in own.items()):
                chosen[names[position]] = row
                yield from extend(position + 1, chosen, kept | own)

    yield from extend(0, {}, {})


def price(tables: Tables, chosen: dict[str, Row]) -> tuple[int, int] | None:
    """Return divided elements and communicated bytes (an all-reduce counts twice); None where states can't be had."""
    body, total = tables.layer.body, 0
    made: dict[str, State] = dict.fromkeys(body.inputs, WHOLE)
    for row in chosen.values():
        made |= dict(row.makes)
    wanted: dict[str, set[State]] = {}
    for row in chosen.values():
        for operand, state in row.needs:
            if isinstance(operand, Ref):
                wanted.setdefault(operand.name, set()).add(state)
    for leaf in leaves(body.output):
        wanted.setdefault(leaf.name, set()).add(WHOLE)
    for name, states in wanted.items():
        missing = states - {made[name]}
        num_bytes = body.tensors[name].num_bytes(1)
        if any(isinstance(state, Shard) for state in missing):
            return None
        if made[name] == WHOLE:
            total += 2 * num_bytes * (ENTERED in missing)  # as a term of a sum it costs nothing
        elif made[name] == PARTIAL:
            total += 2 * num_bytes * (len(missing) > 0) + 2 * num_bytes * (ENTERED in missing)
        elif missing:
            return None
    sizes = {f"{t}.{n}": shape for t, info in tables.layer.modules.items() for n, shape in info.parameters.items()}
    divided = {
        operand.name
        for row in chosen.values()
        for operand, state in row.needs
        if isinstance(operand, ParamRef) and isinstance(state, Shard)
    }
    return sum(prod(sizes[name]) for name in divided if name.endswith("weight")), total


@pytest.mark.parametrize("layer", LAYERS)
def test_the_program_finds_what_brute_force_finds(layer: type[nn.Module]) -> None:
    tables = tables_of(layer)
    prices = [found for chosen in assignments(tables) if (found := price(tables, chosen)) is not None]
    assert len(set(prices)) > 1
    most = max(divided for divided, _ in prices)
    least = min(communicated for divided, communicated in prices if divided == most)
    problem = Problem(tables)
    problem.without_sequences()
    choice = problem.best(("divided", True), ("communicated", False), ("untidiness", False))
    assert choice is not None
    assert choice.optimal
    assert (choice.values["divided"], choice.values["communicated"]) == (most, least)


@pytest.mark.parametrize("layer", LAYERS)
def test_with_fewer_bytes_it_divides_the_most_that_brute_force_does(layer: type[nn.Module]) -> None:
    tables = tables_of(layer)
    prices = [found for chosen in assignments(tables) if (found := price(tables, chosen)) is not None]
    for limit in sorted({communicated for _, communicated in prices}):
        problem = Problem(tables)
        problem.without_sequences()
        problem.bound("communicated", most=limit)
        choice = problem.best(("divided", True))
        assert choice is not None
        assert choice.values["divided"] == max(divided for divided, communicated in prices if communicated <= limit)


def test_what_is_found_is_the_same_every_time() -> None:
    found = []
    for _ in range(2):
        problem = Problem(tables_of(Side))
        found.append(problem.best(("divided", True), ("communicated", False), ("untidiness", False)))
    first, second = found
    assert first is not None
    assert second is not None
    assert (first.parameters, first.moves) == (second.parameters, second.moves)

"""The best division of a layer as an integer program, solved by CP-SAT (OR-Tools).

Nodes n of the body have rows r (`tables`): states s that their operands o need, and states that their results get.
Between the node that makes a value and those that read it, a collective may move it from one state to another.

Variables, all in {0, 1}:

    y[n, r]   node n runs as row r
    p[v, s]   value v is made in state s;  q[w, s]  parameter w is kept in state s
    m[o, k]   operand o is moved by move k (`moves_of`), once for all that read it
    a[o, s]   operand o can be read in state s
    z[v, f]   value v is kept for backward in form f: whole, or divided in one way; z >= y of what reads it so

Constraints:

    (1)  sum_r y[n, r] = 1                                                for every node           `_add_nodes`
    (2)  p[v, s] = sum of y[n, r] over the rows that make v in s          n makes v first          `_add_nodes`
    (3)  y[n, r] <= a[o, s]  where row r needs o in s                                              `_add_needs`
    (4)  y[n, r] <= p[o, s]  instead, where n writes o in place, o may still be written later,     `_add_needs`
         or o is a parameter that module n holds itself
    (5)  a[o, s] <= p[o, s] + sum of m[o, k] over the moves k to s        q[w, s] for parameters   `_add_moves`
    (6)  m[o, k] <= the state that move k starts from                     no move starts from its  `_add_moves`
         own result: scatter and gather start from p, enter from a
    (7)  sum_s q[w, s] = 1, and names of one parameter have one state     for every parameter      `_add_parameters`
    (8)  p[x, whole] = 1 of inputs x, a[x, whole] = 1 of outputs x                                 `_add_ends`
    (9)  q[w, s] = 0 for states that rules rule out                       rules of the user        `restrict`

Quantities, linear in these:

    divided elements    sum of elements(w) * q[w, divided] over parameters of two or more dimensions
    communicated bytes  sum over moves of bytes(o) * weight(k)            a ring's all-reduce weighs 2, its halves 1
    activation bytes    sum of bytes(v) * degree for values that backward needs whole, bytes(v) for those divided
    untidiness          moves, parts, and computation repeated on every rank: which of equal solutions is written

They are optimized one after the other (`Problem.best`), each with those before it fixed at their optimum.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from planner.arguments import ParamRef, Ref, leaves
from planner.program import Node
from planner.sharding import MoveKind
from planner.tp_rules.aliases import VIEWS, last_writes
from planner.tp_rules.layer import Operand, Row, Tables, tensor_of
from planner.tp_rules.operations import operation_name, words
from planner.tp_rules.state import ENTERED, PARTIAL, WHOLE, Shard, State

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

MAX_DETERMINISTIC_TIME = 5.0  # CP-SAT's own measure, about seconds: the same solutions on every machine


@dataclass(frozen=True, slots=True)
class Step:
    """A collective, or a slice, that brings an operand from one state to another; weights per phase, see above."""

    operand: Operand
    kind: MoveKind
    source: State
    target: State
    forward: int
    backward: int


@dataclass(frozen=True, slots=True)
class Choice:
    """A solution: the row of every node, the state of every parameter, the moves, and what it is worth."""

    rows: Mapping[str, Row]
    parameters: Mapping[str, State]
    moves: tuple[Step, ...]
    values: Mapping[str, int]
    optimal: bool


def moves_of(tables: Tables, operand: Operand, *, gathers: bool) -> Iterator[Step]:
    """Yield the moves that an operand can make; `gathers`: also those that undo a division of parameters."""
    grad = tables.layer.needs_grad(operand)
    states = tables.states.get(operand, {})

    def move(kind: MoveKind, source: State, target: State, forward: int, backward: int) -> Step:
        return Step(operand, kind, source, target, forward, backward if grad else 0)

    if grad:
        yield move("enter", WHOLE, ENTERED, 0, 2)
    if PARTIAL in states:
        yield move("on_first", WHOLE, PARTIAL, 0, 0)
        if isinstance(operand, Ref):
            yield move("sum_ranks", PARTIAL, WHOLE, 2, 0)
    for shard in tables.shards(operand) if isinstance(operand, Ref) else []:
        if shard.sequence and PARTIAL in states:
            yield move("scatter_sum", PARTIAL, shard, 1, 1)
        if shard.sequence or shard in tables.slices.get(operand, ()):
            yield move("take_slice", WHOLE, shard, 0, 1)
            if grad:
                yield move("take_entered", ENTERED, shard, 0, 0)
        if shard.sequence or gathers:
            yield move("gather_slices", shard, WHOLE, 1, 0)
            if grad:
                yield move("gather_entered", shard, ENTERED, 1, 1)


class Problem:
    """The integer program of a layer; `gathers` allows to put divided features together again inside the layer."""

    def __init__(self, tables: Tables, *, gathers: bool = False) -> None:
        from ortools.sat.python import cp_model

        self.tables = tables
        self._model = cp_model.CpModel()
        self._gathers = gathers
        self._y: dict[tuple[str, int], Any] = {}
        self._p: dict[tuple[Operand, State], Any] = {}
        self._a: dict[tuple[Operand, State], Any] = {}
        self._m: dict[Step, Any] = {}
        self._saved: dict[tuple[Ref, State], Any] = {}
        self._writes = last_writes(tables.nodes, tables.layer.modules)
        self._add_nodes()
        self._add_parameters()
        self._add_moves()
        self._add_needs()
        self._add_ends()

    def _bool(self, name: str) -> Any:
        return self._model.new_bool_var(name)

    def _add_nodes(self) -> None:
        for name in self.tables.layer.body.inputs:
            for state in self.tables.states.get(Ref(name), {}):
                self._p[Ref(name), state] = self._model.new_constant(1 if state == WHOLE else 0)
        made = set(self.tables.layer.body.inputs)
        for node in self.tables.nodes:
            rows = self.tables.rows[node.name]
            for index in range(len(rows)):
                self._y[node.name, index] = self._bool(f"{node.name}:{index}")
            self._model.add_exactly_one(self._y[node.name, index] for index in range(len(rows)))
            for name in dict.fromkeys(node.writes()):
                if name in made or node.kind == "setitem":
                    continue
                made.add(name)
                for state in self.tables.states.get(Ref(name), {}):
                    makers = [self._y[node.name, i] for i, row in enumerate(rows) if (name, state) in row.makes]
                    self._p[Ref(name), state] = sum(makers) if makers else self._model.new_constant(0)

    def _add_parameters(self) -> None:
        tables = self.tables
        first = {name: group[0] for group in tables.layer.tied for name in group}
        shared: dict[tuple[str, State], Any] = {}
        for operand in self._parameters():
            name = first.get(operand.name, operand.name)
            states: list[State] = [WHOLE, ENTERED, *tables.shards(operand)]
            for state in states:
                if (name, state) not in shared:
                    shared[name, state] = self._bool(f"{name}:{state}")
                self._p[operand, state] = shared[name, state]
            group = [member for member in tables.layer.tied if operand.name in member]
            if not group:
                self._model.add_exactly_one(self._p[operand, state] for state in states)
        for group_names in tables.layer.tied:
            known = [key for key in shared if key[0] == group_names[0]]
            if known:
                self._model.add_exactly_one(shared[key] for key in known)

    def _parameters(self) -> list[ParamRef]:
        found: dict[ParamRef, None] = {}
        for rows in self.tables.rows.values():
            for row in rows:
                found.update((o, None) for o, _ in row.needs if isinstance(o, ParamRef))
        return list(found)

    def _add_moves(self) -> None:
        """Constraints (5) and (6)."""
        for operand in dict.fromkeys(operand for operand, _ in self._p):
            moves = list(moves_of(self.tables, operand, gathers=self._gathers))
            for move in moves:
                self._m[move] = self._bool(f"{operand}:{move.kind}:{move.target}")
            reachable = dict.fromkeys([state for o, state in self._p if o == operand] + [move.target for move in moves])
            for state in reachable:
                self._a[operand, state] = self._bool(f"{operand}:{state}")
                ways = [self._m[move] for move in moves if move.target == state]
                self._model.add(self._a[operand, state] <= self._p.get((operand, state), 0) + sum(ways))
            for move in moves:
                self._model.add(self._m[move] <= self._origin(move, moves))

    def _origin(self, move: Step, moves: Sequence[Step]) -> Any:
        """Return what a move starts from: the state that was made, or what another kind of move made of it."""
        made = self._p.get((move.operand, move.source), 0)
        if move.kind == "enter":
            return self._a[move.operand, WHOLE]
        if move.kind == "gather_entered":
            return self._a[move.operand, move.source]
        if move.kind == "take_entered":
            return made + sum(self._m[other] for other in moves if other.kind == "enter")
        return made

    def _add_needs(self) -> None:
        """Constraints (3) and (4)."""
        made: set[str] = set(self.tables.layer.body.inputs)
        for position, node in enumerate(self.tables.nodes):
            again = {name for name in node.writes() if name in made}
            read = {leaf for leaf in leaves((node.args, node.kwargs)) if isinstance(leaf, Ref | ParamRef)}
            made.update(node.writes())
            for index, row in enumerate(self.tables.rows[node.name]):
                y = self._y[node.name, index]
                for operand, state in row.needs:
                    early = operand.name in again or position <= self._writes.get(operand.name, -1)
                    as_made = operand not in read or (isinstance(operand, Ref) and early)
                    have = self._p if as_made else self._a
                    self._model.add(y <= have.get((operand, state), 0))
                for name, state in row.makes:
                    if name in again:
                        self._model.add(y <= self._p.get((Ref(name), state), 0))

    def _add_ends(self) -> None:
        for leaf in leaves(self.tables.layer.body.output):
            if isinstance(leaf, Ref):
                self._model.add(self._a[leaf, WHOLE] == 1)

    # -- what it is worth --------------------------------------------------------------------------------

    def _elements(self) -> list[tuple[ParamRef, int]]:
        layer = self.tables.layer
        sizes = dict(layer.parameter_shapes)
        for target, info in layer.modules.items():
            sizes |= {f"{target}.{name}" if target else name: shape for name, shape in info.parameters.items()}
        repeats = {name for group in layer.tied for name in group[1:]}
        shapes = [(o, sizes.get(o.name, ())) for o in self._parameters() if o.name not in repeats]
        return [(operand, prod(shape)) for operand, shape in shapes if len(shape) > 1]

    def quantity(self, name: str) -> Any:
        """Return one of the quantities of the docstring as a linear expression."""
        match name:
            case "divided":
                terms = self._elements()
                return sum(n * self._p[o, s] for o, n in terms for s in self.tables.shards(o) if (o, s) in self._p)
            case "communicated":
                return sum(self.move_bytes(move) * var for move, var in self._m.items())
            case "activations":
                return self._activations()
        steps = sum(self._m.values())
        repeated = [
            self._y[node.name, i]
            for node in self.tables.nodes
            for i, row in enumerate(self.tables.rows[node.name])
            if any(state in (ENTERED, PARTIAL) for _, state in row.makes)
        ]
        firsts = sum(
            var for move, var in self._m.items() if move.kind in ("on_first", "gather_slices", "gather_entered")
        )
        parts = sum((s.parts - 1) * var for (_, s), var in self._p.items() if isinstance(s, Shard) and s.parts > 1)
        return 2 * steps + sum(repeated) + firsts + parts

    def move_bytes(self, move: Step) -> int:
        """Return the bytes that a move communicates for one row, forward and backward; an all-reduce's count twice."""
        return (move.forward + move.backward) * tensor_of(self.tables.layer, move.operand).num_bytes(1)

    def _activations(self) -> Any:
        if not self._saved:
            for node in self.tables.nodes:
                for index, row in enumerate(self.tables.rows[node.name]):
                    for kept in saved_forms(self.tables, node, row):
                        if kept not in self._saved:
                            self._saved[kept] = self._bool(f"{kept} saved")
                        self._model.add(self._y[node.name, index] <= self._saved[kept])
        return sum(_form_bytes(self.tables, *kept) * var for kept, var in self._saved.items())

    # -- restrictions and solutions ----------------------------------------------------------------------

    def restrict(self, parameter: str, allowed: Callable[[State], bool]) -> None:
        """Constraint (9): leave a parameter only the states that are allowed."""
        for (operand, state), var in self._p.items():
            if operand == ParamRef(parameter) and not allowed(state):
                self._model.add(var == 0)

    def bound(self, name: str, *, least: int | None = None, most: int | None = None) -> None:
        """Bound a quantity."""
        if least is not None:
            self._model.add(self.quantity(name) >= least)
        if most is not None:
            self._model.add(self.quantity(name) <= most)

    def without_sequences(self) -> None:
        """Rule out that activations are divided beside the parameters."""
        for move, var in self._m.items():
            if any(isinstance(state, Shard) and state.sequence for state in (move.source, move.target)):
                self._model.add(var == 0)

    def best(self, *objectives: tuple[str, bool]) -> Choice | None:
        """Return the best solution by quantities in order (True: the most of it); None where there is none.

        Deterministic: one worker, a fixed seed, and a limit in CP-SAT's own time. Past the limit the best found so far
        is returned, which is legal; `optimal` says whether it is proven.
        """
        optimal, solver = True, None
        for name, most in objectives:
            expression = self.quantity(name)
            (self._model.maximize if most else self._model.minimize)(expression)
            found = self._solve()
            if found is None:
                break
            solver, proven = found
            optimal = optimal and proven
            value = round(solver.value(expression)) if not isinstance(expression, int) else expression
            if not isinstance(expression, int):
                self._model.add(expression >= value if most else expression <= value)
            self._hint(solver)
        return None if solver is None else self._choice(solver, optimal)

    def _solve(self) -> "tuple[cp_model.CpSolver, bool] | None":
        from ortools.sat.python import cp_model

        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        solver.parameters.max_deterministic_time = MAX_DETERMINISTIC_TIME
        status = solver.solve(self._model)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        return solver, status == cp_model.OPTIMAL

    def _hint(self, solver: "cp_model.CpSolver") -> None:
        self._model.clear_hints()  # type: ignore[no-untyped-call]
        for var in (*self._y.values(), *self._m.values(), *self._a.values()):
            self._model.add_hint(var, solver.value(var))

    def _choice(self, solver: "cp_model.CpSolver", optimal: bool) -> Choice:
        rows: dict[str, Row] = {}
        for node in self.tables.nodes:
            listed = self.tables.rows[node.name]
            rows[node.name] = next(row for i, row in enumerate(listed) if solver.value(self._y[node.name, i]))
        parameters = {
            operand.name: state
            for (operand, state), var in self._p.items()
            if isinstance(operand, ParamRef) and solver.value(var)
        }
        moves = tuple(move for move, var in self._m.items() if solver.value(var))
        values = {name: round(solver.value(self.quantity(name))) for name in ("divided", "communicated")}
        kept = {form for node in self.tables.nodes for form in saved_forms(self.tables, node, rows[node.name])}
        values["activations"] = sum(_form_bytes(self.tables, *form) for form in kept)
        return Choice(rows, parameters, moves, values, optimal)


def saved_forms(tables: Tables, node: Node, row: Row) -> set[tuple[Ref, State]]:
    """Return what autograd keeps of what a node reads, and in which form: whole, or divided in one way."""
    layer = tables.layer
    if not _saves_operands(tables, node):
        return set()
    return {
        (operand, state if isinstance(state, Shard) else WHOLE)
        for operand, state in row.needs
        if isinstance(operand, Ref) and layer.needs_grad(operand)
    }


def _form_bytes(tables: Tables, value: Ref, form: State) -> int:
    num_bytes = tables.layer.body.tensors[value.name].num_bytes(1)
    return num_bytes if isinstance(form, Shard) else tables.degree * num_bytes


def _saves_operands(tables: Tables, node: Node) -> bool:
    """Return whether autograd keeps what a node reads: products and nonlinear functions do, sums and views don't."""
    if node.kind == "module":
        return not tables.layer.modules[node.target].additive
    name = operation_name(node)
    scaled = name in _SCALING and sum(isinstance(leaf, Ref | ParamRef) for leaf in leaves(node.args)) < 2
    return not (scaled or name in VIEWS or name in _FREE)


_SCALING = frozenset({"mul", "rmul", "div", "truediv", "imul", "itruediv"})
_FREE = words("add sub radd rsub iadd isub neg sum mean cat concat stack clone where masked_fill")

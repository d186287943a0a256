"""Other ways to cut a graph into stages, each alone: beside them ours is shown. Both start where ours does.

`anneal` moves and swaps nodes between the stages that their neighbours allow; what it minimises is the sum of
load ** 16, which follows the largest load and still tells between partitions of the same one.
"""

import math
import random
import time
from collections.abc import Sequence
from typing import Any

from planner.solver.core.loads import TensorLoads

POWER = 16
HOT, COLD = 1.0, 1e-3


class Loads:
    """The loads of stages under moves of nodes."""

    def __init__(self, graph: TensorLoads, stage: Sequence[int], num_stages: int) -> None:
        self.graph, self.stage = graph, list(stage)
        self.held = [[0] * num_stages for _ in graph.tensors]  # how many of a tensor's nodes each stage has
        self.of_node: list[list[int]] = [[] for _ in stage]
        for index, tensor in enumerate(graph.tensors):
            for node in sorted({tensor.maker, *tensor.readers}):
                self.of_node[node].append(index)
                self.held[index][stage[node]] += 1
        self.touched = [sum(1 for number in row if number) for row in self.held]
        self.loads = [0.0] * num_stages
        for node, node_time in enumerate(graph.node_times):
            self.loads[stage[node]] += node_time
        for index, row in enumerate(self.held):
            for s, number in enumerate(row):
                self.loads[s] += graph.tensors[index].cost if number and self.touched[index] > 1 else 0.0
        self._average = sum(self.loads) / num_stages

    def move(self, node: int, target: int) -> float:
        """Move a node, and return what that adds to the sum of powers."""
        source = self.stage[node]
        change = {source: -self.graph.node_times[node], target: self.graph.node_times[node]}
        for index in self.of_node[node]:
            row, cost, before = self.held[index], self.graph.tensors[index].cost, self.touched[index]
            row[source] -= 1
            row[target] += 1
            now = before - (row[source] == 0) + (row[target] == 1)
            self.touched[index] = now
            if before > 1 and row[source] == 0:
                change[source] -= cost
            if now > 1 and row[target] == 1:
                change[target] += cost
            if before > 1 and now == 1:
                change[target] -= cost if row[target] > 1 else 0.0
            elif before == 1 and now > 1 and row[source]:
                change[source] += cost
        self.stage[node] = target
        gain = 0.0
        for s, value in change.items():
            gain -= (self.loads[s] / self._average) ** POWER
            self.loads[s] += value
            gain += (self.loads[s] / self._average) ** POWER
        return gain


def anneal(graph: TensorLoads, start: Sequence[int], num_stages: int, seconds: float, seed: int = 0) -> list[int]:
    """Return the best stage of each node found in so many seconds of the processor."""
    chance, count = random.Random(seed), len(start)
    before: list[list[int]] = [[] for _ in start]
    for node, after in enumerate(graph.successors):
        for other in after:
            before[other].append(node)
    now = Loads(graph, start, num_stages)
    stage = now.stage
    best, best_load = list(stage), max(now.loads)
    begin, steps, temperature = time.process_time(), 0, HOT

    def allows(node: int, target: int) -> bool:
        return all(stage[n] <= target for n in before[node]) and all(target <= stage[n] for n in graph.successors[node])

    while True:
        if steps % 256 == 0:
            spent = (time.process_time() - begin) / seconds
            if spent >= 1:
                return best
            temperature = HOT * (COLD / HOT) ** spent
        steps += 1
        node = chance.randrange(count)
        source = stage[node]
        target = source + chance.choice((-1, 1))
        if not 0 <= target < num_stages or not allows(node, target):
            continue
        back, gain = [(node, source)], now.move(node, target)
        other = chance.randrange(count)
        if chance.random() < 0.3 and other != node and stage[other] == target and allows(other, source):  # a swap
            gain += now.move(other, source)
            back.append((other, target))
        if gain > 0 and chance.random() >= math.exp(-gain / temperature):
            for moved, home in reversed(back):
                now.move(moved, home)
        elif (largest := max(now.loads)) < best_load:
            best, best_load = list(stage), largest


def constraint_solver(graph: TensorLoads, start: Sequence[int], num_stages: int, seconds: float) -> list[int]:
    """Return the best stage of each node that CP-SAT finds in so many seconds with one worker.

    b[v, s]: node v is in stage s or an earlier one; t[u, s]: stage s has some of tensor u; p[u, s]: and not all.
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    nodes, stages = range(len(start)), range(num_stages)
    by: Any = {(v, s): model.new_bool_var("") for v in nodes for s in stages}
    at: Any = {}
    for v in nodes:
        model.add(by[v, num_stages - 1] == 1)
        for s in stages:
            at[v, s] = model.new_bool_var("")
            model.add(at[v, s] == by[v, s] - (by[v, s - 1] if s else 0))
            model.add_hint(at[v, s], start[v] == s)
        for after in graph.successors[v]:
            for s in stages:
                model.add_implication(by[after, s], by[v, s])
    scale = 1000.0 * num_stages / sum(graph.node_times) * 100
    paid: list[list[Any]] = [[] for _ in stages]
    for tensor in graph.tensors:
        group = sorted({tensor.maker, *tensor.readers})
        for s in stages:
            pays = model.new_bool_var("")
            for a in group:
                for b in group:
                    if a != b:
                        model.add_bool_or(at[a, s].negated(), at[b, s], pays)
            paid[s].append(round(tensor.cost * scale) * pays)
    largest = model.new_int_var(0, round(sum(graph.node_times) * scale), "largest")
    for s in stages:
        model.add(largest >= sum(round(graph.node_times[v] * scale) * at[v, s] for v in nodes) + sum(paid[s]))
    model.minimize(largest)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers, solver.parameters.random_seed = 1, 0
    solver.parameters.max_time_in_seconds = seconds
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return list(start)
    return [next(s for s in stages if solver.boolean_value(at[v, s])) for v in nodes]

"""How far the solver reaches on this machine, and how its time grows.

    python benchmarks/scale.py dag [--layers 200] [--stages 16] [--seconds 60] [--alone] [--only TEXT] [--plot FILE]
    python benchmarks/scale.py chain [--layers 400] [--gpus 256] [--sigma 0.5 1] [--seconds 60] [--growth]
    python benchmarks/scale.py whole [--only gpt] [--seconds 20] [--theoretical]

`chain`: chains of different layers on many GPUs, see `scale_chain`; `whole`: GPT 1T and Llama 405B on thousands, see
`scale_whole`.

`dag`: random graphs of layers cut into stages, the largest load least (`planner.solver.core.partition`). A tensor costs
cf / 4 of an average stage, to the stage that makes it and to each that reads it. `branches w` are w chains, each layer
reading also half a layer on average of those near before it; `random p` has each edge with probability p. Seconds are
the processor's, the enumeration included. With --alone CP-SAT and annealed local search get as many seconds as ours
took, at least 5, and the same start; `worse` says whether ours is.
"""

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import scale_chain
import scale_whole
from local_search import anneal, constraint_solver

from planner.solver.core.loads import Tensor, TensorLoads, load_of
from planner.solver.core.partition import Partition, best_partition

COLUMNS = ("graph", "cf", "layers", "down-sets", "s", "largest load", "bound", "gap", "CP-SAT", "local search", "worse")


@dataclass(frozen=True)
class Measured:
    """One graph and what became of it."""

    family: str
    num_layers: int
    partition: Partition
    cpu_s: float


def branches(num_layers: int, width: int, chance: random.Random) -> list[list[int]]:
    """Return the layers that each reads: the one `width` before it, and some near it."""
    reads = []
    for layer in range(num_layers):
        near = range(max(0, layer - 2 * width), layer)
        found = {other for other in near if chance.random() < 0.5 / width}
        reads.append(sorted(found | ({layer - width} if layer >= width else set())))
    return reads


def random_edges(num_layers: int, probability: float, chance: random.Random) -> list[list[int]]:
    """Return the layers that each reads: any earlier one with this probability."""
    return [[other for other in range(layer) if chance.random() < probability] for layer in range(num_layers)]


def graph_of(reads: Sequence[Sequence[int]], fraction: float, num_stages: int, chance: random.Random) -> TensorLoads:
    """Return the graph with random times, and tensors that cost `fraction` / 4 of an average stage."""
    times = tuple(float(chance.randint(500, 1600)) for _ in reads)
    after: list[list[int]] = [[] for _ in reads]
    for layer, before in enumerate(reads):
        for other in before:
            after[other].append(layer)
    cost = fraction / 4 * sum(times) / num_stages
    tensors = tuple(Tensor(layer, frozenset(readers), cost) for layer, readers in enumerate(after) if readers)
    return TensorLoads(times, tuple(map(tuple, after)), tensors)


def instances(num_layers: int, num_stages: int, seed: int) -> Iterator[tuple[str, float, TensorLoads]]:
    """Yield (family, cf, graph)."""
    for width in (2, 3, 4, 5, 6, 8):
        for fraction in (0.002, 0.01, 0.05, 0.2):
            reads = branches(num_layers, width, random.Random(seed))
            yield f"branches {width}", fraction, graph_of(reads, fraction, num_stages, random.Random(seed + 1))
    for probability in (0.3, 0.2, 0.05):
        for fraction in (0.002, 0.01, 0.05):
            reads = random_edges(num_layers, probability, random.Random(seed))
            yield f"random {probability}", fraction, graph_of(reads, fraction, num_stages, random.Random(seed + 1))


def alone(graph: TensorLoads, num_stages: int, seconds: float) -> list[float]:
    """Return the largest load by CP-SAT and by local search in so many seconds, from the start that ours has."""
    first = best_partition(graph, num_stages, most_states=0, rounds=0)
    start = [
        next(s for s, stage in enumerate(first.stages) if layer in stage) for layer in range(len(graph.node_times))
    ]
    found = []
    for stages in (
        constraint_solver(graph, start, num_stages, seconds),
        anneal(graph, start, num_stages, seconds),
    ):
        parts = [frozenset(layer for layer, at in enumerate(stages) if at == s) for s in range(num_stages)]
        found.append(max(load_of(graph, part) for part in parts))
    return found


def run_dag(arguments: argparse.Namespace) -> int:
    """Print the table of the graphs; return 1 where another way is better, or the load is another one."""
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    measured, wrong = [], 0
    for family, fraction, graph in instances(arguments.layers, arguments.stages, arguments.seed):
        if arguments.only not in f"{family}, {fraction}":
            continue
        start = time.process_time()
        found = best_partition(graph, arguments.stages, time_limit_s=arguments.seconds, clock=time.process_time)
        cpu_s = time.process_time() - start
        measured.append(Measured(f"{family}, cf {fraction}", arguments.layers, found, cpu_s))
        price = max(load_of(graph, stage) for stage in found.stages)
        others = alone(graph, arguments.stages, max(5.0, cpu_s)) if arguments.alone else []
        is_worse = any(other < price * (1 - 1e-9) for other in others)
        wrong += is_worse or abs(price - found.bottleneck) > 1e-9 * price
        cells = [
            *(family, f"{fraction}", f"{arguments.layers}", f"{found.num_states or 'too many'}", f"{cpu_s:.2f}"),
            *(f"{price:.1f}", f"{found.lower_bound:.1f}", f"{found.gap_fraction:.2%}"),
            *((f"{other:.1f}" for other in others) if others else ("-", "-")),
            "yes" if is_worse else "no" if others else "-",
        ]
        print(f"| {' | '.join(cells)} |", flush=True)
    if arguments.plot:
        for count in (50, 100, 150, 200, 300, 400):
            for width in (3, 5):
                graph = graph_of(branches(count, width, random.Random(1)), 0.05, arguments.stages, random.Random(2))
                start = time.process_time()
                found = best_partition(graph, arguments.stages, time_limit_s=arguments.seconds)
                measured.append(Measured(f"branches {width}", count, found, time.process_time() - start))
        plot(measured, arguments.plot)
    return 1 if wrong else 0


def plot(measured: Sequence[Measured], path: Path) -> None:
    """Draw seconds against down-sets, and against layers."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for proved, mark in ((True, "o"), (False, "x")):
        points = [m for m in measured if m.partition.num_states and (m.partition.gap_fraction == 0) == proved]
        left.loglog(
            [m.partition.num_states for m in points], [m.cpu_s for m in points], mark,
            label="proved" if proved else "ended by the time limit",
        )  # fmt: skip
    left.set_xlabel("down-sets")
    left.set_ylabel("seconds of one core")
    left.legend()
    for family in ("branches 3", "branches 5"):
        points = [m for m in measured if m.family == family]
        right.plot([m.num_layers for m in points], [m.cpu_s for m in points], "o-", label=f"{family}, cf 0.05")
    right.set_xlabel("layers")
    right.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> int:
    """Run one part; 1 where something is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True)
    dag = parts.add_parser("dag", help="random graphs cut into stages")
    dag.add_argument("--layers", type=int, default=200)
    dag.add_argument("--stages", type=int, default=16)
    dag.add_argument("--seconds", type=float, default=60.0, help="time limit for each graph")
    dag.add_argument("--seed", type=int, default=1)
    dag.add_argument("--alone", action="store_true", help="CP-SAT and local search beside ours")
    dag.add_argument("--only", default="", metavar="TEXT", help="graphs that hold this text: 'branches 4, 0.05'")
    dag.add_argument("--plot", type=Path, metavar="FILE", help="draw seconds against down-sets and layers")
    dag.set_defaults(run=run_dag)
    chain = parts.add_parser("chain", help="the whole search on chains of different layers, degrees by stage")
    chain.add_argument("--layers", type=int, default=400)
    chain.add_argument("--gpus", type=int, default=256)
    chain.add_argument("--sigma", type=float, nargs="+", default=[0.5, 1.0], help="of the lognormal draws")
    chain.add_argument("--batch", type=int, default=1024)
    chain.add_argument("--seconds", type=float, default=60.0, help="time limit for each search")
    chain.add_argument("--growth", action="store_true", help="also fewer layers, GPUs and degrees")
    chain.set_defaults(run=scale_chain.run)
    whole = parts.add_parser("whole", help="models of up to 1T parameters on thousands of GPUs")
    whole.add_argument("--only", default="", metavar="TEXT", help="models whose name holds this text")
    whole.add_argument("--seconds", type=float, default=20.0, help="time limit for each search")
    whole.add_argument("--theoretical", action="store_true", help="also what emitted plans can't run yet")
    whole.set_defaults(run=scale_whole.run)
    arguments = parser.parse_args()
    return int(arguments.run(arguments))


if __name__ == "__main__":
    sys.exit(main())

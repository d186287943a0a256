"""Solves the inputs of other planners by their own objectives, beside what their tools found and how long they took.

    python benchmarks/peers.py --inputs DIR [--baselines CSV] [--only TEXT]

DIR has a folder for each planner (pipedream, piper, dnn-partitioning, torchgpipe), CSV the results of their tools.
Every plan is priced again by `peer_prices`, which shares no code with the search; `gap` is how far below our objective
the optimum can be. Seconds are the processor's, in this process, from the parsed input to the plan: imports are told
apart. Exit 1 if an objective is worse than theirs, or a plan's price is another.
"""

import time

_START_S = time.process_time()

import argparse  # noqa: E402 - what is imported is timed
import csv  # noqa: E402
import math  # noqa: E402
import re  # noqa: E402
import sys  # noqa: E402
from dataclasses import dataclass, replace  # noqa: E402
from pathlib import Path  # noqa: E402

import networkx as nx  # noqa: E402
from peer_prices import pipedream_price, piper_price, workload_price  # noqa: E402

from planner.peers.dnn_partitioning import read_workload, solve_workload  # noqa: E402
from planner.peers.pipedream import PipeDreamSettings, read_graph, solve_pipedream  # noqa: E402
from planner.peers.piper import read_problem  # noqa: E402
from planner.peers.piper_search import solve_piper  # noqa: E402
from planner.peers.torchgpipe import balance  # noqa: E402

_IMPORTS_S = time.process_time() - _START_S
SAME = 1e-9  # objectives nearer than this, relatively, are equal
COLUMNS = (
    *("peer", "instance", "devices", "settings", "theirs", "ours", "difference", "gap", "price"),
    *("theirs s", "ours s", "ratio"),
)


@dataclass(frozen=True)
class Solved:
    """Our objective, how far below it the optimum can be, the plan's price by their definition, and the seconds."""

    objective: float
    gap: float
    price: float
    cpu_s: float


def solve_pipedream_row(folder: Path, row: dict[str, str]) -> Solved:
    """Solve a row of PipeDream."""
    bandwidths, boundaries, flags = row["settings"].split(";")
    memory = re.search(r"-s (\S+)", flags)
    settings = PipeDreamSettings(
        num_machines=tuple(map(int, row["devices"].split("x"))),
        bandwidths=tuple(map(float, bandwidths.removeprefix("b=").split("/"))),
        boundaries_cost=boundaries == "comm",
        straight="--straight_pipeline" in flags,
        fewer_machines="--use_fewer_machines" in flags,
        memory_bytes=float(memory[1]) if "--use_memory_constraint" in flags and memory else math.inf,
    )
    graph = read_graph(folder / "pipedream" / "profiles" / row["instance"] / "graph.txt")
    start = time.process_time()
    plan = solve_pipedream(graph, settings)
    cpu_s = time.process_time() - start
    price = pipedream_price(graph, settings, plan.stages) if plan.stages else math.inf
    return Solved(plan.bottleneck_s, 0.0, price, cpu_s)


def solve_piper_row(folder: Path, row: dict[str, str]) -> Solved:
    """Solve a row of Piper."""
    given = dict(item.split("=") for item in row["settings"].split(";"))
    problem = replace(
        read_problem(folder / "piper" / "inputs" / f"{row['instance']}.json"),
        num_devices=int(row["devices"]),
        memory_bytes=size(given["mem"]),
        bandwidth=size(given["bw"].removesuffix("/s")),
        num_microbatches=int(given["N"]),
    )
    mode = given["mode"]
    start = time.process_time()
    plan = solve_piper(problem, data_parallel=mode != "nodp", tensor_parallel=mode != "notp", recompute=mode != "noar")
    cpu_s = time.process_time() - start
    if not plan.stages:
        return Solved(math.inf, 0.0, math.inf, cpu_s)
    return Solved(plan.bottleneck, 1 - plan.lower_bound / plan.bottleneck, piper_price(problem, plan.stages), cpu_s)


def size(text: str) -> float:
    """Return the bytes of '8GiB'."""
    return float(text.removesuffix("GiB")) * 2**30 if text.endswith("GiB") else float(text)


def solve_workload_row(folder: Path, row: dict[str, str]) -> Solved:
    """Solve a row of dnn-partitioning."""
    accelerators, cpus = (int(part.removesuffix("acc").removesuffix("cpu")) for part in row["devices"].split("+"))
    given = dict(item.split("=") for item in row["settings"].split(";"))
    workload = replace(
        read_workload(folder / "dnn-partitioning" / "throughput-inputs" / f"{row['instance']}.json"),
        num_accelerators=accelerators,
        num_cpus=cpus,
        accelerator_bytes=float(given["mem"]),
    )
    start = time.process_time()
    placement = solve_workload(workload)
    cpu_s = time.process_time() - start
    price = workload_price(workload, placement.devices) if placement.devices else math.inf
    return Solved(placement.max_load_ms, 0.0, price, cpu_s)


def solve_list_row(folder: Path, row: dict[str, str]) -> Solved:
    """Solve a row of torchgpipe whose costs are those of a PipeDream profile, in topological order, as microseconds."""
    if not row["instance"].startswith("pd_"):
        raise FileNotFoundError("their random lists are not published")
    graph = read_graph(folder / "pipedream" / "profiles" / row["instance"].removeprefix("pd_") / "graph.txt")
    order = nx.lexicographical_topological_sort(
        nx.DiGraph([(source, target) for source, after in enumerate(graph.successors) for target in after])
    )
    costs = [round(graph.nodes[node].time_s * 1e6) for node in order]
    if len(costs) != int(float(row["nodes"])):
        raise FileNotFoundError("their list has other nodes than the profile")
    start = time.process_time()
    sizes = balance(costs, int(row["devices"]))
    cpu_s = time.process_time() - start
    blocks, first = [], 0
    for count in sizes:
        blocks.append(sum(costs[first : first + count]))
        first += count
    return Solved(max(blocks), 0.0, max(blocks) if first == len(costs) else math.nan, cpu_s)


SOLVERS = {
    "pipedream": solve_pipedream_row,
    "piper": solve_piper_row,
    "dnn-partitioning": solve_workload_row,
    "torchgpipe": solve_list_row,
}


def objective(text: str) -> float:
    """Return their objective: infinite where nothing fitted or nothing was found."""
    try:
        return float(text)
    except ValueError:
        return math.inf


def ratio(theirs: str, ours_s: float) -> str:
    """Return our seconds as a part of theirs; nothing where theirs were not measured, or are too few to be."""
    return f"{ours_s / float(theirs):.3f}" if theirs and float(theirs) > 0 else "-"


def cells(row: dict[str, str], solved: Solved) -> tuple[list[str], bool]:
    """Return a row of the table, and whether it is as it should be."""
    theirs = objective(row["objective_value"])
    same_price = solved.price == solved.objective or abs(solved.price - solved.objective) <= SAME * solved.price
    difference = 0.0 if solved.objective == theirs else solved.objective / theirs - 1
    right = same_price and difference <= SAME
    return [
        *(row["peer"], row["instance"], row["devices"], row["settings"]),
        *(f"{theirs:.9g}" if math.isfinite(theirs) else row["objective_value"] or "-", f"{solved.objective:.9g}"),
        *(f"{difference:+.1e}", f"{solved.gap:.1e}", "same" if same_price else f"{solved.price:.9g}"),
        *(row["cpu_s"] or "-", f"{solved.cpu_s:.3f}", ratio(row["cpu_s"], solved.cpu_s)),
    ], right


def main() -> int:
    """Print the table; return 1 where an objective is worse or a price is another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=Path, required=True, metavar="DIR")
    parser.add_argument("--baselines", type=Path, metavar="CSV", help="default: baselines.csv in DIR")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows that hold this text")
    arguments = parser.parse_args()
    baselines = arguments.baselines or arguments.inputs / "baselines.csv"
    print(f"imports took {_IMPORTS_S:.2f} s of the processor\n")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    counts = {"solved": 0, "lower": 0, "wrong": 0, "left out": 0}
    with baselines.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if arguments.only in ",".join(row.values())]
    for row in rows:
        heuristic = row["peer"] == "dnn-partitioning" and "mode=dp" not in row["settings"]
        try:
            solved = SOLVERS[row["peer"]](arguments.inputs, row)
        except FileNotFoundError as error:
            counts["left out"] += 1
            print(f"| {row['peer']} | {row['instance']} | {row['devices']} | {row['settings']} | left out: {error} |")
            continue
        listed, right = cells(row, solved)
        counts["solved"] += 1
        counts["lower"] += solved.objective < objective(row["objective_value"]) * (1 - SAME) and not heuristic
        counts["wrong"] += not right
        print(f"| {' | '.join(listed)} |", flush=True)
    print("\n" + ", ".join(f"{count} {name}" for name, count in counts.items()))
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())

"""This machine's processes as a cluster: what a profile measured on the CPU is planned for.

The processes share cores and memory, and gloo carries their messages over the loopback device.
"""

import os
from pathlib import Path

from planner.cluster import Cluster, Gpu, Link, NodeGroup, check_num_gpus
from planner.errors import UsageError

CPU_NAME = "cpu"

# One process's view under gloo on a two-core virtual machine (torch 2.13, 2 and 4 processes, medians of 12 repeats,
# November 2026): 64 MiB sent in 22 ms (3 GB/s), 64 MiB all-reduced at 0.7 to 1.1 GB/s of bus bandwidth, 1 KiB in
# 0.3 to 7 ms; one thread adds to a tensor in place at 35 GB/s, which the processes share.
LOOPBACK_BANDWIDTH = "1GB/s"
LOOPBACK_LATENCY = "300us"
MEMORY_BANDWIDTH = "10GB/s"
PROCESS_RESERVE = "512MiB"  # the Python process with torch imported


def machine_memory_bytes() -> int:
    """Return the bytes of memory this machine, or the control group it runs in, has; UsageError where unknown."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        raise UsageError("this machine doesn't tell how much memory it has", hint="give --cluster FILE.toml") from None
    for limit in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        try:
            total = min(total, int(limit.read_text(encoding="ascii")))
        except (OSError, ValueError):  # no such control group, or 'max'
            continue
    return total


def shared_cores(cluster: Cluster) -> str | None:
    """Return a note where a cluster's processes outnumber this machine's cores, and so compute slower than profiled."""
    if cluster.speed_fraction == 1:
        return None
    return (
        f"{cluster.num_gpus} processes share {os.cpu_count() or 1} cores: "
        f"layers are priced at {cluster.speed_fraction:.0%} of the speed they were profiled at"
    )


def local_cluster(num_gpus: int) -> Cluster:
    """Return `num_gpus` processes of this machine as a cluster of one node, memory divided equally.

    The peak speed of a core is not known, so a plan for it has no MFU.
    """
    check_num_gpus(num_gpus)
    cpu = Gpu(
        name=CPU_NAME,
        memory=f"{machine_memory_bytes() // num_gpus}B",
        memory_bandwidth=MEMORY_BANDWIDTH,
        peak_flops={},
        source="this machine's memory divided by its processes; the memory bandwidth is an assumption",
    )
    loopback = Link(bandwidth=LOOPBACK_BANDWIDTH, latency=LOOPBACK_LATENCY)
    return Cluster(
        name=f"{CPU_NAME} x {num_gpus}",
        node_groups=(NodeGroup(count=1, gpus_per_node=num_gpus, gpu=CPU_NAME),),
        intra_node=loopback,
        inter_node=loopback,
        memory_reserve=PROCESS_RESERVE,
        speed_fraction=min(1.0, (os.cpu_count() or 1) / num_gpus),
        source=f"gloo over loopback, assumed {LOOPBACK_BANDWIDTH} and {LOOPBACK_LATENCY}",
        gpus={CPU_NAME: cpu},
    )

"""GPUs and the links between them, from `configs/gpus/*.toml` and `configs/clusters/*.toml`.

Files are written with units ('80GB', '450GB/s', '5us'); a bare number is refused, saying which unit to add.
"""

import difflib
import hashlib
import tomllib
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field

from planner.errors import FileFormatError, UsageError
from planner.records import MAX_COUNT, MAX_TIME_S, Fraction, PositiveInt, Record, read_text, validate
from planner.units import Bandwidth, ByteSize, FlopRate, Seconds

# What is divided by is neither zero nor so small or large that a time computed from it overflows.
LEAST_RATE, MOST_RATE = 1.0, 1e24
LEAST_FRACTION = 1e-6

Rate = TypeVar("Rate")
PositiveRate = Annotated[Rate, Field(ge=LEAST_RATE, le=MOST_RATE)]
PositiveFraction = Annotated[Fraction, Field(ge=LEAST_FRACTION)]
Delay = Annotated[Seconds, Field(le=MAX_TIME_S)]
MAX_GPUS = 1_000_000
GpuCount = Annotated[PositiveInt, Field(le=MAX_GPUS)]


class Gpu(Record):
    """A GPU type, or a CPU process as a device. Efficiencies are fractions of the peak that large shapes reach.

    `device_name` is what CUDA calls such a GPU: a profile measured on one is planned for more of them.
    """

    name: str
    memory: Annotated[ByteSize, Field(gt=0, le=MAX_COUNT)]
    memory_bandwidth: PositiveRate[Bandwidth]
    peak_flops: dict[str, PositiveRate[FlopRate]]
    matmul_efficiency: PositiveFraction = 1.0
    memory_efficiency: PositiveFraction = 1.0
    launch_overhead: Delay = 0.0
    device_name: str = ""
    source: str


class Link(Record):
    """One level of the network: `bandwidth` per GPU and direction, `latency` per message."""

    bandwidth: PositiveRate[Bandwidth]
    latency: Delay


def _is_none(value: object) -> bool:
    return value is None


class NodeGroup(Record):
    """`count` nodes of `gpus_per_node` GPUs of one type; links of their own where they are not the cluster's."""

    count: GpuCount
    gpus_per_node: GpuCount
    gpu: str
    intra_node: Link | None = Field(default=None, exclude_if=_is_none)
    inter_node: Link | None = Field(default=None, exclude_if=_is_none)


class Cluster(Record):
    """Nodes and link levels. GPUs are numbered node by node, in the order of the groups.

    `speed_fraction` is what each reaches of the speed that layers were profiled at: less than 1 where processes share
    the cores that a profile had for itself.
    """

    name: str
    node_groups: tuple[NodeGroup, ...]
    intra_node: Link
    inter_node: Link
    memory_reserve: Annotated[ByteSize, Field(le=MAX_COUNT)]
    speed_fraction: PositiveFraction = 1.0
    source: str = ""
    gpus: dict[str, Gpu] = {}

    def model_post_init(self, context: Any) -> None:
        """Refuse a cluster without GPUs."""
        if not self.node_groups:
            raise ValueError("a cluster needs at least one node group")

    @property
    def num_gpus(self) -> int:
        """All GPUs of all groups."""
        return sum(group.count * group.gpus_per_node for group in self.node_groups)

    @property
    def gpus_per_node(self) -> int:
        """GPUs of the smallest node: groups of ranks up to this size can stay inside one."""
        return min(group.gpus_per_node for group in self.node_groups)

    def gpu_at(self, rank: int) -> Gpu:
        """Return the type of the GPU with this number."""
        return self.gpus[self._position(rank)[1].gpu]

    def node_at(self, rank: int) -> int:
        """Return the index of the node that holds the GPU with this number."""
        return self._position(rank)[0]

    def _position(self, rank: int) -> tuple[int, NodeGroup]:
        first_rank = first_node = 0
        for group in self.node_groups:
            size = group.count * group.gpus_per_node
            if rank < first_rank + size:
                return first_node + (rank - first_rank) // group.gpus_per_node, group
            first_rank += size
            first_node += group.count
        raise IndexError(f"GPU {rank} of {self.num_gpus}")

    def links_of(self, group: NodeGroup) -> tuple[Link, Link]:
        """Return the links inside a node of a group, and from it to others."""
        return group.intra_node or self.intra_node, group.inter_node or self.inter_node

    @property
    def has_equal_links(self) -> bool:
        """Whether all nodes have the same links."""
        return len({tuple(map(str, self.links_of(group))) for group in self.node_groups}) == 1

    @property
    def fastest_bytes_per_s(self) -> float:
        """The bandwidth of the fastest link."""
        return max(link.bandwidth for group in self.node_groups for link in self.links_of(group))


def configs_folder() -> Path:
    """Return the folder with the shipped `gpus/` and `clusters/`."""
    package = Path(__file__).parent
    beside = package.parent / "configs"
    return beside if beside.is_dir() else package / "configs"


def _read_toml(path: Path, what: str) -> dict[str, Any]:
    text = read_text(path, what=what)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        problem = "nested too deeply" if isinstance(error, RecursionError) else str(error).partition(";")[0]
        raise FileFormatError(f"{path}: not TOML: {problem}", hint=f"check that this is a {what} file") from None


def _find(kind: str, name: str) -> Path:
    """Return the path of a config by path or by shipped name; UsageError lists the names there are."""
    if name.endswith(".toml") or "/" in name:
        return Path(name)
    path = configs_folder() / kind / f"{name}.toml"
    if path.is_file():
        return path
    names = sorted(found.stem for found in (configs_folder() / kind).glob("*.toml"))
    near = [candidate for candidate in names if candidate.startswith(name)] or _nearest(name, names)
    known = f"known: {', '.join(names)}; or give the path of a .toml file"
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else known
    raise UsageError(f"no {kind.removesuffix('s')} is named {name!r}", hint=hint)


def _nearest(name: str, names: list[str]) -> list[str]:
    """Return the names most like `name`, whole or up to their first dash: 'h1000' is like every h100-*."""

    def likeness(candidate: str) -> float:
        parts = (candidate, candidate.partition("-")[0])
        return max(difflib.SequenceMatcher(None, name, part).ratio() for part in parts)

    best = max(map(likeness, names), default=0.0)
    return [candidate for candidate in names if best >= 0.6 and likeness(candidate) == best]


def read_gpu(name: str) -> Gpu:
    """Return the GPU type of a shipped name ('h100-sxm') or of a .toml path."""
    path = _find("gpus", name)
    return validate(Gpu, {"name": path.stem} | _read_toml(path, "GPU"), source=str(path))


def shipped_gpu(device_name: str) -> str | None:
    """Return the shipped name of the GPU type that CUDA calls `device_name`, or None."""
    names = sorted(path.stem for path in (configs_folder() / "gpus").glob("*.toml"))
    return next((name for name in names if read_gpu(name).device_name == device_name), None)


def read_cluster(name: str) -> Cluster:
    """Return the cluster of a shipped name or of a .toml path, its GPU types read too."""
    path = _find("clusters", name)
    cluster = validate(Cluster, {"name": path.stem} | _read_toml(path, "cluster"), source=str(path))
    missing = {group.gpu for group in cluster.node_groups} - set(cluster.gpus)
    return cluster.model_copy(update={"gpus": cluster.gpus | {gpu: read_gpu(gpu) for gpu in sorted(missing)}})


def cluster_hash(cluster: Cluster) -> str:
    """Return a short hash of everything a plan's price depends on."""
    return hashlib.sha256(cluster.model_dump_json().encode()).hexdigest()[:16]


def check_num_gpus(num_gpus: int) -> None:
    """Raise UsageError for a number of GPUs that no cluster has."""
    if not 1 <= num_gpus <= MAX_GPUS:
        raise UsageError(f"{num_gpus} GPUs: a cluster has 1 to {MAX_GPUS}", hint="give another number of GPUs")


NODE_SIZE = 8


def default_cluster(num_gpus: int, gpu_name: str) -> Cluster:
    """Return a cluster of `num_gpus` of one type: nodes of 8 with the links of `configs/clusters/GPU.toml`.

    The shipped cluster file of that name gives links and reserve; where there is none, `UsageError`.
    """
    check_num_gpus(num_gpus)
    template = read_cluster(gpu_name)
    groups: tuple[NodeGroup, ...]
    if num_gpus <= NODE_SIZE:
        groups = (NodeGroup(count=1, gpus_per_node=num_gpus, gpu=gpu_name),)
    elif num_gpus % NODE_SIZE == 0:
        groups = (NodeGroup(count=num_gpus // NODE_SIZE, gpus_per_node=NODE_SIZE, gpu=gpu_name),)
    else:
        groups = (
            NodeGroup(count=num_gpus // NODE_SIZE, gpus_per_node=NODE_SIZE, gpu=gpu_name),
            NodeGroup(count=1, gpus_per_node=num_gpus % NODE_SIZE, gpu=gpu_name),
        )
    return template.model_copy(update={"name": f"{gpu_name} x {num_gpus}", "node_groups": groups})

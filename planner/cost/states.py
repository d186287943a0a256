"""Memory and time of what outlives a microbatch: parameters, gradients and optimizer states.

What an emitted plan holds per trainable parameter (FSDP2's `replicate` and `fully_shard`, one gather and one
reduce-scatter per step, `reshard_after_forward=False`):

                master   working copy              gradient            optimizer (adamw; momentum; sgd)
    fp32        4 / n    4 where dp_degree > 1     4 (+ 4 / n)         (8; 4; 0) / n
    bf16-mixed  4 / n    2                         4 (+ 4 / n)         (8; 4; 0) / n
    bf16        2 / n    2 where dp_degree > 1     2 (+ 2 / n)         (4; 2; 0) / n

n is the shard degree: dp_degree where data parallelism is sharded, 1 where replicated, or a stage's own (groups of n
replicas each hold one copy, in n parts). The gradient in brackets is the reduced shard beside the accumulated whole,
where n > 1. `replicate` computes on a copy of the master too. Frozen parameters have no gradient and no optimizer
state. Rows of the table are bytes.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

from planner.cluster import Gpu
from planner.plan import DataParallel, Optimizer, Precision

Elements = TypeVar("Elements", int, Any)  # an integer, or a numpy array of them

WORKING_BYTES: dict[Precision, int] = {"fp32": 4, "bf16-mixed": 2, "bf16": 2}
MASTER_BYTES: dict[Precision, int] = {"fp32": 4, "bf16-mixed": 4, "bf16": 2}
NUM_STATES: dict[Optimizer, int] = {"adamw": 2, "adam": 2, "sgd-momentum": 1, "sgd": 0}
COMPUTE_DTYPE: dict[Precision, str] = {"fp32": "float32", "bf16-mixed": "bfloat16", "bf16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class StateRules:
    """How parameters are held; see the table above."""

    optimizer: Optimizer
    precision: Precision
    data_parallel: DataParallel
    dp_degree: int
    shard_degree: int | None = None

    @property
    def num_shards(self) -> int:
        """Into how many parts master, optimizer states and reduced gradient are divided."""
        if self.shard_degree is not None:
            return self.shard_degree
        return self.dp_degree if self.data_parallel == "sharded" else 1

    @property
    def grad_bytes_per_element(self) -> int:
        """Width of an accumulated gradient, which is also what is reduced."""
        return MASTER_BYTES[self.precision]

    def param_bytes(self, elements: Elements) -> Elements:
        """Return the bytes of master and working copy; `elements` counts trainable and frozen ones."""
        master = -(-elements * MASTER_BYTES[self.precision] // self.num_shards)
        copied = self.dp_degree > 1 or self.precision == "bf16-mixed"
        return master + (elements * WORKING_BYTES[self.precision] if copied else 0)

    def grad_bytes(self, trainable: Elements) -> Elements:
        """Return the bytes of gradients during the last backward."""
        whole = trainable * self.grad_bytes_per_element
        return whole + (-(-whole // self.num_shards) if self.num_shards > 1 else 0)

    def optimizer_bytes(self, trainable: Elements) -> Elements:
        """Return the bytes of optimizer states."""
        return -(-trainable * MASTER_BYTES[self.precision] * NUM_STATES[self.optimizer] // self.num_shards)

    def bucket_bytes(self, largest_layer: Elements) -> Elements:
        """Return the buffer through which gradients are reduced: one layer at a time, the largest counts."""
        return largest_layer * (self.grad_bytes_per_element if self.dp_degree > 1 else 0)


def optimizer_s(trainable: float, rules: StateRules, gpu: Gpu) -> float:
    """Return the seconds of the optimizer's pass over memory: it reads and writes, and hardly computes.

    Gradients are read, parameters and states read and written, each at the master's width.
    """
    accesses = 3 + 2 * NUM_STATES[rules.optimizer]
    return accesses * MASTER_BYTES[rules.precision] * trainable / rules.num_shards / memory_bytes_per_s(gpu)


def cast_s(elements: float, rules: StateRules, gpu: Gpu) -> float:
    """Return the seconds in which the step's working copy is written from the master."""
    if rules.dp_degree == 1 and rules.precision != "bf16-mixed":
        return 0.0
    width = MASTER_BYTES[rules.precision] + WORKING_BYTES[rules.precision]
    return width * elements / rules.num_shards / memory_bytes_per_s(gpu)


def memory_bytes_per_s(gpu: Gpu) -> float:
    """Return the memory bandwidth that large passes reach."""
    return gpu.memory_bandwidth * gpu.memory_efficiency

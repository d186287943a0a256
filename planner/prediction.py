"""What a plan is predicted to cost: every number comes from `cost.evaluate`."""

from pydantic import Field

from planner.records import Fraction, NonNegativeFloat, NonNegativeInt, Record


class MemoryUse(Record):
    """Peak memory of one GPU by owner, in bytes."""

    param_bytes: NonNegativeInt
    grad_bytes: NonNegativeInt
    optimizer_bytes: NonNegativeInt
    activation_bytes: NonNegativeInt
    transient_bytes: NonNegativeInt
    communication_bytes: NonNegativeInt
    reserve_bytes: NonNegativeInt

    @property
    def peak_bytes(self) -> int:
        """All owners together, the reserve included."""
        return sum(getattr(self, name) for name in type(self).model_fields)


class StagePrediction(Record):
    """What `cost.evaluate` says of one stage; times are per microbatch except those per step.

    `param_count` is the number of parameters that one GPU computes with, before data parallelism shards them. It and
    `memory` are those of a GPU: where a device group holds several stages, of all of them, the same in each. `gpu`
    names the type of the stage's GPUs where those of the cluster are of several.
    `weight_time_s` is what of the backward runs apart from the rest, after it: 0 where backwards are whole.
    """

    forward_time_s: NonNegativeFloat
    backward_time_s: NonNegativeFloat
    weight_time_s: NonNegativeFloat = Field(default=0.0, exclude_if=lambda value: value == 0.0)
    recompute_time_s: NonNegativeFloat = 0.0
    tensor_parallel_time_s: NonNegativeFloat = 0.0
    send_time_s: NonNegativeFloat = 0.0
    data_parallel_time_s: NonNegativeFloat = 0.0
    optimizer_time_s: NonNegativeFloat = 0.0
    busy_time_s: NonNegativeFloat
    param_count: NonNegativeInt = 0
    memory: MemoryUse
    gpu: str = Field(default="", exclude_if=lambda value: not value)

    @property
    def time_s(self) -> float:
        """Seconds per microbatch: forward and backward, recomputation and tensor-parallel communication included."""
        return self.forward_time_s + self.backward_time_s


class WholePart(Record):
    """Layers, or a `module` in each of them, that every tensor-parallel rank holds whole, and why.

    `param_count` is that of one layer.
    """

    layers: tuple[str, ...]
    module: str = ""
    param_count: NonNegativeInt
    reason: str


class Prediction(Record):
    """What a plan is predicted to cost; every number comes from `cost.evaluate`."""

    step_time_s: NonNegativeFloat
    samples_per_s: NonNegativeFloat
    tokens_per_s: NonNegativeFloat = 0.0
    mfu_fraction: NonNegativeFloat | None = None
    bubble_fraction: Fraction
    exposed_comm_time_s: NonNegativeFloat = 0.0
    bottleneck_stage: NonNegativeInt
    stages: tuple[StagePrediction, ...]
    whole: tuple[WholePart, ...] = ()

    @property
    def heaviest_stage(self) -> int:
        """The stage whose GPUs hold most parameters, the first of equal ones."""
        counts = [stage.param_count for stage in self.stages]
        return counts.index(max(counts))

    @property
    def peak_bytes(self) -> int:
        """The fullest GPU."""
        return max(stage.memory.peak_bytes for stage in self.stages)

"""What each layer costs at a plan's microbatch size, tensor-parallel degree and sharding, from a profile's points."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from planner.arguments import dtype_bytes
from planner.cost.communication import Route, collective_s
from planner.errors import ProfileError
from planner.graph import SharedStorage
from planner.model_profile import LayerClass, LayerCost, ModelProfile
from planner.sharding import ShardedParameter, Sharding

REPLICATED = "replicated"


@dataclass(frozen=True, slots=True)
class LayerNumbers:
    """One layer for one microbatch: seconds of compute and of tensor-parallel collectives, bytes, parameter elements.

    `backward_weight_s` is what of `backward_s` the gradients of weights take. `partial` are the elements of replicated
    parameters whose gradients are summed over the tensor-parallel group. `apart`: it reads nothing of the layer before.
    """

    forward_s: float
    backward_s: float
    backward_weight_s: float
    forward_comm_s: float
    backward_comm_s: float
    activation_bytes: int
    saved_input_bytes: int
    saved_output_bytes: int
    transient_bytes: int
    trainable: int
    frozen: int
    partial: int
    apart: bool = False

    @property
    def recompute_s(self) -> float:
        """Seconds of doing the forward again, its collectives included."""
        return self.forward_s + self.forward_comm_s


def interpolate(rows: int, points: Sequence[tuple[int, float]]) -> float:
    """Return a quantity at `rows` from (microbatch size, value) points in ascending order.

    Between points linear. Beyond the last, by the slope from the first point to the last (neighbouring points may
    differ by noise alone), from 0 to proportional; below the first, by the slope of the first two, at least the first
    in proportion. One point is taken as proportional to rows.
    """
    if len(points) == 1:
        size, value = points[0]
        return value * rows / size
    position = bisect_left(points, (rows, -1.0))
    if position < len(points) and points[position][0] == rows:
        return points[position][1]
    (first, least), (last, most) = points[0], points[-1]
    if rows > last:
        return most + min(max((most - least) / (last - first), 0.0), most / last) * (rows - last)
    low, high = points[max(position, 1) - 1 :][:2]
    slope = (high[1] - low[1]) / (high[0] - low[0])
    value = low[1] + slope * (rows - low[0])
    return max(value, low[1] * rows / low[0]) if rows < low[0] else value


def layer_numbers(
    profile: ModelProfile,
    layer_class: LayerClass,
    rows: int,
    tp_degree: int,
    sharding: str,
    route: Route,
    known: Sequence[LayerCost],
) -> LayerNumbers:
    """Return what a layer of the class costs, by its `known` costs on some GPU type.

    ProfileError names the layer where there is no such number. A replicated layer costs at any tensor-parallel degree
    what it costs at 1.
    """
    degree = 1 if sharding == REPLICATED else tp_degree
    costs = sorted(
        (cost for cost in known if cost.tp_degree == degree and cost.sharding == sharding),
        key=lambda cost: cost.microbatch_size,
    )
    rule = layer_class.sharding(sharding, tp_degree) if sharding != REPLICATED else None
    if not costs or (rule is None and sharding != REPLICATED):
        example = next(layer.name for layer in profile.layers if layer.layer_class == layer_class.name)
        ways = sorted({(cost.tp_degree, cost.sharding) for cost in known})
        raise ProfileError(
            f"layer {example!r} has no cost for tp_degree {tp_degree} with sharding {sharding!r}; known are "
            + ", ".join(f"{name} at {at}" for at, name in ways),
            hint=f"profile the model with --tp {tp_degree}",
        )

    def at(name: str) -> float:
        return interpolate(rows, [(cost.microbatch_size, getattr(cost, name)) for cost in costs])

    width = dtype_bytes(profile.provenance.dtype)
    nearest: LayerCost = min(costs, key=lambda cost: (abs(cost.microbatch_size - rows), cost.microbatch_size))
    trainable = nearest.trainable_param_count
    comm = {"forward": 0.0, "backward": 0.0}
    for call in rule.collectives if rule else ():
        num_bytes = call.bytes_per_row * rows + call.fixed_bytes
        comm[call.phase] += collective_s(call.kind, num_bytes, tp_degree, route)
    return LayerNumbers(
        forward_s=at("forward_time_s"),
        backward_s=at("backward_input_time_s") + at("backward_weight_time_s"),
        backward_weight_s=at("backward_weight_time_s"),
        forward_comm_s=comm["forward"],
        backward_comm_s=comm["backward"],
        activation_bytes=round(at("activation_bytes")),
        saved_input_bytes=round(at("saved_input_bytes")),
        saved_output_bytes=round(at("saved_output_bytes")),
        transient_bytes=round(at("transient_bytes")),
        trainable=trainable,
        frozen=max(0, -(-(nearest.param_bytes - trainable * width) // width)),
        partial=_partial_elements(profile, layer_class, rule),
    )


def _partial_elements(profile: ModelProfile, layer_class: LayerClass, rule: Sharding | None) -> int:
    """Return the elements of the parameters that `partial_gradients` names, in any one layer of the class."""
    if rule is None or not rule.partial_gradients:
        return 0
    layer = next(layer for layer in profile.layers if layer.layer_class == layer_class.name)
    width = dtype_bytes(profile.provenance.dtype)
    names = (f"{layer.module}.{name}" if layer.module else name for name in rule.partial_gradients)
    return sum(profile.parameters[name].num_bytes // width for name in names if name in profile.parameters)


def parameter_sharding(
    profile: ModelProfile, layer: int, name: str, tp_degree: int, sharding: str
) -> ShardedParameter | None:
    """Return how a layer's sharding divides the parameter of that fully qualified name; None where it doesn't."""
    rule = profile.layer_class(layer).sharding(sharding, tp_degree)
    prefix = f"{profile.layers[layer].module}." if profile.layers[layer].module else ""
    return rule.parameters.get(name.removeprefix(prefix)) if rule and name.startswith(prefix) else None


def tie_conflict(
    profile: ModelProfile, shared: SharedStorage, tp_degree: int | Mapping[int, int], shardings: Mapping[int, str]
) -> tuple[int, int] | None:
    """Return two layers whose shardings (by layer index) divide a parameter they share differently, or None.

    `tp_degree` may differ by layer index: at different degrees a whole and a divided one, and slices along the same
    dimension and parts, are parts of one another.
    """
    degrees = {layer: tp_degree if isinstance(tp_degree, int) else tp_degree[layer] for layer in shared.layers}
    ways = [
        (layer, parameter_sharding(profile, layer, name, degrees[layer], shardings[layer]))
        for layer, name in shared.names
    ]
    for (first, way), (second, other) in combinations(ways, 2):
        apart = degrees[first] != degrees[second] and (way is None or other is None)
        if way != other and not apart:
            return first, second
    return None

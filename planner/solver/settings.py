"""The settings of the outer search with their first bounds, before any table exists.

Every stage prepares, runs its microbatches and finishes, so

    (6)  step time >= (sum of prepare + m * sum of (forward + backward) + sum of finish) / pp_degree

over all stages, which is linear in layers, so that cuts don't matter. Where each layer waits for the one before it, and
for the gradient of the one behind it, the stages also wait for one another. With c_j = forward + backward of a
microbatch in stage j, and p microbatches in flight in stage s, bound (1) of `problem` gives

    (7)  step time >= sum over j of A[s, j] * c_j    A[s, s] = 1 + m - p, A[s, j] = 1 before s and 2 behind it; where
                                                     p = m, 1 elsewhere and A[s, s] = 1 + max(forward, backward share)
                                                     * (m - 1); GPipe: 1 elsewhere and A[s, s] = m

for every s, so for every mean of these: with the weights that make all sums over s of weight * A[s, j] one number K,
the step takes K times the sum of all c_j, wherever the cuts are.
"""

from dataclasses import dataclass

from planner.cost.communication import Route, collective_s
from planner.cost.states import WORKING_BYTES, StateRules, cast_s, optimizer_s
from planner.model_profile import ModelProfile
from planner.schedule import num_in_flight
from planner.solver.problem import Setting
from planner.solver.space import Shardings, Space, least_route


def settings_with_bounds(space: Space) -> tuple[list[tuple[float, Setting]], float]:
    """Return every setting with bound (6), and the least bound of settings left out (inf: none).

    Settings whose parameters, gradients and optimizer states fit in no stage's memory are not listed: no plan fits.
    """
    memory = space.pricer.cluster.gpu_at(0).memory  # one GPU type, see `solve`
    found: list[tuple[float, Setting]] = []
    left_out = float("inf")
    pricer = space.pricer
    counts: dict[str, int] = {}
    for layer in pricer.profile.layers:
        counts[layer.layer_class] = counts.get(layer.layer_class, 0) + 1
    chained = _is_chained(pricer.profile)
    combinations: dict[tuple[int, int, tuple[Route, ...]], tuple[list[Shardings], bool]] = {}
    for setting in space.settings():
        pp, tp, dp, rows = setting.pp_degree, setting.tp_degree, setting.dp_degree, setting.microbatch_size
        over = space.stage_routes(pp, tp, dp)
        routes = tuple(dict.fromkeys(over.tensor))
        if (tp, rows, routes) not in combinations:
            combinations[tp, rows, routes] = space.combinations(tp, rows, routes)
        choices, complete = combinations[tp, rows, routes]
        rules = StateRules(space.request.optimizer, space.request.precision, setting.data_parallel, dp)
        tp_route = least_route(routes)
        dp_route = least_route(over.data)
        for shardings in choices:
            totals = _totals(space, setting, shardings, counts, rules, tp_route, dp_route)
            if totals.num_bytes / pp + pricer.cluster.memory_reserve <= memory:
                bound = (totals.once_s + setting.num_microbatches * totals.microbatch_s) / pp
                if chained:
                    bound = max(bound, pipeline_factor(setting, totals.larger_share) * totals.microbatch_s)
                found.append((bound, with_shardings(setting, shardings)))
        if not complete:
            left_out = min(left_out, _least_compute_s(space, setting, counts, tp_route) / pp)
    found.sort()
    return found, left_out


def _is_chained(profile: ModelProfile) -> bool:
    """Return whether each layer reads what the one before it makes, and sends a gradient back."""
    links = {(edge.producer, consumer) for edge in profile.edges if edge.needs_grad for consumer in edge.consumers}
    return all((layer, layer + 1) in links for layer in range(len(profile.layers) - 1))


def pipeline_factor(setting: Setting, larger_share: float) -> float:
    """Return K of (7): the step takes at least K times what one microbatch takes in all stages together.

    `larger_share` is what the larger of forward and backward is of both at least. Equal sums over s for j and j + 1
    need w[j] * (A[j, j] - A[j, j + 1]) = w[j + 1] * (A[j + 1, j + 1] - A[j + 1, j]).
    """
    stages, count = setting.pp_degree, setting.num_microbatches
    own, behind = [], []  # A[s, s] and A[s, j] for j > s; A[s, j] is 1 for j < s
    for s in range(stages):
        in_flight = num_in_flight(setting.schedule, stages, count, s)
        if setting.schedule == "gpipe":
            own.append(float(count))
        else:
            own.append(1 + larger_share * (count - 1) if in_flight == count else 1.0 + count - in_flight)
        behind.append(2.0 if in_flight < count else 1.0)
    if count == 1:
        return 1.0
    weights = [1.0]
    for s in range(stages - 1):
        weights.append(weights[s] * (own[s] - behind[s]) / (own[s + 1] - 1))
    return (weights[0] * own[0] + sum(weights[1:])) / sum(weights)


@dataclass(frozen=True, slots=True)
class _Totals:
    """Of all stages: seconds once a step and for each microbatch, and the bytes of states.

    `larger_share` is what the larger of a layer's forward and backward is of both at least, the same one in all layers.
    """

    once_s: float
    microbatch_s: float
    num_bytes: int
    larger_share: float


def with_shardings(setting: Setting, shardings: Shardings) -> Setting:
    """Return the setting with its choice of sharding filled in."""
    fields = {name: getattr(setting, name) for name in Setting.__slots__}
    return Setting(**fields | {"shardings": shardings})


def _totals(
    space: Space,
    setting: Setting,
    shardings: Shardings,
    counts: dict[str, int],
    rules: StateRules,
    tp_route: Route,
    dp_route: Route,
) -> _Totals:
    """Return what (6) and (7) are made of, with the fastest routes that any stage has."""
    pricer, chosen = space.pricer, dict(shardings)
    gpu = pricer.cluster.gpu_at(0)
    seconds, trainable, frozen, partial = 0.0, 0, 0, 0
    shares = [1.0, 1.0]
    for name, count in counts.items():
        numbers = pricer.numbers(
            name, setting.microbatch_size, setting.tp_degree, chosen.get(name, "replicated"), tp_route
        )
        ways = (numbers.forward_s + numbers.forward_comm_s, numbers.backward_s + numbers.backward_comm_s)
        seconds += count * sum(ways)
        if sum(ways):
            shares = [min(share, way / sum(ways)) for share, way in zip(shares, ways, strict=True)]
        trainable += count * numbers.trainable
        frozen += count * numbers.frozen
        partial += count * numbers.partial
    for readers, is_trainable, elements in pricer.repeats(setting.tp_degree, chosen):
        if is_trainable:
            trainable -= (len(readers) - 1) * elements
        else:
            frozen -= (len(readers) - 1) * elements
    trainable, frozen = max(trainable, 0), max(frozen, 0)
    sharded = rules.num_shards > 1
    grads = trainable * rules.grad_bytes_per_element
    finish = collective_s("reduce_scatter" if sharded else "all_reduce", grads, rules.dp_degree, dp_route)
    finish += collective_s("all_reduce", partial * rules.grad_bytes_per_element, setting.tp_degree, tp_route)
    finish += optimizer_s(trainable, rules, gpu)
    prepare = cast_s(trainable + frozen, rules, gpu)
    if sharded:
        working = (trainable + frozen) * WORKING_BYTES[rules.precision]
        prepare += collective_s("all_gather", working, rules.dp_degree, dp_route)
    states = rules.param_bytes(trainable + frozen) + rules.grad_bytes(trainable) + rules.optimizer_bytes(trainable)
    states -= 3 * setting.pp_degree  # rounded up per stage
    return _Totals(prepare + finish, seconds, states, max(0.5, *shares))


def _least_compute_s(space: Space, setting: Setting, counts: dict[str, int], route: Route) -> float:
    """Return m times the least seconds of every layer over all its shardings."""
    total = 0.0
    for layer_class in space.pricer.profile.layer_classes:
        tp, rows = setting.tp_degree, setting.microbatch_size
        names = ["replicated", *(s.name for s in layer_class.shardings if s.tp_degree == tp)]
        priced = [
            space.pricer.numbers(layer_class.name, rows, tp, name, route)
            for name in names
            if name == "replicated" or space.has_cost(layer_class.name, name, tp)
        ]
        total += counts.get(layer_class.name, 0) * min(
            n.forward_s + n.forward_comm_s + n.backward_s + n.backward_comm_s for n in priced
        )
    return setting.num_microbatches * total

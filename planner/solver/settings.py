"""The settings of the outer search with their first bounds, before any table exists.

Every stage prepares, runs its microbatches and finishes, so

    (6)  step time >= (sum of prepare + m * sum of (forward + backward) + sum of finish) / pp_degree

over all stages, which is linear in layers, so that cuts don't matter.
"""

from planner.cost.communication import Route, collective_s
from planner.cost.states import WORKING_BYTES, StateRules, cast_s, optimizer_s
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
            seconds, num_bytes = _totals(space, setting, shardings, counts, rules, tp_route, dp_route)
            if num_bytes / pp + pricer.cluster.memory_reserve <= memory:
                found.append((seconds / pp, with_shardings(setting, shardings)))
        if not complete:
            left_out = min(left_out, _least_compute_s(space, setting, counts, tp_route) / pp)
    found.sort()
    return found, left_out


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
) -> tuple[float, int]:
    """Return the numerator of (6), with the fastest routes that any stage has, and the bytes of all stages' states."""
    pricer, chosen = space.pricer, dict(shardings)
    gpu = pricer.cluster.gpu_at(0)
    seconds, trainable, frozen, partial = 0.0, 0, 0, 0
    for name, count in counts.items():
        numbers = pricer.numbers(
            name, setting.microbatch_size, setting.tp_degree, chosen.get(name, "replicated"), tp_route
        )
        seconds += count * (
            numbers.forward_s + numbers.forward_comm_s + numbers.backward_s + numbers.backward_comm_s
        )  # fmt: skip
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
    return prepare + setting.num_microbatches * seconds + finish, states - 3 * setting.pp_degree  # rounded up per stage


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

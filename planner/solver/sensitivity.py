"""Over which range of bandwidth and memory a plan stays the best, and what each constraint costs, by solving again.

At another value the plan is priced anew, and a search has only to show that nothing is faster. For memory that decides
whole ranges: with less of it no plan comes up that was not there before, so that a best plan stays one while it fits,
and with more of it a plan that is beaten once stays beaten. Step times of plans may cross more than once as links get
faster; there, the values between those that were tried are not proven. Models with branches are looked at in the
order of the plan's layers.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from planner.cluster import Cluster, Link
from planner.cost.evaluate import Pricer
from planner.model_profile import ModelProfile
from planner.plan import Plan
from planner.solver.differences import SAME, headroom, step_time_s, summary
from planner.solver.find import EndedError, Found, find, make_space, silent
from planner.solver.infeasible import with_memory
from planner.solver.orders import space_in_order_of
from planner.solver.request import SolveRequest, described

MAX_NODES = 1000  # of one search
FURTHEST = 16.0  # bandwidths are tried up to so many times as much and as little
CLOSE = 1.05  # the two ends that are told apart of a bandwidth: a value that is best and one that is not
CLOSE_MEMORY = 0.01  # of the memory now

Quantity = Literal["memory per GPU", "bandwidth between nodes", "bandwidth inside a node"]
Progress = Callable[[str, int, int], None]
TimeLeft = Callable[[], float | None]


@dataclass(frozen=True, slots=True)
class Beyond:
    """What is better just beyond an end of a range: None where nothing fits then; `fits` is the plan's own memory."""

    value: float
    summary: str | None
    step_time_s: float | None
    own_step_time_s: float
    fits: bool


@dataclass(frozen=True, slots=True)
class Range:
    """Where the plan stays the best: from `least` to `most`, None where no end was found up to `tried`."""

    quantity: Quantity
    now: float
    least: float | None
    most: float | None
    tried: tuple[float, float]
    below: Beyond | None = None
    above: Beyond | None = None


@dataclass(frozen=True, slots=True)
class Price:
    """What a constraint of people costs: the best plan without it alone; None where that is no faster."""

    constraint: str
    plan: Plan | None


@dataclass(slots=True)
class Sensitivity:
    """The ranges, and what constraints cost; neither where a `better` plan beats this one as things are now."""

    within_fraction: float = 0.0
    ranges: list[Range] = field(default_factory=list)
    prices: list[Price] = field(default_factory=list)
    better: Plan | None = None
    is_complete: bool = True
    num_searches: int = 0
    num_unproven: int = 0
    """searches that found nothing faster, and did not show that there is nothing"""


class _Prober:
    """Asks whether a plan is the best one on other clusters."""

    def __init__(
        self,
        plan: Plan,
        profile: ModelProfile,
        request: SolveRequest,
        within_fraction: float,
        progress: Progress,
        left_s: TimeLeft,
    ) -> None:
        self.plan, self.profile, self.request = plan, profile, request
        self.num_searches = self.num_unproven = 0
        self._share = 1 - max(within_fraction, SAME)
        self._progress, self._left_s = progress, left_s

    def own_s(self, cluster: Cluster) -> float:
        """Return the step time of the plan there."""
        return Pricer(self.profile, cluster).evaluate(self.plan).step_time_s

    def better(self, cluster: Cluster, label: str, *, best: bool = False) -> Plan | None:
        """Return a plan that is faster there, the best one if asked; None where that is shown not to exist."""
        return self._find(cluster, label, self.own_s(cluster) * self._share, any_plan=not best).plan

    def beyond(self, cluster: Cluster, value: float, label: str) -> Beyond:
        """Return what is best there."""
        fits = headroom(self._priced(cluster), cluster)[1] >= 0
        own_s = self.own_s(cluster)
        plan = self._find(cluster, label, own_s * self._share if fits else float("inf"), any_plan=False).plan
        found_s = None if plan is None else step_time_s(plan)
        return Beyond(value, None if plan is None else summary(plan), found_s, own_s, fits)

    def without(self, cluster: Cluster, constraint: tuple[str, str, str]) -> Price:
        """Return what a constraint costs there."""
        text = described(constraint)
        own_s = self.own_s(cluster) * (1 - SAME)
        return Price(
            text, self._find(cluster, text, own_s, any_plan=False, request=self.request.without(constraint)).plan
        )

    def _priced(self, cluster: Cluster) -> Plan:
        return self.plan.model_copy(update={"prediction": Pricer(self.profile, cluster).evaluate(self.plan)})

    def _find(
        self, cluster: Cluster, label: str, to_beat_s: float, *, any_plan: bool, request: SolveRequest | None = None
    ) -> Found:
        left_s = self._left_s()
        if left_s is not None and left_s <= 0:
            raise EndedError
        self.num_searches += 1
        self._progress(label, self.num_searches, 0)
        found = find(
            space_in_order_of(make_space(self.profile, cluster, request or self.request), self.plan),
            self.plan.origin,
            time_limit_s=left_s,
            to_beat_s=to_beat_s,
            max_nodes=MAX_NODES,
            any_plan=any_plan,
        )
        if found.plan is None and found.was_stopped(MAX_NODES):
            raise EndedError
        self.num_unproven += found.plan is None and not found.is_proven
        return found


def sensitivity(
    plan: Plan,
    profile: ModelProfile,
    cluster: Cluster,
    request: SolveRequest,
    *,
    within_fraction: float = 0.0,
    progress: Progress = silent,
    left_s: TimeLeft = lambda: None,
) -> Sensitivity:
    """Return over which ranges a plan stays the best that the request leaves, all else being equal.

    It counts as the best one while no other's step is shorter by more than `within_fraction`.

    Ctrl-C, or no time left, gives the ranges found so far.
    """
    prober, answer = _Prober(plan, profile, request, within_fraction, progress, left_s), Sensitivity(within_fraction)
    try:
        answer.better = prober.better(cluster, "now", best=True)
        if answer.better is None:
            for constraint in request.constraints:
                answer.prices.append(prober.without(cluster, constraint))
            answer.ranges.append(_memory(prober, cluster))
            if len({cluster.node_at(rank) for stage in plan.stages for rank in stage.gpus}) > 1:
                answer.ranges.append(_bandwidth(prober, cluster, "bandwidth between nodes"))
            answer.ranges.append(_bandwidth(prober, cluster, "bandwidth inside a node"))
    except (EndedError, KeyboardInterrupt):
        answer.is_complete = False
    answer.num_searches, answer.num_unproven = prober.num_searches, prober.num_unproven
    return answer


def _memory(prober: _Prober, cluster: Cluster) -> Range:
    """Return the memory per GPU within which the plan is best: from what it needs to what a better one does."""
    label: Quantity = "memory per GPU"
    now = min(cluster.gpu_at(rank).memory for stage in prober.plan.stages for rank in stage.gpus)
    priced = prober.plan.model_copy(update={"prediction": Pricer(prober.profile, cluster).evaluate(prober.plan)})
    assert priced.prediction is not None
    least, roomy = priced.prediction.peak_bytes, 2**60
    below = prober.beyond(with_memory(cluster, least - 1), least - 1, label)
    better = prober.better(with_memory(cluster, roomy), label)
    if better is None:
        return Range(label, now, least, None, (least, float("inf")), below=below)
    low, high = now, _peak(better)
    while high - low > CLOSE_MEMORY * now:
        middle = (low + high) // 2
        better = prober.better(with_memory(cluster, middle), label)
        low, high = (middle, high) if better is None else (low, min(middle, _peak(better)))
    above = prober.beyond(with_memory(cluster, high), high, label)
    return Range(label, now, least, low, (least, high), below=below, above=above)


def _peak(plan: Plan) -> int:
    assert plan.prediction is not None
    return plan.prediction.peak_bytes


def _bandwidth(prober: _Prober, cluster: Cluster, label: Quantity) -> Range:
    """Return the bandwidth of a kind of link within which the plan is best, as far as values were tried."""
    link = "inter_node" if label == "bandwidth between nodes" else "intra_node"
    now: float = getattr(cluster, link).bandwidth

    def at(value: float) -> Cluster:
        return _with_links(cluster, link, value / now)

    def end(factor: float) -> tuple[float | None, float]:
        """Return the last value that is best on a side (None: all tried ones are), and the first that is not."""
        good, bad = now, None
        while bad is None:
            value = good * factor
            if max(value / now, now / value) > FURTHEST * (1 + SAME):
                return None, good
            if prober.better(at(value), label) is None:
                good = value
            else:
                bad = value
        while max(good / bad, bad / good) > CLOSE:
            middle = (good * bad) ** 0.5
            good, bad = (middle, bad) if prober.better(at(middle), label) is None else (good, middle)
        return good, bad

    least, lower = end(0.5)
    most, upper = end(2.0)
    below = None if least is None else prober.beyond(at(lower), lower, label)
    above = None if most is None else prober.beyond(at(upper), upper, label)
    return Range(label, now, least, most, (lower, upper), below=below, above=above)


def _with_links(cluster: Cluster, kind: str, factor: float) -> Cluster:
    """Return the cluster with so many times the bandwidth of its links of a kind, those of node groups too."""

    def scaled(link: Link | None) -> Link | None:
        return None if link is None else link.model_copy(update={"bandwidth": factor * link.bandwidth})

    groups = tuple(group.model_copy(update={kind: scaled(getattr(group, kind))}) for group in cluster.node_groups)
    return cluster.model_copy(update={kind: scaled(getattr(cluster, kind)), "node_groups": groups})

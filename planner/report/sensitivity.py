"""Over which ranges a plan stays the best, for people and for scripts."""

from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.plan import Plan
from planner.report.text import percent
from planner.solver.differences import reason, slower_fraction, step_time_s, summary
from planner.solver.sensitivity import Beyond, Price, Range, Sensitivity
from planner.units import counted, format_bandwidth, format_bytes, format_seconds


def sensitivity_table(plan: Plan, found: Sensitivity) -> RenderableType:
    """Return the ranges with what is better beyond them; or the plan that is better now."""
    if found.better is not None:
        better = f"{summary(found.better)}: {reason(found.better, plan)}"
        return Text(f"sensitivity: this plan is not the best one as things are: {better}")
    best = f"within {percent(found.within_fraction)} of the best" if found.within_fraction else "the best"
    table = Table(box=box.SIMPLE, title=f"sensitivity: where the plan stays {best}", title_justify="left")
    for name, justify in (("of", "left"), ("now", "right"), ("from", "right"), ("to", "right")):
        table.add_column(name, justify="right" if justify == "right" else "left")
    table.add_column("below", overflow="fold")
    table.add_column("above", overflow="fold")
    for one in found.ranges:
        table.add_row(
            one.quantity, _amount(one, one.now), *_ends(one), _beyond(one.below, plan), _beyond(one.above, plan)
        )
    lines = [Text(_price(plan, price)) for price in found.prices]
    if found.num_unproven:
        shown = f"{found.num_unproven} of {counted(found.num_searches, 'search', 'searches')}"
        lines.append(Text(f"not proven in {shown}: no faster plan was found, nor shown not to exist"))
    if not found.is_complete:
        lines.append(Text("ended before all ranges were found"))
    return Group(table, *lines)


def _price(plan: Plan, price: Price) -> str:
    """Return what a constraint costs in a sentence."""
    if price.plan is None:
        return f"{price.constraint} costs nothing: no plan without it is faster"
    best = f"{summary(price.plan)}, {format_seconds(step_time_s(price.plan))}"
    return f"{price.constraint} costs {percent(slower_fraction(plan, price.plan))}: without it {best} per step"


def _amount(one: Range, value: float) -> str:
    return format_bytes(value) if one.quantity == "memory per GPU" else format_bandwidth(value)


def _ends(one: Range) -> tuple[str, str]:
    """Return both ends; where none was found, the furthest value that was tried."""
    least = _amount(one, one.least) if one.least is not None else f"{_amount(one, one.tried[0])} or less"
    if one.most is not None:
        return least, _amount(one, one.most)
    return least, "any" if one.tried[1] == float("inf") else f"{_amount(one, one.tried[1])} or more"


def _beyond(found: Beyond | None, plan: Plan) -> str:
    if found is None:
        return "-"
    if found.summary is None or found.step_time_s is None:
        return "nothing fits"
    share = found.step_time_s / found.own_step_time_s - 1
    beside = f"{percent(abs(share))} {'slower than this one' if share > 0 else 'faster'}"
    other = "the same with other cuts or recomputed layers" if found.summary == summary(plan) else found.summary
    return f"{other}: {beside}" if found.fits else f"does not fit; then {other}: {beside}"


def sensitivity_json(found: Sensitivity) -> dict[str, Any]:
    """Return the ranges as JSON data; bandwidths in bytes per second, memory in bytes."""

    def finite(value: Any) -> Any:
        return None if value == float("inf") else value

    return {
        "within_fraction": found.within_fraction,
        "is_best_now": found.better is None,
        "better": None if found.better is None else summary(found.better),
        "is_complete": found.is_complete,
        "num_searches": found.num_searches,
        "num_unproven": found.num_unproven,
        "constraints": [
            {
                "constraint": price.constraint,
                "step_time_s": None if price.plan is None else step_time_s(price.plan),
                "summary": None if price.plan is None else summary(price.plan),
            }
            for price in found.prices
        ],
        "ranges": [asdict(one) | {"tried": [finite(value) for value in one.tried]} for one in found.ranges],
    }

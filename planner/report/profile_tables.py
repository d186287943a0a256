"""A profile for people: one row per run of equal layers."""

from itertools import groupby

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.model_profile import LayerCost, ModelProfile
from planner.report.text import layer_ranges
from planner.units import counted, format_bytes, format_count, format_flops, format_seconds


def profile_table(profile: ModelProfile) -> RenderableType:
    """Return the model in a line, then its layers: parameters, times and bytes at the smallest microbatch."""
    where = profile.provenance.gpu or profile.provenance.device
    classes = counted(len(profile.layer_classes), "class", "classes")
    line = (
        f"{profile.name}: {format_count(profile.param_count)} parameters, {counted(len(profile.layers), 'layer')} of "
        f"{classes}, {format_flops(profile.forward_flops_per_row)} forward per sample, "
        f"{profile.provenance.dtype} on {where}"
    )
    table = Table(box=box.SIMPLE)
    table.add_column("layers", overflow="fold")
    table.add_column("class")
    names = ("parameters", "rows", "forward", "backward", "spread", "activations", "transient", "source", "tp")
    for name in names:
        table.add_column(name, justify="right")
    for class_name, members in groupby(profile.layers, key=lambda layer: layer.layer_class):
        layers = list(members)
        layer_class = next(found for found in profile.layer_classes if found.name == class_name)
        cost: LayerCost = min(layer_class.costs, key=lambda found: (found.tp_degree, found.microbatch_size))
        degrees = sorted({found.tp_degree for found in layer_class.costs})
        table.add_row(
            layer_ranges([layer.name for layer in layers]),
            class_name,
            f"{len(layers)} x {format_count(cost.trainable_param_count)}"
            if len(layers) > 1
            else format_count(cost.trainable_param_count),
            str(cost.microbatch_size),
            format_seconds(cost.forward_time_s),
            format_seconds(cost.backward_time_s),
            f"{100 * cost.spread_fraction:.2g} %",
            format_bytes(cost.activation_bytes),
            format_bytes(cost.transient_bytes),
            cost.source,
            ",".join(map(str, degrees)),
        )
    tied = [Text(f"tied: {' = '.join(group)}") for group in profile.tied]
    notes = [Text(f"note: {note}") for note in profile.notes]
    return Group(Text(line), table, *tied, *notes)

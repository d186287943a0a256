"""How many parameters a GPU of each stage holds, and what of the layers every tensor-parallel rank holds whole."""

import math
from collections.abc import Iterator, Mapping, Sequence

from planner.cost.layers import REPLICATED, parameter_sharding
from planner.graph import SharedStorage
from planner.model_profile import ModelProfile, WholeAt
from planner.plan import Stage
from planner.prediction import WholePart


class ParameterCounts:
    """Counts the parameters of layers on one GPU; buffers are none. Keeps what layers of one class share."""

    def __init__(self, profile: ModelProfile, shared: Sequence[SharedStorage]) -> None:
        self.profile = profile
        self._shared = [storage for storage in shared if not profile.parameters[storage.name].buffer]
        self._counts: dict[tuple[str, int, str], int] = {}

    def of_layer(self, layer: int, tp_degree: int, sharding: str) -> int:
        """Return the elements of a layer's parameters on one GPU; a parameter of two names counts once."""
        key = (self.profile.layers[layer].layer_class, tp_degree, sharding)
        if key not in self._counts:
            seen: dict[str, int] = {}
            for name in self.profile.layers[layer].parameters:
                parameter = self.profile.parameters[name]
                if not parameter.buffer:
                    divided = parameter_sharding(self.profile, layer, name, tp_degree, sharding) is not None
                    elements = math.prod(parameter.shape) // (tp_degree if divided else 1)
                    first = parameter.tied_to or name
                    seen[first] = min(elements, seen.get(first, elements))
            self._counts[key] = sum(seen.values())
        return self._counts[key]

    def of_layers(self, chosen: Mapping[int, str], tp_degree: int) -> int:
        """Return the elements of layers on one GPU, of shardings by layer: what the layers share counts once."""
        total = sum(self.of_layer(layer, tp_degree, name) for layer, name in chosen.items())
        for storage in self._shared:
            inside = [(layer, name) for layer, name in storage.names if layer in chosen]
            if len(inside) > 1:
                layer, name = inside[0]
                way = parameter_sharding(self.profile, layer, name, tp_degree, chosen[layer])
                total -= (len(inside) - 1) * (storage.num_elements // (tp_degree if way is not None else 1))
        return total

    def whole_parts(self, stages: Sequence[Stage]) -> Iterator[WholePart]:
        """Yield the layers, and the modules of divided layers, of which every tensor-parallel rank holds the whole."""
        classes = {item.name: item for item in self.profile.layer_classes}
        index_of = {layer.name: index for index, layer in enumerate(self.profile.layers)}
        found: dict[tuple[str, str, int], list[str]] = {}
        for stage in stages:
            for name in stage.layers if stage.tp_degree > 1 else ():
                layer_class = classes[self.profile.layers[index_of[name]].layer_class]
                chosen = stage.shardings.get(layer_class.name, REPLICATED)
                rule = layer_class.sharding(chosen, stage.tp_degree)
                whole = layer_class.whole_at(stage.tp_degree)
                reasons = {"": _reason(stage.tp_degree, whole)}
                if rule is not None:
                    reasons = self._matrices(index_of[name], rule.replicated)
                for module, reason in reasons.items():
                    count = self._count(index_of[name], module)
                    if count:
                        found.setdefault((module, reason, count), []).append(name)
        for (module, reason, count), names in found.items():
            yield WholePart(layers=tuple(names), module=module, param_count=count, reason=reason)

    def _matrices(self, layer: int, replicated: Mapping[str, str]) -> dict[str, str]:
        """Return why modules and parameters of a layer are whole: of two or more dimensions, the others are small."""
        found = {}
        for name, reason in replicated.items():
            full = ".".join(part for part in (self.profile.layers[layer].module, name) if part)
            parameter = self.profile.parameters.get(full)
            if parameter is not None and len(parameter.shape) > 1 and not parameter.buffer:
                found[name.removesuffix(".weight")] = reason
        return found

    def _count(self, layer: int, module: str) -> int:
        """Return the elements of the parameters of a layer, or of one module or parameter in it."""
        if not module:
            return self.of_layer(layer, 1, REPLICATED)
        full = ".".join(part for part in (self.profile.layers[layer].module, module) if part)
        names = [n for n in self.profile.layers[layer].parameters if n == full or n.startswith(f"{full}.")]
        parameters = [self.profile.parameters[name] for name in names]
        return sum(math.prod(parameter.shape) for parameter in parameters if not parameter.buffer)


def _reason(tp_degree: int, whole: WholeAt | None) -> str:
    return whole.reason if whole is not None else f"this plan leaves it whole at tp_degree {tp_degree}"

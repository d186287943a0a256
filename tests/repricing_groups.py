"""The second price of plans whose device groups hold several stages, or whose backwards are split.

It takes the lists of `planner.schedule`, which are drawn in tests of their own, and shares no code with `planner.cost`.
"""

from collections import defaultdict
from collections.abc import Iterable
from functools import cache

from repricing import Repricing

from planner.cluster import Cluster
from planner.model_profile import ModelProfile
from planner.plan import Plan
from planner.schedule import group_actions

Did = tuple[str, int, int]  # kind, stage, microbatch


class GroupRepricing(Repricing):
    """The price of one plan on GPUs of one type."""

    def __init__(self, plan: Plan, profile: ModelProfile, cluster: Cluster) -> None:
        super().__init__(plan, profile, cluster)
        self.group_of = [min(s for s, other in enumerate(plan.stages) if other.gpus == own.gpus) for own in plan.stages]
        lists = group_actions(plan.schedule, plan.pp_degree, plan.num_microbatches, plan.num_chunks)
        self.lists: dict[int, list[Did]] = {
            group: [(action.kind, action.stage, action.microbatch) for action in actions]
            for group, actions in zip(sorted(set(self.group_of)), lists, strict=True)
        }
        self.is_split = any(kind == "I" for kind, _, _ in self.lists[0])

    def apart(self, a: int, b: int) -> bool:
        return self.group_of[a] != self.group_of[b]

    def holders(self, layers: Iterable[int]) -> list[int]:
        """One stage of each group: the first that holds what layers read."""
        found: dict[int, int] = {}
        for s in sorted({self.stage_of[layer] for layer in layers}):
            found.setdefault(self.group_of[s], s)
        return sorted(found.values())

    def elements(self, s: int) -> int:
        """Without what an earlier stage on the same GPUs holds."""
        stage, total = self.plan.stages[s], 0
        for readers, is_trained, elements in self.storages():
            inside = [(layer, name) for layer, name in readers if self.stage_of[layer] == s]
            if inside and is_trained and s in self.holders([layer for layer, _ in readers]):
                total += elements // (stage.tp_degree if self.is_divided(*inside[0], stage) else 1)
        return total

    def seconds(self, did: Did) -> float:
        kind, s, _ = did
        forward, backward = self.action_s(s)
        weights = sum(self.slow(layer, self.plan.stages[s], "backward_weight_time_s") for layer in self.layers_of[s])
        return {"F": forward, "B": backward, "I": backward - weights, "W": weights}[kind]

    def step_s(self) -> float:
        stages = range(len(self.plan.stages))
        pairs = [(a, b) for a in stages for b in stages if a < b and self.apart(a, b)]
        values = {pair: self.message(*pair, gradient=False) for pair in pairs}
        gradients = {pair: self.message(*pair, gradient=True) for pair in pairs}
        once = [self.once_s(s) for s in stages]
        own: defaultdict[int, list[int]] = defaultdict(list)
        for s in stages:
            own[self.group_of[s]].append(s)

        # What each action sends, as (from, to, busy, latency); and every link's messages in the order they leave.
        links: defaultdict[tuple[int, int], list[tuple[Did, int]]] = defaultdict(list)
        cost: dict[tuple[Did, int], tuple[float, float]] = {}
        waits: defaultdict[Did, list[tuple[Did, int]]] = defaultdict(list)
        for group, todo in self.lists.items():
            for did in todo:
                kind, s, i = did
                for other in stages:
                    found = None
                    if kind == "F" and s < other:
                        found = values.get((s, other))
                    elif kind in "BI" and other < s:
                        found = gradients.get((other, s))
                    if found is not None:
                        links[group, self.group_of[other]].append((did, other))
                        cost[did, other] = found
                        waits[kind, other, i].append((did, other))
        before = {entry: sent[at - 1] if at else None for sent in links.values() for at, entry in enumerate(sent)}

        @cache
        def end(did: Did) -> float:
            group = self.group_of[did[1]]
            todo = self.lists[group]
            at = todo.index(did)
            start = end(todo[at - 1]) if at else sum(once[s][0] for s in own[group])
            return max([start, *(leaves(*entry) + cost[entry][1] for entry in waits[did])]) + self.seconds(did)

        @cache
        def leaves(did: Did, other: int) -> float:
            earlier = before[did, other]
            return max(leaves(*earlier) if earlier else 0.0, end(did)) + cost[did, other][0]

        done = {group: end(todo[-1]) + sum(once[s][1] for s in own[group]) for group, todo in self.lists.items()}
        for sharing, tie_s in self.ties():
            together = max(done[self.group_of[s]] for s in sharing) + tie_s
            done |= {self.group_of[s]: together for s in sharing}
        return max(seconds + sum(once[s][2] for s in own[group]) for group, seconds in done.items())

    def peak_bytes(self, s: int) -> int:
        group = self.group_of[s]
        stages = [other for other in range(len(self.plan.stages)) if self.group_of[other] == group]
        kept = {other: self.kept_bytes(other, self.remade(other)) for other in stages}
        full = {other: max(kept[other], self.kept_bytes(other, set())) for other in stages}
        live = most = 0
        for kind, other, _ in self.lists[group]:
            change = {"F": kept[other], "B": -kept[other], "I": full[other] - kept[other], "W": -full[other]}
            live += change[kind]
            most = max(most, live)
        transient = max(self.transient_bytes(o, set() if self.is_split else self.remade(o)) for o in stages)
        held = sum(self.states_bytes(other) + self.buffer_bytes(other) for other in stages) + most + transient
        return held + max(self.bucket_bytes(other) for other in stages) + self.cluster.memory_reserve

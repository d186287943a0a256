"""Answers about all pipelines of a chain: whether any keeps to a limit, and which. See `pipeline` for the bounds."""

from collections.abc import Callable, Sequence
from math import inf

import numpy as np

from planner.solver.core.lattice import Floats
from planner.solver.core.pipeline import EPSILON, Chain, Ints, Pairs, Piece, within_s
from planner.solver.core.pipeline_run import Limited, Run

BELOW = 1e-9  # relative
REUSED = 1.05  # candidates within a limit serve for limits that are smaller by no more


class Pipelines:
    """Answers whether a chain can be run within a limit; `check` is called often, and may raise."""

    def __init__(self, chain: Chain, check: Callable[[], None] = lambda: None) -> None:
        self.chain, self.check = chain, check
        count = chain.num_layers
        forward = np.array([option.layer_forward for option in chain.options])
        backward = np.array([option.layer_backward for option in chain.options])
        gpus = np.array([option.gpus for option in chain.options], dtype=np.int64)
        work = np.min((forward + backward) * gpus[:, None], axis=0)
        self.work = np.concatenate((np.cumsum(work[::-1])[::-1], [0.0]))
        """GPU-seconds per microbatch that the layers from i on take at least"""
        self.head = np.concatenate(([0.0], np.cumsum(forward.min(axis=0))))
        self.after = np.concatenate(([0.0], np.cumsum(backward.min(axis=0))))
        self.start_s = min(float(np.min(option.ready[0, 1:])) for option in chain.options)
        self.finish_s = min(float(np.min(option.tail[0, 1:])) for option in chain.options)
        self._arrive = np.array([option.arrive for option in chain.options]) + chain.latency_s
        self._back = np.array([option.back for option in chain.options]) + chain.latency_s
        if not chain.linked:
            self.head[:] = self.after[:] = self.start_s = self.finish_s = 0.0
            self._arrive[:] = self._back[:] = 0.0
        self.least_back = self._back.min(axis=0)
        self.most_message_s = float(self._arrive[:, 1:count].max(initial=0.0) + self._back[:, 1:count].max(initial=0.0))
        self._all: Pairs | None = None
        self._limited: Limited | None = None
        self.num_runs = 0

    @property
    def most_stages(self) -> int:
        """The largest number of stages looked at."""
        return max((n for n in self.chain.stage_counts if n <= self.chain.num_layers), default=0)

    def find(self, limit_s: float, low_s: float, high_s: float) -> list[Piece] | None:
        """Return stages that (1) allows `limit_s` and whose sum T may be in [low_s, high_s]; None: proven none."""
        self.num_runs += 1
        if self._limited is None or not limit_s <= self._limited.limit_s <= limit_s * REUSED:
            self._limited = Limited(self, limit_s)
        run = Run(self._limited, limit_s * (1 + EPSILON), low_s * (1 - EPSILON), high_s * (1 + EPSILON))
        return run.find() if run.possible() else None

    def decide(
        self, limit_s: float, width_s: float, try_stages: Callable[[list[Piece]], bool] = lambda pieces: False
    ) -> bool:
        """Return True where no plan takes at most `limit_s`: proven; False where it was not shown.

        T is searched in intervals that are halved down to `width_s`. Stages that keep to (1) in an interval are given
        to `try_stages`, which answers whether they are good enough to stop.
        """
        if not self.chain.linked:
            return self.find(limit_s, 0.0, inf) is None
        low = max(float(self.work[0]) / self.chain.num_gpus, float(self.head[-1] + self.after[-1]))
        intervals = [(low, limit_s)]  # every T is within the step
        while intervals:
            low, high = intervals.pop()
            pieces = self.find(limit_s, low, high)
            if pieces is None:
                continue
            if try_stages(pieces) or self.station_s(pieces) <= limit_s or high - low <= width_s:
                return False
            if self._limited is not None:
                self._limited.refine()
            total = self.total_s(pieces)
            at = total * (1 - BELOW)  # no T in the lower part is that of these stages
            at = at if low + 0.1 * (high - low) < at < high else (low + high) / 2
            intervals += [(at, high), (low, at)]
        return True

    @property
    def most_s(self) -> float:
        """What no step takes longer than, whatever the stages: layers, messages and all else one after another."""
        chain = self.chain
        layers = sum(float((option.layer_forward * 2 + option.layer_backward).sum()) for option in chain.options)
        once = sum(float(option.ready.max() + option.tail.max()) for option in chain.options)
        messages = chain.num_layers * self.most_message_s
        return 4 * (chain.num_microbatches * (layers + messages) + chain.num_layers * once)

    def ends_of(self, pairs: Pairs) -> Floats:
        """Return what (1) counts before the first microbatch and after the last one, by what is in front at least."""
        later = pairs.first > 0
        head = np.where(later, self.head[pairs.first] + self.start_s, 0.0)
        after = np.where(later, self.after[pairs.first] + self.finish_s, 0.0)
        return np.asarray(np.maximum(head, pairs.ready) + np.maximum(after, pairs.tail), dtype=np.float64)

    def station_of(self, position: int, pairs: Pairs, remade: Floats, behind: Floats) -> Floats:
        """Return (1) of stages at a position, `behind` being D; inf where one can't stand there."""
        fits = np.isfinite(remade) & np.isfinite(behind)
        b, behind = pairs.backward + np.where(fits, remade, 0.0), np.where(fits, behind, 0.0)
        within = within_s(self.chain, position, pairs.forward, b, behind * self.chain.linked)
        return np.asarray(np.where(fits, self.ends_of(pairs) + within, inf), dtype=np.float64)

    def total_s(self, pieces: Sequence[Piece]) -> float:
        """Return T of stages, with the least messages."""
        return self._sums(pieces)[1]

    def pairs(self) -> Pairs:
        """Return every candidate stage, sorted by its first layer."""
        if self._all is None:
            count, parts = self.chain.num_layers, list[tuple[Ints, Ints, Ints]]()
            for index, option in enumerate(self.chain.options):
                first, stop = np.nonzero(np.isfinite(option.forward + option.backward))
                keep = first < stop
                first, stop = first[keep], stop[keep]
                parts.append((first, stop, np.full(len(first), index)))
            first, stop, chosen = (np.concatenate(columns) for columns in zip(*parts, strict=True))
            order = np.argsort(first, kind="stable")
            first, stop, chosen = first[order], stop[order], chosen[order]
            options = self.chain.options

            def gather(name: str) -> Floats:
                stacked = np.array([getattr(option, name) for option in options])
                return np.asarray(stacked[chosen, first, stop], dtype=np.float64)

            gpus = np.array([option.gpus for option in options], dtype=np.int64)[chosen]
            self._all = Pairs(
                first, stop, chosen, gpus, gather("forward"), gather("backward"), gather("ready"), gather("tail"),
                np.where(first > 0, self._arrive[chosen, first], 0.0),
                np.where(stop < count, self._back[chosen, stop], 0.0),
            )  # fmt: skip
        return self._all

    def station_s(self, pieces: Sequence[Piece]) -> float:
        """Return the largest (1) of given stages, with all that is known of them and the least messages."""
        return self._sums(pieces)[0]

    def _sums(self, pieces: Sequence[Piece]) -> tuple[float, float]:
        """Return the largest (1), and T."""
        chain, options = self.chain, self.chain.options
        at = [(options[piece.option], (piece.first, piece.stop)) for piece in pieces]
        f = np.array([option.forward[span] for option, span in at])
        b = np.array([option.backward[span] for option, span in at])
        for s, piece in enumerate(pieces):
            w = chain.in_flight(len(pieces) - s)
            b[s] += chain.remaking.seconds(piece.option, w, np.array([piece.first]), np.array([piece.stop]))[0]
        ready, tail = (np.array([getattr(option, name)[span] for option, span in at]) for name in ("ready", "tail"))
        arrive = np.array([self._arrive[piece.option, piece.first] if piece.first else 0.0 for piece in pieces])
        last = chain.num_layers
        back = np.array([self._back[piece.option, piece.stop] if piece.stop < last else 0.0 for piece in pieces])
        trips = np.cumsum((f + b + arrive + back)[::-1])[::-1]
        behind = trips - f - b - arrive
        head, after = ready[0] + np.cumsum(f) - f, tail[0] + np.cumsum(b) - b
        sent = np.cumsum(arrive + back) - back  # in front, either way
        if not chain.linked:
            behind, head, after, sent = (np.zeros(len(pieces)) for _ in range(4))
            head[0], after[0] = ready[0], tail[0]
        worst = 0.0
        for s in range(len(pieces)):
            part = slice(s, s + 1)
            within = float(within_s(chain, len(pieces) - s, f[part], b[part], behind[part])[0])
            ends = max(max(head[s], ready[s]) + max(after[s], tail[s]), head[s] + after[s] + sent[s])
            worst = max(worst, float(ends) + within)
        return worst, float(ready[0] + tail[0] + trips[0])

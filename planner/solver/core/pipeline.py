"""A pipeline's chain of stages, each with its own degrees: whether any plan takes at most `limit_s`, and which.

The pipeline is built from the last stage to the first. With p stages from a stage to the end, w microbatches in flight
there, m in all, f and b its seconds of a microbatch (recomputation included), c = f + b, and

    D    the sum of all c behind it, and of the messages between, forward and back
    H    the same in front of it,  T = H + c + D

the step takes at least, under 1F1B,

    (1)  max(forward part of H, ready) + start + (m - w) c + end + max(backward part of H, tail)
    (2)  start = max(w f, f + D)            the first w microbatches go ahead, or the first one makes a round trip
    (3)  end = max(floor((m - w) / w) * trip + w b, floor((m - w - 1) / w) * trip + b + D)
         trip = max(0, D - (w - 1) c)       a round trip on the way is w microbatches more, in place of w c

(one round trip alone where w = m; GPipe: m f + D + m b). All of them grow with D, so the least sum of a suffix, by
(stages p, first layer i, GPUs g), is all that has to be known of it: a dynamic program. It is narrow because

    (4)  GPUs: a stage has c <= most_s, so layers of W GPU-seconds take at least W / most_s of them: few g for each i
    (5)  sum: R + what the layers in front take at least on the G - g GPUs left <= T

where T is searched in intervals [low, high]: with H >= low - D - c, (1) gives (m - 1) c <= limit - low + D and
(m - w) c <= limit - low - D, so that `most_s` is near to what balanced stages take, and D is bounded from above. A
stage with D < (m - 1) c - limit + low is not allowed, so that what is in front of it counts no less for R. What the
first stage prepares and finishes is a part of H and T: every microbatch's way begins and ends there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from planner.plan import Schedule
from planner.solver.core.lattice import Bools, Floats

Ints = NDArray[np.int64]
EPSILON = 1e-11  # relative: sums are rounded


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run any stage [a, b): its GPUs, and arrays [a, b] of seconds, infinite where it can't run so.

    `forward` and `backward` are per microbatch without recomputation, at least the sum of `layer_forward` and
    `layer_backward` of single layers;
    `ready` before the first microbatch and `tail` after the last one are once per step. `arrive[a]` are the least
    seconds in which a microbatch's values come over the link from the stage before, `back[b]` those in which the
    gradients come back from the stage behind.
    """

    gpus: int
    forward: Floats
    backward: Floats
    ready: Floats
    tail: Floats
    arrive: Floats
    back: Floats
    layer_forward: Floats
    layer_backward: Floats


class Remaking(Protocol):
    """Says what recomputation takes."""

    def seconds(self, option: int, in_flight: int, firsts: Ints, stops: Ints) -> Floats:
        """Return the least seconds of recomputation of stages [first, stop) with so many microbatches in flight.

        Infinite where a stage fits in no way.
        """


@dataclass(frozen=True, slots=True)
class Chain:
    """A problem: any number of stages over all layers, together at most `num_gpus`.

    A message arrives `latency_s` after it has passed its link. `stage_counts` are the counts of stages to look at.
    Where not every layer is `linked` to the one before it, a stage is bounded by its own work alone.
    """

    num_layers: int
    num_gpus: int
    num_microbatches: int
    schedule: Schedule
    options: Sequence[Option]
    remaking: Remaking
    latency_s: float
    stage_counts: frozenset[int]
    linked: bool = True

    def in_flight(self, position: int) -> int:
        """Return the microbatches in flight with `position` stages from there to the end."""
        return self.num_microbatches if self.schedule == "gpipe" else min(self.num_microbatches, position)


@dataclass(frozen=True, slots=True)
class Piece:
    """The stage [first, stop), run as an option says."""

    first: int
    stop: int
    option: int


@dataclass(frozen=True, slots=True)
class Pairs:
    """Candidate stages, sorted by their first layer."""

    first: Ints
    stop: Ints
    option: Ints
    gpus: Ints
    forward: Floats
    backward: Floats
    ready: Floats
    tail: Floats
    arrive: Floats
    back: Floats

    def own(self, remade: Floats) -> Floats:
        """Return what each stage adds to T, with so many seconds of recomputation."""
        once = np.where(self.first == 0, self.ready + self.tail, 0.0)
        return self.forward + self.backward + remade + self.arrive + self.back + once

    def __getitem__(self, chosen: Bools | Ints) -> "Pairs":
        return Pairs(*(getattr(self, name)[chosen] for name in self.__slots__))


def within_s(chain: Chain, position: int, f: Floats, b: Floats, behind: Floats) -> Floats:
    """Return what (1) counts within a stage and behind it."""
    m, w, c = chain.num_microbatches, chain.in_flight(position), f + b
    if chain.schedule == "gpipe":
        return m * c + behind
    if w == m:
        return np.maximum(np.maximum(w * f, f + behind) + w * b, w * f + behind + b)
    trip = np.maximum(0.0, behind - (w - 1) * c)
    end = np.maximum(((m - w) // w) * trip + w * b, ((m - w - 1) // w) * trip + b + behind)
    return np.maximum(w * f, f + behind) + (m - w) * c + end


def most_behind_s(chain: Chain, position: int, f: Floats, b: Floats, room: Floats) -> Floats:
    """Return the largest D with `within_s` <= room; negative where there is none: the inverse of `within_s`."""
    m, w, c = chain.num_microbatches, chain.in_flight(position), f + b
    if chain.schedule == "gpipe":
        return room - m * c
    least = m * c <= room
    if w == m:
        most = np.minimum(room - f - w * b, room - w * f - b)
    else:
        rounds = (m - w) * c
        most = room - f - rounds - w * b
        np.minimum(most, room - w * f - rounds - b, out=most)
        np.minimum(most, (room - c - rounds) / 2, out=most)
        for trips, end, round_trips in (((m - w) // w, w * b, 0), ((m - w - 1) // w, b, 1)):
            if trips:
                spare = room + (trips * (w - 1) - (m - w)) * c - end
                np.minimum(most, (spare - w * f) / (trips + round_trips), out=most)
                np.minimum(most, (spare - f) / (trips + round_trips + 1), out=most)
    return np.where(least, most, -1.0)


def most_between_s(chain: Chain, position: int, f: Floats, b: Floats, slack: Floats | float) -> Floats:
    """Return the largest D with `within_s` - D - c <= slack, limit - low: (1) with H = T - D - c; negative: none.

    What asks for a large D, m c - c - D <= slack, is left to `Run._least_behind`.
    """
    m, w, c = chain.num_microbatches, chain.in_flight(position), f + b
    if chain.schedule == "gpipe":
        return np.where((m - 1) * c <= slack, np.inf, -1.0)
    rounds = (m - w) * c
    fits = (rounds - c + f + w * b <= slack) & (rounds - c + w * f + b <= slack)
    most = np.full(len(c), np.inf)
    if w < m:
        most = np.minimum(most, slack - rounds)
        for trips, end, round_trips in (((m - w) // w, w * b, 0), ((m - w - 1) // w, b, 1)):
            spare = slack + c - rounds + trips * (w - 1) * c - end
            for start, more in ((w * f, 0), (f, 1)):
                if (times := trips + round_trips + more - 1) > 0 and trips:
                    np.minimum(most, (spare - start) / times, out=most)
    return np.where(fits, most, -1.0)

"""Lower bounds of when the last stages of a pipeline are done, exact where values go from each stage to the next.

For N candidates at once, each a suffix of p stages (arrays N x p; messages N x (p - 1)). What comes before the suffix
is relaxed: microbatch j arrives at its first stage no earlier than `arrive + j * pace`.

1F1B runs in slots: F_j of every stage is in slot j, and B_i of the stage with p' stages from it to the end in slot
i + p' - 1; every slot is one forward wave down the stages, then one backward of each. GPipe has a closed form: the
completion of a flow shop whose machines are stages and links is a path through the (stage, microbatch) grid, all sums
once and the slowest machine m - 1 times more.
"""

from dataclasses import dataclass

import numpy as np

from planner.plan import Schedule
from planner.solver.tables import Bools, Floats


@dataclass(frozen=True, slots=True)
class Suffixes:
    """N suffixes of p stages: seconds of forwards, backwards, and messages (busy, latency) between neighbours.

    `ready` is when a stage may start at the earliest; `returns` says whether gradients come back over a cut.
    """

    forward: Floats
    backward: Floats
    sent_busy: Floats
    sent_latency: Floats
    back_busy: Floats
    back_latency: Floats
    returns: Bools
    ready: Floats

    def with_front(self, front: "Suffixes") -> "Suffixes":
        """Return the suffixes with one stage, and the message from it, put in front of each."""

        def join(new: Floats, old: Floats) -> Floats:
            return np.concatenate((new, np.broadcast_to(old, (len(new), old.shape[1]))), axis=1)

        return Suffixes(
            forward=join(front.forward, self.forward),
            backward=join(front.backward, self.backward),
            sent_busy=join(front.sent_busy, self.sent_busy),
            sent_latency=join(front.sent_latency, self.sent_latency),
            back_busy=join(front.back_busy, self.back_busy),
            back_latency=join(front.back_latency, self.back_latency),
            returns=np.concatenate(
                (front.returns, np.broadcast_to(self.returns, (len(front.returns), self.returns.shape[1]))), axis=1
            ),
            ready=join(front.ready, self.ready),
        )

    def rows(self, chosen: Bools | slice) -> "Suffixes":
        """Return some of the suffixes."""
        return Suffixes(*(getattr(self, name)[chosen] for name in self.__slots__))


def stage_ends(schedule: Schedule, m: int, s: Suffixes, arrive: Floats, pace: Floats) -> Floats:
    """Return lower bounds (N x p) of when each stage has run its last backward, in seconds from the step's start."""
    return (_one_f_one_b if schedule == "1f1b" else _gpipe)(m, s, arrive, pace)


def _one_f_one_b(m: int, s: Suffixes, arrive: Floats, pace: Floats) -> Floats:
    count, p = s.forward.shape
    free = s.ready.copy()
    # Stages and links in turn: what each adds to a wave (`own`), and the sum of all before and including it (`path`).
    own = np.empty((count, 2 * p - 1))
    own[:, 0::2], own[:, 1::2] = s.forward, s.sent_busy
    steps = own.copy()
    steps[:, 2::2] += s.sent_latency
    path = np.cumsum(steps, axis=1)
    lead = own - path
    wave = np.zeros((count, 2 * p - 1))
    link_free = np.zeros((count, p - 1))
    back_free = np.zeros((count, p - 1))
    done_back = np.zeros((count, p))
    for slot in range(m + p - 1):
        if slot < m:
            wave[:, 0::2] = free
            wave[:, 1::2] = link_free
            np.maximum(wave[:, 0], arrive + slot * pace, out=wave[:, 0])
            ended = path + np.maximum.accumulate(wave + lead, axis=1)
            free = ended[:, 0::2].copy()
            link_free = ended[:, 1::2]
        low, high = max(0, p - 1 - slot), min(p - 1, m + p - 2 - slot)
        inner = min(high, p - 2)  # stages that wait for a gradient
        start = free[:, low : high + 1]
        if low <= inner:
            span = slice(low, inner + 1)
            sent = np.maximum(back_free[:, span], done_back[:, low + 1 : inner + 2]) + s.back_busy[:, span]
            back_free[:, span] = sent
            came = np.where(s.returns[:, span], sent + s.back_latency[:, span], 0.0)
            start = start.copy()
            np.maximum(start[:, : inner + 1 - low], came, out=start[:, : inner + 1 - low])
        done = start + s.backward[:, low : high + 1]
        done_back[:, low : high + 1] = done
        free[:, low : high + 1] = done
    return done_back


def _gpipe(m: int, s: Suffixes, arrive: Floats, pace: Floats) -> Floats:
    count, p = s.forward.shape
    total = np.zeros(count)  # of forwards from stage x on, messages included
    slowest = np.zeros(count)
    last_forward = np.zeros(count)
    own_forward = np.empty((count, p))
    for x in reversed(range(p)):
        if x < p - 1:
            total = total + s.sent_busy[:, x] + s.sent_latency[:, x]
            slowest = np.maximum(slowest, s.sent_busy[:, x])
        total = total + s.forward[:, x]
        slowest = np.maximum(slowest, s.forward[:, x])
        own_forward[:, x] = s.ready[:, x] + m * s.forward[:, x]
        last_forward = np.maximum(last_forward, s.ready[:, x] + total + (m - 1) * slowest)
    last_forward = np.maximum(last_forward, arrive + total + (m - 1) * np.maximum(slowest, pace))
    ends = np.empty((count, p))
    base, total, slowest = last_forward, np.zeros(count), np.zeros(count)
    for x in reversed(range(p)):
        backward = s.backward[:, x]
        if x < p - 1:
            waits = s.returns[:, x]
            base = np.where(waits, base, own_forward[:, x])
            total = np.where(waits, total + s.back_busy[:, x] + s.back_latency[:, x], 0.0)
            slowest = np.where(waits, np.maximum(slowest, s.back_busy[:, x]), 0.0)
        total = total + backward
        slowest = np.maximum(slowest, backward)
        ends[:, x] = base + total + (m - 1) * slowest
    return ends

"""torchgpipe's balancing: a list of costs cut into blocks whose largest is the smallest.

Kim et al., "torchgpipe: On-the-fly Pipeline Parallelism for Training Giant Models", 2020; `torchgpipe.balance`.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from planner.errors import UsageError


def balance(costs: Sequence[float], num_blocks: int) -> list[int]:
    """Return how many costs each of `num_blocks` blocks gets so that the largest sum is the least there is."""
    if not 1 <= num_blocks <= len(costs):
        raise UsageError(
            f"{len(costs)} costs can't fill {num_blocks} blocks", hint="ask for at most as many blocks as costs"
        )
    if any(cost < 0 for cost in costs):
        raise UsageError(f"a cost is {min(costs)}, below zero", hint="give costs of zero and more")
    sums = [0.0, *accumulate(costs)]
    low, high = max(max(costs), sums[-1] / num_blocks) * (1 - 1e-12), sums[-1]
    ends = _filled(sums, high, num_blocks) or []
    while (middle := (low + high) / 2) not in (low, high):
        found = _filled(sums, middle, num_blocks)
        if found is None:
            low = middle
        else:
            ends = found  # the plan itself may be better than the limit asked
            high = max(
                end - start
                for start, end in zip([0.0, *(sums[e] for e in ends)], [sums[e] for e in ends], strict=False)
            )
            high = min(high, middle)
    return _sizes(ends, len(costs), num_blocks)


def _filled(sums: Sequence[float], limit: float, num_blocks: int) -> list[int] | None:
    """Return where blocks end that are filled up to a limit, one after another; None where they are too few."""
    ends: list[int] = []
    end = 0
    while end < len(sums) - 1:
        start, end = end, bisect_right(sums, sums[end] + limit) - 1
        if end == start or len(ends) == num_blocks:
            return None
        ends.append(end)
    return ends


def _sizes(ends: list[int], count: int, num_blocks: int) -> list[int]:
    """Return the sizes of blocks, with large ones cut until there are enough: no block is empty."""
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    while len(sizes) < num_blocks:
        position = max(range(len(sizes)), key=sizes.__getitem__)
        size = sizes[position]
        sizes[position : position + 1] = [size - 1, 1]
    assert sum(sizes) == count
    return sizes

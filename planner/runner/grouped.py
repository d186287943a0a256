"""Products of groups of matrices (`torch.nn.functional.grouped_mm`, the experts of a mixture) in float64."""

import torch
from torch import Tensor


def grouped_product(
    left: Tensor, right: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: object = None
) -> Tensor:
    """Return what `torch.nn.functional.grouped_mm` returns, by one product for each group.

    Rows (or columns) beyond the last of `offs`, which torch leaves undefined, are zero.
    """
    if left.dim() == 3 and right.dim() == 3:
        product = left @ right
    elif offs is None:
        raise ValueError("grouped_mm needs offs where an operand has two dimensions")
    else:
        stops = [int(stop) for stop in offs.tolist()]
        starts = [0, *stops[:-1]]
        pieces = [slice(start, stop) for start, stop in zip(starts, stops, strict=True)]
        if left.dim() == 2 and right.dim() == 2:
            product = torch.stack([left[:, piece] @ right[piece] for piece in pieces])
        elif left.dim() == 2:
            rows = [left[piece] @ right[group] for group, piece in enumerate(pieces)]
            product = torch.cat([*rows, left.new_zeros(left.shape[0] - stops[-1], right.shape[-1])])
        else:
            columns = [left[group] @ right[:, piece] for group, piece in enumerate(pieces)]
            product = torch.cat([*columns, left.new_zeros(left.shape[-2], right.shape[1] - stops[-1])], dim=1)
    return product if bias is None else product + bias

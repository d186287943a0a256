"""Heads are told from what a block computes, whatever its fused projection looks like."""

from pathlib import Path

import pytest

from planner.profiler import profile_model

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, SIZE), nn.Linear(WIDTH, WIDTH)
    def forward(self, x):
        b, t, c = x.shape
        y = self.qkv(x)
        CODE
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, c))

def build_model():
    return nn.Sequential(Block(), Block())

def example_inputs(batch_size):
    return (torch.randn(batch_size, 5, WIDTH),)
"""
SPLIT = "q, k, v = (z.view(b, t, -1, SIZE_OF_HEAD).transpose(1, 2) for z in y.split([A, B, B], -1))"
REPEAT = "; k, v = (z.repeat_interleave(q.shape[1] // z.shape[1], 1) for z in (k, v))"


@pytest.mark.parametrize(
    ("width", "size", "code", "forbidden"),
    [
        (20, 60, "q, k, v = y.view(b, t, 3, 5, 4).permute(2, 0, 3, 1, 4)", {2: 5, 4: 5, 8: 5}),
        (20, 60, "q, k, v = y.view(b, t, 5, 3, 4).permute(3, 0, 2, 1, 4)", {2: 5, 4: 5, 8: 5}),
        (16, 48, "q, k, v = y.view(b, t, 3, 4, 4).permute(2, 0, 3, 1, 4)", {8: 4}),
        (16, 48, "q, k, v = y.view(b, t, 4, 3, 4).permute(3, 0, 2, 1, 4)", {8: 4}),
        (16, 48, "q, k, v = y.view(b, t, 4, 12).transpose(1, 2).chunk(3, -1)", {8: 4}),
        (16, 48, "q, k, v = (z.unflatten(-1, (4, 4)).transpose(1, 2) for z in y.chunk(3, -1))", {8: 4}),
        (16, 24, SPLIT.replace("A, B, B", "16, 4, 4").replace("SIZE_OF_HEAD", "4") + REPEAT, {8: 4}),  # one kv head
        (16, 32, SPLIT.replace("A, B, B", "16, 8, 8").replace("SIZE_OF_HEAD", "2") + REPEAT, {8: 4}),  # 8 q, 4 kv
        (16, 48, "q, k, v = (z.view(b, t, 1, 16).transpose(1, 2) for z in y.chunk(3, -1))", {}),
    ],
)
def test_heads_forbid_degrees(folder: Path, width: int, size: int, code: str, forbidden: dict[int, int]) -> None:
    text = MODEL.replace("WIDTH", str(width)).replace("SIZE", str(size)).replace("CODE", code)
    (folder / "model.py").write_text(text)
    profile = profile_model("model.py", gpu="h100-sxm", dtype="float32", microbatch_sizes=(1,), tp_degrees=(2, 4, 8))
    found = {whole.tp_degree: whole.reason for item in profile.layer_classes for whole in item.whole if whole.forbidden}
    assert set(found) == set(forbidden)
    for degree, heads in forbidden.items():
        assert f"qkv gives {heads} heads, not divisible by {degree}" in found[degree]
        assert any(note.startswith(f"no plan uses tp_degree {degree}: ") for note in profile.notes)
        assert not any(item.tp_degree == degree for layer in profile.layer_classes for item in layer.shardings)


def test_heads_of_one_level_forbid_nothing_that_another_divides(folder: Path) -> None:
    """A pyramid of 3 and 6 heads: over two ranks the second level divides, and the first stays whole and is told."""
    code = "q, k, v = y.view(b, t, 3, self.heads, 4).permute(2, 0, 3, 1, 4)"
    text = MODEL.replace("self):\n", "self, heads, width):\n").replace("self.qkv,", "self.heads = heads; self.qkv,", 1)
    text = text.replace("nn.Linear(WIDTH, SIZE)", "nn.Linear(width, 3 * width)").replace(
        "nn.Linear(WIDTH, WIDTH)", "nn.Linear(width, width)"
    )
    text = text.replace("Block(), Block()", "Block(3, 12), nn.Linear(12, 24), Block(6, 24)").replace("CODE", code)
    (folder / "model.py").write_text(text.replace("WIDTH", "12"))
    profile = profile_model("model.py", gpu="h100-sxm", dtype="float32", microbatch_sizes=(1,), tp_degrees=(2, 4))
    first, second = profile.layer_classes[0], profile.layer_classes[2]
    assert not first.shardings
    assert "0.qkv gives 3 heads (heads=3), not divisible by 2" in first.whole_at(2).reason
    assert not first.whole_at(2).forbidden
    assert second.sharding("tensor", 2)
    assert first.whole_at(4).forbidden
    assert second.whole_at(4).forbidden

"""Attention of token slices, one after the other, against that of all tokens at once."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.testing import assert_close

from meshwright.executor.context_attention import Kept, SlicedAttention
from meshwright.executor.resharding import slice_axes
from tests.executor.context.test_blocks import TOLERANCE

TOKENS = 12


def tensors(keys: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, TOKENS, 8) for heads in (4, keys, keys, 4)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("keys", [4, 2])
@settings(max_examples=12, deadline=None)
@given(cuts=st.lists(st.integers(1, TOKENS - 1), unique=True, min_size=1, max_size=4).map(sorted))
def test_slices_make_the_whole(cuts: list[int], keys: int, dtype: torch.dtype) -> None:
    q, k, v, g = tensors(keys, dtype)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted = F.scaled_dot_product_attention(*leaves, is_causal=True, scale=0.3, enable_gqa=True)
    expected = [wanted.detach(), *torch.autograd.grad(wanted, leaves, g)]

    bounds = [0, *cuts, TOKENS]
    axes = slice_axes([b - a for a, b in pairwise(bounds)])
    kept: Kept = {}
    own, outs = [], []
    for axis in axes:
        start, size = axis.part(TOKENS)
        own.append([x.narrow(2, start, size).clone().requires_grad_() for x in (q, k, v)])
        outs.append(SlicedAttention(axis, 7)(*own[-1], 0.3, kept))
    grads: list[tuple[torch.Tensor, ...]] = []
    for axis, leaves_of, out in reversed(list(zip(axes, own, outs, strict=True))):
        grads.insert(0, torch.autograd.grad(out, leaves_of, g.narrow(2, *axis.part(TOKENS))))
    assert [*kept] == [7]
    got = [torch.cat(outs, 2).detach(), *(torch.cat(of, 2) for of in zip(*grads, strict=True))]
    for mine, theirs in zip(got, expected, strict=True):
        tolerance = 2 * TOLERANCE[dtype] * max(1.0, float(theirs.abs().max()))
        assert_close(mine, theirs, rtol=0, atol=tolerance)


def test_a_slice_keeps_nothing_of_earlier_ones_by_itself() -> None:
    """Their keys lie in one memory of all tokens, that no graph saves, and that is written anew by
    a recompute."""
    q, k, v, _ = tensors(4, torch.float32)
    kept: Kept = {}
    saved: list[torch.Tensor] = []
    for axis in slice_axes([7, 3, 2]):
        own = [x.narrow(2, *axis.part(TOKENS)).clone().requires_grad_() for x in (q, k, v)]
        hooks = torch.autograd.graph.saved_tensors_hooks
        with hooks(lambda x: saved.append(x) or x, lambda x: x):
            first = SlicedAttention(axis, 0)(*own, None, kept)
        again = SlicedAttention(axis, 0)(*own, None, kept)
        assert torch.equal(first, again)
    assert sum(x.numel() for x in saved) == 2 * q.numel() + q.numel() // q.shape[-1]
    assert [x.numel() for x in kept[0].held] == [k.numel(), v.numel()]
    assert_close(kept[0].held[0], k)

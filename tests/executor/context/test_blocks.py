"""Attention put together from blocks of keys, against attention with all of them at once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.testing import assert_close

from meshwright.executor.context_attention import Part, attend, attend_backward

TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-12, torch.bfloat16: 2e-2}


def tensors(heads: int, keys: int, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, 6, 8), (2, keys, count, 8), (2, keys, count, 8), (2, heads, 6, 8)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def whole(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, g: torch.Tensor
) -> list[torch.Tensor]:
    """The output of all keys, and the gradients."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves, attn_mask=mask, scale=0.3, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, leaves, g)]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("keys", [4, 2])
@settings(max_examples=12)
@given(cuts=st.lists(st.integers(1, 9), unique=True, max_size=3).map(sorted))
def test_blocks_of_keys_make_the_whole(
    cuts: list[int], keys: int, masked: bool, dtype: torch.dtype
) -> None:
    q, k, v, g = tensors(4, keys, 10, dtype)
    mask = torch.arange(60).view(6, 10) % 7 != 0 if masked else None
    if mask is not None:
        mask[2, :5] = False  # a query that finds nothing in a first block
    expected = whole(q, k, v, mask, g)
    parts = [slice(a, b) for a, b in zip([0, *cuts], [*cuts, 10], strict=True)]

    def columns(part: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        return k[:, :, part], v[:, :, part], None if mask is None else mask[:, part]

    joined: Part | None = None
    for part in parts:
        found = attend(q, *columns(part), causal=False, scale=0.3)
        joined = found if joined is None else joined.joined(found, slice(0, 6))
    assert joined is not None
    joined = Part(joined.out.to(dtype), joined.log_sum)
    grads = [attend_backward(g, q, *columns(p), joined, causal=False, scale=0.3) for p in parts]
    got = [
        joined.out,
        sum((own[0] for own in grads[1:]), grads[0][0]),
        torch.cat([own[1] for own in grads], 2),
        torch.cat([own[2] for own in grads], 2),
    ]
    for mine, theirs in zip(got, expected, strict=True):
        tolerance = TOLERANCE[dtype] * max(1.0, float(theirs.abs().max()))
        assert_close(mine.to(theirs.dtype), theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_block_of_a_rank_s_own_tokens_is_causal(dtype: torch.dtype) -> None:
    q, k, v, _ = tensors(4, 4, 6, dtype)
    found = attend(q, k, v, None, causal=True, scale=None)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert_close(found.out.to(dtype), expected, rtol=0, atol=TOLERANCE[dtype])

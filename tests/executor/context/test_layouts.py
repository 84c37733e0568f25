"""Tokens on the ranks of the context axis: their order, shifts of them, who attends to what."""

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from meshwright.costmodel.mesh import RING
from meshwright.costmodel.sharding.sequence import Shift
from meshwright.costmodel.sharding.strategies import Placement, R
from meshwright.executor.context_attention import Blocks
from meshwright.executor.lowering.replacements import Halo
from meshwright.executor.resharding.reshard import (
    Axis,
    Reshard,
    into_zigzag,
    local_part,
    out_of_zigzag,
    zigzag_chunks,
)
from tests.helpers.threaded_ranks import Ranks, talking_ranks

TOKENS = Placement("S", 1)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with talking_ranks() as made:
        yield made


@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_zigzag_is_undone(n: int, split: int) -> None:
    x = torch.arange(2 * split * 2 * n * 3).view(2, -1)
    placement = Placement("S", 1, split)
    there = into_zigzag(x, placement, n)
    assert torch.equal(out_of_zigzag(there, placement, n), x)
    assert [*zigzag_chunks(n)[:2]] == [0, 2 * n - 1]


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("n", [2, 4])
def test_all_ranks_together_attend_to_what_is_causal(n: int, zigzag: bool) -> None:
    """Every pair of a query and a key at or before it once; in zigzag as many on each rank."""
    length = 8 * n
    order = torch.arange(length).unsqueeze(0)
    order = into_zigzag(order, TOKENS, n) if zigzag else order
    own = [local_part(order, TOKENS, n, r)[0] for r in range(n)]
    counts = []
    seen = torch.zeros(length, length, dtype=torch.int64)
    for r in range(n):
        blocks = Blocks(axis=Axis("c", n, r), kind=RING, causal=True, zigzag=zigzag, scale=None)
        before = int(seen.sum())
        for j in range(n):
            where = blocks.with_rank(j, 8)
            if where is None:
                continue
            rows, columns, causal = where
            for a, q in enumerate(own[r][rows].tolist()):
                for b, k in enumerate(own[j][columns].tolist()):
                    seen[q, k] += not causal or b <= a
        counts.append(int(seen.sum()) - before)
    assert torch.equal(seen, torch.ones(length, length, dtype=torch.int64).tril())
    assert len(set(counts)) == 1 or not zigzag


@pytest.mark.parametrize("zigzag", [False, True])
def test_a_mask_has_columns_for_the_tokens_of_each_rank(zigzag: bool) -> None:
    mask = torch.arange(16).unsqueeze(0)
    order = into_zigzag(mask, TOKENS, 4) if zigzag else mask
    blocks = Blocks(axis=Axis("c", 4, 1), kind=RING, causal=False, zigzag=zigzag, scale=None)
    for j in range(4):
        assert torch.equal(blocks.columns(mask, j), local_part(order, TOKENS, 4, j))
    assert torch.equal(blocks.columns(mask[:, 5:6], 3), mask[:, 5:6])


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("by", [1, -1])
@pytest.mark.parametrize("wraps", [False, True])
def test_a_shift_takes_its_neighbour_s_token(
    ranks: Ranks, by: int, wraps: bool, n: int, zigzag: bool
) -> None:
    x, g = torch.randn(2, 3, 8 * n, 5, dtype=torch.float64)
    shift = Shift(1, by, wraps=wraps, fill=0.5)
    leaf = x.clone().requires_grad_()
    pad = (0, 0, by, -by)
    expected = leaf.roll(by, 1) if wraps else F.pad(leaf, pad, value=0.5)
    expected.backward(g)
    order, back = (False, zigzag), (zigzag, False)

    def work(data: Axis, tensor: Axis) -> tuple[torch.Tensor, torch.Tensor]:
        mine = x.clone().requires_grad_()
        cut, join = (
            Reshard(R, TOKENS, tensor, None, order),
            Reshard(TOKENS, R, tensor, None, back),
        )
        y = join(Halo(shift, tensor, zigzag=zigzag)(cut(mine)))
        y.backward(g)
        assert mine.grad is not None
        return y.detach(), mine.grad

    for y, gradient in ranks.run((1, n), work).values():
        assert_close(y, expected.detach())
        assert_close(gradient, leaf.grad)

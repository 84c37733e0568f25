"""The ranks of a stage's axes: by brute force over its grid, and of experts by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.executor.ranks import StageMesh

SIZES = st.sampled_from([1, 2, 3, 4])


@given(SIZES, SIZES, SIZES, SIZES, SIZES, st.randoms(use_true_random=False))
def test_axes_are_lines_of_the_grid(
    replicas: int, runs: int, low: int, tp: int, cp: int, order: Any
) -> None:
    high, dp = low * runs, low * runs * replicas * cp
    ranks = list(range(5, 5 + dp * tp))
    order.shuffle(ranks)
    mesh = StageMesh(ranks=tuple(ranks), dp=dp, tp=tp, shards=high, cp=cp)
    place_of = {rank: divmod(k, tp) for k, rank in enumerate(ranks)}
    assert mesh.outer == ((dp // cp, cp) if cp > 1 else (dp,))
    for rank, (d, t) in place_of.items():
        assert mesh.coordinate(rank) == (d, t) and mesh.rank(d, t) == rank
        assert mesh.row(d) == tuple(r for r in ranks if place_of[r][0] == d)
        assert mesh.column(t) == tuple(r for r in ranks if place_of[r][1] == t)
        assert mesh.outer_coordinate(d) == ((d // cp, d % cp) if cp > 1 else (d,))
        line = [
            r
            for r in mesh.column(t)
            if place_of[r][0] // high == d // high and place_of[r][0] % low == d % low
        ]
        assert mesh.line(rank, low, high) == (tuple(line), line.index(rank))


@pytest.mark.parametrize(
    ("given", "shards", "cuts", "experts", "others"),
    [
        ({"dp": 8, "shards": 4, "experts": 2}, 4, (2, 4, 8), "shard shard part",
         "replicate shard shard"),
        ({"dp": 8, "shards": 8, "experts": 4}, 2, (4, 8), "shard part", "shard shard"),
        ({"dp": 8, "shards": 2, "experts": 2}, 2, (2, 4, 8), "replicate shard part",
         "replicate replicate shard"),
        ({"dp": 8, "shards": 1, "experts": 2}, 1, (2, 8), "replicate part",
         "replicate replicate"),
        ({"dp": 4, "tp": 2, "shards": 4, "experts": 4, "folded": True}, 2, (2, 4), "shard part",
         "shard shard"),
        ({"dp": 12, "shards": 4, "experts": 2}, 2, (2, 4, 12), "replicate shard part",
         "replicate shard shard"),
        ({"dp": 4, "shards": 2}, 2, (2, 4), "replicate shard", "replicate shard"),
        ({"dp": 1, "shards": 1}, 1, (1,), "replicate", "replicate"),
    ],
)  # fmt: skip
def test_a_weight_of_experts_is_cut_as_its_holders_are(
    given: dict[str, Any], shards: int, cuts: tuple[int, ...], experts: str, others: str
) -> None:
    """Of 8 data ranks with experts of 2, 4 hold the same: ZeRO over 4 neighbours shards over
    these."""
    tp = given.get("tp", 1)
    mesh = StageMesh(ranks=tuple(range(given["dp"] * tp)), **{"tp": tp, **given})
    assert (mesh.expert_shards, mesh.cuts) == (shards, cuts)
    assert mesh.data_dims(experts=True) == experts.split()
    assert mesh.data_dims(experts=False) == others.split()

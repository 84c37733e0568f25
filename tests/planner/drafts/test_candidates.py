"""Ranks of stages on their nodes."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.planner.drafts.candidates import place_stages, spread_ranks
from meshwright.planner.drafts.space import Space
from meshwright.planner.overrides.overrides import Overrides
from meshwright.planner.overrides.restrictions import restrict
from tests.helpers.planning import cluster, linears, problem_of


@given(st.sampled_from([1, 2, 4, 6, 8]), st.integers(1, 6), st.randoms(use_true_random=False))
def test_stages_tile_the_cluster_along_its_nodes(node: int, nodes: int, rng: random.Random) -> None:
    shapes = [n for n in range(1, node + 1) if node % n == 0]
    shapes += [node * k for k in range(2, nodes + 1) if nodes % k == 0]
    sizes, left = [], node * nodes
    while left:
        sizes.append(rng.choice([n for n in shapes if n <= left]))
        left -= sizes[-1]
    placed = place_stages(sizes, cluster(node, nodes=nodes))
    assert [len(ranks) for ranks in placed] == sizes
    assert sorted(r for ranks in placed for r in ranks) == list(range(node * nodes))
    for ranks in placed:
        assert ranks == tuple(range(ranks[0], ranks[0] + len(ranks)))
        touched = {r // node for r in ranks}
        assert len(touched) == max(1, len(ranks) // node)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_sizes_that_do_not_nest_follow_each_other(sizes: list[int]) -> None:
    placed = place_stages(sizes, cluster(sum(sizes)))
    assert [len(ranks) for ranks in placed] == sizes
    assert sorted(r for ranks in placed for r in ranks) == list(range(sum(sizes)))


@pytest.mark.parametrize(("nodes", "node"), [(2, 2), (2, 4), (3, 6), (4, 8), (2, 12)])
def test_a_pipeline_inside_the_nodes_uses_every_rank_once(nodes: int, node: int) -> None:
    of = linears(48, 12, 8, 24)
    here = Space(
        problem=problem_of(of, cluster(node, nodes=nodes)),
        global_batch_size=48,
        restrictions=restrict(Overrides(), of.graph),
    )
    spread = 0
    for groups in here.stage_counts():
        for mesh in here.meshes(nodes * node // groups, 1):
            for placed in here.placements(mesh, groups):
                ranks = [spread_ranks(placed, group) for group in range(groups)]
                assert sorted(r for own in ranks for r in own) == list(range(nodes * node))
                inner = placed.tp * placed.cp
                for group, own in enumerate(ranks):
                    rows = [own[k : k + inner] for k in range(0, len(own), inner)]
                    apart = {b[0] - a[0] for a, b in itertools.pairwise(rows)}
                    assert apart <= {placed.spread * inner}
                    for row in rows:
                        assert row == tuple(range(row[0], row[0] + inner))
                        assert row[0] // node == row[-1] // node
                    if group % placed.spread:  # the group before is next to it, in the same node
                        before = ranks[group - 1]
                        assert own[0] - before[0] == inner
                        assert all(a // node == b // node for a, b in zip(before, own, strict=True))
                spread += placed.spread > 1
    assert spread

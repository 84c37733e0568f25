"""What the search chooses from: nothing that can't be, and nothing left out that may win."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.costmodel.schedules.schedule import SCHEDULES, stages_of_devices
from meshwright.planner.drafts.mesh import Mesh
from meshwright.planner.drafts.space import MAX_CUTS, MAX_MICROBATCH_CHOICES, Space, groups_of
from meshwright.planner.overrides.overrides import Overrides
from meshwright.planner.overrides.restrictions import restrict
from tests.helpers.planning import Traced, cluster, linears, problem_of

SHAPES = [(1, 4), (1, 6), (2, 3), (3, 3), (1, 12), (2, 6), (3, 8), (4, 12)]  # (nodes, devices each)


@cache
def model(layers: int = 5, width: int = 48, length: int | None = 24) -> Traced:
    return linears(width, layers, 8, length)


def space(
    nodes: int = 1,
    node: int = 4,
    batch: int = 24,
    of: Traced | None = None,
    allow: Collection[str] = (),
    **given: object,
) -> Space:
    of = of or model()
    return Space(
        problem=problem_of(of, cluster(node, nodes=nodes)),
        global_batch_size=batch,
        restrictions=restrict(Overrides(**given), of.graph, allow=allow),
    )


def divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


# --- micro-batches -------------------------------------------------------------------------------


@settings(deadline=None)  # the model is traced once
@given(st.integers(1, 5000))
def test_numbers_of_microbatches_divide_the_batch_and_reach_its_ends(batch: int) -> None:
    counts = space(batch=batch).tried_counts()
    assert counts == sorted(set(counts))
    assert (counts[0], counts[-1]) == (1, batch)
    assert all(batch % m == 0 for m in counts)
    assert len(counts) <= MAX_MICROBATCH_CHOICES
    if len(divisors(batch)) <= MAX_MICROBATCH_CHOICES:
        assert counts == divisors(batch)


# --- meshes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "node"), SHAPES)
def test_meshes_multiply_to_the_devices_and_divide_what_they_split(nodes: int, node: int) -> None:
    here = space(nodes, node)
    for m, devices in itertools.product(divisors(24), divisors(nodes * node)):
        rows, found = 24 // m, here.meshes(devices, m)
        assert len(set(found)) == len(found)
        for mesh in found:
            assert mesh.devices == mesh.dp * mesh.cp * mesh.tp == devices
            assert rows % mesh.dp == 0
            assert 24 % mesh.cp == 0  # the length of a sequence
            assert node % mesh.tp == 0
            assert (mesh.ep, mesh.spread) == (1, 1)
        # every split between batch and weights that both can bear
        plain = {(mesh.dp, mesh.tp) for mesh in found if mesh.cp == 1}
        assert plain == {
            (devices // tp, tp)
            for tp in divisors(devices)
            if node % tp == 0 and rows % (devices // tp) == 0
        }


@pytest.mark.parametrize(("nodes", "node"), SHAPES)
def test_sequences_are_split_only_where_the_batch_does_not_divide(
    nodes: int, node: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, split = space(nodes, node), 0
    everything = itertools.product(divisors(24), divisors(nodes * node))
    assert all(mesh.cp == 1 for m, devices in everything for mesh in here.meshes(devices, m))
    monkeypatch.setattr(
        "meshwright.planner.drafts.space.MIN_CONTEXT", 1
    )  # the test's sequences are short
    for m, devices in itertools.product(divisors(24), divisors(nodes * node)):
        for mesh in here.meshes(devices, m):
            ranks = mesh.dp * mesh.cp
            fewer = [cp for cp in divisors(ranks) if cp < mesh.cp and 24 % cp == 0]
            assert all((24 // m) % (ranks // cp) for cp in fewer)
            split += mesh.cp > 1
    assert split


def test_sequences_are_split_where_the_user_asks() -> None:
    assert {(m.dp, m.cp, m.tp) for m in space(cp=2).meshes(4, 1)} == {(2, 2, 1), (1, 2, 2)}
    vectors = space(of=model(2, 48, None))
    assert all(mesh.cp == 1 for m in divisors(24) for mesh in vectors.meshes(4, m))


def test_what_is_asked_of_one_block_leaves_the_others_free() -> None:
    first = space().graph.blocks[0].name
    assert {mesh.cp for mesh in space(cp={first: 2}).meshes(4, 1)} == {1, 2}
    whole = Mesh(dp=2, tp=2)
    assert space(dp_shard={first: 4}, zero=3).zeros(whole) == [(3, 0)]


def test_the_tensor_axis_leaves_its_node_only_where_asked() -> None:
    assert max(mesh.tp for mesh in space(2, 3).meshes(6, 1)) == 3
    assert [mesh.tp for mesh in space(2, 3, tp=6).meshes(6, 1)] == [6]


@pytest.mark.parametrize(("nodes", "node"), SHAPES)
def test_sizes_of_stages_leave_no_part_of_a_node_over(nodes: int, node: int) -> None:
    sizes = space(nodes, node).sizes()
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == node * nodes
    if nodes == 1:
        assert sizes == list(range(1, node + 1))
    else:
        assert set(sizes) == {
            n for n in range(1, node * nodes + 1)
            if node % n == 0 or (n % node == 0 and nodes % (n // node) == 0)
        }  # fmt: skip


@pytest.mark.parametrize(("nodes", "node"), SHAPES)
def test_equal_groups_divide_the_cluster_along_its_nodes(nodes: int, node: int) -> None:
    total, here = nodes * node, space(nodes, node)
    most = len(here.graph.blocks)
    counts = here.stage_counts()
    assert counts[0] == 1
    for p in range(1, total + 1):
        size = total // p
        fits = total % p == 0 and (size % node == 0 or node % size == 0) and p <= most
        assert (p in counts) == fits


# --- placements ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "node"), SHAPES)
def test_a_pipeline_inside_the_node_is_another_placement(nodes: int, node: int) -> None:
    here, spreads = space(nodes, node, of=model(12)), []
    for p in here.stage_counts():
        for mesh in here.meshes(nodes * node // p, 1):
            contiguous, *others = here.placements(mesh, p)
            assert contiguous == mesh
            for other in others:
                assert nodes > 1 and p > 1 and mesh.dp > 1
                assert other == Mesh(dp=mesh.dp, tp=mesh.tp, cp=mesh.cp, spread=other.spread)
                assert p % other.spread == 0
                assert node % (other.spread * mesh.tp * mesh.cp) == 0
                spreads.append(other.spread)
            assert here.placements(mesh, 1) == [mesh]
    assert bool(spreads) == (nodes > 1 and (nodes, node) != (2, 3))  # there p and node are coprime


def test_a_placement_may_be_given() -> None:
    mesh = Mesh(dp=4, tp=1)
    assert [m.spread for m in space(2, 4, placement="tp,dp,pp").placements(mesh, 2)] == [1]
    assert [m.spread for m in space(2, 4, placement="tp,pp,dp").placements(mesh, 2)] == [2]
    assert [m.spread for m in space(2, 4).placements(mesh, 2)] == [1, 2]


# --- ZeRO ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "node"), SHAPES)
def test_zero_divides_among_all_ranks_or_those_of_a_node(nodes: int, node: int) -> None:
    here = space(nodes, node)
    for devices in here.sizes():
        for mesh in here.meshes(devices, 1):
            found, ranks = here.zeros(mesh), mesh.dp * mesh.cp
            assert len(set(found)) == len(found)
            if ranks == 1:
                assert found == [(0, 0)]
                continue
            assert {z for z, shard in found if not shard} >= {0, 2, 3}
            for zero, shard in found:
                assert 0 <= zero <= 3
                if shard:
                    assert zero > 0
                    assert ranks % shard == 0 and 1 < shard < ranks
                    assert shard * mesh.tp == node


def test_zero_one_divides_whole_matrices_only() -> None:
    """A dim each for the ranks and for the tensor axis, or one for both; 48 x 48 here."""
    here = space(1, 12)
    zeros = {mesh: {z for z, _ in here.zeros(mesh)} for mesh in here.meshes(12, 1)}
    assert 1 in zeros[Mesh(dp=12, tp=1)]
    assert 1 in zeros[Mesh(dp=2, tp=6)]
    five = space(1, 5, batch=5)
    assert {z for z, _ in five.zeros(Mesh(dp=5, tp=1))} == {0, 2, 3}


def test_zero_may_be_given_or_forbidden() -> None:
    mesh = Mesh(dp=4, tp=1)
    assert space(zero=2).zeros(mesh) == [(2, 0)]
    assert space(forbid=["zero"]).zeros(mesh) == [(0, 0)]
    assert space(forbid=["zero-1", "zero-3"]).zeros(mesh) == [(0, 0), (2, 0)]
    far = Mesh(dp=8, tp=1)
    assert {s for _, s in space(2, 4).zeros(far)} == {0, 4}
    assert {s for _, s in space(2, 4, forbid=["dp_shard"]).zeros(far)} == {0}
    assert {s for z, s in space(2, 4, dp_shard=2).zeros(far) if z} == {2}


# --- schedules -----------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", range(4))
def test_schedules_fit_the_stages_the_blocks_and_zero(zero: int) -> None:
    here = space(1, 4)
    most = len(here.graph.blocks)
    for groups, m in itertools.product((1, 2, 3, 4), (1, 4)):
        found = here.schedules(groups, m, zero)
        assert len(set(found)) == len(found) > 0
        for name, each in found:
            assert not SCHEDULES[name].on_request
            assert groups * each <= most
            assert not (zero > 1 and groups > 1 and SCHEDULES[name].splits_backward)
            stages_of_devices(name, num_stages=groups * each, num_devices=groups)
        if groups == 1:
            assert len(found) == 1
        else:
            assert {name for name, _ in found} >= {"gpipe", "1f1b"}
            assert ({"zb_h1"} <= {name for name, _ in found}) == (zero < 2)
            assert (("interleaved_1f1b", 2) in found) == (2 * groups <= most)


def test_a_schedule_may_be_asked_for() -> None:
    assert space(schedule="zb_h2").schedules(2, 4, 0) == [("zb_h2", 1)]
    assert space(virtual_stages=3).schedules(2, 4, 0) == [("interleaved_1f1b", 3)]
    plain = space(forbid=["virtual_stages"]).schedules(2, 4, 0)
    assert plain and {each for _, each in plain} == {1}


@pytest.mark.parametrize(("schedule", "each"), [("1f1b", 1), ("interleaved_1f1b", 3), ("zb_v", 2)])
def test_every_group_has_as_many_stages(schedule: str, each: int) -> None:
    groups = groups_of(schedule, 4, each)
    assert sorted(groups) == sorted([*range(4)] * each)
    assert groups[:4] == [0, 1, 2, 3]


# --- cuts ----------------------------------------------------------------------------------------


def test_a_stage_trains_something_and_ends_where_the_user_cut() -> None:
    here = space()
    legal, blocks = here.legal_stages(), here.graph.blocks
    for i, j in itertools.product(range(len(blocks) + 1), repeat=2):
        assert legal[i, j] == (i < j and any(b.parameters for b in blocks[i:j]))
    names = [block.name for block in blocks]
    given = space(stages=[names[:2], names[2:]]).legal_stages()
    assert {(i, j) for i, j in np.argwhere(given).tolist()} == {(0, 2), (2, len(names))}
    assert tuple(here.cut_at) == tuple(range(len(blocks) + 1))
    assert len(blocks) < MAX_CUTS

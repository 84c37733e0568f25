"""What the search chooses from: nothing that can't be, and nothing left out that may win."""

import dataclasses
import itertools
import random
from collections.abc import Collection
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.costmodel.mesh import Mesh
from meshwright.costmodel.schedules import Pipeline
from meshwright.costmodel.sharing import Sharing
from meshwright.planner.drafts.candidates import place_stages
from meshwright.planner.drafts.space import MAX_CUTS, MAX_MICROBATCH_CHOICES, MIN_CONTEXT, Space
from meshwright.planner.overrides.overrides import Overrides
from meshwright.planner.overrides.restrictions import restrict
from meshwright.planner.plan.words import describe
from meshwright.planner.search.search import Search
from tests.helpers.planning import Traced, cluster, cut, linears, problem_of, token_batch
from tests.helpers.tiers import second_tier
from tests.helpers.traced import WIDTH, with_forward

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
    whole = space(batch=batch).tried_counts(dp=4)
    assert whole == [] or batch % 4 == 0
    assert all(batch // m % 4 == 0 for m in whole)


def test_a_margin_is_of_the_whole_memory() -> None:
    here = space()
    whole, room = here.memory_bytes, here.room_bytes
    spare = dataclasses.replace(here, memory_margin=0.25)
    assert spare.memory_bytes == 0.75 * whole == 0.75 * here.cluster.device.memory_bytes
    assert spare.room_bytes == room - 0.25 * whole


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
    # the test's sequences are short
    monkeypatch.setattr("meshwright.planner.drafts.space.MIN_CONTEXT", 1)
    for m, devices in itertools.product(divisors(24), divisors(nodes * node)):
        for mesh in here.meshes(devices, m):
            ranks = mesh.dp * mesh.cp
            fewer = [cp for cp in divisors(ranks) if cp < mesh.cp and 24 % cp == 0]
            assert all((24 // m) % (ranks // cp) for cp in fewer)
            split += mesh.cp > 1
    assert split


@cache
def decoder(length: int) -> Traced:
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=256, intermediate_size=512, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=512,
    )  # fmt: skip
    with torch.device("meta"):
        return cut(transformers.LlamaForCausalLM(config), token_batch(2, length))


@pytest.mark.parametrize(
    ("length", "batch", "offered"),
    [
        (MIN_CONTEXT, 8, {1}),
        (MIN_CONTEXT, 4, set()),  # half a sequence would be too short
        (2 * MIN_CONTEXT, 4, {2}),
        (2 * MIN_CONTEXT, 8, {1}),
        pytest.param(8 * MIN_CONTEXT, 1, {8}, marks=second_tier("halves of sequences stay")),
    ],
)
def test_the_least_cp_that_divides_the_rows(length: int, batch: int, offered: set[int]) -> None:
    meshes = space(1, 8, batch, decoder(length)).meshes(8, 1)
    assert {mesh.cp for mesh in meshes if mesh.tp == 1} == offered


def test_a_decoder_with_its_loss_inside_is_planned_with_cp() -> None:
    of = decoder(2 * MIN_CONTEXT)
    best = Search(problem_of(of, cluster(4)), 2, Overrides(tp=1, pp=1)).run().best
    assert "cp2" in describe(best.plan)


def totals(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.l(x).cumsum(dim=1).mean()


def test_a_note_says_what_keeps_cp_from_long_sequences() -> None:
    with torch.device("meta"):
        of = cut(with_forward(totals), (torch.empty(2, 2 * MIN_CONTEXT, WIDTH),))
    (note,) = [line for line in space(1, 8, 8, of).notes() if line.startswith("cp can't")]
    assert f"sequences of {2 * MIN_CONTEXT}: :cumsum needs whole sequences" in note
    assert not any("cp" in line for line in space(1, 1, 8, of).notes())
    assert not any("cp" in line for line in space(1, 8, 8, decoder(2 * MIN_CONTEXT)).notes())


def test_sequences_are_split_where_the_user_asks() -> None:
    assert {(m.dp, m.cp, m.tp) for m in space(cp=2).meshes(4, 1)} == {(2, 2, 1), (1, 2, 2)}
    vectors = space(of=model(2, 48, None))
    assert all(mesh.cp == 1 for m in divisors(24) for mesh in vectors.meshes(4, m))


def test_what_is_asked_of_one_block_leaves_the_others_free() -> None:
    first = space().graph.blocks[0].name
    assert {mesh.cp for mesh in space(cp={first: 2}).meshes(4, 1)} == {1, 2}
    whole = Mesh(dp=2, tp=2)
    assert space(dp_shard={first: 4}, zero=3).zeros(whole) == [Sharing(zero=3)]


def test_the_tensor_axis_leaves_its_node_only_where_asked() -> None:
    assert max(mesh.tp for mesh in space(2, 3).meshes(6, 1)) == 3
    assert [mesh.tp for mesh in space(2, 3, tp=6).meshes(6, 1)] == [6]


@pytest.mark.parametrize(("nodes", "node"), SHAPES)
def test_stages_leave_no_part_of_a_node_over(nodes: int, node: int) -> None:
    """Their sizes, and the numbers of equal ones."""
    here, total = space(nodes, node), node * nodes
    assert here.sizes() == [
        n for n in range(1, total + 1)
        if nodes == 1 or node % n == 0 or (n % node == 0 and nodes % (n // node) == 0)
    ]  # fmt: skip
    assert here.stage_counts() == [
        p for p in range(1, min(total, len(here.graph.blocks)) + 1)
        if total % p == 0 and (total // p % node == 0 or node % (total // p) == 0)
    ]  # fmt: skip


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
                assert found == [Sharing()]
                continue
            assert {one.zero for one in found if not one.dp_shard} >= {0, 2, 3}
            for one in found:
                assert 0 <= one.zero <= 3
                if shard := one.dp_shard:
                    assert one.zero > 0
                    assert ranks % shard == 0 and 1 < shard < ranks
                    assert shard * mesh.tp == node


def test_zero_one_divides_whole_matrices_only() -> None:
    """A dim each for the ranks and for the tensor axis, or one for both; 48 x 48 here."""
    here = space(1, 12)
    zeros = {mesh: {one.zero for one in here.zeros(mesh)} for mesh in here.meshes(12, 1)}
    assert 1 in zeros[Mesh(dp=12, tp=1)]
    assert 1 in zeros[Mesh(dp=2, tp=6)]
    five = space(1, 5, batch=5)
    assert {one.zero for one in five.zeros(Mesh(dp=5, tp=1))} == {0, 2, 3}


def test_zero_may_be_given_or_forbidden() -> None:
    mesh = Mesh(dp=4, tp=1)
    assert space(zero=2).zeros(mesh) == [Sharing(zero=2)]
    late = space(post_validation=True, allow=["post_validation"]).zeros(mesh)
    free = space().zeros(mesh)
    assert late == [one for one in free if one.zero < 3] and Sharing(zero=3) in free
    assert space(forbid=["zero"]).zeros(mesh) == [Sharing()]
    assert space(forbid=["zero-1", "zero-3"]).zeros(mesh) == [Sharing(), Sharing(zero=2)]
    far = Mesh(dp=8, tp=1)
    assert {one.dp_shard for one in space(2, 4).zeros(far)} == {None, 4}
    assert {one.dp_shard for one in space(2, 4, forbid=["dp_shard"]).zeros(far)} == {None}
    assert {one.dp_shard for one in space(2, 4, dp_shard=2).zeros(far) if one.zero} == {2}


@pytest.mark.parametrize(
    ("stages", "m", "zero", "may"),
    [(1, 1, 0, True), (1, 2, 0, False), (2, 1, 0, False), (1, 1, 1, False)],
)
def test_one_pass_without_zero_may_be_stepped_in_the_backward(
    stages: int, m: int, zero: int, may: bool
) -> None:
    pipeline = Pipeline("1f1b", stages, m, stages)
    here = space(allow=["optimizer_in_backward"])
    assert here.other_steppings == ("in_backward",) and not space().other_steppings
    assert here.may_step("in_backward", pipeline, Sharing(zero=zero)) is may


# --- ranks of stages on their nodes --------------------------------------------------------------


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


@pytest.mark.parametrize(("nodes", "node"), [(2, 2), (3, 6), (2, 12)])
def test_a_pipeline_inside_the_nodes_uses_every_rank_once(nodes: int, node: int) -> None:
    here = space(nodes, node, 48, linears(48, 12, 8, 24))
    spread = 0
    for groups in here.stage_counts():
        for mesh in here.meshes(nodes * node // groups, 1):
            for placed in here.placements(mesh, groups):
                ranks = [placed.ranks_of(group) for group in range(groups)]
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


# --- how ZeRO's weights and gradients travel ------------------------------------------------------


def test_secondary_shards_lie_in_a_node_of_several() -> None:
    far = Mesh(dp=8, tp=1)
    assert space(2, 4).secondaries(far, Sharing(zero=3)) == [None, 4]
    assert space(2, 4).secondaries(Mesh(dp=4, tp=2), Sharing(zero=3)) == [None, 2]
    within = Sharing(zero=3, dp_shard=4)  # ZeRO divides within the node
    assert space(2, 4).secondaries(far, within) == [None]
    assert space(2, 4).secondaries(far, Sharing(zero=2)) == [None]
    assert space(1, 8).secondaries(far, Sharing(zero=3)) == [None]
    assert space(2, 4, forbid=["hpz"]).secondaries(far, Sharing(zero=3)) == [None]
    assert space(2, 4, hpz=2).secondaries(far, Sharing(zero=3)) == [2]
    assert space(2, 4, hpz=2).secondaries(far, Sharing(zero=2)) == []  # asks for ZeRO-3
    all_of_them = space(2, 4, hpz=8)  # as many as it divides among
    assert all_of_them.secondaries(far, Sharing(zero=3)) == [None]
    assert space(2, 4, hpz=3).secondaries(far, Sharing(zero=3)) == []


def test_what_is_quantised_is_allowed_or_asked_for() -> None:
    far = Mesh(dp=8, tp=1)
    assert space(2, 4).quantizations(far, Sharing(zero=3)) == ["none"]
    allowed = space(2, 4, allow=["quantized"])
    assert allowed.quantizations(far, Sharing(zero=3)) == ["none", "weights", "gradients", "both"]
    assert allowed.quantizations(far, Sharing(zero=2)) == ["none"]
    forbidden = space(2, 4, allow=["quantized"], forbid=["quantized"])
    assert forbidden.quantizations(far, Sharing(zero=3)) == ["none"]
    asked = space(2, 4, allow=["quantized"], quantized="both")
    assert asked.quantizations(far, Sharing(zero=3)) == ["both"]
    assert asked.quantizations(far, Sharing(zero=1)) == []  # asks for ZeRO-3
    assert asked.quantizations(Mesh(dp=1, tp=8), Sharing()) == ["none"]


def test_what_is_compressed_is_allowed_or_asked_for() -> None:
    far, offered = Mesh(dp=8, tp=1), ["none", "powersgd-4", "topk-0.1"]
    assert space(2, 4).compressions(far, Sharing()) == ["none"]
    allowed = space(2, 4, allow=["compressed"])
    assert allowed.compressions(far, Sharing()) == offered
    assert allowed.compressions(far, Sharing(zero=1)) == ["none"]
    assert allowed.compressions(Mesh(dp=8, tp=1, ep=2), Sharing()) == ["none"]
    assert space(2, 4, allow=["compressed"], forbid=["compressed"]).compressions(
        far, Sharing()
    ) == ["none"]
    asked = space(2, 4, allow=["compressed"], compressed="topk-10")
    assert asked.compressions(far, Sharing()) == ["topk-10"]
    assert asked.compressions(far, Sharing(zero=1)) == []  # asks for no ZeRO
    assert asked.compressions(Mesh(dp=1, tp=8), Sharing()) == ["none"]
    own = Sharing(compressed="powersgd-4")
    names = {name for m in (2, 8) for p in allowed.schedules(2, m, own) for name in (p.schedule,)}
    assert names and not names & {"chimera", "dualpipe"}


def test_one_chain_prices_gathers_near_and_far_but_not_hops() -> None:
    far = Mesh(dp=8, tp=1)
    found = space(2, 4, allow=["quantized"], zero=3, dp_shard=8).transports(far)
    assert {
        (own.hpz, own.quantized): [(one.zero, one.hpz) for one in ways]
        for own, ways in found.items()
    } == {
        (None, "none"): [(3, None), (3, 4)],
        (None, "weights"): [(3, None), (3, 4)],
        (None, "gradients"): [(3, None)],
        (4, "gradients"): [(3, 4)],
        (None, "both"): [(3, None)],
        (4, "both"): [(3, 4)],
    }


# --- schedules -----------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", range(4))
def test_schedules_fit_the_stages_the_blocks_and_zero(zero: int) -> None:
    here = space(1, 4)
    most = len(here.graph.blocks)
    for groups, m in itertools.product((1, 2, 3, 4), (1, 4)):
        found = here.schedules(groups, m, Sharing(zero=zero))
        assert len(set(found)) == len(found) > 0
        for own in found:
            assert not own.record.on_request
            assert own.num_stages <= most
            assert not (zero > 2 and groups > 1 and own.record.splits_backward)
            assert len(own.placed) == groups
        if groups == 1:
            assert len(found) == 1
        else:
            names = {own.schedule for own in found}
            assert names >= {"gpipe", "1f1b"}
            assert ("zb_h1" in names) == (zero < 3)
            interleaved = Pipeline("interleaved_1f1b", 2 * groups, m, groups)
            assert (interleaved in found) == (2 * groups <= most)


def test_a_schedule_may_be_asked_for() -> None:
    assert space(schedule="zb_h2").schedules(2, 4) == [Pipeline("zb_h2", 2, 4, 2)]
    assert space(virtual_stages=3).schedules(2, 4) == [Pipeline("interleaved_1f1b", 6, 4, 2)]
    plain = space(forbid=["virtual_stages"]).schedules(2, 4)
    assert plain and {own.each for own in plain} == {1}


@pytest.mark.parametrize(("schedule", "each"), [("1f1b", 1), ("interleaved_1f1b", 3), ("zb_v", 2)])
def test_every_group_has_as_many_stages(schedule: str, each: int) -> None:
    groups = Pipeline(schedule, 4 * each, 4, 4).device_of
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

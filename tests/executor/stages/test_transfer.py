"""What crosses between stages: every destination box once, from ranks that hold it."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.costmodel.sharding.strategies import Placement, R
from meshwright.executor.ranks.meshes import StageMesh
from meshwright.executor.stages.transfer import Channel, held, intersect, slices, within

SHAPE = (12, 24)  # divisible by every degree tried
S0, S1 = Placement("S", 0), Placement("S", 1)
kinds = [R, S0, S1]
placements = st.sampled_from(kinds)


@st.composite
def stages(draw: st.DrawFn) -> tuple[StageMesh, StageMesh]:
    """Two stages on disjoint ranks, in any order; tokens have as many parts on both."""
    cp = draw(st.sampled_from([1, 2, 3]))
    sizes = [(cp * draw(st.integers(1, 4)), draw(st.integers(1, 3))) for _ in range(2)]
    count = sum(dp * tp for dp, tp in sizes)
    order = draw(st.permutations(range(count)))
    cut = sizes[0][0] * sizes[0][1]
    source, target = (
        StageMesh(ranks=tuple(ranks), dp=dp, tp=tp, shards=dp, cp=cp)
        for ranks, (dp, tp) in zip((order[:cut], order[cut:]), sizes, strict=True)
    )
    return source, target


def mesh(first: int, dp: int, tp: int) -> StageMesh:
    return StageMesh(ranks=tuple(range(first, first + dp * tp)), dp=dp, tp=tp, shards=dp)


def boxes(
    of: StageMesh, placements: tuple[Placement, ...]
) -> dict[int, tuple[tuple[int, int], ...]]:
    """What each rank of a stage holds."""
    return {
        of.rank(d, t): held(SHAPE, placements, of, d) for d in range(of.dp) for t in range(of.tp)
    }


def on_axes(mesh: StageMesh, rows: Placement, tokens: Placement) -> tuple[Placement, ...]:
    """The placements on the outer axes that a mesh has; tokens are not split where rows are."""
    tokens = R if tokens == rows else tokens
    return (rows, tokens)[: len(mesh.outer)]


@given(stages(), placements, placements, placements)
def test_every_destination_gets_its_tensor(
    meshes: tuple[StageMesh, StageMesh], first: Placement, second: Placement, tokens: Placement
) -> None:
    source, target = meshes
    before, after = on_axes(source, first, tokens), on_axes(target, second, tokens)
    x = torch.arange(SHAPE[0] * SHAPE[1]).view(SHAPE)
    has, wants = boxes(source, before), boxes(target, after)
    received = {rank: torch.full_like(x[within(box, _all())], -1) for rank, box in wants.items()}
    times = {rank: torch.zeros_like(part) for rank, part in received.items()}
    for piece in slices(SHAPE, source, before, target, after):
        sent = x[within(has[piece.source], _all())][within(piece.box, has[piece.source])]
        place = within(piece.box, wants[piece.target])
        received[piece.target][place] = sent
        times[piece.target][place] += 1
    for rank, box in wants.items():
        assert torch.equal(received[rank], x[within(box, _all())])
        assert bool((times[rank] == 1).all())


def _all() -> tuple[tuple[int, int], ...]:
    return tuple((0, size) for size in SHAPE)


@given(stages(), placements, placements, placements)
def test_replicas_share_the_sending(
    meshes: tuple[StageMesh, StageMesh], first: Placement, second: Placement, tokens: Placement
) -> None:
    source, target = meshes
    before, after = on_axes(source, first, tokens), on_axes(target, second, tokens)
    sent = Counter(piece.source for piece in slices(SHAPE, source, before, target, after))
    replicas = defaultdict(list)
    for rank, box in boxes(source, before).items():
        replicas[box].append(sent[rank])
    for loads in replicas.values():
        assert max(loads) - min(loads) <= 1


@given(st.integers(1, 4), st.integers(1, 4), placements)
def test_equal_meshes_send_each_to_its_counterpart(dp: int, tp: int, placement: Placement) -> None:
    source, target = mesh(0, dp, tp), mesh(dp * tp, dp, tp)
    moved = slices(SHAPE, source, (placement,), target, (placement,))
    assert [(p.source, p.target) for p in moved] == list(
        zip(source.ranks, target.ranks, strict=True)
    )


@pytest.mark.parametrize(
    ("a", "b", "common"),
    [
        (((0, 4),), ((2, 6),), ((2, 4),)),
        (((0, 4),), ((4, 6),), None),
        (((0, 4), (0, 2)), ((1, 2), (0, 9)), ((1, 2), (0, 2))),
        ((), (), ()),
    ],
)
def test_intersection(
    a: tuple[tuple[int, int], ...],
    b: tuple[tuple[int, int], ...],
    common: tuple[tuple[int, int], ...] | None,
) -> None:
    assert intersect(a, b) == common == intersect(b, a)


def test_a_channel_knows_its_own_slices() -> None:
    source, target = mesh(0, 2, 1), mesh(2, 1, 2)
    moved = slices(SHAPE, source, (S0,), target, (R,))
    sender = Channel(
        moved, 0, held(SHAPE, (S0,), source, 0), torch.bfloat16, torch.device("cpu"), None, 7
    )
    assert [(p.source, p.target) for p in sender.outgoing] == [(0, 2), (0, 3)]
    assert sender.incoming == []
    assert sender.bytes_sent == 2 * 6 * 24 * 2

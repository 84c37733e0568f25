"""What crosses between stages: every destination box once, from ranks that hold it. Memory of what
was sent: given back where nobody else has it, with the graph behind it whole."""

from collections import Counter, defaultdict
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.costmodel.sharding.strategies import Placement, R
from meshwright.executor.ranks.meshes import StageMesh
from meshwright.executor.transfers import Channel, handed, held, release, slices, within

SHAPE = (12, 24)  # divisible by every degree tried
S0, S1 = Placement("S", 0), Placement("S", 1)
placements = st.sampled_from([R, S0, S1])


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


Box = tuple[tuple[int, int], ...]
ALL: Box = tuple((0, size) for size in SHAPE)


def boxes(of: StageMesh, placements: tuple[Placement, ...]) -> dict[int, Box]:
    """What each rank of a stage holds."""
    return {
        of.rank(d, t): held(SHAPE, placements, of, d) for d in range(of.dp) for t in range(of.tp)
    }


def on_axes(mesh: StageMesh, rows: Placement, tokens: Placement) -> tuple[Placement, ...]:
    """The placements on the outer axes that a mesh has; tokens are not split where rows are."""
    tokens = R if tokens == rows else tokens
    return (rows, tokens)[: len(mesh.outer)]


@given(stages(), placements, placements, placements)
def test_every_destination_gets_its_tensor_from_replicas_in_turn(
    meshes: tuple[StageMesh, StageMesh], first: Placement, second: Placement, tokens: Placement
) -> None:
    source, target = meshes
    before, after = on_axes(source, first, tokens), on_axes(target, second, tokens)
    x = torch.arange(SHAPE[0] * SHAPE[1]).view(SHAPE)
    has, wants = boxes(source, before), boxes(target, after)
    received = {rank: torch.full_like(x[within(box, ALL)], -1) for rank, box in wants.items()}
    times = {rank: torch.zeros_like(part) for rank, part in received.items()}
    sends = Counter[int]()
    for piece in slices(SHAPE, source, before, target, after):
        sent = x[within(has[piece.source], ALL)][within(piece.box, has[piece.source])]
        place = within(piece.box, wants[piece.target])
        received[piece.target][place] = sent
        times[piece.target][place] += 1
        sends[piece.source] += 1
    for rank, box in wants.items():
        assert torch.equal(received[rank], x[within(box, ALL)])
        assert bool((times[rank] == 1).all())
    replicas = defaultdict(list)
    for rank, box in has.items():
        replicas[box].append(sends[rank])
    for loads in replicas.values():
        assert max(loads) - min(loads) <= 1


def test_an_axis_splits_what_the_one_outside_of_it_left() -> None:
    of = StageMesh(ranks=tuple(range(4)), dp=4, tp=1, shards=4, cp=2)
    firsts = [held(SHAPE, (S1, S1), of, d) for d in range(4)]
    assert [box[1] for box in firsts] == [(0, 6), (6, 12), (12, 18), (18, 24)]


@given(st.integers(1, 4), st.integers(1, 4), placements)
def test_equal_meshes_send_each_to_its_counterpart(dp: int, tp: int, placement: Placement) -> None:
    source, target = mesh(0, dp, tp), mesh(dp * tp, dp, tp)
    moved = slices(SHAPE, source, (placement,), target, (placement,))
    assert [(p.source, p.target) for p in moved] == list(
        zip(source.ranks, target.ranks, strict=True)
    )


def test_a_channel_knows_its_own_slices() -> None:
    source, target = mesh(0, 2, 1), mesh(2, 1, 2)
    moved = slices(SHAPE, source, (S0,), target, (R,))
    box, device = held(SHAPE, (S0,), source, 0), torch.device("cpu")
    sender = Channel(moved, 0, box, torch.bfloat16, device, None, 7)
    assert [(p.source, p.target) for p in sender.outgoing] == [(0, 2), (0, 3)]
    assert sender.incoming == []
    assert sender.bytes_sent == 2 * 6 * 24 * 2


# --- memory of what was sent ----------------------------------------------------------------------


def test_the_graph_behind_what_was_released_is_whole() -> None:
    x = torch.arange(6.0).reshape(2, 3).requires_grad_()
    out = handed((x * x).sum(dim=0, keepdim=True))
    assert release(out)
    assert (out.untyped_storage().nbytes(), out.shape) == (0, (1, 3))
    torch.autograd.backward([out], [torch.tensor([[1.0, 2.0, 3.0]])])
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * x.detach() * torch.tensor([1.0, 2.0, 3.0]))


@pytest.mark.parametrize(
    "also",
    [
        lambda y: y,  # a name
        lambda y: y.detach(),  # a stage on the same rank
        lambda y: y[:1],  # a message
        lambda y: y.exp() * y,  # an operator that saves it
    ],
    ids=["name", "alias", "part", "saved"],
)
def test_what_somebody_has_stays(also: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.ones(2, 3, requires_grad=True)
    made = x + 1
    out, other = handed(made), also(made)
    del made
    assert not release(out)
    assert torch.equal(out, torch.full((2, 3), 2.0))
    del other
    assert release(out)


def test_what_its_own_operator_saved_stays() -> None:
    x = torch.ones(2, requires_grad=True)
    out = handed(torch.tanh(x))
    assert not release(out)
    torch.autograd.backward([out], [torch.ones(2)])
    assert x.grad is not None
    assert torch.allclose(x.grad, 1 - torch.tanh(torch.ones(2)) ** 2)

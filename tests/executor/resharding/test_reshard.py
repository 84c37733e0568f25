"""Re-shards against the states they move between, and the tables against each other."""

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.costmodel.sharding.strategies import RP, TRANSITIONS, P, Placement, R, transition
from meshwright.executor.resharding import reshard
from meshwright.executor.resharding.reshard import (
    MOVES,
    Axis,
    Reshard,
    join_parts,
    local_part,
    split_parts,
)
from tests.helpers.shards import cut, gradient_state, joined, shards, whole
from tests.helpers.threaded_ranks import Ranks, alone, talking_ranks

SHAPE = (8, 16, 4)
SHARDS = tuple(Placement("S", *of) for of in ((0,), (1,), (1, 2), (1, 4), (2,)))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with talking_ranks() as made:
        yield made


@st.composite
def splits(draw: st.DrawFn) -> tuple[torch.Tensor, Placement, int]:
    n, split, rest = (draw(st.integers(1, 4)) for _ in range(3))
    shape = draw(st.lists(st.integers(1, 3), max_size=2))
    dim = draw(st.integers(0, len(shape)))
    shape.insert(dim, split * n * rest)
    x = torch.arange(math.prod(shape)).view(shape)
    return x, Placement("S", dim, split), n


@given(splits())
def test_join_undoes_split(of: tuple[torch.Tensor, Placement, int]) -> None:
    """A shard is its share of every part."""
    x, placement, n = of
    parts = split_parts(x, placement, n)
    assert torch.equal(join_parts(parts, placement), x)
    size = x.shape[placement.dim]
    block = size // placement.split
    for k, part in enumerate(parts):
        held = torch.tensor([i for i in range(size) if i % block * n // block == k])
        assert torch.equal(part, x.index_select(placement.dim, held))
        assert torch.equal(local_part(x, placement, n, k), part)


@given(st.integers(0, 40), st.integers(1, 7))
def test_parts_that_differ_are_filled_up(size: int, n: int) -> None:
    """What ranks hold of a dim that they don't divide; zeros stand behind it where it travels."""
    x, placement = torch.arange(1, size + 1), Placement("S", 0)
    mine = [local_part(x, placement, n, k) for k in range(n)]
    assert torch.equal(torch.cat(mine), x)
    parts = split_parts(x, placement, n)
    for part, own in zip(parts, mine, strict=True):
        assert torch.equal(part[: len(own)], own) and not part[len(own) :].any()
    assert torch.equal(join_parts(parts, placement, size), x)


@given(st.lists(st.integers(1, 3), min_size=2, max_size=4), st.data())
def test_two_axes_split_two_factors_of_one_dim(factors: list[int], data: st.DataObject) -> None:
    """The second axis sees fewer parts before its factor, if the first axis split one of them."""
    chosen = data.draw(st.permutations(range(len(factors))))[:2]
    mesh = (2, 3)
    sizes = [
        n * math.prod(m for c, m in zip(chosen, mesh, strict=True) if c == i)
        for i, n in enumerate(factors)
    ]
    state = tuple(Placement("S", 0, math.prod(sizes[:c])) for c in chosen)
    x = torch.arange(math.prod(sizes))
    grid = x.view(sizes)
    held = shards(x, (state[0], state[1]), mesh)
    for rank, mine in held.items():
        expected = grid
        for factor, n, k in zip(chosen, mesh, rank, strict=True):
            expected = expected.chunk(n, factor)[k]
        assert torch.equal(mine, expected.flatten())
    assert torch.equal(whole(held, (state[0], state[1]), mesh, "x"), x)


# --- transitions ---------------------------------------------------------------------------------


def states(kind: str) -> tuple[Placement, ...]:
    return {"R": (R,), "Rp": (RP,), "P": (P,), "S": SHARDS}[kind]


TRIED = [
    (source, target)
    for kinds in MOVES
    for source, target in product(*map(states, kinds))
    if source != target
]
# of sizes that the ranks divide, and of others: 5 on 4 leaves the last with nothing
UNEVEN = [(a, b) for a, b in TRIED if {a.split, b.split} == {1} and (a.sharded or b.sharded)]
SIZED = [(*pair, SHAPE) for pair in TRIED] + [(*pair, (7, 9, 5)) for pair in UNEVEN]


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize(("source", "target", "shape"), SIZED, ids=str)
def test_a_move_keeps_value_and_gradient(
    ranks: Ranks,
    source: Placement,
    target: Placement,
    shape: tuple[int, ...],
    n: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    x, g = torch.randn(2, *shape, dtype=torch.float64)
    values = cut(x, source, n)
    gradients = cut(g, gradient_state((R, target))[1], n)
    size = shape[source.dim] if source.sharded and shape[source.dim] % n else None
    calls: list[str] = []
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        monkeypatch.setattr(reshard, name, _noted(name, getattr(reshard, name), calls))

    def work(data: Axis, tensor: Axis) -> tuple[torch.Tensor, torch.Tensor, str, str]:
        mine = values[tensor.rank].clone().requires_grad_()
        moved = Reshard(source, target, tensor, size)(mine)
        forward = calls[0] if calls else ""
        if tensor.rank == 0:
            calls.clear()
        moved.backward(gradients[tensor.rank])
        assert mine.grad is not None
        return moved.detach(), mine.grad, forward, calls[0] if calls else ""

    got = ranks.run((1, n), work)
    moved = [got[0, k][0] for k in range(n)]
    back = [got[0, k][1] for k in range(n)]
    torch.testing.assert_close(joined(moved, target, "value"), x)
    state = gradient_state((R, source))[1]
    torch.testing.assert_close(joined(back, state, "gradient"), g)
    assert (transition(source, target) or ("", "")) == got[0, 0][2:]


def _noted(name: str, collective: Any, calls: list[str]) -> Any:
    def noting(*args: Any) -> torch.Tensor:
        if next(arg for arg in args if isinstance(arg, Axis)).rank == 0:
            calls.append(name)
        return collective(*args)

    return noting


def test_every_transition_with_a_price_has_a_move() -> None:
    """But for a parameter of which an outer axis reads a part: it is summed over all ranks."""
    priced = {(a, b.rstrip("!")) for a, b in TRANSITIONS if a != b}
    assert priced | {("Rp", "S"), ("Rp", "P")} == set(MOVES)
    stays = {a: moves for (a, b), moves in TRANSITIONS.items() if a == b}
    assert stays == dict.fromkeys(("R", "Rp", "P", "S"), ("", ""))
    assert transition(SHARDS[0], P) is None and transition(RP, P) is None


def test_a_move_leaves_its_input_alone() -> None:
    x = torch.ones(4, requires_grad=True)
    made = alone((1, 2), lambda data, tensor: Reshard(R, P, tensor)(x))
    assert torch.equal(made[0, 0], x) and torch.equal(made[0, 1], torch.zeros(4))
    assert torch.equal(x, torch.ones(4))


@pytest.mark.parametrize(("source", "target"), [(P, R), (SHARDS[0], R)], ids=str)
def test_leaves_do_not_share_the_memory_of_a_gradient(
    ranks: Ranks, source: Placement, target: Placement
) -> None:
    """Two leaves get the gradient of their sum: what is added to one's is not added to the
    other's."""

    def work(data: Axis, tensor: Axis) -> tuple[torch.Tensor, torch.Tensor | None]:
        one, other = (torch.ones(4, requires_grad=True) for _ in range(2))
        move = Reshard(source, target, tensor)
        (move(one) + move(other)).square().sum().backward()
        assert other.grad is not None
        before = other.grad.clone()
        move(one).square().sum().backward()
        return before, other.grad

    for before, after in ranks.run((1, 2), work).values():
        assert after is not None and torch.equal(before, after)

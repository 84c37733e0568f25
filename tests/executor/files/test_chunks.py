"""What a rank holds of a tensor, who writes it, and what of an optimizer is a tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from meshwright.executor.checkpoint.optimizer_state import collect
from meshwright.executor.files.chunks import ReplicaWriters, local_chunks


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Placement], tuple[int, ...]]:
    """A shape, and placements on a mesh of up to three axes. Strided shards are even ones, on every
    rank."""
    shape = draw(st.lists(st.integers(1, 24), min_size=0, max_size=3))
    mesh = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    left = list(shape)  # of each dim, on the first rank
    even = [True] * len(shape)  # as on all others
    placements: list[Placement] = []
    for ranks in mesh:
        kinds: list[Placement] = [Replicate()]
        for dim, size in enumerate(left):
            kinds.append(Shard(dim))
            splits = [f for f in (2, 3, 4) if even[dim] and size % (f * ranks) == 0]
            kinds += [_StridedShard(dim, split_factor=f) for f in splits]
        chosen = draw(st.sampled_from(kinds))
        placements.append(chosen)
        if not isinstance(chosen, Replicate):
            even[chosen.dim] &= left[chosen.dim] % ranks == 0
            left[chosen.dim] = -(-left[chosen.dim] // ranks)
    return tuple(shape), placements, tuple(mesh)


@settings(max_examples=200, deadline=None)
@given(layouts())
def test_boxes_are_what_torch_gives_each_rank(
    layout: tuple[tuple[int, ...], list[Placement], tuple[int, ...]],
) -> None:
    shape, placements, mesh = layout
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    seen = torch.zeros(shape, dtype=torch.int64)
    for coordinate in product(*(range(n) for n in mesh)):
        local = whole
        for placement, ranks, rank in zip(placements, mesh, coordinate, strict=True):
            if isinstance(placement, (Shard, _StridedShard)):
                local = placement._split_tensor(local, ranks, with_padding=False)[0][rank]
        held = local_chunks(shape, placements, mesh, coordinate)
        assert sum(torch.Size(box.sizes).numel() for box in held) == local.numel()
        for box in held:
            there = tuple(slice(a, a + n) for a, n in zip(box.offset, box.sizes, strict=True))
            here = tuple(slice(a, a + n) for a, n in zip(box.local_offset, box.sizes, strict=True))
            assert torch.equal(whole[there], local[here])
            seen[there] += 1
    copies = 1
    for placement, ranks in zip(placements, mesh, strict=True):
        copies *= ranks if isinstance(placement, Replicate) else 1
    assert bool((seen == copies).all())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mesh:
    shape: tuple[int, ...]
    coordinate: tuple[int, ...]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def mesh(self) -> torch.Tensor:
        return torch.arange(5, 5 + math.prod(self.shape)).view(self.shape)

    def get_coordinate(self) -> tuple[int, ...]:
        return self.coordinate


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple),
    st.lists(st.integers(1, 1000), min_size=1, max_size=30),
)
def test_one_replica_writes_each_tensor_and_none_much_more(
    shape: tuple[int, ...], sizes: list[int]
) -> None:
    tensors = [torch.empty(size, device="meta") for size in sizes]
    written = []
    for rank, coordinate in enumerate(product(*(range(n) for n in shape)), 5):
        writers, mesh = ReplicaWriters(), _Mesh(shape=shape, coordinate=coordinate)
        chosen = [writers.choose(x, mesh) for x in tensors]  # type: ignore[arg-type]
        written.append([replica.mine for replica in chosen])
        for replica in chosen:  # of which all ranks know the one
            assert (rank in replica.ranks(mesh)) == replica.mine  # type: ignore[arg-type]
    assert all(sum(chosen) == 1 for chosen in zip(*written, strict=True))
    loads = [sum(n for n, mine in zip(sizes, own, strict=True) if mine) for own in written]
    assert max(loads) - min(loads) <= max(sizes)


def test_a_scalar_parameter_is_stored_like_any_other() -> None:
    """Its states have no dims, as counters have none; they go where it goes."""
    parameters = {"scale": nn.Parameter(torch.ones(())), "weight": nn.Parameter(torch.ones(3))}
    optimizer = torch.optim.AdamW(parameters.values())
    for p in parameters.values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    tensors, notes = collect(optimizer, parameters, parameters)
    assert {fqn: set(states) for fqn, states in tensors.items()} == {
        "scale": {"exp_avg", "exp_avg_sq"},
        "weight": {"exp_avg", "exp_avg_sq"},
    }
    assert {fqn: set(values) for fqn, values in notes["values"].items()} == {
        "scale": {"step"},
        "weight": {"step"},
    }

"""Whole tensors to what ranks hold of them, and back."""

from collections.abc import Mapping, Sequence

import torch
from torch.testing import assert_close

from meshwright.costmodel.sharding.strategies import P, Placement, R
from meshwright.executor.lowering.context import State, local_view
from meshwright.executor.resharding import Axis
from meshwright.executor.resharding.reshard import join_parts, local_part
from tests.helpers.threaded_ranks import Mesh, Rank

TOLERANCE = 1e-9
GRADIENT = {"R": R, "P": R, "Rp": P}  # the state of a gradient, of a value that is not split


def cut(x: torch.Tensor, placement: Placement, n: int) -> list[torch.Tensor]:
    """What n ranks hold of `x`; a partial value is random parts that sum to it."""
    if placement.sharded:
        return [local_part(x, placement, n, k) for k in range(n)]
    if placement.kind != "P":
        return [x] * n
    if x.dtype == torch.bool:
        return [x, *[torch.zeros_like(x)] * (n - 1)]
    shape = (n - 1, *x.shape)
    noise = torch.randn(shape) if x.is_floating_point() else torch.randint(-9, 9, shape)
    noise = noise.to(x.dtype)
    return [x - noise.sum(0), *noise]


def shards(x: torch.Tensor, state: State, mesh: Mesh) -> dict[Rank, torch.Tensor]:
    """What each rank of a mesh holds of `x`, cut by the data axis first."""
    inner = local_view(state[1], state[0], Axis("data", mesh[0], 0))
    return {
        (d, t): leaf
        for d, piece in enumerate(cut(x, state[0], mesh[0]))
        for t, leaf in enumerate(cut(piece, inner, mesh[1]))
    }


def joined(parts: Sequence[torch.Tensor], placement: Placement, what: str) -> torch.Tensor:
    """The inverse of `cut`; replicas must agree."""
    if placement.sharded and placement.split == 1:
        return torch.cat(list(parts), placement.dim)  # the last may be smaller
    if placement.sharded:
        return join_parts(torch.stack(list(parts)), placement)
    if placement.kind == "P":
        return torch.stack(list(parts)).sum(0)
    for part in parts[1:]:
        close(part, parts[0], f"{what}: replicas differ")
    return parts[0]


def whole(held: Mapping[Rank, torch.Tensor], state: State, mesh: Mesh, what: str) -> torch.Tensor:
    """The inverse of `shards`."""
    inner = local_view(state[1], state[0], Axis("data", mesh[0], 0))
    rows = [
        joined([held[d, t] for t in range(mesh[1])], inner, f"{what} on the tensor axis")
        for d in range(mesh[0])
    ]
    return joined(rows, state[0], f"{what} on the data axis")


def gradient_state(state: State) -> State:
    data, tensor = (GRADIENT.get(p.kind, p) for p in state)
    return data, tensor


def close(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert_close(
        actual,
        expected,
        rtol=TOLERANCE,
        atol=TOLERANCE,
        equal_nan=True,
        msg=lambda m: f"{what}: {m}",
    )

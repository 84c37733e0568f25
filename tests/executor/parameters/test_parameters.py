"""A rank's parameters: ZeRO's shard of a local tensor, and the tensors made of a parameter."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.costmodel.sharding.strategies import Placement, R
from meshwright.executor.parameters.parameters import (
    ParameterSpec,
    accumulate_grads,
    expose,
    load,
    make_parameter,
    refresh_frozen,
    shard_placement,
)
from meshwright.executor.ranks.meshes import StageMesh, single_process

ROWS, COLUMNS = Placement("S", 0), Placement("S", 1)


@pytest.mark.parametrize(
    ("shape", "placement", "n", "shard"),
    [
        ((8, 6), R, 4, ROWS),
        ((4, 3), R, 4, ROWS),  # one each
        ((6, 8), R, 4, COLUMNS),
        ((2, 3), R, 4, R),
        ((8, 8), ROWS, 4, COLUMNS),  # the dim that the tensor axis leaves alone
        ((8, 3), ROWS, 4, ROWS),  # nested in the tensor axis' shard
        ((8, 3), Placement("S", 0, 3), 4, R),  # never in a strided one
        ((), R, 2, R),
    ],
)
def test_zero_shards_the_first_dim_that_divides(
    shape: tuple[int, ...], placement: Placement, n: int, shard: Placement
) -> None:
    assert shard_placement(shape, placement, n) == shard


def test_zero_leaves_the_experts_dim_and_uneven_parts_alone() -> None:
    assert shard_placement((8, 6), R, 2, first=1) == COLUMNS
    assert shard_placement((8, 3), ROWS, 4, even=False) == R


@pytest.mark.parametrize(("dtype", "aliased"), [(torch.float32, True), (torch.bfloat16, False)])
@pytest.mark.parametrize("trainable", [True, False])
def test_a_leaf_is_a_cast_of_what_is_stored(
    dtype: torch.dtype, aliased: bool, trainable: bool
) -> None:
    place = single_process(torch.device("cpu"), [StageMesh(ranks=(0,), dp=1, tp=1, shards=1)])
    source = nn.Parameter(torch.arange(4.0), requires_grad=trainable)
    spec = ParameterSpec(
        value="w", fqn="w", placement=R, sum_data=True, sum_tensor=False, zero=2, dtype=dtype
    )
    p = make_parameter(spec, source, place)
    expose(p, place, source)
    assert p.api is source
    assert (p.shape, p.trainable, p.reached) == ((4,), trainable, trainable)
    assert (p.aliased, p.scattered, p.leaf.dtype) == (aliased, False, dtype)
    load(p, torch.ones(4), place)
    refresh_frozen([p])
    assert source.tolist() == [1.0] * 4  # the user's own
    assert p.stored.tolist() == [1.0] * 4
    assert (p.leaf.tolist() == [1.0] * 4) == (aliased or not trainable)


def test_gradients_add_up_over_steps() -> None:
    place = single_process(torch.device("cpu"), [StageMesh(ranks=(0,), dp=1, tp=1, shards=1)])
    spec = ParameterSpec(value="w", fqn="w", placement=R, sum_data=True, sum_tensor=False)
    p = make_parameter(spec, nn.Parameter(torch.zeros(2)), place)
    expose(p, place)
    for _ in range(2):
        p.gradient = torch.ones(2)
        accumulate_grads([p], place.device)
        assert p.gradient is None
    assert p.api.grad.tolist() == [2.0, 2.0]

"""Replicas that train apart end in the weights of the same algorithm on one device: R inner loops,
and torch's own SGD with Nesterov's momentum on the mean of what they changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright import Overrides
from meshwright.executor.ranks import all_gather_object, gloo_group
from tests.executor.runtime.outer_loops import Alone, all_names, nearly, planned
from tests.helpers import tiny
from tests.helpers.ranks import on_ranks

EVERY, STEPS = 3, 7


def trained(world: int, inner: dict[str, Any], outer: dict[str, Any], tied: bool) -> None:
    """Seven steps of the plan, each replica's weights and losses beside the oracle's."""
    overrides = Overrides(**inner, replicas=2, sync_every=EVERY, **outer)
    result = planned(world, overrides=overrides, tied=tied)
    assert (result.plan.num_ranks, result.plan.replicas) == (world, 2)
    optimizer = result.make_optimizer(torch.optim.AdamW, lr=1e-2)
    fragments = [sorted(f for share in of for f in (p.fqn for p in share.parameters))
                 for of in result.meetings.fragments]  # fmt: skip
    names = everywhere(fragments)
    alone = Alone(
        replicas=2, every=EVERY, fragments=names, bits=outer.get("outer_bits", 32), tied=tied
    )
    assert sorted(name for of in names for name in of) == sorted(all_names(tied))
    number = result.meetings.world.number
    for step in range(STEPS):
        batch = tiny.batch(8, step)
        loss = result.train_step(batch, optimizer=optimizer)
        assert abs(float(loss) - alone.step(batch)[number]) < 1e-5
    result.meetings.meet_if_due()
    with result.meetings.world.inside():
        here = result.runtime.full_state_dict()
    nearly(here, alone.weights(number))
    nearly(result.full_state_dict(), alone.outer)


def everywhere(fragments: list[list[str]]) -> list[list[str]]:
    """The names of each fragment on any rank."""
    told = all_gather_object(gloo_group(), fragments)
    return [sorted({n for of in told for n in of[j]}) for j in range(len(fragments))]


@pytest.mark.parametrize(
    ("world", "inner", "outer", "tied"),
    [
        (2, {}, {}, False),
        (2, {}, {"outer_bits": 8}, False),
        (2, {}, {"fragments": 3}, True),
        (4, {"dp": 2, "zero": 1}, {}, False),
        (4, {"tp": 2}, {"fragments": 3}, False),
        (4, {"pp": 2}, {}, True),
        (4, {"dp": 2, "zero": 0}, {}, False),
    ],
)
def test_replicas_end_as_on_one_device(
    world: int, inner: dict[str, Any], outer: dict[str, Any], tied: bool
) -> None:
    on_ranks(world, trained, world, inner, outer, tied)

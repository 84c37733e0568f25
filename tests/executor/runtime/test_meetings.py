"""Replicas that train apart end in the weights of the same algorithm on one device: R inner loops,
and torch's own SGD with Nesterov's momentum on the mean of what they changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright import Overrides
from meshwright.executor.ranks import all_gather_object, gloo_group
from meshwright.executor.ranks.worlds import summed
from tests.executor.runtime.outer_loops import ROWS, Alone, all_names, nearly, planned
from tests.helpers import tiny
from tests.helpers.ranks import on_ranks
from tests.helpers.tiers import second_tier, tiered

EVERY, STEPS = 3, 7


def trained(world: int, inner: dict[str, Any], outer: dict[str, Any], tied: bool) -> None:
    """Seven steps of the plan, each replica's weights and losses beside the oracle's."""
    outer = {"replicas": 2, **outer}
    count, rows = outer["replicas"], 12 if outer["replicas"] == 3 else 8
    overrides = Overrides(**inner, sync_every=EVERY, **outer)
    result = planned(world, overrides=overrides, tied=tied, global_batch_size=rows)
    assert (result.plan.num_ranks, result.plan.replicas) == (world, count)
    optimizer = result.make_optimizer(torch.optim.AdamW, lr=1e-2)
    fragments = [sorted(f for share in of for f in (p.fqn for p in share.parameters))
                 for of in result.meetings.fragments]  # fmt: skip
    names = everywhere(fragments)
    alone = Alone(
        replicas=count, every=EVERY, fragments=names, bits=outer.get("outer_bits", 32), tied=tied
    )
    assert sorted(name for of in names for name in of) == sorted(all_names(tied))
    number = result.meetings.world.number
    for step in range(STEPS):
        batch = tiny.batch(rows, step)
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
        *(
            pytest.param(*cell, marks=second_tier("other ways to hold and step weights"))
            for cell in (
                (3, {}, {"replicas": 3}, False),
                (4, {"dp": 2, "zero": 0}, {}, False),
                (4, {"dp": 2, "zero": 3}, {}, False),
                (4, {"dp": 2, "zero": 2}, {"fragments": 3, "outer_bits": 32}, True),
                (2, {"optimizer_in_backward": True}, {}, False),
                (4, {"pp": 2, "post_validation": True, "num_microbatches": 2}, {}, False),
                (4, {"dp": 2, "zero": 1, "offload": {"optimizer": 1.0}}, {}, False),
                (8, {"dp": 2, "tp": 2, "zero": 1}, {"fragments": 3}, False),
            )
        ),
    ],
)
def test_replicas_end_as_on_one_device(
    world: int, inner: dict[str, Any], outer: dict[str, Any], tied: bool
) -> None:
    on_ranks(world, trained, world, inner, outer, tied)


# --- what comes between a step's gradients and the optimizer --------------------------------------


def stepped_by_hand(between: str) -> None:
    """The ordinary loop: whatever is called before the optimizer's H-th step, it is met with."""
    result = planned(2, overrides=Overrides(replicas=2, sync_every=EVERY))
    optimizer = torch.optim.AdamW(result.parameters(), lr=1e-2)
    alone = Alone(replicas=2, every=EVERY, fragments=[all_names()])
    number = result.meetings.world.number
    for step in range(EVERY + 2):
        batch = tiny.batch(ROWS, step)
        optimizer.zero_grad()
        result.train_step(batch)
        if between == "norms":
            result.clip_grad_norm_(1e9)
            assert result.metrics(grad_norm=True)["grad_norm"] > 0
        else:
            result.settle()
            result.state_dict(), result.full_state_dict()
            result.eval_step(batch)
        optimizer.step()
        alone.step(batch)
    with result.meetings.world.inside():
        here = result.runtime.full_state_dict()
    nearly(here, alone.weights(number))
    nearly(result.full_state_dict(), alone.outer)


@pytest.mark.parametrize("between", ["norms", "states"])
def test_the_optimizer_has_stepped_before_a_meeting(between: str) -> None:
    on_ranks(2, stepped_by_hand, between)


# --- copies on tensor ranks -----------------------------------------------------------------------


def stays_alike(bits: int) -> None:
    """What tensor ranks hold alike beside split weights stays the same bits on all of them."""
    overrides = Overrides(replicas=2, sync_every=EVERY, tp=2, outer_bits=bits)
    result = planned(4, overrides=overrides, cluster=tiny.slow_host(4))
    optimizer = result.make_optimizer(torch.optim.AdamW, lr=1e-2)
    alone = Alone(replicas=2, every=EVERY, fragments=[all_names()])
    for step in range(STEPS):
        batch = tiny.batch(ROWS, step)
        result.train_step(batch, optimizer=optimizer)
        alone.step(batch)
    parameters = result.runtime.stage_parameters
    copies = {p.fqn: p.stored.detach().clone() for p in parameters if not p.placement.sharded}
    assert 0 < len(copies) < len(parameters)
    for other in all_gather_object(gloo_group(), copies)[result.meetings.world.number * 2 :][:2]:
        assert {n for n, x in copies.items() if not torch.equal(x, other[n])} == set()
    near = 1e-5 if bits == 32 else 1e-2  # steps of 8 bits
    for name, x in result.full_state_dict().items():
        assert float((x - alone.outer[name].detach()).abs().max()) <= near, name


@pytest.mark.parametrize("bits", tiered((8, 32), (8).__eq__, "blocks with a scale, the harder"))
def test_copies_on_tensor_ranks_stay_alike(bits: int) -> None:
    on_ranks(4, stays_alike, bits)


def test_a_sum_does_not_depend_on_where_its_elements_are() -> None:
    """Of more replicas than `sum` adds in order."""
    for seed in range(20):
        column = torch.randn(9, generator=torch.Generator().manual_seed(seed)) * 1e3
        in_order = column[0]
        for x in column[1:]:
            in_order = in_order + x
        for width in (1, 3, 8, 37, 100):
            assert torch.equal(summed(column[:, None].repeat(1, width)), in_order.expand(width))

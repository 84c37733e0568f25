"""What moves between ranks inside of a pass, by hand on links of one byte a second: re-shards,
statistics of a batch, classes, tokens of experts; and what other kernels than products move."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.costmodel.kernels.collectives import Group, collective_time
from meshwright.costmodel.kernels.moe_costs import exchange_seconds, reached_part
from meshwright.costmodel.operators.cost import Cost
from meshwright.costmodel.operators.flops import model_flops
from meshwright.costmodel.operators.pricing import Pricer
from meshwright.costmodel.quantized import buffer_bytes, wire_bytes
from meshwright.costmodel.sharding.strategies import RP, P, Placement, R
from meshwright.costmodel.targets import EAGER
from tests.costmodel.operators.test_pricing import (
    DOWN,
    LENGTH,
    QKV,
    ROWS,
    SCORES,
    UP,
    WIDTH,
    busy,
    costs,
    moving,
    net,
    pricer,
    talking,
)
from tests.helpers.planning import Traced, cluster, cut
from tests.models.experts_models import batch, language_model, token_loss

TP = 4
WORDS = 12
FIRST, SECOND = Placement("S", 0), Placement("S", 2)


# --- re-shards -----------------------------------------------------------------------------------

WHOLE = 4 * ROWS * LENGTH * WIDTH
SUM, PART, SWAP = 2 * WHOLE * 3 / 4, WHOLE * 3 / 4, WHOLE * 3 / 16


@pytest.mark.parametrize(
    ("source", "target", "forward", "backward"),
    [
        (R, RP, 0, SUM),
        (R, SECOND, 0, PART),
        (P, R, SUM, 0),
        (P, RP, SUM, SUM),
        (P, SECOND, PART, PART),
        (FIRST, SECOND, SWAP, SWAP),
        (SECOND, R, PART, 0),
        (SECOND, RP, PART, PART),
        (R, P, 0, 0),
        (RP, R, 0, 0),
        (SECOND, SECOND, 0, 0),
    ],
    ids=str,
)
def test_a_re_shard_costs_its_collectives(
    source: Placement, target: Placement, forward: float, backward: float
) -> None:
    found = pricer(net(), talking(), tp=TP).reshard("linear_1", source, target)
    assert found is not None
    assert (found.forward_s, found.backward_s) == pytest.approx((forward, backward))
    assert (found.forward_comm_s, found.backward_comm_s) == (found.forward_s, found.backward_s)


@pytest.mark.parametrize(("source", "target"), [(SECOND, P), (RP, SECOND), (RP, P)], ids=str)
def test_no_re_shard_leads_there(source: Placement, target: Placement) -> None:
    assert pricer(net(), talking(), tp=TP).reshard("linear_1", source, target) is None


def test_a_gradient_that_nobody_wants_is_not_moved_and_a_weights_is_summed_once() -> None:
    found = pricer(net(), talking(), tp=TP)
    x, _ = found.graph.inputs
    assert found.reshard(x, R, RP) == Cost()
    weight = next(v for v, fqn in found.graph.parameters.items() if fqn == "down.weight")
    numel = math.prod(found.graph.values[weight].shape)
    assert found.reshard_parameter(weight, R, RP) == Cost(reduce_s=2 * 4 * numel * 3 / 4)
    assert found.reshard_parameter(weight, Placement("S", 0), R) == found.reshard(
        weight, Placement("S", 0), R
    )


# --- inside of operators -------------------------------------------------------------------------


class Words(nn.Module):
    """Looked up, normed over the batch, added up, classified."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(WORDS, WIDTH), nn.BatchNorm1d(LENGTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.first(self.words(ids))
        return self.out(self.norm(x) + x).flatten(0, 1)


@cache
def words() -> Traced:
    with torch.device("meta"):
        ids = torch.zeros(ROWS, LENGTH, dtype=torch.long)
        loss = lambda made, to: F.cross_entropy(made, to.flatten())  # noqa: E731
        return cut(Words(), (ids, ids), loss, precision="fp32")


def one(found: Pricer, short: str, strategy: str = "replicate") -> Cost:
    (cost,) = costs(found, short, strategy)
    return cost


def test_statistics_of_a_batch_are_summed_four_times_by_slow_kernels() -> None:
    """Sums and squares of each channel both ways; four passes more over the rows of a rank."""
    each = 2 * 4 * LENGTH * 1 / 2
    found = one(pricer(words(), talking(), dp=2, rows=2), "batch_norm")
    assert (found.forward_comm_s, found.backward_comm_s) == pytest.approx((2 * each, 2 * each))
    assert (found.forward_s, found.backward_s) == pytest.approx((2 * each, 2 * each))
    two, alone = (one(pricer(words(), moving(), dp=dp, rows=2), "batch_norm") for dp in (2, 1))
    passes = 4 * 4 * 2 * LENGTH * WIDTH
    assert two.forward_s - alone.forward_s == pytest.approx(passes)
    assert two.backward_s - alone.backward_s == pytest.approx(passes)


@pytest.mark.parametrize(("short", "count"), [("cross_entropy_loss", 3), ("embedding", 0)])
def test_split_classes_exchange_numbers_of_each_row(short: str, count: int) -> None:
    """The largest logit, the sum of exponentials, the target's; an embedding is partial."""
    found = one(pricer(words(), talking(), tp=2), short, "vocab")
    assert found.forward_comm_s == pytest.approx(count * 2 * 4 * ROWS * LENGTH / 2)
    assert found.backward_comm_s == 0


def test_look_ups_sums_and_losses_move_what_they_read_and_write() -> None:
    found = pricer(words(), moving())
    row = 4 * ROWS * LENGTH * WIDTH
    lookup, added = one(found, "embedding"), one(found, "add")
    table = 4 * WORDS * WIDTH
    assert (lookup.forward_s, lookup.backward_s) == (2 * row, 2 * row + table)
    assert (added.forward_s, added.backward_s) == (3 * row, 2 * row)  # gradients pass through
    logits, targets = 4 * ROWS * LENGTH * WORDS, 8 * ROWS * LENGTH
    loss = one(found, "cross_entropy_loss")
    assert loss.forward_s == logits + targets + 4
    assert loss.backward_s == 4 + (logits + targets) + logits


def test_model_flops_count_products_forward_once_and_backward_twice() -> None:
    """No dX of the batch is left out, by convention; attention's two products; frozen less."""
    attention = 2 * SCORES
    for frozen, backward in ((False, 2 * DOWN), (True, DOWN)):
        found = model_flops(net(frozen=frozen).graph, net(frozen=frozen).table)
        assert found.of(ROWS) == 3 * (UP + QKV + attention) + DOWN + backward
        assert found.of(2 * ROWS) == 2 * found.of(ROWS)


# --- experts -------------------------------------------------------------------------------------


def test_copies_of_tokens_travel_once_to_each_place_that_wants_them() -> None:
    assert reached_part(4, 2) == 1 - (3 / 4) ** 2
    on = cluster(4, nodes=2, bandwidth=1.0, node_bandwidth=0.1)
    group, nbytes, copies = Group(size=8, per_node=4), 1000.0, 2
    given: dict[str, Any] = {"tokens": 10.0, "message_s": 0.0}
    each = exchange_seconds(nbytes, copies, group, on, once_per_node=False, **given)
    assert each == pytest.approx(collective_time("all_to_all", 8 * nbytes, group, on))
    inside = 8 * (1 - (7 / 8) ** 2) / 2 * nbytes * 3 / 4
    between = (1 - (1 / 2) ** 2) * nbytes / 2 / (0.1 / 4)
    once = exchange_seconds(nbytes, copies, group, on, once_per_node=True, **given)
    assert once == pytest.approx(max(inside, between)) == between
    fast = cluster(4, nodes=2, bandwidth=1.0, node_bandwidth=1e6)
    assert exchange_seconds(
        nbytes, copies, group, fast, once_per_node=True, **given
    ) == pytest.approx(inside)
    slow = exchange_seconds(
        nbytes, copies, group, fast, once_per_node=True, tokens=10.0, message_s=1e3
    )
    assert slow == pytest.approx(10 * (2 - 1) * (1 - (1 / 2) ** 2) * 1e3)
    here = Group(size=4, per_node=4)
    alone = exchange_seconds(nbytes, copies, here, on, once_per_node=True, **given)
    assert alone == pytest.approx(4 * (1 - (3 / 4) ** 2) / 2 * nbytes * 3 / 4)


def test_expert_ranks_hold_a_part_of_the_experts_and_the_fullest_one_more_copies() -> None:
    loss = lambda made, to: token_loss(made[0], to) + made[1]  # noqa: E731
    of = cut(language_model("routed", "none"), batch(4, 0), loss, precision="fp32")
    target = replace(EAGER, expert_imbalance=1.5)
    alone, shared = (pricer(of, busy(), ep=ep, target=target) for ep in (1, 2))
    kinds = set()
    for value in of.graph.values:
        kind = of.table.has_experts(value), value in of.table.copies
        kinds.add(kind)
        assert shared.numel(value) == alone.numel(value) * (0.5, 1)[not kind[0]] * (1, 1.5)[kind[1]]
    assert kinds == {(False, False), (True, False), (False, True)}


# --- quantised blocks ----------------------------------------------------------------------------


def test_blocks_of_few_bits_by_hand() -> None:
    """256 elements and their scale: of 8 bits 260 bytes, of 4 bits 132."""
    assert (wire_bytes(256, 8), wire_bytes(256, 4)) == (256 + 4, 128 + 4)
    beside = {"none": 0, "weights": 260 + 128, "gradients": 2 * 132 + 128, "both": 2 * 132 + 128}
    assert {name: buffer_bytes(256.0, name) for name in beside} == beside

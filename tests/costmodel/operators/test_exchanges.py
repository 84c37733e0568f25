"""What moves between ranks inside of a pass, by hand on links of one byte a second: re-shards,
statistics of a batch, classes, tokens of experts; what other kernels than products move; what the
context axis divides and sends, what a product hides of its collective."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.costmodel.blocks.backward import backward_course
from meshwright.costmodel.blocks.block_memory import block_memory
from meshwright.costmodel.kernels.collectives import (
    Group,
    collective_time,
    exchange_seconds,
    reached_part,
)
from meshwright.costmodel.operators.cost import Cost
from meshwright.costmodel.operators.flops import model_flops
from meshwright.costmodel.operators.pricing import Pricer
from meshwright.costmodel.quantized import wire_bytes
from meshwright.costmodel.sharding.layouts import BlockLayouts
from meshwright.costmodel.sharding.moves import moves
from meshwright.costmodel.sharding.strategies import RP, P, Placement, R
from meshwright.costmodel.sharing import Sharing
from meshwright.costmodel.targets import EAGER
from meshwright.profiles.cluster import Cluster
from tests.costmodel.operators.test_pricing import (
    DOWN,
    ENDLESS,
    GELU,
    LENGTH,
    QKV,
    ROWS,
    SCORES,
    UP,
    WIDE,
    WIDTH,
    busy,
    costs,
    moving,
    net,
    pricer,
    talking,
)
from tests.helpers.planning import Traced, cluster, cut
from tests.helpers.tiers import tiered
from tests.helpers.traced import with_forward
from tests.models.experts_models import batch, language_model, token_loss

TP = 4
WORDS = 12
FIRST, SECOND = Placement("S", 0), Placement("S", 2)
WHOLE = 4 * ROWS * LENGTH * WIDTH
SUM, PART, SWAP = 2 * WHOLE * 3 / 4, WHOLE * 3 / 4, WHOLE * 3 / 16


@pytest.mark.parametrize(
    ("source", "target", "forward", "backward"),
    [
        (R, RP, 0, SUM), (R, SECOND, 0, PART), (P, R, SUM, 0), (P, RP, SUM, SUM),
        (P, SECOND, PART, PART), (FIRST, SECOND, SWAP, SWAP), (SECOND, R, PART, 0),
        (SECOND, RP, PART, PART), (R, P, 0, 0), (RP, R, 0, 0), (SECOND, SECOND, 0, 0),
    ],
    ids=str,
)  # fmt: skip
def test_a_re_shard_costs_its_collectives(
    source: Placement, target: Placement, forward: float, backward: float
) -> None:
    found = pricer(net(), talking(), tp=TP).reshard("linear_1", source, target)
    assert found is not None
    assert (found.forward_s, found.backward_s) == pytest.approx((forward, backward))
    assert (found.forward_comm_s, found.backward_comm_s) == (found.forward_s, found.backward_s)


def test_a_gradient_that_nobody_wants_is_not_moved_and_a_weights_is_summed_once() -> None:
    found = pricer(net(), talking(), tp=TP)
    for source, target in ((SECOND, P), (RP, SECOND), (RP, P)):  # no re-shard leads there
        assert found.reshard("linear_1", source, target) is None
    x, _ = found.graph.inputs
    assert found.reshard(x, R, RP) == Cost()
    weight = next(v for v, fqn in found.graph.parameters.items() if fqn == "down.weight")
    numel = math.prod(found.graph.values[weight].shape)
    assert found.reshard(weight, R, RP, once=True) == Cost(reduce_s=2 * 4 * numel * 3 / 4)
    rows = Placement("S", 0)
    assert found.reshard(weight, rows, R, once=True) == found.reshard(weight, rows, R)


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


def test_what_other_kernels_move_and_blocks_of_few_bits() -> None:
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
    # 256 elements and their scale: of 8 bits 260 bytes, of 4 bits 132
    assert (wire_bytes(256, 8), wire_bytes(256, 4)) == (256 + 4, 128 + 4)
    beside = {"none": 0, "weights": 260 + 128, "gradients": 2 * 132 + 128, "both": 2 * 132 + 128}
    assert {name: Sharing(quantized=name).buffer_bytes(256.0) for name in beside} == beside


def test_model_flops_count_products_forward_once_and_backward_twice() -> None:
    """No dX of the batch is left out, by convention; attention's two products; frozen less."""
    attention = 2 * SCORES
    for frozen, backward in ((False, 2 * DOWN), (True, DOWN)):
        found = model_flops(net(frozen=frozen).graph, net(frozen=frozen).table)
        assert found.of(ROWS) == 3 * (UP + QKV + attention) + DOWN + backward
        assert found.of(2 * ROWS) == 2 * found.of(ROWS)


def test_copies_of_tokens_travel_once_to_each_place_that_wants_them() -> None:
    assert reached_part(4, 2) == 1 - (3 / 4) ** 2
    on = cluster(4, nodes=2, bandwidth=1.0, node_bandwidth=0.1)
    group, copies, nbytes = Group(size=8, per_node=4), 2, 1000.0

    def seconds(of: Group, on: Cluster, *, message_s: float = 0.0, once: bool = True) -> Any:
        how = {"once_per_node": once, "tokens": 10.0, "message_s": message_s}
        return exchange_seconds(nbytes, copies, of, on, **how)

    each = collective_time("all_to_all", 8 * nbytes, group, on)
    assert seconds(group, on, once=False) == pytest.approx(each)
    inside = 8 * (1 - (7 / 8) ** 2) / 2 * nbytes * 3 / 4
    between = (1 - (1 / 2) ** 2) * nbytes / 2 / (0.1 / 4)
    assert seconds(group, on) == pytest.approx(max(inside, between)) == between
    fast = cluster(4, nodes=2, bandwidth=1.0, node_bandwidth=1e6)
    assert seconds(group, fast) == pytest.approx(inside)
    slow = seconds(group, fast, message_s=1e3)
    assert slow == pytest.approx(10 * (2 - 1) * (1 - (1 / 2) ** 2) * 1e3)
    alone = seconds(Group(size=4, per_node=4), on)
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


def test_context_parallelism_divides_activations_and_work() -> None:
    of = net()
    one, two = pricer(of, busy()), pricer(of, busy(), cp=2)
    for alone, shared in zip(costs(one, "linear"), costs(two, "linear"), strict=True):
        assert shared.forward_s == pytest.approx(alone.forward_s / 2)
        assert shared.backward_s == pytest.approx(alone.backward_s / 2)
    (alone,), (shared,) = (costs(p, "scaled_dot_product_attention") for p in (one, two))
    assert shared.forward_s == pytest.approx(alone.forward_s / 2)  # own queries, all keys
    (gelu,) = (op for op in of.graph.ops if op.short == "gelu")
    assert two.nbytes(gelu.results[0]) == one.nbytes(gelu.results[0]) / 2 == GELU / 2
    for value in of.graph.parameters:
        assert two.nbytes(value) == one.nbytes(value)


@pytest.mark.parametrize("cp", [2, 3])
def test_context_parallelism_gathers_keys_and_values(cp: int) -> None:
    """Of K and V together, (n-1)/n come from others; backward again, and their gradients go."""
    on = cluster(cp, flops=ENDLESS, memory_bandwidth=ENDLESS, bandwidth=1.0)
    (cost,) = costs(pricer(net(), on, cp=cp), "scaled_dot_product_attention")
    both = 2 * 4 * ROWS * LENGTH * WIDTH
    assert cost.forward_comm_s == pytest.approx(both * (cp - 1) / cp)
    assert cost.backward_comm_s == pytest.approx(2 * both * (cp - 1) / cp)
    assert not any(c.forward_comm_s for c in costs(pricer(net(), talking(), cp=2), "linear"))


def test_a_ring_hides_sends_and_ulysses_turns_tokens_into_heads() -> None:
    """Where a device computes long enough; gradients of keys and values go all the way round."""
    on = cluster(4, flops=1.0, memory_bandwidth=ENDLESS, bandwidth=1e3)
    short = "scaled_dot_product_attention"
    (cost,) = costs(pricer(net(), on, cp=2, cp_kind="ring"), short)
    assert cost.forward_comm_s == cost.backward_comm_s == 0
    assert cost.forward_s == pytest.approx(SCORES)
    (slow,) = costs(pricer(net(), talking(), cp=2, cp_kind="ring"), short)
    one = 2 * 4 * ROWS * LENGTH * WIDTH / 2  # keys and values of a rank
    assert (slow.forward_comm_s, slow.backward_comm_s) == pytest.approx((one, 3 * one))
    # q, k, v and the output, of which (n-1)/n go to others, either way
    found = pricer(net(), talking(), cp=2, cp_kind="ulysses")
    (cost,) = costs(found, "scaled_dot_product_attention")
    each = 4 * ROWS * LENGTH * WIDTH / 2
    assert cost.forward_comm_s == cost.backward_comm_s == pytest.approx(4 * each / 2)


@pytest.mark.parametrize("kind", ["all_gather", "ring", "ulysses"])
def test_memory_of_attention_over_tokens_that_are_split(kind: str) -> None:
    """Of n = 2 ranks: by heads q, k and v are moved, and kept so; by blocks the backward holds 2n
    keys and values with their gradients, but for the rank's own, one sum of either, and the
    gradients of a block."""
    of, each = net(), WHOLE / 2
    block = of.graph.blocks[-1]
    layouts = BlockLayouts(of.graph, of.table, block, 1)
    steps = moves(layouts, layouts.complete({}, {}), {})
    found = pricer(of, busy(), cp=2, cp_kind=kind)
    memory = block_memory(found, steps)
    kept = [s for s in memory.keeps["scaled_dot_product_attention"] if s in memory.moved]
    assert [s.nbytes for s in kept] == [each] * 3 * (kind == "ulysses")
    more = each * (2 * (4 - 1 + 1 / 2) + 3) * (kind != "ulysses")
    (most,) = (m.during for m in backward_course(found, steps, memory, block.parameters))
    assert most == 4 * each + more


TOKEN = 4 * ROWS * WIDTH


def traced(move: Callable[[Tensor], Tensor]) -> Traced:
    with torch.device("meta"):
        model = with_forward(lambda self, x: move(self.l(x)).square().mean())
        return cut(model, (torch.empty(ROWS, LENGTH, WIDTH),), None, precision="fp32")


MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "pad": lambda y: F.pad(y, (0, 0, 1, -1)), "roll": lambda y: y.roll(-1, 1)
}  # fmt: skip


@pytest.mark.parametrize("short", tiered(MOVES, "pad".__eq__, "a pad stays"))
def test_a_shift_takes_a_token_of_a_neighbour_and_one_token_less_all(short: str) -> None:
    of = traced(MOVES[short])
    (sent,) = costs(pricer(of, talking(), cp=2), short)
    assert sent.forward_comm_s == sent.backward_comm_s == sent.forward_s == pytest.approx(TOKEN)
    (copied,), (alone,) = (costs(pricer(of, moving(), cp=cp), short) for cp in (2, 1))
    assert copied.forward_s == pytest.approx(alone.forward_s / 2) and not alone.forward_comm_s
    less = traced(lambda y: y[:, 1:] if short == "pad" else y[:, :-1])
    (cost,) = costs(pricer(less, talking(), cp=2), "slice")
    assert cost.forward_comm_s == pytest.approx(TOKEN * LENGTH / 2)


@pytest.mark.parametrize("rate", [0.01, 1.0, 100.0])
def test_a_product_hides_its_collective_part_by_part(rate: float) -> None:
    """By a simulation of a ring: of 4 parts the first one is there, each other arrives after one
    more send, and is multiplied once it has arrived and the one before is done."""
    on = cluster(4, flops=rate, memory_bandwidth=ENDLESS, bandwidth=1.0)
    target = dataclasses.replace(EAGER, overlap_tensor=("reduce_scatter",))
    plain, hidden = (pricer(net(), on, tp=4, target=each) for each in (EAGER, target))
    (down,) = (op for op in plain.graph.ops if op.results[0] == "linear_1")
    whole_s = 2 * ROWS * LENGTH * WIDE * WIDTH / 4 / rate
    sent_s = 4 * ROWS * LENGTH * WIDTH * 3 / 4
    done_s = 0.0
    for k in range(4):
        done_s = max(done_s, k * sent_s / 3) + whole_s / 4
    kept = Placement(kind="S", dim=1)
    cost = hidden.reshard(down.results[0], P, kept)
    assert cost is not None
    assert cost.forward_s == pytest.approx(max(done_s - whole_s, 0.0), rel=1e-6, abs=1e-6)
    without = plain.reshard(down.results[0], P, kept)
    assert without is not None
    assert without.forward_s == pytest.approx(sent_s)
    assert cost.backward_s == pytest.approx(without.backward_s)  # gathered, which is not hidden


def attends_causally(x: Tensor) -> Tensor:
    heads = x.view(ROWS, LENGTH, 2, WIDTH // 2).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


@pytest.mark.parametrize(("cp", "late"), [(1, 1), (2, 3 / 2), (3, 1)])
def test_the_last_rank_has_most_of_causal_attention_but_in_zigzag(cp: int, late: float) -> None:
    """Half of the scores. Six tokens are two chunks for each of three ranks, not of two: there the
    second rank has 3/4 of them."""
    found = pricer(traced(attends_causally), busy(), cp=cp)
    (cost,) = costs(found, "scaled_dot_product_attention")
    assert cost.forward_s == pytest.approx(SCORES / cp * late)

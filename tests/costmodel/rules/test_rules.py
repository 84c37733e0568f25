"""Every sharding rule against the operator itself: all strategies, forward and backward.

Written rules and automatic classes are verified call by call, views also on random shapes.
"""

import math
from collections.abc import Iterator
from functools import partial
from itertools import accumulate, pairwise
from operator import mul

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.costmodel.graph import Graph, Op, Ref, TensorMeta
from meshwright.costmodel.rules.auto import refine
from meshwright.costmodel.rules.registry import RULES
from meshwright.costmodel.sharding.factors import analyse
from meshwright.costmodel.sharding.strategies import indivisible
from meshwright.executor.lowering import emitter
from meshwright.executor.lowering.implementations import GlobalLoss, SyncBatchNorm
from meshwright.executor.resharding.reshard import Axis
from tests.costmodel.rules.rule_cases import (
    AUTOMATIC,
    EXPERTS,
    IMAGES,
    WRITTEN,
    Case,
    Spec,
    case,
    ids,
    k,
    w,
    x,
)
from tests.costmodel.traces import graph_of, operator, sample_of
from tests.helpers.sharded_ops import PRECISION, OperatorCheck, Sample
from tests.helpers.threaded_ranks import Ranks, talking_ranks
from tests.helpers.tiers import second_tier, tiered

MODELS = ("gpt2_dropout", "llama", "bert", "resnet")
CALLS = [*WRITTEN, *IMAGES, *AUTOMATIC, *EXPERTS]
FIRST = set({of.op: of.name for of in reversed(CALLS)}.values())  # a call of each operator


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    torch.manual_seed(0)
    with talking_ranks() as made:
        yield made


@pytest.mark.parametrize(
    "of",
    tiered(CALLS, lambda of: of.name in FIRST, "a call of each operator stays", lambda of: of.name),
)
def test_operator_on_shards_is_the_operator(of: Case, ranks: Ranks) -> None:
    check = operator(of)
    found = {str(s.results[0]) for data in (False, True) for s in check.options(2, data=data)}
    assert found == of.splits
    assert check.sample.table.ops[check.op.name].known == of.known
    check.everything(ranks)


def test_every_written_rule_has_a_case_and_indivisible_factors_are_named() -> None:
    of_cases = {of.op for of in (*WRITTEN, *IMAGES)} - {"matmul"}  # automatic
    by_planner = {"loss_in_parts"}  # in no trace (tests/planner/plan/test_loss_parts.py)
    assert {name.split(".")[1] for name in RULES} == of_cases | by_planner
    check = operator(case("linear", "", F.linear, x(4, 6, 10), w(12, 10)))
    assert indivisible(check.sample.table, check.traced, 4) == {"b0": 6}  # in: 3, 3, 3, 1
    assert indivisible(check.sample.table, check.traced, 2) == {}


@pytest.mark.parametrize("split", ["n", "vocab"])
def test_loss_counts_its_rows_over_every_axis_that_splits_them(
    ranks: Ranks, split: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its target is not known before the step."""
    loss = lambda a, t: F.cross_entropy(a.flatten(0, 1), t.flatten(), ignore_index=0)  # noqa: E731
    check = operator(case("ce", "", loss, x(4, 6, 4), ids(3, 4, 6)))
    monkeypatch.setattr(emitter, "is_counted", lambda *_: False)
    _, data = check.options(2, data=True)
    tensor = next(s for s in check.options(2) if s.split_factor == split)
    check.check((2, 2), data, tensor, ranks, talking=True)


@pytest.mark.parametrize("weights", [(), (k(4),)], ids=["no reduction", "class weights"])
def test_losses_in_micro_batches(ranks: Ranks, weights: tuple[Spec, ...]) -> None:
    reduction = "mean" if weights else "none"
    loss = partial(F.cross_entropy, reduction=reduction)
    check = operator(case("ce", "", loss, x(8, 4), ids(4, 8), *weights))
    check.microbatches = 2
    for option in check.options(2, data=True):
        check.check((2, 1), option, None, ranks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_vocabulary_loss_is_as_precise_as_the_plain_one(ranks: Ranks, dtype: torch.dtype) -> None:
    logits = (torch.randn(16, 4096) * 3).to(dtype).requires_grad_()
    target = torch.randint(0, 4096, (16,))
    exact = F.cross_entropy(logits.double(), target, reduction="sum")
    (gradient,) = torch.autograd.grad(exact, logits)

    def work(data: Axis, tensor: Axis) -> tuple[torch.Tensor, torch.Tensor]:
        mine = logits.detach().chunk(2, 1)[tensor.rank].requires_grad_()
        loss = GlobalLoss("cross_entropy", 2, tensor, (), first_class=2048 * tensor.rank)
        loss = loss(mine, target, -100, 0.0)
        return loss.detach(), torch.autograd.grad(loss, mine)[0]

    got = ranks.run((1, 2), work)
    tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": torch.finfo(dtype).eps}
    for loss, _ in got.values():
        # in single precision at least: a sum over many rows is out of fp16's range
        wide = torch.promote_types(dtype, torch.float32)
        torch.testing.assert_close(loss, exact.detach().to(wide), **tolerance)
    both = torch.cat([part for _, part in got.values()], 1)
    torch.testing.assert_close(both, gradient.to(dtype), **tolerance)


def test_synchronised_batch_norm_keeps_the_dtype_of_mixed_precision(ranks: Ranks) -> None:
    given = (torch.randn(8, 4, 6) + 3).bfloat16()
    weight, bias, mean, var = torch.rand(4), torch.rand(4), torch.zeros(4), torch.ones(4)
    means = mean.clone(), var.clone()
    expected = F.batch_norm(given, *means, weight, bias, True)

    def work(data: Axis, tensor: Axis) -> tuple[torch.Tensor, ...]:
        stats = mean.clone(), var.clone()
        part = given.chunk(2)[data.rank]
        return SyncBatchNorm(data, 8)(part, weight, bias, *stats, True, 0.1, 1e-5), *stats

    got = ranks.run((2, 1), work)
    out = torch.cat([made for made, *_ in got.values()])
    assert out.dtype == expected.dtype
    torch.testing.assert_close(out, expected, rtol=0.01, atol=0.01)
    for _, *stats in got.values():
        torch.testing.assert_close(stats, list(means))


@pytest.mark.parametrize("name", MODELS)
def test_operators_of_models_have_rules_and_gradients_where_autograd_has_them(name: str) -> None:
    sample = sample_of(name)
    assert all(sample.table.ops[op.name].known for op in sample.ops)
    traced, observed = graph_of(name).graph.values, sample.graph.values
    differ = {n for n in observed if observed[n].requires_grad != traced[n].requires_grad}
    assert differ == set()


def view(before: tuple[int, ...], after: tuple[int, ...]) -> OperatorCheck:
    values = {"x": torch.randn(before, dtype=PRECISION), "y": torch.randn(after, dtype=PRECISION)}
    metas = {
        name: TensorMeta(shape=tuple(t.shape), dtype=PRECISION, requires_grad=True)
        for name, t in values.items()
    }
    args = (Ref("x"), list(after))
    op = Op(name="y", target="aten.view.default", args=args, kwargs={}, results=("y",))
    graph = Graph(
        values=metas, ops=(op,), derived=(), inputs={"x": "x"}, batched=frozenset({"x"}),
        parameters={}, buffers={}, constants={}, loss="y", batch_size=before[0],
    )  # fmt: skip
    return OperatorCheck(Sample(graph=graph, table=analyse(graph), values=values), op)


@st.composite
def two_shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes of one size: prime factors dealt out to dims, in orders of their own."""
    primes = draw(st.lists(st.sampled_from([2, 2, 2, 3]), min_size=1, max_size=6))

    def dealt() -> tuple[int, ...]:
        order = draw(st.permutations(primes))
        cuts = sorted(draw(st.lists(st.integers(0, len(primes)), max_size=4)))
        ends = [0, *cuts, len(primes)]
        return tuple(math.prod(order[a:b]) for a, b in pairwise(ends))

    return dealt(), dealt()


@given(two_shapes())
def test_refinement_multiplies_to_both_shapes_in_one_order(
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    left, right, sizes, whole = refine(*shapes)
    for dims, shape in zip((left, right), shapes, strict=True):
        assert tuple(math.prod(sizes[f] for f in dim) for dim in dims) == shape
    kept = [[f for dim in dims for f in dim if f not in whole] for dims in (left, right)]
    assert kept[0] == kept[1]
    # a prefix of either shape that is the size of a prefix of the other is never whole
    ends = [set(accumulate(shape, mul)) for shape in shapes]
    if ends[0] <= ends[1] or ends[1] <= ends[0]:
        assert not whole


@second_tier("views of fixed shapes stay, and the dims that they have in common")
@settings(deadline=None, max_examples=40)
@given(two_shapes())
def test_views_of_random_shapes(
    ranks: Ranks, shapes: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    view(*shapes).everything(ranks)

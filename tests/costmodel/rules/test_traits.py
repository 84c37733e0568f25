"""Special operators are lines of a table: one added there is priced, drawn and refused as its
traits say, and nowhere is an operator known by its name.
"""

import ast
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.costmodel.graph import Block, Graph, Op
from meshwright.costmodel.operators.cost import Cost
from meshwright.costmodel.operators.fusion import Fusion, fuse
from meshwright.costmodel.operators.local_call import signature
from meshwright.costmodel.operators.pricing import Pricer
from meshwright.costmodel.rules import recomputable, registry, traits
from meshwright.costmodel.rules.language import ein
from meshwright.costmodel.rules.traits import Draw, RowLoss, Statistics, Traits
from meshwright.costmodel.sharding.factors import analyse
from meshwright.costmodel.sharding.strategies import strategies
from meshwright.executor.stages import check_evaluable
from meshwright.planner.tracing.trace import trace
from meshwright.profiles.cluster import Cluster
from tests.helpers.planning import setting_on
from tests.helpers.source_files import PRODUCT, files_in
from tests.helpers.traced import with_forward

NAME = "traits_test.normalise"
# comparisons of an operator's name with a literal, or with a constant that is one
NAMED = {
    "planner/tracing/convert.py": 1,  # which strides a `contiguous` of fake tensors sees
    "planner/tracing/values/functional.py": 3,  # the inverse of a view
    "executor/lowering/emitter.py": 1,  # the operator that it would add
    # which rows an indexing reads, constants made in the graph, the arithmetic of masks and counts
    "costmodel/sharding/rows.py": 16,
    # what styles of torch's `parallelize_module` are for, layers of torch.nn
    "planner/frameworks/tensor_styles.py": 5,
    "planner/frameworks/torch_script.py": 2,
    "executor/runtime/evaluation.py": 1,  # a loss that is divided by its count
}


@torch.library.custom_op("traits_test::normalise", mutates_args=())
def normalise(x: torch.Tensor, mean: torch.Tensor, training: bool) -> torch.Tensor:
    return x - mean


normalise.register_fake(lambda x, mean, training: torch.empty_like(x))
normalise.register_autograd(lambda ctx, grad: (grad, None, None))


def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.ops.traits_test.normalise(self.linear(x), self.mean, True).square().mean()


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> Graph:
    monkeypatch.setitem(registry.RULES, NAME, ein("b c, c -> b c"))
    model = with_forward(forward, linear=nn.Linear(64, 64), mean=nn.Buffer(torch.zeros(64)))
    return trace(model, (torch.randn(8, 64),))


def special(monkeypatch: pytest.MonkeyPatch, added: Traits) -> None:
    monkeypatch.setattr(traits, "TRAITS", {**traits.TRAITS, NAME: added})


def operator(graph: Graph) -> Op:
    return next(op for op in graph.ops if op.short == NAME)


def priced(graph: Graph, dp: int) -> Cost:
    setting = setting_on(Cluster.from_catalog("h100-sxm"), dp=dp, rows=8)
    table, op = analyse(graph), operator(graph)
    (whole,) = strategies(graph, table, op, 1)
    return Pricer(graph=graph, table=table, setting=setting).op_cost(op, whole)


def repeatable(graph: Graph) -> bool:
    block: Any = Block(
        name="", ops=graph.ops, inputs=(), outputs=(), derived=(), parameters=(), buffers=(),
        class_id="",
    )  # fmt: skip
    return recomputable(block)


def test_an_ordinary_operator_communicates_nothing_and_may_run_twice(graph: Graph) -> None:
    assert priced(graph, 2) == priced(graph, 1)
    assert repeatable(graph)
    check_evaluable(graph)


def test_a_norm_sums_statistics(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, two = priced(graph, 1), priced(graph, 2)
    special(monkeypatch, Traits(statistics=Statistics(of_batch=True, running=(1,), training=2)))
    assert priced(graph, 1) == alone
    assert priced(graph, 2).forward_comm_s > 0 == alone.forward_comm_s
    assert not repeatable(graph)
    check_evaluable(graph, num_microbatches=2)  # by its running statistics
    special(monkeypatch, Traits(statistics=Statistics(of_batch=True, running=(2,), training=2)))
    check_evaluable(graph)  # by those of the batch, as it has no others
    with pytest.raises(ValueError, match="no running statistics"):
        check_evaluable(graph, num_microbatches=2)
    # a norm of rows updates its buffers and sums nothing
    special(monkeypatch, Traits(statistics=Statistics(of_batch=False, running=(1,), training=2)))
    assert priced(graph, 2) == two
    assert not repeatable(graph)


@pytest.mark.parametrize(
    ("draw", "draws", "again", "evaluates"),
    [
        (Draw(when=lambda op: op.args[2]), True, False, False),
        (Draw(when=lambda op: not op.args[2]), False, True, True),
        (Draw(kind="uniform", when=lambda op: True), True, True, False),
        (Draw(kind="dropout", when=lambda op: True, training=True), True, True, True),
    ],
    ids=["unplanned", "not in this call", "by counter", "in training"],
)
def test_an_operator_that_draws(
    graph: Graph, monkeypatch: pytest.MonkeyPatch, *, draw: Draw, draws: bool, again: bool,
    evaluates: bool,
) -> None:  # fmt: skip
    special(monkeypatch, Traits(draw=draw))
    table, op = analyse(graph), operator(graph)
    (whole,) = strategies(graph, table, op, 1)
    assert traits.draws(op) == draws
    assert (signature(graph, table, op, whole, rows=8, tp=1) is None) == draws
    assert repeatable(graph) == again
    if evaluates:
        check_evaluable(graph)
    else:
        with pytest.raises(ValueError, match="draws random numbers"):
            check_evaluable(graph)


def test_kernels_and_losses(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    op, table = operator(graph), analyse(graph)
    (whole,) = strategies(graph, table, op, 1)
    plain = priced(graph, 1)
    special(monkeypatch, Traits(kernel="lookup"))
    assert priced(graph, 1).forward_s < plain.forward_s  # reads no more rows than it writes
    special(monkeypatch, Traits(stride_bound=True))
    assert signature(graph, table, op, whole, rows=8, tp=1) is None
    special(monkeypatch, Traits(loss=RowLoss(kind="nll", reduction=2)))
    assert traits.row_reduction(op) == 1  # True, where `nll_loss` has its mean
    assert fuse(graph, table, "full") == Fusion()


def names_compared(tree: ast.AST) -> int:
    """Comparisons of `.short` with a text, or with a constant that is no table of them."""
    found = 0
    for node in ast.walk(tree):
        if not isinstance(node, ast.Compare):
            continue
        sides = [node.left, *node.comparators]
        named = any(isinstance(x, ast.Attribute) and x.attr == "short" for x in sides)
        texts = any(
            isinstance(x, ast.Constant) and isinstance(x.value, str) for x in ast.walk(node)
        )
        named |= texts and any(isinstance(x, ast.Name) and x.id == "short" for x in sides)
        among = isinstance(node.ops[0], ast.In | ast.NotIn)
        table = among and isinstance(sides[1], ast.Name | ast.Attribute)
        found += named and not table
    return found


def test_no_operator_is_known_by_its_name() -> None:
    found = {file.path: names_compared(file.tree) for file in files_in(*PRODUCT)}
    more = {path: count for path, count in found.items() if count > NAMED.get(path, 0)}
    assert not more, f"ask a trait (`costmodel/rules/traits.py`) instead of a name: {more}"

"""Leaves: what is kept as one node runs as it is written, split as it is declared."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright import leaf
from meshwright.costmodel.graph import Graph, Op
from meshwright.costmodel.rules.leaf import LEAF, LEAVES, RANDOM_LEAF, leaf_of
from meshwright.costmodel.sharding.factors import analyse
from meshwright.costmodel.sharding.strategies import P, R, strategies
from meshwright.planner.blocks.cut import cut_blocks
from meshwright.planner.tracing.leaves.probe import LeafError
from meshwright.planner.tracing.trace import TraceError, trace
from tests.helpers.traced import ROWS, WIDTH, rows, with_forward
from tests.models.leaf_models import (
    LENGTH,
    Branch,
    Rounded,
    Scan,
    Swish,
    batch,
    kernel,
    loss_fn,
    model_of,
)


def graph_of(*kinds: str, precision: str = "fp32") -> Graph:
    return trace(model_of(kinds), batch(ROWS), loss_fn=loss_fn, precision=precision)


def leaves_in(graph: Graph) -> list[Op]:
    return [op for op in graph.ops if op.short in LEAVES]


def traced(
    forward: Callable[..., Any], *parts: nn.Module, inputs: Any = None, **more: Any
) -> Graph:
    """A model of one linear layer `l` and some parts `p0`, `p1`, ..., with this forward."""
    model = with_forward(forward)
    for k, part in enumerate(parts):
        model.add_module(f"p{k}", part)
    return trace(model, inputs or (rows(WIDTH),), **more)


# --- what a trace makes of them -------------------------------------------------------------------


def test_a_leaf_is_one_operator_with_its_parameters() -> None:
    graph = graph_of("scan")
    (op,) = leaves_in(graph)
    assert op.key == "layers.0.part:leaf"
    assert [graph.parameters[v] for v in op.operands[1:]] == [
        "layers.0.part.decay", "layers.0.part.mix",
    ]  # fmt: skip
    assert [graph.values[r].shape for r in op.results] == [(ROWS, LENGTH, 2 * 16)]
    assert graph.values[op.results[0]].requires_grad


def test_a_rule_says_what_splits() -> None:
    graph = graph_of("scan", "kernel", "swish", "rounded")
    table = analyse(graph)
    names = [
        sorted(s.name for s in strategies(graph, table, op, 2) if s.name != "replicate")
        for op in leaves_in(graph)
    ]
    assert names == [["d"], ["i", "o", "s"], ["d0", "d1"], []]
    made = {s.name: s for s in strategies(graph, table, leaves_in(graph)[1], 2)}
    assert made["i"].results == (P,)
    batched = [
        len(strategies(graph, table, op, ROWS, only=table.batch)) > 1 for op in leaves_in(graph)
    ]
    assert batched == [True, True, True, False]


def test_letters_that_no_result_has_stay_whole_unless_summed() -> None:
    def made(**said: Any) -> Graph:
        product = leaf(lambda x, w: x @ w.T, rule="b i, o i -> b o", **said)
        return traced(lambda self, x: product(self.l(x), self.l.weight).sum())

    for graph, names in ((made(), ["o"]), (made(sums="i"), ["i", "o"])):
        table = analyse(graph)
        found = strategies(graph, table, leaves_in(graph)[0], 2)
        assert sorted(s.name for s in found if s.name != "replicate") == names
        assert found[0].results == (R,)


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ("b d, d -> b d", "does not fit"),
        ("b d, o d, o, x -> b o", "4 terms"),
        ("b d -> b d, b", "2 terms"),
        ("b d, o d, o -> b o", "half|parts"),
    ],
)
def test_rules_that_do_not_fit_are_refused(rule: str, says: str) -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.l(x).view(x.shape[0], WIDTH // 2, 2).flatten(1)

    with pytest.raises(LeafError, match=says):
        traced(lambda self, x: self.p0(x).sum(), leaf(Fixed(), rule=rule))


def test_a_rule_without_an_arrow_or_for_a_method_is_refused() -> None:
    with pytest.raises(ValueError, match="legal: terms"):
        leaf(nn.Linear, rule="b d")
    with pytest.raises(ValueError, match="is a method"):
        leaf(nn.Linear(2, 2).forward)
    with pytest.raises(ValueError, match=r"'q' can't be summed; legal: .* here i"):
        leaf(nn.Linear, rule="b i, o i -> b o", sums="q")
    with pytest.raises(ValueError, match="legal: a module"):
        leaf(3)
    with pytest.raises(ValueError, match="the whole model"):
        trace(leaf(nn.Linear(WIDTH, 1)), (rows(WIDTH),))


def test_hooks_on_a_leaf_run_once_and_inside() -> None:
    parts = [leaf(nn.Linear(WIDTH, WIDTH)) for _ in range(3)]
    parts[0].register_forward_hook(lambda module, args, made: 2 * made)
    parts[1].register_forward_pre_hook(lambda module, args: (3 * args[0],))
    parts[2].register_full_backward_hook(lambda module, taken, given: (5 * taken[0],))

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.p2(self.p1(self.p0(self.l(x)))).sum()

    graph = traced(forward, *parts)
    assert [op.short for op in graph.ops] == ["linear", "leaf", "leaf", "leaf", "sum"]
    for op, part in zip(leaves_in(graph), parts, strict=True):
        x = rows(WIDTH).requires_grad_()
        (made,) = leaf_of(op).program([x, part.weight, part.bias])
        wanted = part(x)
        torch.testing.assert_close(made, wanted)
        (found,) = torch.autograd.grad(made.sum(), x)
        torch.testing.assert_close(found, torch.autograd.grad(wanted.sum(), x)[0])


def test_a_forward_put_on_a_module_itself_is_no_leaf() -> None:
    part = nn.Linear(WIDTH, WIDTH)
    part.forward = lambda x, plain=part.forward: 2 * plain(x)
    with pytest.raises(LeafError, match=r"p0 .Linear. has a forward of its own.*in a subclass"):
        traced(lambda self, x: self.p0(self.l(x)).sum(), leaf(part))


def test_what_is_not_run_may_draw_and_is_seeded() -> None:
    graph = graph_of("kernel", "scan")
    assert [op.short for op in leaves_in(graph)] == [RANDOM_LEAF, LEAF]
    assert not any("trust" in note for note in graph.notes)


@pytest.mark.parametrize("kind", ["scan", "branch"])
def test_a_deep_stack_of_leaves_is_one_class(kind: str) -> None:
    graph = graph_of(*[kind] * 12)
    cut = cut_blocks(graph, analyse(graph))
    layers = [b.class_id for b in cut.blocks if b.name.startswith("layers.")]
    assert len(layers) == 12 and len(set(layers)) == 1
    places = (
        {graph.parameters[op.operands[-1]] for op in leaves_in(graph)}
        if kind == "scan"
        else {op.module for op in leaves_in(graph)}
    )
    assert len(places) == 12


def test_results_and_arguments_of_all_kinds() -> None:
    @leaf
    def odd(pair: tuple[Tensor, Tensor], *, scale: float, skip: Any) -> Any:
        first, second = pair
        return {"sum": first + scale * second, "rest": [second.detach(), None, 3, first]}

    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.l(x)
        made = odd((y, x), scale=2.0, skip=None)
        assert made["rest"][1:3] == [None, 3] and made["rest"][3] is y
        return (made["sum"] + made["rest"][0] + made["rest"][3]).sum()

    graph = traced(forward)
    (op,) = leaves_in(graph)
    assert [graph.values[r].requires_grad for r in op.results] == [True, False]


def test_buffers_that_a_leaf_writes_are_updates() -> None:
    graph = graph_of("branch")
    ((buffer, value),) = graph.updates.items()
    assert graph.buffers[buffer] == "layers.0.part.seen"
    assert value in leaves_in(graph)[0].results
    assert not graph.values[value].requires_grad


def test_leaves_share_parameters_with_the_rest() -> None:
    part = leaf(nn.Linear(WIDTH, WIDTH))

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.p0(self.l(x)).sum()

    model = with_forward(forward)
    model.add_module("p0", part)
    model.l.weight = part.weight
    graph = trace(model, (rows(WIDTH),))
    (op,) = leaves_in(graph)
    (linear,) = (o for o in graph.ops if o.short == "linear")
    assert set(op.operands) & set(linear.operands) - set(linear.results)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda x: x.mul_(2), "writes to its argument 0"),
        (lambda x: {x}, "gives a set"),
        (lambda x: 3, "makes no tensor"),
        (lambda x: x[x > 0], "depend on values"),
    ],
)
def test_what_no_leaf_can_do_is_refused(made: Callable[..., Any], says: str) -> None:
    with pytest.raises(LeafError, match=says):
        traced(lambda self, x: leaf(made)(self.l(x)).sum())


def test_graphs_with_leaves_can_be_kept_in_files() -> None:
    graph = graph_of("scan", "swish", "rounded", "kernel", "branch")
    again = pickle.loads(pickle.dumps(graph))
    assert [op.args for op in again.ops] == [op.args for op in graph.ops]
    x = torch.rand(2, 3, 32)
    decay, mix = torch.rand(32), torch.rand(32, 3)
    (made,) = leaf_of(leaves_in(again)[0]).program([x, decay, mix])
    scan = Scan()
    with torch.no_grad():
        scan.decay.copy_(decay)
        scan.mix.copy_(mix)
    torch.testing.assert_close(made, scan(x)["y"].detach())


# --- without a declaration ------------------------------------------------------------------------


def test_a_module_that_branches_on_values_becomes_a_leaf_and_is_reported() -> None:
    graph = graph_of("branch", "routed")
    assert [op.module for op in leaves_in(graph)] == ["layers.0.part", "layers.1.part"]
    first, second = graph.notes
    assert "layers.0.part (Branch)" in first and "if y.sum() > 0" in first
    assert re.search(r"leaf_models\.py:\d+", first) and "in full on every rank" in first
    assert "layers.1.part (Routed)" in second and "random numbers" in second


def test_where_shapes_depend_on_values_the_module_around_is_tried() -> None:
    class Selected(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[x > 0]

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Selected()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).mean()

    graph = traced(lambda self, x: self.p0(self.l(x)), Mean())
    assert [op.module for op in leaves_in(graph)] == ["p0"]
    with pytest.raises(TraceError, match=r"(?s)masks and torch.where.*As one node.*result="):
        traced(lambda self, x: self.p0(self.l(x)).sum(), Selected())


def test_weights_on_meta_can_not_be_run() -> None:
    with torch.device("meta"):
        part = Branch()
    with pytest.raises(TraceError, match=r"(?s)condition `y.sum\(\) > 0`.*on the meta device"):
        traced(lambda self, x: self.p0(x).sum(), part, inputs=(rows(32),))
    said = leaf(part, result=torch.empty_like)
    graph = traced(
        lambda self, x: self.p0(x).sum() + self.l(x[:, :WIDTH]).sum(), said, inputs=(rows(32),)
    )
    assert leaf_of(leaves_in(graph)[0]).work.source.startswith("estimated")


def test_autograd_functions_are_leaves_and_run_outside_of_a_trace() -> None:
    graph = graph_of("rounded", "swish")
    assert [leaf_of(op).name for op in leaves_in(graph)] == ["Rounded", "Swish"]
    x = torch.rand(3, requires_grad=True)
    Rounded.apply(Swish.apply(x), 4.0).sum().backward()
    s = x.detach().sigmoid()
    torch.testing.assert_close(x.grad, s + x.detach() * s * (1 - s))
    assert kernel(torch.ones(1, 1, 2), torch.ones(3, 2)).tolist() == [[[2.0, 2.0, 2.0]]]


def test_modules_of_torch_run_on_other_weights() -> None:
    """Weights that a module keeps elsewhere too (LSTM), or computes from others (weight norm)."""
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
    recurrent = leaf(
        nn.LSTM(WIDTH, WIDTH, 2, batch_first=True), rule="b _ _ -> b _ _, _ b _, _ b _"
    )
    x = torch.rand(ROWS, 4, WIDTH)

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.p1(self.p0(self.l(x))[0]).sum()

    graph = traced(forward, recurrent, leaf(normed), inputs=(x,))
    for op, module in zip(leaves_in(graph), (recurrent, normed), strict=True):
        weights = [module.get_parameter(graph.parameters[v][3:]) for v in op.operands[1:]]
        made = leaf_of(op).program([x, *weights])
        wanted = module(x)
        torch.testing.assert_close(made[0], wanted[0] if isinstance(wanted, tuple) else wanted)


def test_regions_of_autocast_and_without_gradients() -> None:
    product = leaf(lambda x, w: x @ w)

    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            half = product(self.l(x), self.l.weight)
        with torch.no_grad():
            plain = product(self.l(x), self.l.weight)
        return (half.float() + plain).sum()

    graph = traced(forward)
    half, plain = leaves_in(graph)
    metas = [graph.values[op.results[0]] for op in (half, plain)]
    assert [(m.dtype, m.requires_grad) for m in metas] == [
        (torch.bfloat16, True), (torch.float32, False),
    ]  # fmt: skip
    x, w = torch.rand(2, WIDTH), torch.rand(WIDTH, WIDTH)
    (made,) = leaf_of(half).program([x, w])
    torch.testing.assert_close(made, x.bfloat16() @ w.bfloat16())

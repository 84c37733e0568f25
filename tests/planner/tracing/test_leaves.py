"""Leaves: what is kept as one node runs as it is written, split as it is declared.

Trials of rules: what is known of each forward, which is written for its one fault."""

import itertools
import math
import pickle
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from meshwright import leaf
from meshwright.costmodel.graph import Graph, Op
from meshwright.costmodel.rules import RuleError
from meshwright.costmodel.rules.leaf import LEAF, LEAVES, RANDOM_LEAF, leaf_of
from meshwright.costmodel.sharding.factors import analyse
from meshwright.costmodel.sharding.strategies import P, R, strategies
from meshwright.planner.blocks import cut_blocks
from meshwright.planner.tracing.leaves import record as leaf_trial
from meshwright.planner.tracing.leaves.probe import LeafError
from meshwright.planner.tracing.trace import TraceError, trace
from tests.helpers.tiers import second_tier, tiered
from tests.helpers.traced import ROWS, WIDTH, rows, with_forward
from tests.models import leaf_models


@cache
def graph_of(*kinds: str) -> Graph:
    return trace(leaf_models.model_of(kinds), leaf_models.batch(ROWS), loss_fn=leaf_models.loss_fn)


def declared() -> Graph:
    """Leaves of all kinds of declaration, and one that the tracer makes."""
    return graph_of("scan", "kernel", "swish", "rounded", "branch")


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
    graph = declared()
    op, *_ = leaves_in(graph)
    assert op.key == "layers.0.part:leaf"
    names = [graph.parameters[v] for v in op.operands[1:]]
    assert names == ["layers.0.part.decay", "layers.0.part.mix"]
    assert [graph.values[r].shape for r in op.results] == [(ROWS, leaf_models.LENGTH, 2 * 16)]
    assert graph.values[op.results[0]].requires_grad


def test_a_rule_says_what_splits() -> None:
    graph = declared()
    table, leaves = analyse(graph), leaves_in(graph)[:4]
    splits = [{s.name: s for s in strategies(graph, table, op, 2)} for op in leaves]
    names = [sorted(of_leaf.keys() - {"replicate"}) for of_leaf in splits]
    assert names == [["d"], ["i", "o", "s"], ["d0", "d1"], []]
    assert splits[1]["i"].results == (P,)
    batched = [len(strategies(graph, table, op, ROWS, only=table.batch)) > 1 for op in leaves]
    assert batched == [True, True, True, False]


@second_tier("letters of sums and whole dims are among those of test_a_rule_says_what_splits")
def test_letters_that_no_result_has_are_summed_and_unnamed_dims_stay_whole() -> None:
    for said, names in (("b i, o i -> b o", ["i", "o"]), ("b _, o _ -> b o", ["o"])):
        product = leaf(lambda x, w: x @ w.T, rule=said)
        graph = traced(lambda self, x, call=product: call(self.l(x), self.l.weight).sum())
        table = analyse(graph)
        splits = strategies(graph, table, leaves_in(graph)[0], 2)
        assert sorted(s.name for s in splits if s.name != "replicate") == names
        assert splits[0].results == (R,)


@second_tier("a rule that only a trial refuses stays")
@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ("b d, d -> b d", "does not fit"),
        ("b d, o d, o, x -> b o", "4 terms"),
        ("b d -> b d, b", "2 terms"),
        ("b d, o d, o -> b o", r"splits 'o', but on one of 2 parts .* the forward raises"),
    ],
)
def test_rules_that_do_not_fit_are_refused(rule: str, says: str) -> None:
    class Fixed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).view(x.shape[0], WIDTH // 2, 2).flatten(1)

    with pytest.raises(LeafError, match=says):
        traced(lambda self, x: self.p0(x).sum(), leaf(Fixed(WIDTH, WIDTH), rule=rule))


def test_a_rule_without_an_arrow_or_for_a_method_is_refused() -> None:
    with pytest.raises(ValueError, match="legal: terms"):
        leaf(nn.Linear, rule="b d")
    with pytest.raises(ValueError, match="is a method"):
        leaf(nn.Linear(2, 2).forward)
    with pytest.raises(RuleError, match="'b b' names a dim twice"):
        leaf(nn.Linear, rule="b b -> b")
    with pytest.raises(ValueError, match="legal: a module"):
        leaf(3)
    with pytest.raises(ValueError, match="the whole model"):
        trace(leaf(nn.Linear(WIDTH, 1)), (rows(WIDTH),))


def test_hooks_on_a_leaf_run_once_and_inside() -> None:
    parts = [leaf(nn.Linear(WIDTH, WIDTH)) for _ in range(3)]
    parts[0].register_forward_hook(lambda module, args, y: 2 * y)
    parts[1].register_forward_pre_hook(lambda module, args: (3 * args[0],))
    parts[2].register_full_backward_hook(lambda module, taken, gradients: (5 * taken[0],))
    graph = traced(lambda self, x: self.p2(self.p1(self.p0(self.l(x)))).sum(), *parts)
    assert [op.short for op in graph.ops] == ["linear", "leaf", "leaf", "leaf", "sum"]
    for op, part in zip(leaves_in(graph), parts, strict=True):
        x = rows(WIDTH).requires_grad_()
        (actual,), wanted = leaf_of(op).program([x, part.weight, part.bias]), part(x)
        torch.testing.assert_close(actual, wanted)
        gradient, expected = (torch.autograd.grad(y.sum(), x)[0] for y in (actual, wanted))
        torch.testing.assert_close(gradient, expected)


def test_a_forward_put_on_a_module_itself_is_no_leaf() -> None:
    part = nn.Linear(WIDTH, WIDTH)
    part.forward = lambda x, plain=part.forward: 2 * plain(x)
    with pytest.raises(LeafError, match=r"p0 .Linear. has a forward of its own.*in a subclass"):
        traced(lambda self, x: self.p0(self.l(x)).sum(), leaf(part))


def test_what_is_not_run_may_draw_and_is_seeded() -> None:
    assert [op.short for op in leaves_in(declared())][:2] == [LEAF, RANDOM_LEAF]
    assert not any("trust" in note for note in declared().notes)


@pytest.mark.parametrize(
    "kind", tiered(["scan", "branch"], "scan".__eq__, "leaves that are declared stay")
)
def test_a_deep_stack_of_leaves_is_one_class(kind: str) -> None:
    graph = graph_of(*[kind] * 6)
    cut = cut_blocks(graph, analyse(graph))
    layers = [b.class_id for b in cut.blocks if b.name.startswith("layers.")]
    assert len(layers) == 6 and len(set(layers)) == 1
    assert len({op.module for op in leaves_in(graph)}) == 6
    if kind == "scan":
        assert len({graph.parameters[op.operands[-1]] for op in leaves_in(graph)}) == 6


def test_results_and_arguments_of_all_kinds() -> None:
    @leaf
    def odd(pair: tuple[Tensor, Tensor], *, scale: float, skip: Any) -> Any:
        first, second = pair
        return {"sum": first + scale * second, "rest": [second.detach(), None, 3, first]}

    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.l(x)
        outputs = odd((y, x), scale=2.0, skip=None)
        assert outputs["rest"][1:3] == [None, 3] and outputs["rest"][3] is y
        return (outputs["sum"] + outputs["rest"][0] + outputs["rest"][3]).sum()

    graph = traced(forward)
    (op,) = leaves_in(graph)
    assert [graph.values[r].requires_grad for r in op.results] == [True, False]


def test_buffers_that_a_leaf_writes_are_updates() -> None:
    graph = declared()
    ((buffer, value),) = graph.updates.items()
    assert graph.buffers[buffer] == "layers.4.part.seen"
    assert value in leaves_in(graph)[-1].results
    assert not graph.values[value].requires_grad


def test_leaves_share_parameters_with_the_rest() -> None:
    model = with_forward(lambda self, x: self.p0(self.l(x)).sum())
    model.p0 = leaf(nn.Linear(WIDTH, WIDTH))
    model.l.weight = model.p0.weight
    graph = trace(model, (rows(WIDTH),))
    (op,) = leaves_in(graph)
    (linear,) = (o for o in graph.ops if o.short == "linear")
    assert set(op.operands) & set(linear.operands) - set(linear.results)


@second_tier("a result whose shape depends on values stays")
@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda x: x.mul_(2), "writes to its argument 0"),
        (lambda x: {x}, "gives a set"),
        (lambda x: 3, "makes no tensor"),
        (lambda x: x[x > 0], "depend on values"),
    ],
)
def test_what_no_leaf_can_do_is_refused(function: Callable[..., Any], says: str) -> None:
    with pytest.raises(LeafError, match=says):
        traced(lambda self, x: leaf(function)(self.l(x)).sum())


def _function(backward: Callable[[Tensor, Tensor], Tensor]) -> type[torch.autograd.Function]:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.sign()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
            return backward(*ctx.saved_tensors, g)

    return Function


NOT_LINEAR: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "clamped": lambda x, g: g.clamp(-1e-2, 1e-2),
    "of unit norm": lambda x, g: g / g.norm(),
    "signs": lambda x, g: g.sign(),
    "clipped by norm": lambda x, g: g * (3 / g.norm()).clamp(max=1),
}


@pytest.mark.parametrize(
    "name", tiered(NOT_LINEAR, "signs".__eq__, "other ways not to be linear; signs stay")
)
def test_a_backward_of_weights_that_is_not_linear_is_refused(name: str) -> None:
    """Each rank and micro-batch would run it on its part of the gradient."""
    of = _function(NOT_LINEAR[name])
    with pytest.raises(LeafError, match=r"is not linear in the gradient.*Way out"):
        traced(lambda self, x: F.linear(x, of.apply(self.l.weight)).sum())
    traced(lambda self, x: of.apply(self.l(x)).sum())  # rows have their gradients whole


@second_tier("what is planned of such functions on rows stays")
def test_linear_backwards_of_weights_are_planned() -> None:
    for of in (
        _function(lambda x, g: g * (x.abs() < 1)),
        _function(lambda x, g: g.to(torch.bfloat16).to(g.dtype)),
        _function(lambda x, g: torch.zeros_like(g)),
    ):
        traced(lambda self, x, of=of: F.linear(x, of.apply(self.l.weight)).sum())


def test_graphs_with_leaves_can_be_kept_in_files() -> None:
    again = pickle.loads(pickle.dumps(declared()))
    assert [op.args for op in again.ops] == [op.args for op in declared().ops]
    x, scan = torch.rand(2, 3, 32), leaf_models.Scan()
    (actual,) = leaf_of(leaves_in(again)[0]).program([x, scan.decay, scan.mix])
    torch.testing.assert_close(actual, scan(x)["y"])


# --- without a declaration ------------------------------------------------------------------------


def test_a_module_that_branches_on_values_becomes_a_leaf_and_is_reported() -> None:
    graph = graph_of("branch", "routed")
    assert [op.module for op in leaves_in(graph)] == ["layers.0.part", "layers.1.part"]
    first, second = graph.notes
    assert "layers.0.part (Branch)" in first and "if y.sum() > 0" in first
    assert re.search(r"leaf_models\.py:\d+", first) and "in full on every rank" in first
    assert "layers.1.part (Routed)" in second and "random numbers" in second


@second_tier("classes of equal leaves stay (a deep stack of scans)")
def test_modules_that_hold_the_method_of_a_class_are_alike() -> None:
    class Rounding(leaf_models.Branch):
        def __init__(self) -> None:
            super().__init__()
            self.act = leaf_models.Rounded.apply  # another object each time

    graph = traced(
        lambda self, x: (self.p0(x) + self.p1(x)).sum(), Rounding(), Rounding(), inputs=(rows(32),)
    )
    assert [leaf_of(op).number for op in leaves_in(graph)] == [0, 0]


@second_tier("modules that branch become leaves, and leaves of such shapes are refused")
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


@second_tier("weights on meta under a branch; branches, and result=, stay")
def test_weights_on_meta_can_not_be_run() -> None:
    with torch.device("meta"):
        part = leaf_models.Branch()
    with pytest.raises(TraceError, match=r"(?s)condition `y.sum\(\) > 0`.*on the meta device"):
        traced(lambda self, x: self.p0(x).sum(), part, inputs=(rows(32),))
    said = leaf(part, result=torch.empty_like)
    graph = traced(
        lambda self, x: self.p0(x).sum() + self.l(x[:, :WIDTH]).sum(), said, inputs=(rows(32),)
    )
    assert leaf_of(leaves_in(graph)[0]).work.source.startswith("estimated")


def test_autograd_functions_are_leaves_and_run_outside_of_a_trace() -> None:
    assert [leaf_of(op).name for op in leaves_in(declared())][2:4] == ["Swish", "Rounded"]
    x = torch.rand(3, requires_grad=True)
    leaf_models.Rounded.apply(leaf_models.Swish.apply(x), 4.0).sum().backward()
    s = x.detach().sigmoid()
    torch.testing.assert_close(x.grad, s + x.detach() * s * (1 - s))
    assert leaf_models.kernel(torch.ones(1, 1, 2), torch.ones(3, 2)).tolist() == [[[2.0, 2.0, 2.0]]]


def test_modules_of_torch_run_on_other_weights() -> None:
    """Weights that a module keeps elsewhere too (LSTM), or computes from others (weight norm)."""
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
    rule = "b _ _ -> b _ _, _ b _, _ b _"
    recurrent = leaf(nn.LSTM(WIDTH, WIDTH, 2, batch_first=True), rule=rule)
    x = torch.rand(ROWS, 4, WIDTH)
    forward = lambda self, x: self.p1(self.p0(self.l(x))[0]).sum()  # noqa: E731
    graph = traced(forward, recurrent, leaf(normed), inputs=(x,))
    for op, module in zip(leaves_in(graph), (recurrent, normed), strict=True):
        weights = [module.get_parameter(graph.parameters[v][3:]) for v in op.operands[1:]]
        actual, wanted = leaf_of(op).program([x, *weights]), module(x)
        torch.testing.assert_close(actual[0], wanted[0] if isinstance(wanted, tuple) else wanted)


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
    assert [m.dtype for m in metas] == [torch.bfloat16, torch.float32]
    assert [m.requires_grad for m in metas] == [True, False]
    x, w = torch.rand(2, WIDTH), torch.rand(WIDTH, WIDTH)
    (actual,) = leaf_of(half).program([x, w])
    torch.testing.assert_close(actual, x.bfloat16() @ w.bfloat16())


class Cumulative(nn.Module):
    """Each row's sums of what was before, times weights."""

    def __init__(self, inner: torch.dtype | None = None) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.rand(WIDTH)), inner

    def forward(self, x: Tensor) -> Tensor:
        x, w = (x.to(self.inner), self.scale.to(self.inner)) if self.inner else (x, self.scale)
        return x.cumsum(1) * w


class WrongBackward(torch.autograd.Function):
    """x², row by row; its gradient takes the rows' mean."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * grads[0] * x.mean(0, keepdim=True)


def projected(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return x @ w.T + bias


def _applied(function: type[torch.autograd.Function]) -> Callable[[Tensor], Any]:
    return lambda x: function.apply(x)


def _of_rows(target: Any) -> Graph:
    """A leaf on [rows, time, width]."""
    module = isinstance(target, nn.Module)

    def forward(self: Any, x: Tensor) -> Tensor:
        return (self.p0(self.l(x)) if module else target(self.l(x))).float().sum()

    return traced(forward, *[target] * module, inputs=(rows(6, WIDTH),))


def _of_weights(target: Any) -> Graph:
    return traced(lambda self, x: target(self.l(x), self.l.weight, self.l.bias).sum())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: _of_rows(leaf(Cumulative(), rule="b s d, d -> b s d")),
            r"two parts.*'s': result 0 is off by up to .*operand 1 is scale.*write _",
        ),
        pytest.param(
            lambda: _of_rows(leaf(lambda x: x / x.shape[-1], rule="b s d -> b s d")),
            r"'d': result 0 is off",
            marks=second_tier("results that are off, and gradients that are, stay"),
        ),
        pytest.param(
            lambda: _of_weights(leaf(projected, rule="b i, o i, o -> b o")),
            r"together, 'i': result 0 is off by up to .*\(a bias\) belongs outside",
            marks=second_tier("results that are off, and gradients that are, stay"),
        ),
        (
            lambda: _of_rows(_applied(leaf(WrongBackward, rule="b s d -> b s d"))),
            r"together, 'b': the gradient of operand 0 is off by up to .*Ways out",
        ),
    ],
)
def test_a_rule_that_does_not_hold_is_refused(make: Callable[[], Graph], says: str) -> None:
    with pytest.raises(LeafError, match=f"(?s)does not hold.*{says}") as caught:
        make()
    assert "'b':" not in str(caught.value) or "'b':" in says


def test_a_rule_that_holds_is_not_taken_on_trust() -> None:
    """Also where the forward computes in less than it is given."""
    for graph in (
        *(
            _of_rows(leaf(Cumulative(of), rule="b _ d, d -> b _ d"))
            for of in (None, torch.bfloat16)
        ),
        _of_weights(leaf(projected, rule="b _, o _, o -> b o")),
    ):
        assert "trust" not in graph.notes[0]


@second_tier("trials with weights, and of rules that do not hold, stay")
def test_meta_models_and_long_loops_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaf_trial, "MAX_KERNELS", 50)  # of fewer steps than the sample has

    def built(rule: str) -> Graph:
        with torch.device("meta"):
            part = leaf(leaf_models.Scan(), rule=rule)

        def forward(self: Any, x: Tensor) -> Tensor:
            return self.p0(x)["y"].sum() + self.l(x[..., :WIDTH]).sum()

        return traced(forward, part, inputs=(rows(12, leaf_models.INNER),))

    graph = built("b _ d, d, d _ -> b _ d")
    assert leaf_of(leaves_in(graph)[0]).work.kernels > 50
    assert "trust" not in graph.notes[0]
    with pytest.raises(LeafError, match="'s': result 0 is off"):
        built("b s d, d, d _ -> b s d")


@second_tier("trials of what splits evenly stay")
def test_heads_of_a_fixed_size_are_not_cut_in_a_trial() -> None:
    def heads(x: Tensor) -> Tensor:
        return torch.cat([part.softmax(-1) for part in x.split(4, -1)], -1)

    assert "trust" not in _of_rows(leaf(heads, rule="b s d -> b s d")).notes[0]


CALLS = itertools.count(1)


@second_tier("a forward whose equal calls differ stays")
@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: F.dropout(x, 0.5), "draws random numbers"),
        (lambda x: x * next(CALLS), "two equal calls differ"),
        (lambda x: x @ x.new_ones(x.shape[-1], 2**13) @ x.new_ones(2**13, 2**13), "at most"),
        (lambda x: (x - math.inf) * 0, "nothing finite"),
    ],
)
def test_what_can_not_be_tried_is_noted(function: Callable[..., Any], why: str) -> None:
    (note,) = _of_rows(leaf(function, rule="b s _ -> b s _")).notes
    assert "taken on trust" in note and why in note


def test_a_trial_refuses_what_writes_to_buffers_that_a_trace_can_not_see() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            return 2 * x

    part = leaf(Counting(), rule="b _ -> b _", result=torch.empty_like)
    with pytest.raises(LeafError, match=r"writes to seen, .* with result=.*leave result= out"):
        traced(lambda self, x: self.p0(self.l(x)).sum(), part)


@second_tier("a matter of time alone; trials stay")
def test_a_rule_is_tried_once() -> None:
    runs: list[tuple[int, ...]] = []

    @leaf(rule="b s d -> b s d")
    def doubled(x: Tensor) -> Tensor:
        if not isinstance(x, FakeTensor):
            runs.append(tuple(x.shape))
        return 2 * x

    _of_rows(doubled)
    first = len(runs)
    assert first > 1 and max(map(math.prod, runs)) <= 4**3
    _of_rows(doubled)
    assert len(runs) == first


class Averaged(nn.Module):
    """A table read by indices, and a buffer of the rows' mean."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.rand(5, WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        y = x + self.table[chosen]
        self.mean = 0.9 * self.mean + 0.1 * y.mean((0, 1))
        self.calls += 1
        return y


@second_tier("trials with weights, and of rules that do not hold, stay")
def test_indices_and_buffers_are_tried() -> None:
    def built(rule: str) -> Graph:
        def forward(self: Any, x: Tensor, chosen: Tensor) -> Tensor:
            return self.p0(self.l(x), chosen % 5).sum()

        inputs = rows(6, WIDTH), torch.zeros(ROWS, 6, dtype=torch.long)
        return traced(forward, leaf(Averaged(), rule=rule), inputs=inputs)

    assert "trust" not in built("_ _ d, _ _, _ d, d -> _ _ d, d").notes[0]
    with pytest.raises(LeafError, match=r"'s': result 1 is off.*result 1 the new value of mean"):
        built("_ s d, _ s, _ d, d -> _ s d, d")


@second_tier("result= and a trial stay where a buffer is written")
def test_kernels_that_fake_tensors_can_not_run_are_tried() -> None:
    def running(x: Tensor) -> Tensor:
        assert x.data_ptr()
        return x.cumsum(1)

    graph = _of_rows(leaf(running, rule="b _ d -> b _ d", result=torch.empty_like))
    assert "trust" not in graph.notes[0]
    with pytest.raises(LeafError, match="'s': result 0 is off"):
        _of_rows(leaf(running, rule="b s d -> b s d", result=torch.empty_like))


@second_tier("regions of autocast around a leaf stay")
def test_regions_of_autocast_are_tried() -> None:
    said = leaf(lambda x, w: x @ w, rule="b s i, i o -> b s o")

    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return said(self.l(x), self.l.weight).float().sum()

    assert "trust" not in traced(forward, inputs=(rows(6, WIDTH),)).notes[0]

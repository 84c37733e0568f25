"""Rules that users add: what is refused, what is verified, and that an added rule is used."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.costmodel.graph import Graph, Op, Ref
from meshwright.costmodel.rules.language import divided, ein
from meshwright.costmodel.rules.registry import GIVEN, RuleError
from meshwright.costmodel.sharding.factors import analyse
from meshwright.costmodel.sharding.strategies import strategies
from meshwright.costmodel.user_rules import (
    Trial,
    faults,
    meta_of,
    random_operands,
    rule,
    verified,
    verify_call,
)
from meshwright.planner.tracing.trace import trace
from tests.helpers.tiers import second_tier, tiered
from tests.helpers.traced import with_forward

GOOD = "b s h, h o -> b s o"


def project_back(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple:
    x, w = ctx.saved_tensors
    return grad @ w.T, torch.einsum("bsh,bso->ho", x, grad)


def halves_back(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple:
    gx, gw = project_back(ctx, grad)
    return gx, gw + grad.mean()  # not what the forward says, and no sum over parts


def registered(name: str, backward: object) -> None:
    schema = "(Tensor x, Tensor w) -> Tensor"
    made = torch.library.custom_op(
        f"meshwright_test::{name}", lambda x, w: x @ w, mutates_args=(), schema=schema
    )
    made.register_fake(lambda x, w: x.new_empty(*x.shape[:-1], w.shape[1]))
    made.register_autograd(
        backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
    )


registered("project", project_back)
registered("crooked", halves_back)


def graph_calling(name: str, shape: Sequence[int], *rest: Any) -> Graph:
    """A parameter on its way through an operator, with further operands as they are."""
    call = getattr(torch.ops.meshwright_test, name)
    weights = any(isinstance(each, nn.Parameter) for each in rest)
    held = nn.ParameterList(rest) if weights else rest
    model = with_forward(
        lambda self, x: call(x * self.weight, *self.rest).square().sum(),
        weight=nn.Parameter(torch.randn(*shape)),
        rest=held,
    )
    return trace(model, (torch.randn(4, *shape),))


def graph_of(name: str) -> Graph:
    return graph_calling(name, (6, 16), nn.Parameter(torch.randn(16, 32)))


def op_of(graph: Graph, name: str) -> Op:
    return next(op for op in graph.ops if op.target == f"meshwright_test.{name}.default")


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    GIVEN.clear()


def test_operator_without_a_rule_runs_whole_and_with_one_is_split() -> None:
    graph = graph_of("project")
    op = op_of(graph, "project")
    assert len(strategies(graph, analyse(graph), op, 2)) == 1
    rule("meshwright_test::project", GOOD, linear=[[0]], flops=2.0)
    table = analyse(verified(graph))
    assert table.ops[op.name].flops == 2.0
    found = {str(s.results[0]) for s in strategies(graph, table, op, 2)}
    assert found == {"R", "S(1)", "S(2)", "P"}


OFF = second_tier("gradients that are off stay, and parts that don't run")


@pytest.mark.parametrize(
    ("spec", "options", "wrong"),
    [
        ("b s x, h o -> b s o", {}, "factor 'x' (sum): a part does not run"),
        pytest.param(GOOD, {"mean": "h"}, "factor 'h' (mean): result 0 is off by", marks=OFF),
        pytest.param(
            GOOD,
            {"linear": [[0, 1]]},
            "factor 'linear 0 1' (partial): result 0 is off by",
            marks=OFF,
        ),
    ],
)
def test_wrong_rule_is_found_before_it_is_used(spec: str, options: dict, wrong: str) -> None:
    rule("meshwright_test::project", spec, **options)
    with pytest.raises(RuleError, match="does not hold") as error:
        verified(graph_of("project"))
    assert wrong in str(error.value)
    assert "Factors that hold: b, s" in str(error.value)


def test_backwards_and_nan_are_verified_too() -> None:
    rule("meshwright_test::crooked", GOOD)
    with pytest.raises(RuleError, match="the gradient of operand 1 is off by up to"):
        verified(graph_of("crooked"))
    rule("meshwright_test::crooked", GOOD, verify=False)
    verified(graph_of("crooked"))
    # random parts of a positive number are negative, and have no logarithm
    op = Op(name="y", target="aten.log.default", args=(Ref("x"),), kwargs={}, results=("y",))
    trial = Trial.of(op, [torch.rand(4, 6, dtype=torch.float64) + 0.5])
    metas = [meta_of(trial.operands[0])]
    assert faults(trial, ein("a b -> a b")(op, metas, metas)) == []
    (fault,) = faults(trial, ein("a b -> a b", linear=[[0]])(op, metas, metas))
    assert "is off by up to" in str(fault)


def test_rule_that_can_not_be_tried_is_used_and_noted() -> None:
    library = torch.library.Library("meshwright_test_cuda", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", torch.empty_like, "Meta")
    model = with_forward(lambda self, x: self.l(torch.ops.meshwright_test_cuda.twice(x)).sum())
    graph = trace(model, (torch.randn(4, 8),))
    rule("meshwright_test_cuda::twice", "*d -> *d")
    noted = verified(graph)
    assert "the rule of meshwright_test_cuda.twice was not verified in full: " in noted.notes[-1]


@pytest.mark.parametrize(
    ("operator", "spec", "options", "message"),
    [
        ("meshwright_test::project", "b s h h o", {}, "one '->', terms for what it gives"),
        ("meshwright_test::project", "b s h, h o -> b s b", {}, "names a dim twice"),
        ("meshwright_test::project", "b [s] h, h o -> b s o", {}, "is not made of names"),
        ("meshwright_test::project", GOOD, {"whole": "q"}, "whole='q' is no factor; legal: b, h"),
        ("meshwright_test::project", GOOD, {"pinned": [2]}, "operand 2 of pinned"),
        ("meshwright_test::project", GOOD, {"counts": {"n": "h"}}, "has no argument 'n'; legal: x"),
        ("meshwright_test::nothing", GOOD, {}, "no operator 'meshwright_test::nothing'"),
        ("aten::linear", "*b i, o i -> *b o", {}, "legal: one rule; pass override=True"),
        (torch.nn.Linear, GOOD, {}, "is no operator"),
        ("meshwright_test::project", GOOD, {"whole": "["}, "whole='[' is no regular expression"),
        ("meshwright_test::project", "b s h, h o, o -> b s o", {}, "3 operands, but the operator"),
    ],
)
def test_bad_rules_are_refused(operator: object, spec: str, options: dict, message: str) -> None:
    with pytest.raises(RuleError) as error:
        rule(operator, spec, **options)
    assert message in str(error.value)
    assert not GIVEN


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("b h, h o -> b o", "`b h` has 2 dims, the tensor [4, 6, 16]"),
        ("b s h, o h -> b s o", "is of size 16 and stands for a dim of 32"),
    ],
)
def test_call_that_a_rule_does_not_fit_says_where(spec: str, message: str) -> None:
    rule("meshwright_test::project", spec)
    with pytest.raises(RuleError) as error:
        verified(graph_of("project"))
    assert message in str(error.value).replace("`h`", "it")
    assert "test_user_rules.py" in str(error.value)


def test_shipped_rule_is_replaced_only_on_request() -> None:
    rule("aten::softmax", "*d w -> *d w", whole="w d.*", override=True)
    model = with_forward(lambda self, x: self.l(x).softmax(-1).square().sum())
    graph = trace(model, (torch.randn(4, 6, 8),))
    table = analyse(verified(graph))
    op = next(op for op in graph.ops if op.short == "softmax")
    assert set(table.ops[op.name].kinds.values()) == {"whole"}


def defined(name: str, schema: str, forward: Callable, backward: Callable | None = None) -> None:
    """An operator whose results are like its first operand; `backward` takes the gradient and which
    operands need one."""
    made = torch.library.custom_op(
        f"meshwright_test::{name}", forward, mutates_args=(), schema=schema
    )
    made.register_fake(lambda x, *rest, **options: torch.empty_like(x))
    if backward is not None:
        made.register_autograd(lambda ctx, grad: backward(grad, ctx.needs_input_grad))


def _pairs_swapped(x: torch.Tensor) -> torch.Tensor:
    even = x.shape[-1] // 2 * 2
    swapped = x[..., :even].unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return torch.cat([swapped, x[..., even:]], -1)


def _only_first(grad: torch.Tensor, needs: Sequence[bool]) -> tuple[torch.Tensor, None, None]:
    if any(needs[1:]):
        raise RuntimeError("no derivative")
    return grad.sum(-1, keepdim=True).expand_as(grad), None, None  # not that of x * a + b


def _group_softmax(x: torch.Tensor, groups: int = 4) -> torch.Tensor:
    return x.unflatten(-1, (groups, -1)).softmax(-1).flatten(-2)


X_TO_Y = "(Tensor x) -> Tensor"
defined("flipped", X_TO_Y, lambda x: x.flip(1), lambda g, _: g.flip(1))
defined("pairs", X_TO_Y, _pairs_swapped, lambda g, _: _pairs_swapped(g))
defined(
    "scaled", "(Tensor x, Tensor a, Tensor b) -> Tensor", lambda x, a, b: x * a + b, _only_first
)
defined("forward_only", X_TO_Y, lambda x: 2 * x)
defined("groups", "(Tensor x, int groups=4) -> Tensor", _group_softmax, lambda g, _: (g, None))
COUNTED = "(Tensor x, int? n=None) -> Tensor"
defined("counted", COUNTED, lambda x, n=None: x.clone(), lambda g, _: (g, None))
defined("picked", "(Tensor x, Tensor i) -> Tensor", lambda x, i: x * i)
for known in ("leaf", "batch_norm", "zeros_like"):
    defined(known, X_TO_Y, lambda x: 3 * x, lambda g, _: 3 * g)


PARTS = second_tier("parts that hold by twos and not by threes stay")


def names_at(graph: Graph, name: str, degree: int) -> set[str]:
    found = strategies(graph, analyse(graph), op_of(graph, name), degree)
    return {s.split_factor for s in found} - {""}


@pytest.mark.parametrize(
    ("name", "shape", "factor"),
    [
        pytest.param("flipped", (3, 8), "k", marks=PARTS),  # of three, in three parts
        pytest.param("flipped", (4, 8), "k", marks=PARTS),
        ("pairs", (10,), "d"),  # two parts of two hold, two of three don't
    ],
)
def test_odd_parts_are_tried(name: str, shape: tuple[int, ...], factor: str) -> None:
    rule(f"meshwright_test::{name}", "b k d -> b k d" if factor == "k" else "*b d -> *b d")
    with pytest.raises(RuleError, match=f"factor '{factor}' .map.: result 0 is off by"):
        verified(graph_calling(name, shape))


def test_factor_that_does_not_split_into_few_parts_is_noted() -> None:
    def stubborn(x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] != 11:
            raise ValueError("eleven")
        return x.clone()

    defined("stubborn", X_TO_Y, stubborn, lambda g, _: g)
    rule("meshwright_test::stubborn", "b d -> b d")
    (note,) = verified(graph_calling("stubborn", (11,))).notes
    assert "factor 'd' of 11 elements was not split" in note


def test_gradients_of_the_call_are_checked_and_given_sizes_kept() -> None:
    rule("meshwright_test::scaled", "n d, d, d -> n d")
    graph = graph_calling("scaled", (8,), torch.randn(8), torch.randn(8))
    with pytest.raises(RuleError, match=r"factor 'd' .map.: the gradient of operand 0 is off by"):
        verified(graph)
    op = op_of(graph, "scaled")
    trial = Trial.of(op, [torch.randn(4, 8), torch.randn(8), torch.randn(8)])
    assert trial.needs == (True, False, False)
    rule("meshwright_test::pairs", "*b (d two) -> *b (d two)", whole="two", sizes={"two": 2})
    graph = verified(graph_calling("pairs", (10,)))
    assert not graph.notes
    assert [names_at(graph, "pairs", n) for n in (2, 5)] == [set(), {"d"}]  # not three and two


def test_integers_are_no_parts_of_a_sum_unchecked_gradients_noted_counts_of_nothing_refused() -> (
    None
):
    for option, given in (("pinned", [1]), ("linear", [[1]])):
        rule("meshwright_test::picked", "n d, d -> n d", **{option: given})
        with pytest.raises(RuleError, match=r"operand 1 of pinned or linear.*legal: 0"):
            verified(graph_calling("picked", (8,), torch.ones(8, dtype=torch.int64)))
    rule("meshwright_test::forward_only", "*d -> *d")
    model = with_forward(lambda self, x: self.l(torch.ops.meshwright_test.forward_only(x)).sum())
    graph = trace(model, (torch.randn(4, 8),))
    for _ in range(2):
        (note,) = verified(graph).notes
        assert "no gradient flows to its operands" in note
    rule("meshwright_test::counted", "b (n d) -> b (n d)", counts={"n": "n"})
    with pytest.raises(RuleError, match=r"argument 'n' .* is None, and counts nothing"):
        verified(graph_calling("counted", (8,)))


def test_trials_leave_the_callers_random_numbers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rule("meshwright_test::pairs", "*b (d two) -> *b (d two)", whole="two", sizes={"two": 2})
    graph = graph_calling("pairs", (14,))
    op = op_of(graph, "pairs")
    metas = [graph.values[v] for v in op.operands]
    given = GIVEN["meshwright_test.pairs"]
    seen: list[torch.Tensor] = []  # what the operator is called on
    monkeypatch.setattr(
        "meshwright.costmodel.user_rules.random_operands",
        lambda *given: seen.extend(found := random_operands(*given)) or found,
    )
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        assert verify_call(given, op, metas, given.rule(op, metas, metas)) == ""
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(*seen)


def test_count_left_at_its_default_is_divided() -> None:
    given = {"whole": "d", "counts": {"groups": "g"}, "verify": False}
    rule("meshwright_test::groups", "*b (g d) -> *b (g d)", **given)
    graph = graph_calling("groups", (12,))
    op = op_of(graph, "groups")
    made = analyse(graph).ops[op.name]
    assert divided(op, made, op.args, op.kwargs, {"g": 2}) == (list(op.args), {"groups": 2})
    assert divided(op, made, op.args, op.kwargs, {}) == (list(op.args), {})


@pytest.mark.parametrize(
    "name", tiered(("leaf", "batch_norm", "zeros_like"), "batch_norm".__eq__, "one name stays")
)
def test_operators_of_others_are_not_known_by_name(name: str) -> None:
    graph = graph_calling(name, (8,))
    table = analyse(graph)
    op = op_of(graph, name)
    assert op.short == f"meshwright_test.{name}" and not table.ops[op.name].known
    assert graph.values[op.results[0]].requires_grad

"""Random numbers by counter: they are distributed as torch's, and the same however they are cut."""

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from meshwright.costmodel.graph import Op, Ref
from meshwright.executor.lowering import replacements as draws
from meshwright.executor.lowering.replacements import DropoutAttention, IndexGrid, drawn
from meshwright.planner.plan.plan import PlanError
from tests.costmodel.rules.rule_cases import CaseModule, case, total, x
from tests.helpers.sharded_ops import OperatorCheck, sampled

SHAPE = (64, 50, 40)
NUMBER = math.prod(SHAPE)
RNG = torch.tensor([77, 0])


def call(target: str, *args: Any, **kwargs: Any) -> Op:
    return Op(name="y", target=target, args=args, kwargs=kwargs, results=("y",))


def numbers(op: Op, *operands: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return drawn(op, dtype, IndexGrid(SHAPE, [], 0), 5)(RNG, *operands)


BLANK = torch.zeros(SHAPE)
OPERATORS = {
    "uniform": (call("aten.rand.default", list(SHAPE)), (), 0.5, 12**-0.5),
    "between": (call("aten.uniform.default", Ref("x"), -1.0, 3.0), (BLANK,), 1.0, 4 * 12**-0.5),
    "normal": (call("aten.randn.default", list(SHAPE)), (), 0.0, 1.0),
    "shifted": (call("aten.normal_functional.default", Ref("x"), 2.0, 3.0), (BLANK,), 2.0, 3.0),
    "exponential": (call("aten.exponential.default", Ref("x"), 2.0), (BLANK,), 0.5, 0.5),
    "integers": (call("aten.randint.default", 9, list(SHAPE)), (), 4.0, (80 / 12) ** 0.5),
    "from five": (call("aten.randint.low", 5, 9, list(SHAPE)), (), 6.5, (15 / 12) ** 0.5),
    "flags": (call("aten.bernoulli.p", Ref("x"), 0.3), (BLANK,), 0.3, 0.21**0.5),
    "chances": (call("aten.bernoulli.default", Ref("x")), (BLANK * 0 + 0.3,), 0.3, 0.21**0.5),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
def test_moments_are_those_of_the_distribution(name: str) -> None:
    op, operands, mean, deviation = OPERATORS[name]
    y = numbers(op, *operands).double()
    assert abs(float(y.mean()) - mean) < 5 * deviation / NUMBER**0.5
    assert abs(float(y.std()) / deviation - 1) < 0.02


def test_uniform_numbers_stay_below_one() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        y = numbers(OPERATORS["uniform"][0], dtype=dtype)
        assert y.dtype == dtype
        assert 0 <= float(y.min()) < 0.01 and 0.98 < float(y.max()) < 1


def test_exponential_numbers_are_positive() -> None:
    """Their logarithms are finite, as Gumbel noise needs it."""
    least = drawn(OPERATORS["exponential"][0], torch.float32, IndexGrid((1,), [], 0), 5)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(draws, "random_bits", lambda index, *_: torch.zeros_like(index))
        assert 0 < float(least(RNG)) < 1e-7
        patched.setattr(draws, "random_bits", lambda index, *_: index * 0 + 2**32 - 1)
        assert 8 < float(least(RNG)) < torch.inf


def test_neighbours_are_not_correlated_and_channels_dropped_whole() -> None:
    op = OPERATORS["normal"][0]
    y = numbers(op)
    other = drawn(op, torch.float32, IndexGrid(SHAPE, [], 0), 6)(RNG)
    for a, b in ((y, other), (y[..., 1:], y[..., :-1]), (y[1:], y[:-1])):
        assert abs(float((a * b).mean())) < 5 / b.numel() ** 0.5
    y = numbers(call("aten.feature_dropout.default", Ref("x"), 0.25, True), torch.ones(SHAPE))
    assert torch.equal(y, y[..., :1].expand(SHAPE))
    assert set(y.unique().tolist()) == {0.0, float(torch.tensor(1 / 0.75))}
    assert abs(float((y == 0).double().mean()) - 0.25) < 5 * (0.19 / (64 * 50)) ** 0.5


def test_a_row_draws_the_same_wherever_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "LEAST_PART", 1)  # masks are drawn in parts
    for op in (OPERATORS["uniform"][0], call("aten.dropout.default", Ref("x"), 0.5, True)):
        module = drawn(op, torch.float32, IndexGrid(SHAPE, [], NUMBER // 64), 5)
        first, later = (module(torch.tensor([77, row]), torch.ones(SHAPE)) for row in (0, 3))
        assert torch.equal(first[3:], later[:-3]) and not torch.equal(first[1:], first[:-1])


@pytest.mark.parametrize(("low", "high"), [(0, 2**33), (-(2**40), 2**40), (5, 2**63 - 1)])
def test_integers_of_wide_ranges_reach_their_ends(low: int, high: int) -> None:
    op = call("aten.randint.low", low, high, list(SHAPE))
    y = numbers(op, dtype=torch.int64)
    width = float(high - low)
    assert low <= int(y.min()) < low + width / 1000
    assert high - width / 1000 < int(y.max()) < high
    shares = (y.double() - low) / width
    assert abs(float(shares.mean()) - 0.5) < 5 * (12 * NUMBER) ** -0.5
    assert {int(v) for v in (y[0] % 2).unique()} == {0, 1}  # low bits are drawn, too


def test_what_can_not_be_drawn_by_counter_is_refused() -> None:
    with pytest.raises(PlanError, match=r"from -1 below 9223372036854775807; legal: .* 2\*\*63"):
        numbers(call("aten.randint.low", -1, 2**63 - 1, list(SHAPE)), dtype=torch.int64)
    module = CaseModule(case("alpha_dropout", "", lambda a: F.alpha_dropout(a, 0.4, True), x(4, 6)))
    sample = sampled(module, module.batch(), total, differentiable_inputs=True)
    check = OperatorCheck(sample, next(op for op in sample.ops if op.short == "alpha_dropout"))
    with pytest.raises(PlanError, match=r"alpha_dropout.* draws random numbers .*dp=1 and tp=1"):
        check.check((1, 2), None, check.replicated, None)  # type: ignore[arg-type]


def test_attention_drops_its_probabilities_in_training_alone() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 6, 4)
    module = DropoutAttention(IndexGrid((2, 3, 6, 6), [], 0), 5)

    def attend(p: float) -> torch.Tensor:
        return module(q, k, v, None, p, True, None, RNG)

    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(attend(1.0), torch.zeros_like(expected))
    assert not torch.allclose(attend(0.5), expected)
    torch.testing.assert_close(attend(0.0), expected)
    module.eval()
    for p in (0.5, 1.0):
        torch.testing.assert_close(attend(p), expected)

"""Products in 8 bits against rounding by definition in double precision; scales of parts."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from meshwright.executor.backward import EightBitExperts, EightBitProduct, eight_bits
from meshwright.executor.backward.eight_bits import rounded
from meshwright.planner.operators import grouped_linear

FORMATS = {torch.float8_e4m3fn: (448.0, 3, -6), torch.float8_e5m2: (57344.0, 2, -14)}
few = settings(deadline=None, max_examples=30)
KINDS = pytest.mark.parametrize("dtype", FORMATS)
SCALED = pytest.mark.parametrize("by", ["tensor", "row", "block", "fine"])
IN_4_BITS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.double)  # e2m1
M, K, N = 24, 48, 32


def numbers(seed: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
    """Of both signs and many magnitudes, in bf16."""
    drawn = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=drawn) * torch.randn(shape, generator=drawn).mul(3).exp2()
    return (scale * x).bfloat16()


def by_definition(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """All of x rounded to the nearest on the grid of one scale, in double precision."""
    most, bits, least = FORMATS[dtype]
    x = x.double()
    largest = float(x.abs().max())
    if largest == 0:
        return x
    scale = 2.0 ** math.ceil(math.log2(largest / most))
    assert largest / most <= scale < 2 * largest / most
    exponent = (x / scale).abs().clamp(min=2.0**-200).log2().floor().clamp(min=least)
    step = (exponent - bits).exp2()
    return (x / scale / step).round() * step * scale  # half to even


def in_4_bits(x: torch.Tensor) -> torch.Tensor:
    """Each 16 numbers of a row on e2m1's grid, with scales that are on e4m3's."""
    rows, width = x.shape
    blocks = nn.functional.pad(x.double(), (0, -width % 16)).reshape(-1, 16)
    scale = by_definition(blocks.abs().amax(1, keepdim=True) / 6, torch.float8_e4m3fn)
    quotient = blocks / scale.clamp(min=2.0**-300)
    apart = (quotient.abs().unsqueeze(-1) - IN_4_BITS).abs()
    odd = torch.arange(8) % 2  # of two as near, the one with an even mantissa
    nearest = (apart + 1e-12 * odd).argmin(-1)
    return (quotient.sign() * IN_4_BITS[nearest] * scale).view(rows, -1)[:, :width]


def wanted(x: torch.Tensor, dtype: torch.dtype, *, by: str) -> torch.Tensor:
    if by == "fine":
        return in_4_bits(x)
    if by == "tensor":
        return by_definition(x, dtype)
    width = 32 if by == "block" else x.shape[1]
    blocks = [torch.cat([by_definition(b, dtype) for b in row.split(width)]) for row in x]
    return torch.stack(blocks)


@KINDS
@SCALED
@few
@given(seed=st.integers(0, 1000), power=st.integers(-60, 60))
def test_rounding_is_to_the_nearest_on_the_least_scale(
    dtype: torch.dtype, by: str, seed: int, power: int
) -> None:
    x = numbers(seed, 5, 33, scale=2.0**power)
    x[1] = 0
    if by == "fine" and dtype == torch.float8_e5m2:
        return  # nothing is
    found = rounded(x, dtype, by=by)
    assert torch.equal(found.wide().double(), wanted(x, dtype, by=by))


@KINDS
@few
@given(seed=st.integers(0, 1000), parts=st.integers(1, 6))
def test_parts_with_scales_of_their_own_are_rounded_as_the_whole(
    dtype: torch.dtype, seed: int, parts: int
) -> None:
    """But far below the largest: there the error is a subnormal's half step."""
    most, bits, least = FORMATS[dtype]
    x = numbers(seed, 12, 40)
    whole = rounded(x, dtype, by="tensor").wide()
    apart = torch.cat([rounded(part, dtype, by="tensor").wide() for part in x.chunk(parts)])
    largest = float(x.float().abs().max())
    normal = x.float().abs() >= 2 * 2.0**least / most * largest
    assert torch.equal(whole[normal], apart[normal])
    assert float((whole - apart).abs().max()) <= 2 * 2.0 ** (least - bits - 1) / most * 2 * largest


@SCALED
@KINDS
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_what_is_not_finite_stays_so(dtype: torch.dtype, by: str, value: str) -> None:
    x = numbers(1, 3, 5)
    x[1, 2] = float(value)
    assert not bool(rounded(x, dtype, by=by).wide()[1].isfinite().all())


def test_zeros_and_the_least_and_largest_numbers_have_scales() -> None:
    for value in (0.0, 1e-38, 3e38):
        x = torch.full((2, 2), value, dtype=torch.bfloat16)
        found = rounded(x, torch.float8_e4m3fn, by="tensor")
        assert 0 < float(found.scale) < math.inf
        assert torch.allclose(found.wide(), x.float(), rtol=0.07, atol=2.0**-126)


@SCALED
@pytest.mark.parametrize(
    ("operator", "biased"),
    [("linear", True), ("linear", False), ("addmm", True), ("matmul", False)],
)
def test_products_and_their_gradients_are_those_of_rounded_operands(
    operator: str, biased: bool, by: str
) -> None:
    """In fp32 results would be exact; they are rounded to bf16, once or, with a vector, twice."""
    shape = (N, K) if operator == "linear" else (K, N)
    x = nn.Parameter(numbers(1, M, K))
    w, b = nn.Parameter(numbers(2, *shape)), nn.Parameter(numbers(3, N))
    grad = numbers(4, M, N)
    given = {"linear": (x, w, b), "addmm": (b, x, w), "matmul": (x, w)}[operator]
    found = EightBitProduct(operator, by=by)(*given[: 3 if biased else 2])
    found.backward(grad)
    e4m3, e5m2 = FORMATS
    gradients = e5m2 if by == "tensor" else e4m3

    def round_(t: torch.Tensor, dtype: torch.dtype = e4m3) -> torch.Tensor:
        return wanted(t.detach(), dtype, by=by)

    lying = w.detach() if operator == "linear" else w.detach().t()
    y = round_(x) @ round_(lying).t() + (b.detach().double() if biased else 0.0)
    of_x = round_(grad, gradients) @ round_(lying.t()).t()
    of_w = round_(grad.t(), gradients) @ round_(x.detach().t()).t()
    assert x.grad is not None and w.grad is not None
    of_w = of_w if operator == "linear" else of_w.t()
    for made, exact in ((found, y), (x.grad, of_x), (w.grad, of_w)):
        off = (made.detach().double() - exact).abs()
        assert float((off / (exact.abs() + 2**-4 * exact.abs().max())).max()) < 2**-6
    assert (b.grad is not None) is biased


@SCALED
@pytest.mark.parametrize("operator", ["linear", "mm"])
def test_units_give_what_emulation_gives(
    operator: str, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torch._scaled_mm` on this CPU, for an uneven number of rows, too; what it is given lies as
    units want it, the left by rows and the right by columns."""
    multiply = torch._scaled_mm

    def laid(a: torch.Tensor, b: torch.Tensor, *args: object, **given: object) -> torch.Tensor:
        assert a.is_contiguous() and b.t().is_contiguous()
        return multiply(a, b, *args, **given)

    if by in ("block", "fine"):
        pytest.skip("blocks are emulated everywhere")
    monkeypatch.setattr(torch, "_scaled_mm", laid)
    for m in (M, 32, 7):
        both = []
        for units in (False, True):
            monkeypatch.setattr(eight_bits, "has_units", lambda device, units=units: units)
            lying = (N, K) if operator == "linear" else (K, N)
            x, w = nn.Parameter(numbers(1, m, K)), nn.Parameter(numbers(2, *lying))
            try:
                y = EightBitProduct(operator, by=by)(x, w)
            except RuntimeError as error:
                if "only supports per-tensor scaling for CPU" not in str(error):
                    raise
                pytest.skip("this torch has no such product on CPUs")
            y.backward(numbers(4, m, N))
            both.append((y.detach(), x.grad, w.grad))
        for emulated, unit in zip(*both, strict=True):
            assert emulated is not None and unit is not None
            off = (emulated - unit).float().abs().max() / emulated.float().abs().max()
            assert float(off) < 2**-7


@SCALED
@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_experts_are_those_of_rounded_operands(by: str, transposed: bool) -> None:
    """Operands are rounded along what the forward sums over, the result's gradient along its
    features; gradients of operands are those of the rounded ones."""
    e4m3, e5m2 = FORMATS
    chosen = torch.randint(3, (1, M, 2), generator=torch.Generator().manual_seed(5))
    x = nn.Parameter(numbers(1, 1, M, 2, K))
    w = nn.Parameter(numbers(2, 3, *((N, K) if transposed else (K, N))))
    grad = numbers(4, 1, M, 2, N)
    dim = 2 if transposed else 1
    y = EightBitExperts(grouped_linear, by=by, dim=dim)(x, w, chosen, None, transposed)
    y.backward(grad)

    def round_(t: torch.Tensor, dtype: torch.dtype = e4m3) -> torch.Tensor:
        return wanted(t.detach().reshape(-1, t.shape[-1]), dtype, by=by).view(t.shape)

    of_grad = round_(grad, e5m2 if by == "tensor" else e4m3)
    matrices = w.detach() if transposed else w.detach().transpose(1, 2)  # by expert: o × i
    picked = round_(matrices)[chosen]
    exact_y = torch.einsum("bski,bskoi->bsko", round_(x), picked)
    of_x = torch.einsum("bsko,bskoi->bski", of_grad, picked)
    one_hot = torch.nn.functional.one_hot(chosen, 3).double()
    of_w = torch.einsum("bsko,bski,bske->eoi", of_grad, round_(x), one_hot)
    assert x.grad is not None and w.grad is not None
    of_w = of_w if transposed else of_w.transpose(1, 2)
    for made, exact in ((y, exact_y), (x.grad, of_x), (w.grad, of_w)):
        off = (made.detach().double() - exact).abs()
        assert float((off / (exact.abs() + 2**-4 * exact.abs().max())).max()) < 2**-6


def test_nothing_but_operands_is_kept() -> None:
    kept: list[torch.Tensor] = []
    x, w = nn.Parameter(numbers(1, M, K)), nn.Parameter(numbers(2, N, K))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        EightBitProduct("linear", by="tensor")(x, w)
    assert {t.data_ptr() for t in kept} == {x.data_ptr(), w.data_ptr()}
    kept.clear()
    copies, experts = nn.Parameter(numbers(1, 1, M, 2, K)), nn.Parameter(numbers(2, 3, K, N))
    chosen = torch.zeros(1, M, 2, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        EightBitExperts(grouped_linear, by="block", dim=1)(copies, experts, chosen, None, False)
    held = (copies, experts, chosen)
    assert {t.data_ptr() for t in kept} == {each.data_ptr() for each in held}


@SCALED
def test_no_rows_are_rounded_to_none(by: str) -> None:
    """As on a rank whose experts get no token."""
    nothing = torch.empty(0, K, dtype=torch.bfloat16, requires_grad=True)
    w = nn.Parameter(numbers(2, N, K))
    y = EightBitProduct("linear", by=by)(nothing, w)
    assert y.shape == (0, N)
    y.sum().backward()
    assert w.grad is not None and not bool(w.grad.any())

"""Products of 8-bit floats, forward and backward, of operands in 16 bits (`costmodel/fp8.py`).

    y = x wᵀ      x by rows, w by rows
    ∂x = ∂y w     ∂y by rows, w by columns
    ∂w = ∂yᵀ x    ∂y by columns, x by columns

"By rows" is along what the product sums over: with scales by tensor (`rowwise` False) a tensor has
one scale whichever way it is read, and gradients are in e5m2; with scales by row all is in e4m3.
The scale is the least power of two s with max |x| <= s · M, computed on the bits of the largest
number, so that x / s is exact in bf16 but where it falls below the least normal number, and a NaN
or an infinity stays one. Nothing but x and w is kept for the backward: both are cast again.

Products run as `torch._scaled_mm` where the device has units for them, which want the left operand
by rows and the right one by columns, of sides that are multiples of 16: rows of zeros are added to
what is summed over, and a part of a weight with other sides is multiplied as elsewhere: its numbers
rounded to 8 bits, in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.costmodel.fp8 import SIDE
from meshwright.costmodel.rules import TRAITS
from meshwright.executor.devices import has_streams

# of fp32's bits: the first of an exponent, all of them, those of a number and its inverse together
ONE, EXPONENT, TOP = 2**23, 255 * 2**23, 254 * 2**23
MOST = 253  # exponents, so that 1/s is a normal number, too
UNITS = (8, 9)  # CUDA's least compute capability


@dataclass(frozen=True, slots=True)
class Rounded:
    """A matrix in 8 bits, and its scale: a number, or one for each row (m, 1)."""

    bits: torch.Tensor
    scale: torch.Tensor

    def wide(self) -> torch.Tensor:
        """The numbers that it stands for."""
        return self.bits.float() * self.scale


def rounded(x: torch.Tensor, dtype: torch.dtype, *, rowwise: bool) -> Rounded:
    """A matrix (m, k) in 8 bits."""
    dim = {"dim": 1, "keepdim": True} if rowwise else {}
    largest = torch.linalg.vector_norm(x, math.inf, **dim)
    exponent = _exponent(largest, dtype)
    inverse = (TOP - exponent).view(torch.float32)
    bits = (x * (inverse.to(x.dtype) if rowwise else inverse)).to(dtype)
    return Rounded(bits, exponent.view(torch.float32))


def _exponent(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bits of the scale as a number of fp32, which has no mantissa."""
    mantissa, power = math.frexp(torch.finfo(dtype).max)  # in [1/2, 1)
    fits = round((2 * mantissa - 1) * ONE)  # the largest mantissa of fp32 that needs no more
    bits = largest.float().view(torch.int32) + (ONE - 1 - fits)
    least, most = power * ONE, (MOST + power - 1) * ONE
    return (bits & EXPONENT).clamp(least, min(most, EXPONENT)) - (power - 1) * ONE


def has_units(device: torch.device) -> bool:
    """Whether a device multiplies in 8 bits; what stands for one in a rehearsal does: no plan is
    made for those that don't."""
    if device.type != "cuda":
        return has_streams(device)
    if torch.version.hip:
        return "gfx9" in torch.cuda.get_device_properties(device).gcnArchName
    return torch.cuda.get_device_capability(device) >= UNITS


def formats(device: torch.device, *, rowwise: bool) -> tuple[torch.dtype, torch.dtype]:
    """The formats of operands and of gradients."""
    kind = ""
    if device.type == "cuda" and torch.version.hip:
        kind = "uz" * ("gfx94" in torch.cuda.get_device_properties(device).gcnArchName)
    operands = getattr(torch, f"float8_e4m3fn{kind}")
    wide = getattr(torch, f"float8_e5m2{'fnuz' if kind else ''}")
    return operands, operands if rowwise else wide


def multiplied(a: Rounded, b: Rounded, dtype: torch.dtype, *, fast: bool = False) -> torch.Tensor:
    """a bᵀ of (m, k) and (n, k); `fast` adds up in fewer bits."""
    n, k = b.bits.shape
    if has_units(a.bits.device) and k % SIDE == 0 and n % SIDE == 0:
        product: torch.Tensor = torch._scaled_mm(
            a.bits,
            b.bits.t(),
            a.scale,
            b.scale.t() if b.scale.dim() else b.scale,
            out_dtype=dtype,
            use_fast_accum=fast,
        )
        return product
    return (a.wide() @ b.wide().t()).to(dtype)


def product(x: torch.Tensor, weight: torch.Tensor, *, rowwise: bool) -> torch.Tensor:
    """x wᵀ of (m, k) and (n, k)."""
    operands, _ = formats(x.device, rowwise=rowwise)
    left = rounded(x, operands, rowwise=rowwise)
    right = rounded(weight, operands, rowwise=rowwise)
    return multiplied(_turned(left), _turned(right), x.dtype, fast=True)


@dataclass(slots=True)
class Gradient:
    """A result's gradient (m, n), rounded once where scales are of tensors."""

    wide: torch.Tensor
    rowwise: bool
    once: Rounded | None = None

    def of_input(self, weight: torch.Tensor) -> torch.Tensor:
        """∂y w of a weight (n, k)."""
        operands, gradients = formats(weight.device, rowwise=self.rowwise)
        left = rounded(self.wide, gradients, rowwise=self.rowwise)
        self.once = None if self.rowwise else left
        right = _turned(rounded(weight.t(), operands, rowwise=self.rowwise))
        return multiplied(_turned(left), right, self.wide.dtype, fast=self.rowwise)

    def of_weight(self, x: torch.Tensor) -> torch.Tensor:
        """∂yᵀ x of an input (m, k)."""
        operands, gradients = formats(x.device, rowwise=self.rowwise)
        if self.once is not None:
            left = Rounded(self.once.bits.t(), self.once.scale)
        else:
            left = rounded(self.wide.t(), gradients, rowwise=self.rowwise)
        right = rounded(x.t(), operands, rowwise=self.rowwise)
        return multiplied(_turned(left), _turned(right), x.dtype, fast=self.rowwise)


def _turned(x: Rounded) -> Rounded:
    """The same, by rows in memory, of which zeros fill up what units sum over."""
    short = -x.bits.shape[1] % SIDE
    if short and has_units(x.bits.device):
        bytewise = F.pad(x.bits.view(torch.uint8), (0, short))  # a zero has no bit set
        return Rounded(bytewise.view(x.bits.dtype), x.scale)
    return Rounded(x.bits.contiguous(), x.scale)


class _Product(torch.autograd.Function):
    """x wᵀ + b of x (.., k) and w (n, k), or (k, n) unless `transposed`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        transposed: bool,
        rowwise: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.transposed, ctx.rowwise = transposed, rowwise
        return forward(x, weight, bias, transposed=transposed, rowwise=rowwise)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        of_input = of_weight = of_bias = None
        gradient = Gradient(_rows(grad), ctx.rowwise)
        if ctx.needs_input_grad[0]:
            of_input = of_x(gradient, weight, grad.shape, transposed=ctx.transposed)
        if ctx.needs_input_grad[1]:
            of_weight = of_w(gradient, x, transposed=ctx.transposed)
        if ctx.needs_input_grad[2]:
            of_bias = grad.reshape(-1, grad.shape[-1]).sum(0)
        return of_input, of_weight, of_bias, None, None


_product: Callable[..., torch.Tensor] = _Product.apply


def forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    transposed: bool,
    rowwise: bool,
) -> torch.Tensor:
    """The product of x (.., k) with a weight as it lies, plus a vector."""
    result_rows = product(_rows(x), weight if transposed else weight.t(), rowwise=rowwise)
    result_rows = result_rows if bias is None else result_rows + bias
    return result_rows.view(*x.shape[:-1], result_rows.shape[-1])


def of_x(
    gradient: Gradient, weight: torch.Tensor, shape: Sequence[int], *, transposed: bool
) -> torch.Tensor:
    """The gradient of x, for a weight as it lies and a result of `shape`."""
    grad_x = gradient.of_input(weight if transposed else weight.t())
    return grad_x.view(*shape[:-1], grad_x.shape[-1])


def of_w(gradient: Gradient, x: torch.Tensor, *, transposed: bool) -> torch.Tensor:
    """The gradient of the weight as it lies."""
    grad_w = gradient.of_weight(_rows(x))
    return grad_w if transposed else grad_w.t()


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


class EightBitProduct(nn.Module):
    """`linear`, `addmm`, `mm` or `matmul` in 8 bits."""

    def __init__(self, operator: str, *, rowwise: bool) -> None:
        super().__init__()
        traits = TRAITS[operator].product
        assert traits is not None
        self.product, self.rowwise = traits, rowwise

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        at = self.product
        bias = args[at.bias] if len(args) > 2 else None
        return _product(args[at.x], args[at.weight], bias, at.transposed, self.rowwise)

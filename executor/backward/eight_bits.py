"""Products of 8- or 4-bit floats, forward and backward, of operands in 16 bits.

    y = x wᵀ      x by rows, w by rows
    ∂x = ∂y w     ∂y by rows, w by columns
    ∂w = ∂yᵀ x    ∂y by columns, x by columns

"By rows" is along what the product sums over. A tensor is scaled `by` "tensor": it has one scale
whichever way it is read, and gradients are in e5m2; by "row", or by "block" of 32 numbers of a row,
all is in e4m3; "fine" is e2m1, of which blocks of 16 have a scale in e4m3, held as e4m3 numbers.
Experts' matrices are rounded along what their forward sums over, gradients of what
they make along its features, once each.
The scale is the least power of two s with max |x| <= s · M, computed on the bits of the largest
number, so that x / s is exact in bf16 but where it falls below the least normal number, and a NaN
or an infinity stays one. Nothing but x and w is kept for the backward: both are cast again.

Products run as `torch._scaled_mm` where the device has units for them, which want the left operand
by rows and the right one by columns, of sides that are multiples of 16: rows of zeros are added to
what is summed over, and a part of a weight with other sides is multiplied as elsewhere: its numbers
rounded to 8 bits, in fp32. So are operands with scales by block, everywhere; experts' rounded
numbers are multiplied in 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.costmodel.precisions import BLOCK, IN_BLOCK, ROW, SIDE, TENSOR
from meshwright.costmodel.rules import TRAITS
from meshwright.executor.devices import has_streams

# of fp32's bits: the first of an exponent, all of them, those of a number and its inverse together
ONE, EXPONENT, TOP = 2**23, 255 * 2**23, 254 * 2**23
MOST = 253  # exponents, so that 1/s is a normal number, too
MOST_OF_4 = 6.0  # the largest number of e2m1
UNITS = (8, 9)  # CUDA's least compute capability


@dataclass(frozen=True, slots=True)
class Rounded:
    """A matrix in 8 bits, and its scale: a number, or one for each row (m, 1), or for each `block`
    of a row (m, k / block)."""

    bits: torch.Tensor
    scale: torch.Tensor
    block: int = 0

    @property
    def in_blocks(self) -> bool:
        """Whether rows have several scales."""
        return self.scale.dim() > 1 and self.scale.shape[1] != 1

    def wide(self) -> torch.Tensor:
        """The numbers that it stands for."""
        scale = self.scale
        if self.in_blocks:
            scale = scale.repeat_interleave(self.block, 1)[:, : self.bits.shape[1]]
        return self.bits.float() * scale


def rounded(x: torch.Tensor, dtype: torch.dtype, *, by: str) -> Rounded:
    """A matrix (m, k) in 8 bits."""
    if not x.numel():  # of no rows there is no largest number
        return Rounded(x.to(dtype), torch.ones((), device=x.device))
    if block := IN_BLOCK.get(by, 0):
        rows, width = x.shape
        blocks = F.pad(x, (0, -width % block)).reshape(-1, block)
        found = rounded(blocks, dtype, by=ROW) if by == BLOCK else _in_4_bits(blocks, dtype)
        bits = found.bits.view(torch.uint8).view(rows, -1)[:, :width].view(dtype)
        return Rounded(bits, found.scale.view(rows, -1), block)
    dim = {"dim": 1, "keepdim": True} if by == ROW else {}
    largest = torch.linalg.vector_norm(x, math.inf, **dim)
    exponent = _exponent(largest, dtype)
    inverse = (TOP - exponent).view(torch.float32)
    bits = (x * (inverse.to(x.dtype) if by == ROW else inverse)).to(dtype)
    return Rounded(bits, exponent.view(torch.float32))


def _in_4_bits(blocks: torch.Tensor, dtype: torch.dtype) -> Rounded:
    """Blocks (n, 16) on e2m1's grid, 0 to 2 in steps of 1/2, to 4 in steps of 1, to 6 in steps of
    2, each times a scale that `dtype` holds, times a power of two for all."""
    largest = blocks.abs().amax(1, keepdim=True).float() / MOST_OF_4
    scale = rounded(largest.t(), dtype, by=TENSOR).wide().t()
    quotient = blocks.float() / torch.where(scale == 0, 1.0, scale)
    quotient = quotient.clamp(-MOST_OF_4, MOST_OF_4)
    size = quotient.abs()
    step = 0.5 + 0.5 * (size >= 2) + (size >= 4)
    return Rounded(((quotient / step).round() * step).to(dtype), scale)


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


def formats(device: torch.device, *, by: str) -> tuple[torch.dtype, torch.dtype]:
    """The formats of operands and of gradients."""
    kind = ""
    if device.type == "cuda" and torch.version.hip:
        kind = "uz" * ("gfx94" in torch.cuda.get_device_properties(device).gcnArchName)
    operands = getattr(torch, f"float8_e4m3fn{kind}")
    wide = getattr(torch, f"float8_e5m2{'fnuz' if kind else ''}")
    return operands, wide if by == TENSOR else operands


def multiplied(a: Rounded, b: Rounded, dtype: torch.dtype, *, fast: bool = False) -> torch.Tensor:
    """a bᵀ of (m, k) and (n, k); `fast` adds up in fewer bits."""
    n, k = b.bits.shape
    units = has_units(a.bits.device) and not (a.in_blocks or b.in_blocks)
    if units and k % SIDE == 0 and n % SIDE == 0:
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


def product(x: torch.Tensor, weight: torch.Tensor, *, by: str) -> torch.Tensor:
    """x wᵀ of (m, k) and (n, k)."""
    operands, _ = formats(x.device, by=by)
    left = rounded(x, operands, by=by)
    right = rounded(weight, operands, by=by)
    return multiplied(_turned(left), _turned(right), x.dtype, fast=True)


@dataclass(slots=True)
class Gradient:
    """A result's gradient (m, n), rounded once where scales are of tensors."""

    wide: torch.Tensor
    by: str
    once: Rounded | None = None

    def of_input(self, weight: torch.Tensor) -> torch.Tensor:
        """∂y w of a weight (n, k)."""
        operands, gradients = formats(weight.device, by=self.by)
        left = rounded(self.wide, gradients, by=self.by)
        self.once = left if self.by == TENSOR else None
        right = _turned(rounded(weight.t(), operands, by=self.by))
        return multiplied(_turned(left), right, self.wide.dtype, fast=self.by != TENSOR)

    def of_weight(self, x: torch.Tensor) -> torch.Tensor:
        """∂yᵀ x of an input (m, k)."""
        operands, gradients = formats(x.device, by=self.by)
        if self.once is not None:
            left = Rounded(self.once.bits.t(), self.once.scale)
        else:
            left = rounded(self.wide.t(), gradients, by=self.by)
        right = rounded(x.t(), operands, by=self.by)
        return multiplied(_turned(left), _turned(right), x.dtype, fast=self.by != TENSOR)


def _turned(x: Rounded) -> Rounded:
    """The same, by rows in memory, of which zeros fill up what units sum over."""
    short = -x.bits.shape[1] % SIDE
    if short and has_units(x.bits.device) and not x.in_blocks:
        bytewise = F.pad(x.bits.view(torch.uint8), (0, short))  # a zero has no bit set
        return Rounded(bytewise.view(x.bits.dtype), x.scale)
    return replace(x, bits=x.bits.contiguous())


class _Product(torch.autograd.Function):
    """x wᵀ + b of x (.., k) and w (n, k), or (k, n) unless `transposed`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        transposed: bool,
        by: str,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.transposed, ctx.by = transposed, by
        return forward(x, weight, bias, transposed=transposed, by=by)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        of_input = of_weight = of_bias = None
        gradient = Gradient(_rows(grad), ctx.by)
        if ctx.needs_input_grad[0]:
            of_input = of_x(gradient, weight, grad.shape, transposed=ctx.transposed)
        if ctx.needs_input_grad[1]:
            of_weight = of_w(gradient, x, transposed=ctx.transposed)
        if ctx.needs_input_grad[2]:
            of_bias = grad.reshape(-1, grad.shape[-1]).sum(0)
        return of_input, of_weight, of_bias, None, None


_product: Callable[..., torch.Tensor] = _Product.apply


def forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, transposed: bool, by: str
) -> torch.Tensor:
    """The product of x (.., k) with a weight as it lies, plus a vector."""
    result_rows = product(_rows(x), weight if transposed else weight.t(), by=by)
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

    def __init__(self, operator: str, *, by: str) -> None:
        super().__init__()
        traits = TRAITS[operator].product
        assert traits is not None
        self.product, self.by = traits, by

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        at = self.product
        bias = args[at.bias] if len(args) > 2 else None
        return _product(args[at.x], args[at.weight], bias, at.transposed, self.by)


class _OfExperts(torch.autograd.Function):
    """`multiply` of operands that are rounded to 8 bits, x along its last dim and the weight along
    `dim`. They are kept as they are; the backward rounds them, and the gradient along its last dim,
    and multiplies again."""

    @staticmethod
    def forward(
        ctx: Any,
        multiply: Callable[..., torch.Tensor],
        by: str,
        dim: int,
        x: torch.Tensor,
        weight: torch.Tensor,
        *others: Any,
    ) -> torch.Tensor:
        ctx.multiply, ctx.by, ctx.dim = multiply, by, dim
        ctx.tensors = [k for k, other in enumerate(others) if isinstance(other, torch.Tensor)]
        ctx.others = [None if k in ctx.tensors else other for k, other in enumerate(others)]
        ctx.save_for_backward(x, weight, *(others[k] for k in ctx.tensors))
        return multiply(*_narrow(x, weight, by, dim), *others)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (grad,), (x, weight, *tensors) = grads, ctx.saved_tensors
        wanted = ctx.needs_input_grad[3:]
        others = list(ctx.others)
        for k, tensor in zip(ctx.tensors, tensors, strict=True):
            others[k] = tensor
        given = [*_narrow(x, weight, ctx.by, ctx.dim), *others]
        leaves = [
            operand.detach().requires_grad_() if asks else operand
            for operand, asks in zip(given, wanted, strict=True)
        ]
        narrow = _stands_for(grad, formats(grad.device, by=ctx.by)[1], ctx.by)
        asked = [leaf for leaf, asks in zip(leaves, wanted, strict=True) if asks]
        with torch.enable_grad():
            found = iter(torch.autograd.grad(ctx.multiply(*leaves), asked, narrow))
        return (None, None, None, *(next(found) if asks else None for asks in wanted))


def _narrow(
    x: torch.Tensor, weight: torch.Tensor, by: str, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    operands, _ = formats(x.device, by=by)
    turned = _stands_for(weight.movedim(dim, -1), operands, by).movedim(-1, dim)
    return _stands_for(x, operands, by), turned


def _stands_for(x: torch.Tensor, dtype: torch.dtype, by: str) -> torch.Tensor:
    return rounded(_rows(x), dtype, by=by).wide().to(x.dtype).view(x.shape)


_of_experts: Callable[..., torch.Tensor] = _OfExperts.apply


class EightBitExperts(nn.Module):
    """Products of experts in 8 bits, of copies of tokens and matrices whose `dim` is summed over,
    by what multiplies them in 16."""

    def __init__(self, multiply: Callable[..., torch.Tensor], *, by: str, dim: int) -> None:
        super().__init__()
        self.multiply, self.by, self.dim = multiply, by, dim

    def forward(self, x: torch.Tensor, weight: torch.Tensor, *others: Any) -> torch.Tensor:
        return _of_experts(self.multiply, self.by, self.dim, x, weight, *others)

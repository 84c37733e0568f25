"""Mixtures of experts as three operators, each one node of a traced graph.

Each of s tokens goes to k of E experts. The dozens of kernels of a framework (counting, sorting,
exchanging) are three operators here, so that they can be planned and priced:

    dispatch         (b, s, h), (b, s, k)               -> (b, s, k, h)   a copy per chosen expert
    grouped_linear   (b, s, k, i), (E, i, o), (b, s, k) -> (b, s, k, o)   each copy by its expert
    combine          (b, s, k, h)                       -> (b, s, h)      the copies' sum

`grouped_linear` takes biases (E, o) as well, and matrices stored as (E, o, i) if `transposed`. A
copy for "expert" E meets none and comes out as zeros (routers that drop tokens).

The copies keep their token's place; the ranks that hold them are priced in `costmodel/rules/moe.py`
and lowered in `executor/lowering/emitter.py`.

A grouped product sorts the copies by expert, x_e being those of expert e, and multiplies

    y_e = x_e W_e + b_e,     dx_e = dy_e W_eᵀ,     dW_e = x_eᵀ dy_e,     db_e = 1ᵀ dy_e,

one product per expert that has any: 2·b·s·k·i·o FLOPs whatever E is, and no copies of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

# --- rows sorted by expert ------------------------------------------------------------------------


def expert_order(experts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The order that sorts copies by expert, those of none last; copies of each expert."""
    flat = experts.reshape(-1)
    counts = torch.zeros(count + 1, dtype=torch.int64, device=flat.device)
    return flat.argsort(stable=True), counts.scatter_add_(0, flat, torch.ones_like(flat))[:count]


def inverse_of(order: Tensor) -> Tensor:
    """The permutation that undoes one."""
    places = torch.arange(order.numel(), device=order.device)
    return torch.empty_like(order).scatter_(0, order, places)


def grouped_rows(
    rows: Tensor, weight: Tensor, counts: Sequence[int], bias: Tensor | None = None
) -> Tensor:
    """[n, i] sorted by expert, [E, i, o], [E, o] -> [n, o]; zeros behind the `counts` rows."""
    out = rows.new_empty(rows.shape[0], weight.shape[2])
    for expert, part in _parts(counts):
        if bias is None:
            torch.mm(rows[part], weight[expert], out=out[part])
        else:
            torch.addmm(bias[expert], rows[part], weight[expert], out=out[part])
    out[sum(counts) :].zero_()
    return out


def grouped_weights(rows: Tensor, grads: Tensor, counts: Sequence[int]) -> Tensor:
    """[n, i], [n, o], both sorted by expert -> [E, i, o]: zero for an expert without rows."""
    out = rows.new_zeros(len(counts), rows.shape[1], grads.shape[1])
    for expert, part in _parts(counts):
        torch.mm(rows[part].t(), grads[part], out=out[expert])
    return out


def _parts(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """The rows of each expert that has any."""
    for expert, (start, stop) in enumerate(pairwise(accumulate(counts, initial=0))):
        if stop > start:
            yield expert, slice(start, stop)


# --- operators ------------------------------------------------------------------------------------


@torch.library.custom_op("meshwright::dispatch", mutates_args=())
def dispatch(x: Tensor, experts: Tensor) -> Tensor:
    """One copy of each token per chosen expert."""
    spread = x.unsqueeze(-2).expand(*experts.shape, x.shape[-1])
    return spread.clone(memory_format=torch.contiguous_format)


@dispatch.register_fake
def _(x: Tensor, experts: Tensor) -> Tensor:
    return x.new_empty(*experts.shape, x.shape[-1])


@torch.library.custom_op("meshwright::grouped_linear", mutates_args=())
def grouped_linear(
    x: Tensor, weight: Tensor, experts: Tensor, bias: Tensor | None = None, transposed: bool = False
) -> Tensor:
    """Each copy times the matrix of its expert, 0 <= expert < weight.shape[0], plus its bias."""
    order, counts = expert_order(experts, weight.shape[0])
    rows = x.reshape(-1, x.shape[-1]).index_select(0, order)
    matrices = weight.transpose(1, 2) if transposed else weight
    products = grouped_rows(rows, matrices, counts.tolist(), bias)
    return products.index_select(0, inverse_of(order)).view(*x.shape[:-1], matrices.shape[-1])


@grouped_linear.register_fake
def _(
    x: Tensor, weight: Tensor, experts: Tensor, bias: Tensor | None = None, transposed: bool = False
) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[1 if transposed else 2])


def _under_autocast(device: str) -> Callable[..., Tensor]:
    """The grouped product as autocast has products: operands in its dtype."""
    key: Any = torch._C._parse_dispatch_key(f"Autocast{device.upper()}")

    def call(
        x: Tensor,
        weight: Tensor,
        experts: Tensor,
        bias: Tensor | None = None,
        transposed: bool = False,
    ) -> Tensor:
        dtype = torch.get_autocast_dtype(device)
        bias = None if bias is None else bias.to(dtype)
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            product: Tensor = grouped_linear(
                x.to(dtype), weight.to(dtype), experts, bias, transposed
            )
        return product

    return call


_LIBRARY = torch.library.Library("meshwright", "FRAGMENT")  # lives as long as its kernels
for _device in ("cpu", "cuda"):
    _LIBRARY.impl("grouped_linear", _under_autocast(_device), f"Autocast{_device.upper()}")


@torch.library.custom_op("meshwright::grouped_linear_weight_gradient", mutates_args=())
def grouped_linear_weight_gradient(x: Tensor, grad: Tensor, experts: Tensor, count: int) -> Tensor:
    """The gradient of the weights of `count` experts in a grouped product."""
    order, counts = expert_order(experts, count)
    rows = x.reshape(-1, x.shape[-1]).index_select(0, order)
    grads = grad.reshape(-1, grad.shape[-1]).index_select(0, order)
    return grouped_weights(rows, grads, counts.tolist())


@grouped_linear_weight_gradient.register_fake
def _(x: Tensor, grad: Tensor, experts: Tensor, count: int) -> Tensor:
    return x.new_empty(count, x.shape[-1], grad.shape[-1])


@torch.library.custom_op("meshwright::combine", mutates_args=())
def combine(x: Tensor) -> Tensor:
    """The sum of each token's copies."""
    return x.sum(-2)


@combine.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-2], x.shape[-1])


# --- their backward -------------------------------------------------------------------------------


def _dispatch_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return combine(grad), None


def _keep_operands(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, experts, _, ctx.transposed = inputs
    ctx.save_for_backward(x, weight, experts)


def _grouped_linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, experts = ctx.saved_tensors
    # arguments that were left to their defaults are not listed
    to_x, to_weight, _, to_bias = (*ctx.needs_input_grad, False)[:4]
    count, transposed = weight.shape[0], ctx.transposed
    sides = (grad, x) if transposed else (x, grad)
    ones = grad.new_ones(*grad.shape[:-1], 1)
    return (
        grouped_linear(grad, weight, experts, None, not transposed) if to_x else None,
        grouped_linear_weight_gradient(*sides, experts, count) if to_weight else None,
        None,
        grouped_linear_weight_gradient(ones, grad, experts, count).squeeze(1) if to_bias else None,
        None,
    )


def _keep_copies(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.copies = inputs[0].shape[-2]


def _combine_backward(ctx: Any, grad: Tensor) -> Tensor:
    return grad.unsqueeze(-2).expand(*grad.shape[:-1], ctx.copies, grad.shape[-1])


dispatch.register_autograd(_dispatch_backward)
grouped_linear.register_autograd(_grouped_linear_backward, setup_context=_keep_operands)
combine.register_autograd(_combine_backward, setup_context=_keep_copies)

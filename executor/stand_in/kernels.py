"""Where CUDA chooses what an operator runs, the stand-in chooses alike: attention, and autocast.

Under autocast CUDA runs the operators of two lists in the region's dtype, or in fp32 (source:
torch's documentation, "CUDA Ops that can autocast to float16", "to float32"); others as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import pad
from torch.utils import _pytree as pytree

HALVES = (torch.bfloat16, torch.float16)
_ATEN = torch.ops.aten
_TO_REGION = (
    "addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "chain_matmul", "conv1d", "conv2d",
    "conv3d", "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input", "convolution",
    "einsum", "gru_cell", "linalg_multi_dot", "linear", "lstm_cell", "matmul", "mm", "mv", "prelu",
    "scaled_dot_product_attention",
)  # fmt: skip
_TO_FP32 = (
    "acos", "asin", "binary_cross_entropy_with_logits", "cdist", "cosh", "cosine_embedding_loss",
    "cosine_similarity", "cross_entropy_loss", "cumprod", "cumsum", "dist", "erfinv", "exp",
    "expm1", "group_norm", "hinge_embedding_loss", "kl_div", "l1_loss", "layer_norm", "log",
    "log10", "log1p", "log2", "log_softmax.int", "margin_ranking_loss", "mse_loss",
    "multi_margin_loss", "multilabel_margin_loss", "nll_loss", "nll_loss_nd", "norm.Scalar",
    "norm.ScalarOpt_dim", "pdist", "poisson_nll_loss", "pow.Scalar", "pow.Tensor_Scalar",
    "pow.Tensor_Tensor", "prod", "prod.dim_int", "reciprocal", "renorm", "rsqrt", "sinh",
    "smooth_l1_loss", "soft_margin_loss", "softmax.int", "softplus", "sum", "sum.dim_IntList",
    "tan", "triplet_margin_loss",
)  # fmt: skip

# one kernel on CUDA, several operators where a device has none of its own
_OWN_KERNELS = ("silu_backward", "mish_backward")


def register_kernels(device_type: str) -> Sequence[torch.library.Library]:
    """Register the choices for the extra device of that name; they last as long as the result."""
    aten = torch.library.Library("aten", "IMPL")
    aten.impl("scaled_dot_product_attention", _attention, "AutogradPrivateUse1")
    for name in _OWN_KERNELS:
        aten.impl(name, _elementwise, "PrivateUse1")
    every = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    every.fallback(torch.library.fallthrough_kernel)
    for names, fp32 in ((_TO_REGION, False), (_TO_FP32, True)):
        for name in names:
            aten.impl(name, _casting(name, device_type, fp32=fp32), "AutocastPrivateUse1")
    return aten, every


def _elementwise(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The result of an operator that is never run but on tensors without values."""
    return torch.empty_like(x)


def _casting(name: str, device_type: str, *, fp32: bool) -> Callable[..., Any]:
    """An operator with the floating operands on the device cast first."""
    packet, _, overload = name.partition(".")
    op = getattr(getattr(_ATEN, packet), overload or "default")
    key: Any = torch._C._parse_dispatch_key("AutocastPrivateUse1")
    keys: Any = torch._C.DispatchKeySet(key)

    def call(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.float32 if fp32 else torch.get_autocast_dtype(device_type)

        def cast(x: torch.Tensor) -> torch.Tensor:
            ours = x.device.type == device_type and x.is_floating_point()
            return x.to(dtype) if ours and x.dtype != torch.float64 else x

        args, kwargs = pytree.tree_map_only(torch.Tensor, cast, (args, kwargs))
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return op(*args, **kwargs)

    return call


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention by the kernel that CUDA chooses: flash for halves without a mask, the
    memory-efficient one, or written out (source: torch, native/transformers/cuda/sdp_utils.cpp)."""
    dim, half = query.shape[-1], query.dtype in HALVES
    fits = query.dim() == 4 and dim == value.shape[-1]
    if fits and half and attn_mask is None and dim <= 256:
        scale = dim**-0.5 if scale is None else scale
        padded = (pad(x, (0, -dim % 8)) if dim % 8 else x for x in (query, key, value))
        found = _ATEN._scaled_dot_product_flash_attention(
            *padded, dropout_p, is_causal, scale=scale
        )
        result: torch.Tensor = found[0]
        return result[..., :dim] if dim % 8 else result
    aligned = dim % (8 if half else 4) == 0 and (half or query.dtype == torch.float32)
    if fits and aligned and query.shape[1] == key.shape[1]:
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                none = torch.zeros_like(attn_mask, dtype=query.dtype)
                attn_mask = none.masked_fill_(~attn_mask, float("-inf"))
            attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
        keeps = any(x.requires_grad for x in (query, key, value))
        found = _ATEN._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, keeps, dropout_p, is_causal, scale=scale
        )
    else:
        found = _ATEN._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    result = found[0]
    return result

"""The device that stands for a cluster's GPU in a rehearsal: fake tensors of a device of its own.

torch lets Python register one device beside its own (PrivateUse1, torch >= 2.10): operators know it
as another device than the host, autograd runs backward on it, and its module's streams and events
are ours. So what is done otherwise on a GPU than on a CPU is done in a rehearsal, too, down to
`fully_shard`'s streams, and an operator that is given a tensor of the host beside one of the device
raises. (Fake tensors of device "cuda" get no further than the forward in a build of torch without
CUDA: autograd asks for the device's own streams.)

Streams here are names and clocks (`streams.py`); no work is queued on them. The device stays
registered until the process ends, and is not available to anything but a rehearsal. A process that
has a GPU, or another such device, gets none, and ranks are rehearsed as CPU ranks: torch would take
the stand-in for its accelerator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import pad
from torch.optim.optimizer import _foreach_supported_types
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

from meshwright.executor.devices import HOST
from meshwright.executor.stand_in.streams import ORDER, Event, MixedDevicesError, Stream

NAME = "rehearsed"
FakeWork: Any = getattr(_distributed_c10d, "FakeWork", dist.Work)  # private
_SET_DATA: Any = getattr(torch.Tensor.data, "__set__")  # noqa: B009  # a slot mypy doesn't know


class Module:
    """`torch.rehearsed`: what `torch.cuda` is for CUDA, as far as training asks for it."""

    def __init__(self) -> None:
        self.Stream, self.Event = Stream, Event  # named as in torch.cuda
        self.seeds: list[int] = []
        self.kernels: Sequence[torch.library.Library] = ()  # to live as long

    def is_available(self) -> bool:
        """Not to anything but a rehearsal."""
        return False

    def is_initialized(self) -> bool:
        """Always: there is nothing to initialise."""
        return True

    def device_count(self) -> int:
        """One."""
        return 1

    def current_device(self) -> int:
        """The number of the only one."""
        return 0

    def current_stream(self, device: Any = None) -> Stream:
        """The stream that operators are queued on."""
        return ORDER.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Context in which operators are queued on a stream."""
        before, ORDER.current = ORDER.current, stream
        try:
            yield
        finally:
            ORDER.current = before

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        """Context of a device: there is one."""
        yield

    def synchronize(self, device: Any = None) -> None:
        """The host waits for all streams."""
        ORDER.wait_for_all()

    def manual_seed(self, seed: int) -> None:
        """Takes note: fake tensors draw nothing."""
        self.seeds.append(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """Nothing."""
        return torch.empty(0, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        """Nothing."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Dtypes that autocast may cast to."""
        return list(HALVES)

    def _is_in_bad_fork(self) -> bool:
        return False


def device_for(backend: str) -> tuple[torch.device, str]:
    """The device for ranks of a cluster with a communication backend; and why it is the host, where
    it should be another."""
    if backend == "gloo":
        return HOST, ""
    why = _why_none()
    if why:
        return HOST, f"{backend} ranks as such, but as CPU ranks: {why}"
    module()
    return torch.device(NAME, 0), ""


def _why_none() -> str:
    if getattr(torch, NAME, None) is not None:
        return ""
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        return f"torch {torch.__version__} has no devices made in Python"
    if torch.cuda.is_available():
        return "this process has a GPU, which torch would pass over; hide it from the process"
    name = torch._C._get_privateuse1_backend_name()
    return "" if name == "privateuseone" else f"torch's extra device is {name!r} here"


@cache
def module() -> Module:
    """The stand-in's module; registers the device where it is the first call."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers the backend

    # autograd starts its threads for the devices that it finds at the first backward of a process:
    # with none, a process can still be forked afterwards
    torch.zeros((), requires_grad=True).backward()
    stand_in = Module()
    setup: Any = backend_registration._setup_privateuseone_for_python_backend
    setup(NAME, stand_in, _hook())
    dist.Backend.backend_capability[dist.Backend.FAKE].append(NAME)
    stand_in.kernels = register_kernels(NAME)
    return stand_in


@contextmanager
def standing_in() -> Iterator[None]:
    """Context in which the stand-in runs a rank, from the beginning of its order."""
    ORDER.begin()
    ORDER.followed = True
    # whose streams are made in C++: a device in Python has none
    accelerator: Any = torch.accelerator
    works: Any = FakeWork
    current, wait = accelerator.current_stream, works.wait

    def waited(work: Any, *args: Any) -> Any:
        ORDER.awaited(work)
        return wait(work, *args)

    accelerator.current_stream, works.wait = module().current_stream, waited
    # a rank alone has plain parameters, which optimizers step at once on a GPU
    stepped_at_once: Any = _foreach_supported_types
    stepped_at_once.append(FakeTensor)
    try:
        yield
    finally:
        ORDER.followed = False
        accelerator.current_stream, works.wait = current, wait
        stepped_at_once.remove(FakeTensor)


def _hook() -> Any:
    class Hook(backend_registration._DummyPrivateUse1Hook):
        def is_available(self) -> bool:
            return False

    return Hook()


class MovingData(TorchFunctionMode):
    """Lets `x.data = y` take `x` to the stand-in: torch allows it between its own devices alone.
    For tensors that no graph knows yet."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func == _SET_DATA and args[0].device != args[1].device:
            x, y = args[0], args[1].detach()
            if isinstance(x, torch.nn.Parameter):
                y = torch.nn.Parameter(y, requires_grad=x.requires_grad)
            torch._C._swap_tensor_impl(x, y)
            x.__dict__, y.__dict__ = y.__dict__, x.__dict__
            return None
        return func(*args, **(kwargs or {}))


def mixes_devices(error: RuntimeError) -> bool:
    """Whether an error is that of an operator given tensors of several devices."""
    names = {type(error).__name__, str(error).split(" for ")[0]}
    return not names.isdisjoint((
        MixedDevicesError.__name__,
        "FakeTensorDeviceMismatchError",
        "Unhandled FakeTensor Device Propagation",  # torch 2.11
    ))  # fmt: skip


# --- kernels --------------------------------------------------------------------------------------

# Where CUDA chooses what an operator runs, the stand-in chooses alike: attention, and autocast.
#
# Under autocast CUDA runs the operators of two lists in the region's dtype, or in fp32 (source:
# torch's documentation, "CUDA Ops that can autocast to float16", "to float32"); others as they
# come.


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
        outputs = _ATEN._scaled_dot_product_flash_attention(
            *padded, dropout_p, is_causal, scale=scale
        )
        result: torch.Tensor = outputs[0]
        return result[..., :dim] if dim % 8 else result
    aligned = dim % (8 if half else 4) == 0 and (half or query.dtype == torch.float32)
    if fits and aligned and query.shape[1] == key.shape[1]:
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                none = torch.zeros_like(attn_mask, dtype=query.dtype)
                attn_mask = none.masked_fill_(~attn_mask, float("-inf"))
            attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
        keeps = any(x.requires_grad for x in (query, key, value))
        outputs = _ATEN._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, keeps, dropout_p, is_causal, scale=scale
        )
    else:
        outputs = _ATEN._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    result = outputs[0]
    return result

"""What a leaf's call makes and costs, found by running it once apart from the trace.

On fake tensors first: shapes, which results carry gradients, which buffers are written to, kernels,
FLOPs and bytes, and what autograd keeps. A forward that asks for values can't run on those; it runs
for real then, on random numbers of the traced shapes and the model's own weights, twice: what
differs between the runs depends on data and is refused. Where neither is possible, the shapes come
from the declaration's `result`, and the work is estimated from them.

A probe runs in a thread of its own, because the modes by which torch traces are thread-local.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from meshwright.costmodel.rules.language import Dims
from meshwright.costmodel.rules.leaf import Work
from meshwright.planner.errors import TraceError
from meshwright.planner.operators.leaf import Program
from meshwright.planner.tracing.user_module.similar_layers import PLAIN

T = TypeVar("T")
_CALL, _GETATTR = nn.Module.__call__, nn.Module.__getattr__
REAL_BYTES = 2**28  # tensors that a forward is run on for real take no more than this

# What launches nothing though it makes a tensor that is not called a view
ALLOCATIONS = frozenset({
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view",
})  # fmt: skip


class LeafError(TraceError):
    """A module can't be kept as one node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLike:
    """What a probe knows of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def of(x: torch.Tensor) -> TensorLike:
        return TensorLike(
            shape=tuple(x.shape), stride=x.stride(), dtype=x.dtype, requires_grad=x.requires_grad
        )

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def resized(self, dims: Dims, sizes: Mapping[str, int]) -> TensorLike:
        """As wide in each dim as the product of the sizes of its factors."""
        shape = tuple(math.prod(sizes[name] for name in names) for names in dims)
        strides = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
        return replace(self, shape=shape, stride=strides)

    def empty(self) -> torch.Tensor:
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
        return made.requires_grad_(self.requires_grad)

    def random(self) -> torch.Tensor:
        """Normal numbers; zeros where they are integers, which may count something."""
        made = torch.zeros(self.shape, dtype=self.dtype)
        made = made.normal_() if self.dtype.is_floating_point else made
        return made.requires_grad_(self.requires_grad)

    def copy_of(self, x: torch.Tensor) -> torch.Tensor:
        made = x.detach().to("cpu", self.dtype, copy=True)
        return made.requires_grad_(self.requires_grad)


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A result that is one of the operands."""

    operand: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """`leaves` and `spec` are the output: tensors made, operands given back, plain values.
    `written` are the names of buffers that were written to; `random`: it draws numbers, None where
    nobody looked; `runs`: on fake tensors."""

    leaves: tuple[Any, ...]
    spec: Any
    written: tuple[str, ...]
    work: Work
    random: bool | None
    runs: bool = False

    @property
    def made(self) -> list[TensorLike]:
        return [x for x in self.leaves if isinstance(x, TensorLike)]


def apart(work: Callable[[], T], *, grad: bool) -> T:
    """The result of `work` in a thread of its own, where no tracing mode is on."""

    def run() -> T:
        # a tracer may have put itself in the place of these
        with (
            mock.patch.object(nn.Module, "__call__", _CALL),
            mock.patch.object(nn.Module, "__getattr__", _GETATTR),
            torch.set_grad_enabled(grad),
        ):
            return work()

    with ThreadPoolExecutor(1, thread_name_prefix="leaf") as pool:
        return pool.submit(run).result()


def on_fakes(program: Program, operands: Sequence[TensorLike]) -> Probe:
    """The probe by fake tensors; raises whatever the forward does there."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        found = _counted(program, [x.empty() for x in operands], "counted on its operators")
    return replace(found, runs=True)


def _counted(program: Program, given: list[torch.Tensor], source: str) -> Probe:
    """One run, and what its operators do."""
    count = len(given) - len(program.state)
    if torch.is_grad_enabled():  # activations are results of something
        given = [x.clone() if x.requires_grad else x for x in given[:count]] + given[count:]
    counter, kept = _Counter(given), _Kept()
    hooks = torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda x: x)
    with hooks, FlopCounterMode(display=False) as flops, counter:
        leaves, made, spec, written = _outcome(program, given)
    work = Work(
        kernels=max(1, counter.kernels),
        flops=int(flops.get_total_flops()),
        nbytes=counter.nbytes,
        taken=tuple(counter.taken),
        source=source,
        **kept.described(given, made),
    )
    return Probe(leaves=leaves, spec=spec, written=written, work=work, random=counter.random)


def for_real(
    program: Program, operands: Sequence[TensorLike], state: Mapping[str, torch.Tensor]
) -> Probe:
    """The probe by running the forward on random numbers and `state`, the weights themselves."""
    total = sum(x.nbytes for x in operands)
    if total > REAL_BYTES:
        raise LeafError(
            f"{program.name} would have to be run to see what it makes, but its tensors take "
            f"{total / 2**20:.0f} MiB; legal: {REAL_BYTES // 2**20} MiB"
        )
    if any(x.device.type == "meta" for x in state.values()):
        raise LeafError(
            f"{program.name} would have to be run to see what it makes, but its weights are on the "
            "meta device"
        )
    count = len(operands) - len(program.state)
    found = []
    with torch.random.fork_rng(devices=[]):
        for seed in (0, 1):
            torch.manual_seed(seed)
            given = [x.random() for x in operands[:count]]
            weights = zip(program.state, operands[count:], strict=True)
            given += [like.copy_of(state[name]) for name, like in weights]
            found.append(_counted(program, given, "counted on a run with random numbers"))
    first, second = found
    if (first.leaves, first.spec) != (second.leaves, second.spec):
        raise LeafError(
            f"{program.name} makes tensors whose shapes, or numbers, depend on values; make them "
            "of fixed shape (masks, padding), or keep the module around it as one node"
        )
    written = tuple(dict.fromkeys((*first.written, *second.written)))
    return replace(first, written=written)


def by_result(
    program: Program, operands: Sequence[TensorLike], result: Callable[..., Any]
) -> Probe:
    """The probe by a declaration's `result`; the work is estimated: 2 FLOPs for each parameter
    and row of the first result, operands and results passed once and kept. Nobody sees whether it
    draws numbers or writes to a buffer."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        given = [x.empty() for x in operands]
        count = len(given) - len(program.state)
        args, kwargs = program.arguments(given[:count])
        output = result(*args, **kwargs)
    flows = torch.is_grad_enabled() and any(x.requires_grad for x in operands)
    leaves, spec = pytree.tree_flatten(output)
    described = [
        replace(TensorLike.of(x), requires_grad=flows and x.dtype.is_floating_point)
        if isinstance(x, torch.Tensor)
        else x
        for x in leaves
    ]
    made = [x for x in described if isinstance(x, TensorLike)]
    weights = sum(math.prod(x.shape) for x in operands[count:])
    first = made[0].shape if made else ()
    work = Work(
        kernels=1,
        flops=2 * weights * math.prod(first[:-1]),
        nbytes=sum(x.nbytes for x in made),
        taken=tuple(x.nbytes for x in operands),
        saves=(*range(len(operands)), *(-1 - k for k in range(len(made)))),
        saved_bytes=0,
        numel=max(1, math.prod(first)),
        source="estimated from its shapes",
    )
    return Probe(leaves=tuple(described), spec=spec, written=(), work=work, random=None)


Outcome = tuple[tuple[Any, ...], list[torch.Tensor], Any, tuple[str, ...]]


def _outcome(program: Program, given: Sequence[torch.Tensor]) -> Outcome:
    """One run: its output's leaves described, the tensors made, the spec, buffers written."""
    count = len(given) - len(program.state)
    state = dict(zip(program.state, given[count:], strict=True))
    versions = [x._version for x in given]
    output, after = program.run(given[:count], state)
    changed = [x._version != version for x, version in zip(given, versions, strict=True)]
    for k in range(count):
        if changed[k]:
            raise LeafError(
                f"{program.name} writes to its argument {k}; write to a copy of it, or return the "
                "new value"
            )
    written = tuple(
        name
        for name, touched in zip(program.state, changed[count:], strict=True)
        if touched or after[name] is not state[name]
    )
    numbers = {id(x): k for k, x in enumerate(given)}
    leaves, spec = pytree.tree_flatten(output)
    described: list[Any] = []
    made: list[torch.Tensor] = []
    for leaf in leaves:
        if id(leaf) in numbers:
            described.append(Given(operand=numbers[id(leaf)]))
        elif isinstance(leaf, torch.Tensor):
            made.append(leaf)
            described.append(TensorLike.of(leaf))
        elif isinstance(leaf, PLAIN):
            described.append(leaf)
        else:
            raise LeafError(
                f"{program.name} gives a {type(leaf).__name__}; legal in a leaf's results: "
                "tensors, numbers, strings and None, in tuples, lists, dicts and dataclasses that "
                "torch.utils._pytree knows"
            )
    if not made and not written:
        raise LeafError(f"{program.name} makes no tensor; a leaf is there for those it makes")
    made += [after[name] for name in written]
    return tuple(described), made, spec, written


class _Counter(TorchDispatchMode):
    """Kernels, the bytes they read and write, of the tensors `given` (`taken`) and of others, and
    whether one draws random numbers."""

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.kernels = self.nbytes = 0
        self.taken = [0] * len(given)
        self.places = {_storage(x): k for k, x in enumerate(given)}
        self.random = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if _launches(func, result):
            self.kernels += 1
            for x in pytree.tree_leaves((args, kwargs, result)):
                if not isinstance(x, torch.Tensor):
                    continue
                place = self.places.get(_storage(x))
                if place is None:
                    self.nbytes += x.nbytes
                else:
                    self.taken[place] += x.nbytes
        self.random = self.random or torch.Tag.nondeterministic_seeded in func.tags
        return result


def _launches(func: Any, result: Any) -> bool:
    """Whether an operator works on elements: views, allocations and questions about tensors, such
    as on which device they are, don't."""
    if func.namespace == "prim" or func._schema.name.split("::")[1] in ALLOCATIONS:
        return False
    returns = func._schema.returns
    info = returns[0].alias_info if returns else None
    made = any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(result))
    return made and (info is None or info.is_write)


class _Kept:
    """The allocations that autograd keeps."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        self.tensors.append(x)
        return x

    def described(
        self, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]
    ) -> dict[str, Any]:
        places = {_storage(x): k for k, x in enumerate(given)}
        places |= {_storage(x): -1 - k for k, x in enumerate(made) if _storage(x) not in places}
        kept = {_storage(x): x.untyped_storage().nbytes() for x in self.tensors}
        return {
            "saves": tuple(sorted(places[s] for s in kept if s in places)),
            "saved_bytes": sum(size for s, size in kept.items() if s not in places),
            "numel": max(1, made[0].numel()) if made else 1,
        }


def _storage(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata

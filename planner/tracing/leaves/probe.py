"""Probes of leaves: shapes and cost of a call, from a run of it outside of the trace.

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

from meshwright.costmodel import rules
from meshwright.costmodel.graph import Graph, Op
from meshwright.costmodel.rules import Work
from meshwright.planner.errors import TraceError
from meshwright.planner.operators import Operand, Program
from meshwright.planner.tracing.user_module import PLAIN
from meshwright.planner.tracing.values import TensorLike

T = TypeVar("T")
_CALL, _GETATTR = nn.Module.__call__, nn.Module.__getattr__
REAL_BYTES = 2**28  # tensors that a forward is run on for real take no more than this

# operators that launch no kernel, though their schema does not call the result a view
ALLOCATIONS = frozenset({
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view",
})  # fmt: skip


class LeafError(TraceError):
    """A module can't be kept as one node."""

    CODE = "MW204"
    PLACE = "a module that is kept as one node"
    LEGAL = "tensors in and out, of which a rule or the rows of the batch say how they are split"
    WAY_OUT = "keep another module (meshwright.leaf), or give its rule"


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The output and the cost of one call.

    `leaves` and `spec` are the output's pytree: `TensorLike` for a new tensor, `Operand` for one
    that was taken, plain values. `written` are the names of buffers that were written to; `random`:
    whether random numbers were drawn, None where that is not known; `runs`: the forward runs on
    fake tensors.
    """

    leaves: tuple[Any, ...]
    spec: Any
    written: tuple[str, ...]
    work: Work
    random: bool | None
    runs: bool = False

    @property
    def outputs(self) -> list[TensorLike]:
        """The new tensors among the results."""
        return [x for x in self.leaves if isinstance(x, TensorLike)]


def in_plain_thread(work: Callable[[], T], *, grad: bool) -> T:
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


def probe_on_fakes(program: Program, operands: Sequence[TensorLike]) -> Probe:
    """The probe on fake tensors; raises whatever the forward does there."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        probe = _counted(program, [x.empty() for x in operands], "counted on its operators")
    return replace(probe, runs=True)


def _counted(program: Program, tensors: list[torch.Tensor], source: str) -> Probe:
    """The probe by one run on `tensors`, in which operators are counted."""
    count = len(tensors) - len(program.state)
    if torch.is_grad_enabled():  # activations are results of something
        tensors = [x.clone() if x.requires_grad else x for x in tensors[:count]] + tensors[count:]
    saved: list[torch.Tensor] = []  # by autograd, for the backward

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved.append(x)
        return x

    counter = _KernelCounter(tensors)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
    with hooks, FlopCounterMode(display=False) as flops, counter:
        leaves, outputs, spec, written = _outcome(program, tensors)
    places = {_storage(x): -1 - k for k, x in enumerate(outputs)}
    places |= {_storage(x): k for k, x in enumerate(tensors)}
    saved_bytes = {_storage(x): x.untyped_storage().nbytes() for x in saved}
    work = Work(
        kernels=max(1, counter.kernels),
        flops=int(flops.get_total_flops()),
        nbytes=counter.nbytes,
        taken=tuple(counter.taken),
        saves=tuple(sorted(places[s] for s in saved_bytes if s in places)),
        saved_bytes=sum(size for s, size in saved_bytes.items() if s not in places),
        numel=max(1, outputs[0].numel()) if outputs else 1,
        source=source,
    )
    return Probe(leaves=leaves, spec=spec, written=written, work=work, random=counter.random)


def probe_on_random(
    program: Program, operands: Sequence[TensorLike], state: Mapping[str, torch.Tensor]
) -> Probe:
    """The probe by two runs on random numbers and `state`, the user's weights. Raises `LeafError`
    for more than `REAL_BYTES` of tensors, weights on the meta device, or results that depend on
    values."""
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
    probes = []
    with torch.random.fork_rng(devices=[]):
        for seed in (0, 1):
            torch.manual_seed(seed)
            tensors = [x.random() for x in operands[:count]]
            weights = zip(program.state, operands[count:], strict=True)
            tensors += [like.copy_of(state[name]) for name, like in weights]
            probes.append(_counted(program, tensors, "counted on a run with random numbers"))
    first, second = probes
    if (first.leaves, first.spec) != (second.leaves, second.spec):
        raise LeafError(
            f"{program.name} makes tensors whose shapes, or numbers, depend on values; make them "
            "of fixed shape (masks, padding), or keep the module around it as one node"
        )
    return replace(first, written=tuple(dict.fromkeys((*first.written, *second.written))))


def probe_by_result(
    program: Program, operands: Sequence[TensorLike], result: Callable[..., Any]
) -> Probe:
    """The probe by a declaration's `result`: random numbers and writes to buffers are not seen. The
    work is estimated: 2 FLOPs for each parameter and row of the first result, operands and results
    moved once and saved."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        tensors = [x.empty() for x in operands]
        count = len(tensors) - len(program.state)
        args, kwargs = program.arguments(tensors[:count])
        output = result(*args, **kwargs)
    flows = torch.is_grad_enabled() and any(x.requires_grad for x in operands)
    leaves, spec = pytree.tree_flatten(output)
    described = [
        replace(TensorLike.of(x), requires_grad=flows and x.dtype.is_floating_point)
        if isinstance(x, torch.Tensor)
        else x
        for x in leaves
    ]
    outputs = [x for x in described if isinstance(x, TensorLike)]
    weights = sum(math.prod(x.shape) for x in operands[count:])
    first = outputs[0].shape if outputs else ()
    work = Work(
        kernels=1,
        flops=2 * weights * math.prod(first[:-1]),
        nbytes=sum(x.nbytes for x in outputs),
        taken=tuple(x.nbytes for x in operands),
        saves=(*range(len(operands)), *(-1 - k for k in range(len(outputs)))),
        saved_bytes=0,
        numel=max(1, math.prod(first)),
        source="estimated from its shapes",
    )
    return Probe(leaves=tuple(described), spec=spec, written=(), work=work, random=None)


# --- the backward of a leaf that takes no rows ----------------------------------------------------
#
# Each rank and each micro-batch runs it on its own part of the gradient, and the parts are summed
# afterwards: right where the backward is linear, as torch's own are.


SCALES = (2.0**-20, 2.0**20)  # thresholds of clamps and of norms lie between
NONLINEAR = 0.1  # of the largest gradient: rounding to 8 bits is no more


def check_backwards(graph: Graph) -> None:
    """Raises `LeafError` for a leaf of weights alone whose backward is not linear in the gradient
    that it is given. What draws random numbers, or does not run on small ones, is trusted."""
    rows, tried = set(graph.batched), set[int]()
    for op in (*graph.derived, *graph.ops):
        if not rows.isdisjoint(op.operands):
            rows.update(op.results)
        elif op.short in rules.LEAVES:
            leaf = rules.leaf_of(op)
            if any(leaf.gradients) and id(leaf) not in tried and not _linear(graph, op):
                raise LeafError(
                    f"{leaf.name} is called on weights alone, and its backward is not linear in "
                    "the gradient that it is given (it clamps, or divides by a norm, say): each "
                    "rank and each micro-batch has a part of that gradient, and the sum of what "
                    "is made of the parts is another one. Way out: let its backward pass the "
                    "gradient on, and change p.grad after the step's backward "
                    "(clip_grad_value_, a step of your optimizer)",
                    place=op.source or f"leaf {leaf.name}",
                )
            tried.add(id(leaf))


def _linear(graph: Graph, op: Op) -> bool:
    program, metas = rules.leaf_of(op).program, [graph.values[v] for v in op.operands]
    if sum(meta.nbytes for meta in metas) > REAL_BYTES:
        return True

    def gradients() -> list[list[torch.Tensor]]:
        """Gradients of the operands by g, by h, by g + h, and by multiples of g."""
        operands = [torch.zeros(meta.shape, dtype=meta.dtype) for meta in metas]
        for x in operands:
            if x.dtype.is_floating_point:
                x.normal_().requires_grad_()
        results = [x for x in program(operands) if x.requires_grad]
        g, h = ([torch.randn_like(x) for x in results] for _ in range(2))
        given = [g, h, [a + b for a, b in zip(g, h, strict=True)]]
        given += [[x * scale for x in g] for scale in SCALES]
        flowing = [x for x in operands if x.requires_grad]
        return [
            [x.float() for x in torch.autograd.grad(
                results, flowing, some, retain_graph=True, materialize_grads=True
            )]
            for some in given
        ]  # fmt: skip

    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            of_g, of_h, of_both, *of_scaled = in_plain_thread(gradients, grad=True)
    except Exception:  # noqa: BLE001 - the user's own; it need not run on the CPU
        return True
    pairs = [(both, g + h) for both, g, h in zip(of_both, of_g, of_h, strict=True)]
    for scale, scaled in zip(SCALES, of_scaled, strict=True):
        pairs += [(x / scale, g) for x, g in zip(scaled, of_g, strict=True)]
    finite = all(x.isfinite().all() for pair in pairs for x in pair)
    return not finite or not any(
        (x - y).abs().max() > NONLINEAR * y.abs().max() for x, y in pairs if y.numel()
    )


Outcome = tuple[tuple[Any, ...], list[torch.Tensor], Any, tuple[str, ...]]


def _outcome(program: Program, tensors: Sequence[torch.Tensor]) -> Outcome:
    """One run: (leaves of the output as in `Probe`, the new tensors, the spec, buffers written).
    Raises `LeafError` for a write to an argument, results of other types, or none."""
    count = len(tensors) - len(program.state)
    state = dict(zip(program.state, tensors[count:], strict=True))
    versions = [x._version for x in tensors]
    output, after = program.run(tensors[:count], state)
    changed = [x._version != version for x, version in zip(tensors, versions, strict=True)]
    if True in changed[:count]:
        raise LeafError(
            f"{program.name} writes to its argument {changed.index(True)}; write to a copy of it, "
            "or return the new value"
        )
    written = tuple(
        name
        for name, touched in zip(program.state, changed[count:], strict=True)
        if touched or after[name] is not state[name]
    )
    numbers = {id(x): k for k, x in enumerate(tensors)}
    leaves, spec = pytree.tree_flatten(output)
    described: list[Any] = []
    outputs: list[torch.Tensor] = []
    for leaf in leaves:
        if id(leaf) in numbers:
            described.append(Operand(numbers[id(leaf)]))
        elif isinstance(leaf, torch.Tensor):
            outputs.append(leaf)
            described.append(TensorLike.of(leaf))
        elif isinstance(leaf, PLAIN):
            described.append(leaf)
        else:
            raise LeafError(
                f"{program.name} gives a {type(leaf).__name__}; legal in a leaf's results: "
                "tensors, numbers, strings and None, in tuples, lists, dicts and dataclasses that "
                "torch.utils._pytree knows"
            )
    if not outputs and not written:
        raise LeafError(f"{program.name} makes no tensor; a leaf is there for those it makes")
    outputs += [after[name] for name in written]
    return tuple(described), outputs, spec, written


class _KernelCounter(TorchDispatchMode):
    """Counts kernels and the bytes that they read and write: `taken` of each of `tensors`,
    `nbytes` of all others; `random`: whether one draws random numbers."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels = self.nbytes = 0
        self.taken = [0] * len(tensors)
        self.numbers = {_storage(x): k for k, x in enumerate(tensors)}
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
                number = self.numbers.get(_storage(x))
                if number is None:
                    self.nbytes += x.nbytes
                else:
                    self.taken[number] += x.nbytes
        self.random = self.random or torch.Tag.nondeterministic_seeded in func.tags
        return result


def _launches(func: Any, result: Any) -> bool:
    """Whether an operator launches a kernel: views, allocations and queries of metadata (a tensor's
    device) don't."""
    if func.namespace == "prim" or func._schema.name.split("::")[1] in ALLOCATIONS:
        return False
    returns = func._schema.returns
    info = returns[0].alias_info if returns else None
    outputs = any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(result))
    return outputs and (info is None or info.is_write)


def _storage(x: torch.Tensor) -> int:
    return int(x.untyped_storage()._cdata)

"""Records what a rank does: collectives and messages, memory, floating-point operations.

All of it passes torch's dispatcher, fake tensors or real ones, so that the same recorder writes the
log of a rehearsal and that of a real run.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from meshwright.executor import stand_in
from meshwright.executor.checkpoint import SavedTensor
from meshwright.executor.devices import HOST, has_streams
from meshwright.executor.prices import Prices
from meshwright.executor.ranks import OBJECTS, progress
from meshwright.executor.rehearsal.events import Event, Kind, RankLog
from meshwright.executor.rehearsal.memory import Memory

_ATEN = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_LEAVES = 2**63  # autograd's count at its accumulation of gradients
_SENDS, _RECEIVES = ("send",), ("recv_", "recv_any_source_")
_BROADCASTS = ("broadcast_",)
_OUT_FIRST = ("_allgather_base_", "_reduce_scatter_base_", "alltoall_base_")  # (out, in, group)


def _flash(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(q.shape, *_repeated(q, k, v)))


def _flash_backward(grad: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad.shape, q.shape, *_repeated(q, k, v)))


def _repeated(q: Any, *operands: Any) -> list[tuple[int, ...]]:
    """The shapes of keys and values for each head of the queries, which may share them."""
    return [(*x.shape[:1], q.shape[1], *x.shape[2:]) for x in operands]


# of CPUs, and with keys that heads share, which torch's counter leaves out
_MORE_FLOPS: Mapping[Any, Callable[..., int]] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _flash,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _flash_backward,
    _ATEN._scaled_dot_product_flash_attention: _flash,
    _ATEN._scaled_dot_product_flash_attention_backward: _flash_backward,
}


def _flops(packet: Any, args: Any, kwargs: Any, result: Any) -> int:
    if packet in _MORE_FLOPS:
        return _MORE_FLOPS[packet](*args, **kwargs)
    return int(flop_registry[packet](*args, **kwargs, out_val=result))


class Recorder(TorchDispatchMode):
    """Records inside `with`."""

    def __init__(
        self,
        device: torch.device = HOST,
        prices: Prices | None = None,
        known: stand_in.Known | None = None,
    ) -> None:
        """Recorder of a rank on a device; other devices are not counted. Operators of a step get
        `prices`, where there are any. In a rehearsal, `fakes`, the mode of its tensors, answers and
        extends what is `known` of operators."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = known
        self.fakes = stand_in.KnownFakes(known.results) if known is not None else None
        self.counted: dict[stand_in.Key, int] = {}  # FLOPs of operators with fake tensors
        self.took: dict[stand_in.Key, tuple[float, float]] = {}  # seconds of the same
        self.device = device
        self.events: list[Event] = []
        self.memory = Memory(device)
        self.flops: Counter[str] = Counter()
        self.step = 0, 0  # events of a step
        self.saved: tuple[SavedTensor, ...] = ()
        self.unrun: dict[str, str] = {}  # leaves, and why
        self.block = ""  # that runs
        self.forwards: list[tuple[int, str]] = []  # (autograd's count at its start, block)
        self.unawaited = 0  # receives
        self.prices = prices
        self.priced = False  # while a step runs
        self.device_s = self.host_s = 0.0  # of operators since the last event
        self.awaited: dict[Any, int] = {}  # group -> its collectives that the rank waited for

    def log(self, rank: int) -> RankLog:
        """Log of the rank."""
        peak, by_kind = self.memory.peak()
        return RankLog(
            rank=rank,
            events=tuple(self.events),
            races=tuple(stand_in.ORDER.races) if has_streams(self.device) else (),
            peak_bytes=peak,
            peak_by_kind=by_kind,
            saved_by_block={block: n for block, n in self.memory.saved.items() if n},
            flops=dict(self.flops),
            step=self.step,
            saved=self.saved,
            unrun=dict(self.unrun),
        )

    def enter(self, block: str) -> None:
        """The forward of a block begins, or ("") an instruction has ended."""
        self.block = block
        self.memory.enter(block)
        if block and torch.is_grad_enabled():
            self.forwards.append((torch._C._autograd._get_sequence_nr(), block))

    def _follow_backward(self) -> None:
        """Have `block` be the one whose backward runs, if any: that of autograd's node."""
        node = torch._C._current_autograd_node()
        if node is not None and (count := node._sequence_nr()) < _LEAVES:
            k = bisect_right(self.forwards, count, key=lambda x: x[0]) - 1
            self.block = self.forwards[k][1] if k >= 0 else ""

    def wait(self, receives: int | None = None, older: int = 0) -> None:
        """The rank waits here for so many posted receives, or for all, behind `older` ones."""
        count = self.unawaited - older if receives is None else receives
        self.flush()
        if count:
            where = str(progress.activity)
            self.events.append(Event(kind=Kind.WAIT, count=count, older=older, where=where))
            self.unawaited -= count

    @contextmanager
    def pricing(self, on: bool = True) -> Iterator[None]:
        """Context in which operators are priced, or not."""
        self.flush()
        before, self.priced = self.priced, on and self.prices is not None
        try:
            yield
            self.flush()
        finally:
            self.priced = before

    def flush(self) -> None:
        """Write down the operators since the last event."""
        if self.device_s or self.host_s:
            self.events.append(
                Event(
                    kind=Kind.WORK,
                    device_s=self.device_s,
                    host_s=self.host_s,
                    where=str(progress.activity),
                )
            )
            self.device_s = self.host_s = 0.0

    def _price(
        self, func: Any, args: Sequence[Any], result: Any, flops: int, key: stand_in.Key | None
    ) -> None:
        """Add an operator's seconds, after waits of its stream for collectives."""
        assert self.prices is not None
        for group, before in (
            self.awaited.items() if stand_in.ORDER.current is stand_in.ORDER.default else ()
        ):
            stream = stand_in.ORDER.of_group[group]
            done = stand_in.ORDER.default.clock.get(stream.stream_id, 0)
            if done > before:
                self.flush()
                remaining_s = stream.clock[stream.stream_id] - done
                self.events.append(Event(kind=Kind.AWAIT, group=group, count=remaining_s))
                self.awaited[group] = done
        took = self.took.get(key) if key is not None else None
        if took is None:
            took = self.prices.operator(func, args, result, flops)
            if key is not None:
                self.took[key] = took
        device_s, host_s = took
        self.device_s += device_s
        self.host_s += host_s

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the wrapper that says so takes its time

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:  # about half of all calls
            return args[0].fake_device
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            group, operands = self._communicates(func, args)
            result = func(*args, **kwargs)
            if group is not None and stand_in.ORDER.followed:
                self._transfer(func.overloadpacket.__name__, group, args, operands, result)
            return result
        key, result = self._run(func, args, kwargs)
        results = [result] if type(result) is FakeTensor else _tensors(result)
        for x in results:
            self.memory.see(x)
        flops = self._measure(func, args, kwargs, result, key)
        if self.priced:
            self._price(func, args, result, flops, key)
        if stand_in.ORDER.followed:
            self._queue(func, args, kwargs, results)
        return result

    def _run(self, func: Any, args: Sequence[Any], kwargs: Any) -> tuple[stand_in.Key | None, Any]:
        """An operator's result, and its key, if it has fake tensors alone."""
        fakes = self.fakes
        key = fakes.key(func, args, kwargs) if fakes is not None else None
        if fakes is None or key is None:
            return None, func(*args, **kwargs)
        result = fakes.known(key, args)
        if result is stand_in.NOT_KNOWN:
            result = fakes.worked_out(key, args, kwargs)
        return key, result

    def _queue(self, func: Any, args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> None:
        """Follow the order of work on the stand-in's streams."""
        operands = stand_in.operands_of(func, args, kwargs)
        results = [x for x in results if x.device.type == self.device.type]
        if func.overloadpacket.__name__ in stand_in.ALLOCATE:
            stand_in.ORDER.allocated(results)
        elif operands is not None and (
            results or func._schema.is_mutable
        ):  # else it reads no values
            stand_in.ORDER.queued(partial(self._said, str(func)), operands, results)

    def _transfer(
        self,
        name: str,
        group: Any,
        args: Sequence[Any],
        tensors: Sequence[torch.Tensor],
        result: Any,
    ) -> None:
        """The same of a collective or message. Raises MixedDevicesError for tensors elsewhere."""
        what = f"{name} of {group[0]!r}"
        every = _tensors(args)
        for x in every:
            if x.device.type != self.device.type:
                raise stand_in.MixedDevicesError(
                    f"{what} is given a tensor of shape {list(x.shape)} on {x.device}"
                )
        only_reads = len(every) > len(tensors) or name in _SENDS
        reads = {id(x) for x in tensors} if only_reads else set()
        operands = [(f"a tensor {list(x.shape)}", x, id(x) not in reads) for x in every]
        work = dist.Work.unbox(result[-1] if isinstance(result, (list, tuple)) else result)
        stand_in.ORDER.transferred(partial(self._said, what), operands, group, work)

    def _said(self, what: str) -> str:
        return f"{progress.activity}, block {self.block}: {what}"

    def _measure(
        self, func: Any, args: Any, kwargs: Any, result: Any, key: stand_in.Key | None
    ) -> int:
        """Count an operator's FLOPs, which it returns."""
        packet = func.overloadpacket
        if packet not in flop_registry and packet not in _MORE_FLOPS:
            return 0
        count = self.counted.get(key) if key is not None else None
        if count is None:
            count = _flops(packet, args, kwargs, result)
            count = count // 2 if _is_causal(func, args, kwargs) else count
            if key is not None:
                self.counted[key] = count
        self.flops[str(packet)] += count
        return count

    def _communicates(self, func: Any, args: Sequence[Any]) -> tuple[Any, list[torch.Tensor]]:
        """Returns the group, None where it isn't recorded, and the tensors that are sent, or
        received into."""
        groups = enumerate(map(_group, args))
        place, group = next(((k, g) for k, g in groups if g is not None), (0, None))
        if group is None or group.group_desc == OBJECTS:
            return None, []
        name = func.overloadpacket.__name__
        ranks = tuple(dist.get_process_group_ranks(group))
        known = group.group_desc, ranks
        operands = args[1] if name in _OUT_FIRST else args[0]
        tensors = _tensors(operands)
        self._follow_backward()
        kind, root, peer, tag = Kind.COLLECTIVE, None, None, 0
        if name in _SENDS or name in _RECEIVES:
            kind = Kind.SEND if name in _SENDS else Kind.RECEIVE
            peer, tag = ranks[args[place + 1]], args[place + 2]
        elif name in _BROADCASTS:
            root = ranks[args[place + 1]]
        self.unawaited += kind is Kind.RECEIVE
        self.memory.communicated(_tensors(args))
        self.flush()
        if kind is Kind.COLLECTIVE and stand_in.ORDER.followed:
            self.awaited.setdefault(known, 0)
        self.events.append(
            Event(
                kind=kind,
                operation=name,
                group=known,
                shapes=tuple(tuple(x.shape) for x in tensors),
                dtype=str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
                nbytes=sum(x.numel() * x.dtype.itemsize for x in tensors),
                root=root,
                peer=peer,
                tag=tag,
                stream=stand_in.ORDER.name if stand_in.ORDER.followed else "",
                where=str(progress.activity),
                block=self.block,
            )
        )
        return known, tensors

    @contextmanager
    def following_resizes(self) -> Iterator[None]:
        """Context in which memory that is freed and taken again under a tensor (`fully_shard`) is
        followed: no operator passes the dispatcher then."""
        storages: Any = torch.UntypedStorage  # whose method is replaced
        resize = storages.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self.memory.resized(storage)
            return result

        storages.resize_ = resized
        try:
            yield
        finally:
            storages.resize_ = resize


def _is_causal(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a fused attention leaves out the keys after each query: half of all, which kernels
    skip and torch's counter doesn't."""
    names = [x.name for x in func._schema.arguments]
    if "is_causal" not in names:
        return False
    place = names.index("is_causal")
    return bool(args[place] if place < len(args) else kwargs.get("is_causal", False))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def _group(x: Any) -> Any:
    """The process group in an argument of torch's communication operators; None for others."""
    if isinstance(x, dist.ProcessGroup):
        return x
    if isinstance(x, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(x)
        except (RuntimeError, TypeError):
            return None  # a reduction, or another object
    return None

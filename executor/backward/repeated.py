"""Recompute in a lowered graph: nodes that run again once the backward asks for what they made.

Of repeated nodes neither the results are held nor what their operators keep for themselves. In
place of each such tensor autograd is given a note (by hooks on what it saves) of the node that made
it; the tensors that those nodes read from others are held instead. The first note that is read has
the nodes run again that notes are of, and those before them, once: nothing else of the block is.

A gather is begun with the block's backward, if what it reads is held, and waited for by the first
note of it that is read: what lies between hides it where communication has streams of its own. A
product that puts its weight's gradient off reads its input when that is computed (`later`). What is
held may go to host memory meanwhile (`away.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from meshwright.executor.backward.away import Saved, packer, unpack
from meshwright.executor.host_values import window_on


@dataclass(frozen=True, slots=True)
class _Note:
    """Stands for a tensor that a repeated node made: a window on one of its results (`packed`: of
    what its operators save, in order)."""

    node: fx.Node
    index: int
    packed: bool
    window: tuple[Any, ...]  # offset, shape, strides
    dtype: torch.dtype
    grad: bool

    @property
    def key(self) -> _Key:
        return self.node, self.index, self.packed


_Key: TypeAlias = tuple[fx.Node, int, bool]
_Held: TypeAlias = torch.Tensor | Saved | _Note


@runtime_checkable
class Gather(Protocol):
    """A module that may gather again what it gathered in the forward."""

    @property
    def gathers(self) -> bool: ...

    def start(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start it; what is returned waits for it."""


@dataclass(frozen=True, slots=True)
class Later:
    """A tensor to read after its graph's backward."""

    of: _Pass
    note: _Note

    def start(self) -> None:
        """Start to gather it."""
        self.of.start([self.note.node])

    def read(self) -> torch.Tensor:
        return self.of.tensor(self.note)


def later(t: torch.Tensor) -> Later | None:
    """Note of an operand that only the backward's end reads; None where autograd holds it as it
    is."""
    running = _RUNNING.get()
    return running.later(t) if running is not None else None


def repeated(module: fx.GraphModule, again: Collection[fx.Node]) -> fx.GraphModule:
    """The graph with `again` of its nodes run again in the backward."""
    if not again:
        return module
    outer = fx.Graph()
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    outer.output(
        outer.call_module("part", tuple(outer.placeholder(n.target) for n in placeholders))
    )
    return fx.GraphModule({"part": Repeated(module, again)}, outer)


class Repeated(nn.Module):
    """Runs a graph, and `again` of its nodes again in the backward."""

    def __init__(self, graph: fx.GraphModule, again: Collection[fx.Node]) -> None:
        super().__init__()
        self.graph = graph
        self.again = frozenset(node.name for node in again)

    def forward(self, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.graph(*args)
        if torch.compiler.is_compiling():  # a compiler plans the backward: it may repeat all
            return checkpoint(self.graph, *args, use_reentrant=False, preserve_rng_state=False)
        return _Pass(self.graph, self.again).run(*args)


class _Pass(fx.Interpreter):
    """One forward of a graph, and what it takes to repeat its nodes."""

    def __init__(self, graph: fx.GraphModule, again: frozenset[str]) -> None:
        super().__init__(graph)
        self.again = again
        self.leaving = {node.name for node in graph.graph.output_node().all_input_nodes}
        self.made: dict[int, tuple[StorageWeakRef, fx.Node, int]] = {}  # by address of the storage
        self.operands: dict[fx.Node, Any] = {}
        self.pack = packer()
        self.parts: dict[
            fx.Node, torch.Tensor | Saved
        ] = {}  # that gathers read, and nothing makes again
        self.early: list[fx.Node] = []  # gathers to begin with the backward
        self.begun: dict[fx.Node, Callable[[], torch.Tensor]] = {}
        self.asked: set[_Key] = set()  # what autograd holds notes of
        self.put_off: set[_Key] = set()  # what is read later
        self.running: tuple[fx.Node, set[int]] | None = None
        self.count = 0
        self.found: dict[_Key, torch.Tensor] = {}

    def run(self, *args: Any, **options: Any) -> Any:
        token = _RUNNING.set(self)
        try:
            with saved_tensors_hooks(self._noted, self._read):
                result = super().run(*args, **options)
        finally:
            _RUNNING.reset(token)
        self.env.clear()
        self.args_iter = iter(())  # what was given may go away
        early, needed = self._needed(self.asked), self._needed(self.asked | self.put_off)
        self.operands = {n: operand for n, operand in self.operands.items() if n in needed}
        for node in [n for n, operand in self.operands.items() if self._gathers(n, operand)]:
            self.parts[node] = self.operands.pop(node)[0][0]
            self.early += [node] * (node in early)
        self.made.clear()
        return result

    def _needed(self, asked: Collection[_Key]) -> set[fx.Node]:
        """The nodes to run again for what is asked for."""
        needed = {node for node, *_ in asked}
        for node in reversed(self.operands):
            if node in needed:
                needed.update(note.node for note in _notes(self.operands[node]))
        return needed

    def _gathers(self, node: fx.Node, operands: Any) -> bool:
        """Whether a node gathers what is held."""
        module = self.fetch_attr(str(node.target)) if node.op == "call_module" else None
        return isinstance(module, Gather) and module.gathers and not _notes(operands)

    def run_node(self, n: fx.Node) -> Any:
        if n.name not in self.again:
            return super().run_node(n)
        operands = self.fetch_args_kwargs_from_env(n)
        self.operands[n] = tree_map_only(torch.Tensor, self._held, operands)
        read = {_address(t) for t in tree_leaves(operands) if isinstance(t, torch.Tensor)}
        self.running, self.count = (n, read), 0
        result = super().run_node(n)
        self.running = None
        if n.name in self.leaving:  # held anyway
            return result
        for k, t in enumerate(tree_leaves(result)):
            if isinstance(t, torch.Tensor) and _address(t) not in read | self.made.keys():
                self.made[_address(t)] = StorageWeakRef(t.untyped_storage()), n, k
        return result

    # --- forward ---

    def _noted(self, t: torch.Tensor) -> _Held:
        """Autograd's stand-in for a tensor that it saves."""
        if self.running is not None:
            node, read = self.running
            self.count += 1
            if _address(t) not in read | self.made.keys():
                note = _Note(node, self.count - 1, True, (), t.dtype, False)
                self.asked.add(note.key)
                return note
        held = self._held(t)
        if isinstance(held, _Note):
            self.asked.add(held.key)
        return t if isinstance(held, torch.Tensor) else held

    def _held(self, t: torch.Tensor) -> _Held:
        if _address(t) not in self.made:
            held = t if self.pack is None else self.pack(t)
            return held if held is not t else t.detach().requires_grad_(t.requires_grad)
        _, node, k = self.made[_address(t)]
        window = t.storage_offset(), t.shape, t.stride()
        return _Note(node, k, False, window, t.dtype, t.requires_grad)

    def later(self, t: torch.Tensor) -> Later | None:
        held = self._held(t)
        if not isinstance(held, _Note):
            return None
        self.put_off.add(held.key)
        return Later(self, held)

    # --- backward ---

    def start(self, nodes: Collection[fx.Node]) -> None:
        """Start the gathers among these nodes that are not under way."""
        for node in [n for n in nodes if n in self.parts]:
            with torch.no_grad():
                self.begun[node] = self.fetch_attr(str(node.target)).start(
                    unpack(self.parts.pop(node))
                )

    def _read(self, held: _Held) -> torch.Tensor:
        if self.early:
            self.start(self.early)
            self.early = []
        return self.tensor(held) if isinstance(held, _Note) else unpack(held)

    def tensor(self, note: _Note) -> torch.Tensor:
        """Tensor of a note; the first one that is read runs the operators again."""
        if note.key not in self.found:
            self.start([note.node])
            if note.node in self.begun:
                with torch.no_grad():
                    self.found[note.key] = self.begun.pop(note.node)()
            else:
                self._repeat()
        kept_tensor = self.found[note.key]
        if note.packed:
            return kept_tensor
        with torch.no_grad():
            window = window_on(kept_tensor, note.dtype, note.window)
        return window.requires_grad_(note.grad)

    def _repeat(self) -> None:
        """Run the nodes again, each by itself; what is not read any more is let go."""
        last = {note.key: n for n, operand in self.operands.items() for note in _notes(operand)}
        asked = self.asked | self.put_off
        for node, operands in self.operands.items():
            operands = tree_map_only(Saved, Saved.read, operands)
            args, kwargs = tree_map_only(_Note, self.tensor, operands)
            packed: list[torch.Tensor] = []
            with torch.enable_grad(), saved_tensors_hooks(_into(packed), _unread):
                result = getattr(self, node.op)(node.target, args, kwargs)
            tensors = {(node, k, False): t for k, t in enumerate(tree_leaves(result))}
            tensors |= {(node, k, True): t for k, t in enumerate(packed)}
            wanted = asked | last.keys()
            self.found |= {key: t.detach() for key, t in tensors.items() if key in wanted}
            del result, tensors, packed
            for note in _notes(operands):
                if last[note.key] is node and note.key not in asked:
                    self.found.pop(note.key, None)
        self.operands.clear()


_RUNNING: ContextVar[_Pass | None] = ContextVar("the forward that runs", default=None)


def _notes(operands: Any) -> list[_Note]:
    return [held for held in tree_leaves(operands) if isinstance(held, _Note)]


def _address(t: torch.Tensor) -> int:
    address: int = t.untyped_storage()._cdata
    return address


def _into(packed: list[torch.Tensor]) -> Callable[[torch.Tensor], None]:
    """Takes what is saved without its graph, which holds the list: none would ever be freed."""

    def pack(t: torch.Tensor) -> None:
        packed.append(t.detach())

    return pack


def _unread(_: None) -> torch.Tensor:
    raise AssertionError("no backward runs through what was repeated")

"""Live bytes of tensors' memory by weak references, and their peak by kind.

An allocation is known when an operator returns a tensor over it, and released when torch releases
it. What it was for is often known only later (a gradient becomes one when the step delivers it), so
that allocations and releases are kept in order, and the peak is told apart at the end. What a
block's forward made and outlives it, is saved for its backward.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from meshwright.executor.devices import HOST

SAVED, TRANSIENT = "saved activations", "transient"
BUFFERS = "buffers of collectives"
REST = ""  # what nobody named: saved if a block's forward made it and left it, else transient


class Memory:
    """Follows the memory of tensors on one kind of device."""

    def __init__(self, device: torch.device = HOST) -> None:
        self.sizes: list[list[int]] = []  # of each allocation, [bytes now]
        self.kinds: list[str] = []
        self.changes: list[tuple[int, int]] = []  # (allocation, bytes more or less), in order
        self.numbers: dict[int, int] = {}  # memory's identity -> allocation
        self.held: set[int] = set()  # allocations that were not released
        self.began = 0
        self.device = device.type
        self.places: list[int] = []  # of each allocation, the place where it was made
        self.entered: list[tuple[str, int]] = [("", 0)]  # block, or none; changes before it
        self.ended: int | None = None
        self.saved: Counter[str] = Counter()  # bytes at the peak by block
        self._references: dict[int, Any] = {}

    def see(self, x: torch.Tensor, kind: str = REST) -> None:
        """Take note of a tensor's memory, the first time that it is seen. That of a DTensor is its
        local tensor's, which is seen by itself."""
        if x.device.type != self.device or is_traceable_wrapper_subclass(x):
            return
        storage = x.untyped_storage()
        identity = storage._cdata
        if identity in self.numbers:
            return
        number = len(self.sizes)
        self.numbers[identity] = number
        self.held.add(number)
        nbytes = storage.nbytes()
        self.sizes.append([nbytes])
        self.kinds.append(kind)
        self.places.append(len(self.entered) - 1)
        self.changes.append((number, nbytes))
        self._references[identity] = weakref.ref(storage, self._released(identity, number))

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Memory that was seen has another size from now on."""
        number = self.numbers.get(storage._cdata)
        if number is None:
            return
        now, before = storage.nbytes(), self.sizes[number][0]
        if now != before:
            self.sizes[number][0] = now
            self.changes.append((number, now - before))

    def number(self, x: torch.Tensor) -> int:
        """The allocation of a tensor; -1 for those that are not followed."""
        return self.numbers.get(x.untyped_storage()._cdata, -1)

    def name(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Say what the memory of tensors is for."""
        for x in tensors:
            self.see(x)
            if (number := self.number(x)) >= 0:
                self.kinds[number] = kind

    def communicated(self, tensors: Iterable[torch.Tensor]) -> None:
        """Tensors are given to a collective or message, or received."""
        for x in tensors:
            self.see(x)
            if (number := self.number(x)) >= 0 and not self.kinds[number]:
                self.kinds[number] = BUFFERS

    def enter(self, block: str) -> None:
        """A block's forward begins, or (empty) has ended."""
        self.entered.append((block, len(self.changes)))

    def begin(self) -> None:
        """The peak is that of what follows."""
        self.began = len(self.changes)

    def end(self) -> None:
        """The peak is that of what came before."""
        self.ended = len(self.changes)

    def peak(self) -> tuple[int, dict[str, int]]:
        """Bytes at the peak between `begin` and `end`, and by kind."""
        now, highest, at = 0, 0, self.began
        for k, (_, change) in enumerate(self.changes[: self.ended]):
            now += change
            if k + 1 >= self.began and now > highest:
                highest, at = now, k + 1
        by_kind: Counter[str] = Counter()
        self.saved.clear()
        for number, change in self.changes[:at]:
            kind, block = self._kind_at(number, at)
            by_kind[kind] += change
            if block:
                self.saved[block] += change
        return highest, {kind: n for kind, n in by_kind.items() if n}

    def _kind_at(self, number: int, at: int) -> tuple[str, str]:
        """Kind of an allocation after so many changes, and the block that saved it."""
        kind, place = self.kinds[number], self.places[number]
        if kind not in (REST, BUFFERS):
            return kind, ""
        block = self.entered[place][0]
        entered_next = place + 1 < len(self.entered) and self.entered[place + 1][1] < at
        return (SAVED, block) if block and entered_next else (kind or TRANSIENT, "")

    def _released(self, identity: int, number: int) -> Callable[[Any], None]:
        def released(_: Any) -> None:
            if self.numbers.get(identity) == number:
                del self.numbers[identity], self._references[identity]
                self.held.discard(number)
                self.changes.append((number, -self.sizes[number][0]))

        return released

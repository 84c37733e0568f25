"""A forward that leaves something in its modules, run a second time on fake tensors.

A trace is one forward, and every step runs it again from the same attributes. That is right where a
second forward, which starts with what the first left, does the same: a mask that is made once, a
tensor kept to be looked at. It is wrong for counters, for flags of a first call, and for tensors of
one step that the next one reads. A tensor attribute that every forward replaces by one of its shape
is carried from step to step as a buffer; the rest is refused with its line.

Calls are compared that depend on inputs, parameters or random draws; those that do not (a mask) may
be made once or always.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.planner.errors import TraceError
from meshwright.planner.tracing.user_module import Held, Key, Watch, calling_place

WAYS_OUT = (
    "A plan is one forward, run at every step. Ways out: keep tensors by register_buffer, which "
    "every forward may write; count, and set attributes, between steps; pass what differs from "
    "step to step in the batch"
)


class _Calls(TorchDispatchMode):
    """Records the calls of one forward that depend on the tensors `known`, and the first use of
    each of `kept`."""

    def __init__(self, known: Iterable[torch.Tensor], kept: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = [*known]  # ids are compared: none is used again
        self.known = {id(x) for x in self.alive}
        self.kept = {id(x) for x in kept}
        self.used: dict[int, str] = {}
        self.calls: list[tuple[Any, str]] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves((args, kwargs))
        operands = [x for x in leaves if isinstance(x, torch.Tensor)]
        made = [x for x in pytree.tree_leaves(output) if isinstance(x, torch.Tensor)]
        self.alive += made
        for x in operands:
            if id(x) in self.kept:
                self.used.setdefault(id(x), calling_place())
        if func.namespace == "prim":  # questions about a tensor
            return output
        random = torch.Tag.nondeterministic_seeded in func.tags
        if random or any(id(x) in self.known for x in operands):
            self.known.update(map(id, made))
            told = [tuple(x.shape) if isinstance(x, torch.Tensor) else repr(x) for x in leaves]
            self.calls.append(((str(func), told), calling_place()))
        return output


def kept_tensors(
    forward: Callable[[], Any], watch: Watch, known: Sequence[torch.Tensor]
) -> frozenset[Key]:
    """The tensor attributes to carry like buffers from one `forward` to the next, whose inputs and
    parameters are `known`. Raises TraceError where a second forward would not do what the first
    did."""
    start = Held(watch.holders)
    with _Calls(known) as first:
        forward()
    left = Held(watch.holders)
    tensors = {id(x): key for key in start.changed(left) for x in left.tensors.get(key, [])}
    kept = [x for held in left.tensors.values() for x in held if id(x) in tensors]
    with _Calls(known, kept) as second:
        forward()
    again = Held(watch.holders)
    carried: set[Key] = set()
    for number, place in second.used.items():
        key = tensors[number]
        x = next(x for x in kept if id(x) == number)
        if number not in first.known:
            continue  # the same in every forward
        if x.requires_grad:
            raise _refusal(watch, key, place, "carries a gradient: detach() it")
        if start.values.get(key) != left.values[key] or left.values[key][:1] != ("tensor",):
            raise _refusal(watch, key, place, "is read by the next one")
        carried.add(key)
    if carried:
        return frozenset(carried)
    for key in start.changed(left) | left.changed(again):
        if key not in watch.written_first and left.values.get(key) != again.values.get(key):
            raise _refusal(watch, key, None, "would be another after the next one")
    for (call, place), (other, _) in zip(first.calls, second.calls, strict=False):
        if call != other:
            raise _other_course(start.changed(left), watch, place)
    if len(first.calls) != len(second.calls):
        longer = max(first.calls, second.calls, key=len)
        raise _other_course(
            start.changed(left), watch, longer[min(len(first.calls), len(second.calls))][1]
        )
    return frozenset()


def name_of(key: Key) -> str:
    """An attribute as users write it."""
    return ".".join(part for part in key if part)


def _refusal(watch: Watch, key: Key, used: str | None, why: str) -> TraceError:
    at = f", read at {used}," if used else ""
    return TraceError(
        f"at {watch.place(key)} the forward leaves something in the attribute "
        f"{name_of(key)!r} which{at} {why}. {WAYS_OUT}"
    )


def _other_course(changed: Iterable[Key], watch: Watch, place: str) -> TraceError:
    key = min(changed)
    return TraceError(
        f"at {watch.place(key)} the forward changes the attribute {name_of(key)!r}, and at "
        f"{place} a second forward takes another course. {WAYS_OUT}"
    )

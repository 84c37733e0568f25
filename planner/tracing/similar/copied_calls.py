"""Copies of a traced layer's operators, for the similar layers that were not traced.

In the exported program, marks enclose the calls of the first, the second and the last layer of a
group (`stand_ins.py`), and `repeated` nodes stand for those between. Between two marks the
converter makes operators as ever; at a `repeated` node those of the second layer are appended
again, with

    an input            -> the same input of this call
    an own parameter    -> the parameter of that name in this layer, buffers alike
    a result            -> a new value
    a constant          -> the same where the first and second layer share it, else a new one
    anything else       -> itself

At the end the three traced calls must prove to be one program under that renaming, and nothing may
have passed a call's border other than inputs and outputs: no write, no alias, no value read from
outside. Otherwise `Irregular` is raised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from meshwright.costmodel.graph import Op, Ref, map_refs
from meshwright.costmodel.memo import Memo
from meshwright.planner.tracing.similar.stand_ins import ENTER, LEAVE, REPEATED, Irregular
from meshwright.planner.tracing.user_module import SimilarLayers
from meshwright.planner.tracing.values import TracedState

MARKS = (ENTER, LEAVE, REPEATED)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TracedCall:
    """A traced call of a member: operators `start` to `stop` (exclusive) of the graph, its input
    values, its outputs (none until its `leave` mark), and the `outer` slots from before it."""

    member: str
    start: int
    inputs: tuple[str, ...]
    outer: frozenset[str]
    stop: int = 0
    outputs: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class _CanonicalCall:
    """A call in names that do not depend on the layer: a line for each operator, the layer's
    tensors (value -> path below it), and the values from outside in order of use."""

    lines: list[str] = field(default_factory=list)
    parameters: dict[str, str] = field(default_factory=dict)
    buffers: dict[str, str] = field(default_factory=dict)
    outside: list[str] = field(default_factory=list)


class CopiedCalls:
    """The calls of similar layers in a graph that is being built, and their copies."""

    def __init__(
        self, state: TracedState, model: nn.Module, groups: Sequence[SimilarLayers]
    ) -> None:
        self.state, self.builder, self.slots = state, state.builder, state.slots
        self.model = model
        self.groups = {name: group for group in groups for name in group.members}
        self.calls: dict[str, _TracedCall] = {}
        self.open: _TracedCall | None = None
        self.copies: dict[str, list[str]] = {}  # spared member -> the slots it makes
        self.programs = Memo[str, _CanonicalCall]()
        self.copied_results: set[str] = set()

    def mark(
        self, target: Any, operands: Sequence[Any], member: str, position: int = 0
    ) -> str | None:
        """Handle a mark on slots; for a `repeated` one, the slot of the result that it stands for.
        Raises `Irregular` for calls that are not closed."""
        if not all(isinstance(x, str) for x in operands):
            raise Irregular(f"{member} meets a value that is no tensor of the graph")
        if target is REPEATED:
            if member not in self.copies:
                self.copies[member] = self._copy(member, self._read(operands))
                self.copied_results.update(self.copies[member])
            return self.copies[member][position]
        if target is ENTER:
            if self.open is not None:
                raise Irregular(f"{member} is called inside of {self.open.member}")
            inputs, start = self._read(operands), len(self.builder.ops)
            outer = frozenset(self.slots.held)
            self.open = _TracedCall(member=member, inputs=inputs, start=start, outer=outer)
        else:
            call, self.open = self.open, None
            if call is None or call.member != member:
                raise Irregular(f"the call of {member} does not end where it began")
            if any(self.slots.root(slot) in call.outer for slot in operands):
                raise Irregular(f"{member} gives a view of its input")
            outputs, stop = self._read(operands), len(self.builder.ops)
            self.calls[member] = replace(call, outputs=outputs, stop=stop)
        return None

    def _read(self, slots: Sequence[str]) -> tuple[str, ...]:
        before = len(self.builder.ops)
        values = tuple(map(self.slots.read, slots))
        if len(self.builder.ops) != before:
            raise Irregular("a layer is given a view of memory that was written to")
        return values

    def check_write(self, slot: str) -> None:
        """Raise `Irregular` where a write passes the border of a call."""
        root = self.slots.root(slot)
        if root in self.copied_results or (self.open is not None and root in self.open.outer):
            raise Irregular("a write passes the border of a layer")

    def _copy(self, member: str, inputs: Sequence[str]) -> list[str]:
        """Append the operators of a spared member; the slots of its results."""
        group = self.groups[member]
        first, second, _ = group.traced
        if first not in self.calls or second not in self.calls or self.open is not None:
            raise Irregular(f"{member} is called before {second} ends")
        call, program = self.calls[second], self._program(second)
        values = self.builder.values
        if any(values[a] != values[b] for a, b in zip(call.inputs, inputs, strict=True)):
            raise Irregular(f"{member} takes other tensors than {second}")
        suffix = f"_copy{group.members.index(member)}"
        names: dict[str, str] = {}
        constants = self.state.constants
        for a, b in zip(self._program(first).outside, program.outside, strict=False):
            if a != b and b in constants:  # the first and second layer do not share it
                names[b] = self.state.constant(b + suffix, constants[b], values[b])
        names |= dict(zip(call.inputs, inputs, strict=True))
        for value, path in program.parameters.items():
            slot = self.state.parameter(f"{member}.{path}", values[value])
            (names[value],) = self._read([slot])
        for value, path in program.buffers.items():
            slot = self.state.buffer(f"{member}.{path}", value + suffix, values[value])
            (names[value],) = self._read([slot])
        for op in self._ops(second):
            module = _moved(op.module, second, member)
            self.builder.repeat(op, names, op.name + suffix, module)
        return [self.slots.new(names[output]) for output in call.outputs]

    def _program(self, member: str) -> _CanonicalCall:
        return self.programs.of(member, lambda: self._canonical(member, self.calls[member]))

    def _canonical(self, member: str, call: _TracedCall) -> _CanonicalCall:
        program, values = _CanonicalCall(), self.builder.values
        tokens: dict[str, str] = {}
        for k, value in enumerate(call.inputs):
            tokens.setdefault(value, f"input {k}")
        parameters: dict[str, str] = {}
        module = self.model.get_submodule(member)
        for path, _ in module.named_parameters(remove_duplicate=False):
            slot = self.state.known_parameter(f"{member}.{path}")
            if slot is not None:
                parameters.setdefault(self.slots.held[slot], path)

        def token(value: str) -> str:
            if value not in tokens:
                fqn = self.state.buffers.get(value, "")
                if value in parameters:
                    program.parameters[value] = parameters[value]
                    tokens[value] = f"parameter {parameters[value]}"
                elif fqn.startswith(f"{member}."):
                    program.buffers[value] = fqn.removeprefix(f"{member}.")
                    tokens[value] = f"buffer {program.buffers[value]}"
                else:
                    tokens[value] = f"outside {len(program.outside)}"
                    program.outside.append(value)
            return tokens[value]

        for k, op in enumerate(self._ops(member)):
            args = map_refs((op.args, op.kwargs), lambda value: Ref(token(value)))
            sizes = [(values[r].shape, values[r].dtype) for r in op.results]
            several, module_path = op.results != (op.name,), _moved(op.module, member, "")
            program.lines.append(repr((op.target, args, sizes, several, module_path, op.source)))
            tokens |= {result: f"result {k} {j}" for j, result in enumerate(op.results)}
        program.lines.append(str([token(value) for value in call.outputs]))
        return program

    def check(self) -> None:
        """Raise `Irregular` unless the traced layers of each group are one program, closed but for
        inputs and outputs."""
        if self.open is not None:
            raise Irregular(f"the call of {self.open.member} does not end")
        apart: list[str] = []
        for group in dict.fromkeys(self.groups.values()):
            if not all(name in self.calls for name in group.traced):
                raise Irregular(f"{group.members[0]} and its like are not all traced")
            first, second, last = (self._program(name) for name in group.traced)
            if first.lines != second.lines == last.lines:  # it takes what no other layer makes
                apart.append(group.traced[0])
                continue
            if self._shared(first, second) != self._shared(second, last):
                raise Irregular(f"{group.traced[0]} and its like share not the same tensors")
            flows = [
                [self.builder.values[r].requires_grad for op in self._ops(name) for r in op.results]
                for name in group.traced[1:]
            ]
            if flows[0] != flows[1]:
                raise Irregular(f"gradients flow otherwise through {group.traced[2]}")
        if apart:
            raise Irregular(f"{apart[0]} computes otherwise than its like", apart)
        self._check_closed()

    def _ops(self, member: str) -> Sequence[Op]:
        call = self.calls[member]
        return self.builder.ops[call.start : call.stop]

    def _shared(self, a: _CanonicalCall, b: _CanonicalCall) -> list[bool]:
        """For each value from outside, whether two calls read the same one. Raises `Irregular`
        where they are not one program up to equal constants."""
        if a.lines != b.lines or len(a.outside) != len(b.outside):
            raise Irregular("two layers that are built alike compute differently")
        constants = self.state.constants
        for x, y in zip(a.outside, b.outside, strict=True):
            known = x in constants and y in constants
            if x != y and not (known and _equal(constants[x], constants[y])):
                raise Irregular(f"two layers that are built alike read {x} and {y}")
        return [x == y for x, y in zip(a.outside, b.outside, strict=True)]

    def _check_closed(self) -> None:
        inside: dict[str, str] = {}
        at: dict[int, str] = {}
        for member, call in self.calls.items():
            at |= dict.fromkeys(range(call.start, call.stop), member)
            results = {r for op in self._ops(member) for r in op.results}
            inside |= dict.fromkeys(results.difference(call.outputs), member)
        for k, op in enumerate(self.builder.ops):
            member_at = at.get(k)
            if any(inside.get(name, member_at) != member_at for name in op.operands):
                raise Irregular(f"{op.key} reads what a layer keeps to itself")


def _moved(module: str, old: str, new: str) -> str:
    inside = module == old or module.startswith(f"{old}.")
    return new + module.removeprefix(old) if inside else module


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)

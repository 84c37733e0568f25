"""Leaves while a model is traced: each call becomes one operator of the exported program,

    leaf(operands, number, ranks, sizes, strides, dtypes) -> results

whose results have the shapes that a probe found (`leaf_probe.py`). Calls that can't be told apart
(equal modules but for their weights, equal arguments but for the values of tensors) share one
`Leaf`, so that equal layers stay equal.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils import _pytree as pytree

from meshwright.costmodel.rules.leaf import LEAF, RANDOM_LEAF, Leaf, Work
from meshwright.planner.errors import Untraceable, around
from meshwright.planner.operators.leaf import Applied, Operand, Program, state_of, to_meta
from meshwright.planner.tracing.leaves.check import check_rule
from meshwright.planner.tracing.leaves.probe import (
    Given,
    LeafError,
    Probe,
    TensorLike,
    apart,
    by_result,
    for_real,
    on_fakes,
)
from meshwright.planner.tracing.similar.stand_ins import Irregular, positions_of
from meshwright.planner.tracing.user_module.hooks import hooked, hooks_in, taken_hooks
from meshwright.planner.tracing.user_module.leaf import TRACE, Amount, Declaration, declared
from meshwright.planner.tracing.user_module.similar_layers import PLAIN, describe

_LIBRARY = torch.library.Library("meshwright", "FRAGMENT")
_SCHEMA = (
    "(Tensor[] operands, int leaf, int[] ranks, int[] sizes, int[] strides, ScalarType[] dtypes) "
    "-> Tensor[]"
)
_LIBRARY.define(LEAF + _SCHEMA)
_LIBRARY.define(RANDOM_LEAF + _SCHEMA, tags=(torch.Tag.nondeterministic_seeded,))
# By class or function: the kinds of calls whose rule was checked in this process (as hashes, which
# keep nothing alive), and why it is taken on trust there
_TRIED: WeakKeyDictionary[Any, dict[int, str]] = WeakKeyDictionary()
OPERATORS = (torch.ops.meshwright.leaf.default, torch.ops.meshwright.random_leaf.default)


def _shapes(
    operands: list[torch.Tensor],
    leaf: int,
    ranks: list[int],
    sizes: list[int],
    strides: list[int],
    dtypes: list[torch.dtype],
) -> list[torch.Tensor]:
    made = []
    at = 0
    for rank, dtype in zip(ranks, dtypes, strict=True):
        part = slice(at, at + rank)
        made.append(
            torch.empty_strided(sizes[part], strides[part], dtype=dtype, device=operands[0].device)
        )
        at += rank
    return made


for _operator in OPERATORS:
    torch.library.register_fake(_operator, _shapes, lib=_LIBRARY)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One kind of call: what makes two of them the same, and what was found out about it. `trust`
    is why its rule is taken on trust, if it is."""

    key: tuple[Any, ...]
    number: int
    program: Program
    probe: Probe
    trust: str


class Leaves:
    """The leaves of one model while it is exported once.

    `kept` are modules, by FQN, that are leaves because they can't be traced otherwise, and why;
    `scale` is the traced batch over the sample batch.
    """

    def __init__(self, model: nn.Module, kept: Mapping[str, str], scale: float) -> None:
        self.model, self.kept, self.scale = model, kept, scale
        self.found: list[Leaf] = []
        self.places: list[str] = []
        self.calls: list[_Call] = []
        self.classes: dict[str, tuple[nn.Module, type]] = {}
        self.hooks: dict[str, dict[str, Any]] = {}  # of the leaves' own modules
        if declared(model) is not None:
            raise ValueError(
                f"leaf: {type(model).__name__} is the whole model, of which nothing would be left "
                "to plan; declare the modules in it that can't be traced"
            )

    # --- the copy ---

    def dress(self, copied: nn.Module, spared: Sequence[str]) -> None:
        """Make the leaves of a copy record their calls; `spared` modules stand in for others."""
        for fqn, original in self.model.named_modules():
            said = declared(original)
            inside = any(fqn == name or fqn.startswith(f"{name}.") for name in spared)
            if inside or (said is None and fqn not in self.kept):
                continue
            module = copied.get_submodule(fqn)
            self._dress(fqn, module, original, said or Declaration())

    def _dress(self, fqn: str, module: nn.Module, original: nn.Module, said: Declaration) -> None:
        cls = type(module)
        if "forward" in vars(module):
            raise LeafError(
                f"{fqn} ({cls.__name__}) has a forward of its own in place of its class's, which "
                "may hold on to the model's own weights; a leaf is run by its class's forward. Way "
                "out: override forward in a subclass"
            )
        self.classes[fqn] = module, cls
        self.hooks[fqn] = taken_hooks(module)  # the leaf's call runs them, not the trace's

        def forward(proxy: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if TRACE.get() is not self:
                return cls.forward(proxy, *args, **kwargs)
            with hooked(module, self.hooks[fqn]):
                return self._module(fqn, module, original, said, args, kwargs)

        # a class, because an attribute would bypass the proxies by which export follows modules
        body = {"forward": forward, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
        module.__class__ = type(cls.__name__, (cls,), body)

    @contextmanager
    def recording(self) -> Iterator[None]:
        token = TRACE.set(self)
        try:
            yield
        finally:
            TRACE.reset(token)

    def undress(self) -> None:
        """After the export: the copy's leaves are what is run, by their own forward."""
        for fqn, (module, cls) in self.classes.items():
            module.__class__ = cls
            vars(module).update(self.hooks[fqn])
        for module, _ in self.classes.values():
            to_meta(module)

    # --- calls ---

    def _module(
        self,
        fqn: str,
        module: nn.Module,
        original: nn.Module,
        said: Declaration,
        args: Any,
        kwargs: Any,
    ) -> Any:
        parts, integers = describe(original)
        watched = positions_of(module)
        known = {place: n for place, n in integers.items() if place not in watched}
        subject = Subject(
            name=type(original).__name__,
            place=fqn,
            function=module,
            module=module,
            kind=type(original),
            identity=(tuple(parts), frozenset(known.items()), hooks_in(original)),
            state=state_of(module),
            weights=state_of(original),
            said=said,
            positions=bool(watched),
        )
        try:
            return self._call(subject, args, kwargs)
        except LeafError as error:
            if fqn not in self.kept:
                raise
            outer = around(fqn)[1:]
            raise Untraceable(str(error), places=outer, why=self.kept[fqn]) from error

    def function(self, subject: Any, args: Any, kwargs: Any) -> Any:
        found = Subject(
            name=subject.__qualname__,
            place="",
            module=None,
            kind=subject,
            identity=("function", subject),
            function=Applied(subject) if isinstance(subject, type) else subject,
            state={},
            weights={},
            said=declared(subject) or Declaration(),
            positions=False,
        )
        return self._call(found, args, kwargs)

    def _call(self, subject: Subject, args: Any, kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        template: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                template.append(Operand(sum(isinstance(x, Operand) for x in template)))
            elif isinstance(leaf, (*PLAIN, enum.Enum)):
                template.append(leaf)
            else:
                raise LeafError(
                    f"{subject.name} is given a {type(leaf).__name__}; legal in a leaf's "
                    "arguments: tensors, numbers, strings, enums and None, in tuples, lists and "
                    "dicts"
                )
        operands = [*tensors, *subject.state.values()]
        if not operands:
            raise LeafError(f"{subject.name} takes no tensor; a leaf works on those it takes")
        likes = tuple(map(TensorLike.of, operands))
        cast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        program = Program(
            name=subject.name,
            function=subject.function,
            module=subject.module,
            leaves=tuple(template),
            spec=spec,
            state=tuple(subject.state),
            dense=tuple(x.is_contiguous() for x in operands),
            autocast=cast,
        )
        key = (
            subject.identity,
            subject.said,
            tuple(map(_comparable, template)),
            spec,
            likes,
            cast,
            torch.is_grad_enabled(),
        )
        call = next((c for c in self.calls if c.key == key), None)
        if call is None:
            call = self._new(key, program, likes, subject)
        return self._apply(call, operands, subject)

    def _apply(self, call: _Call, operands: list[torch.Tensor], subject: Subject) -> Any:
        """The call's operator, and its results in the place of the forward's own."""
        names = {name: k for k, name in enumerate(subject.state)}
        first = len(operands) - len(subject.state)
        likes = [*call.probe.made]
        likes += [TensorLike.of(operands[first + names[name]]) for name in call.probe.written]
        made = iter(
            OPERATORS[call.probe.random is not False](  # seeded where nobody knows
                operands,
                call.number,
                [len(x.shape) for x in likes],
                [n for x in likes for n in x.shape],
                [n for x in likes for n in x.stride],
                [x.dtype for x in likes],
            )
        )
        leaves: list[Any] = []
        for leaf in call.probe.leaves:
            if isinstance(leaf, TensorLike):
                tensor = next(made)
                flows = leaf.requires_grad or not tensor.requires_grad
                leaves.append(tensor if flows else tensor.detach())
            else:
                leaves.append(operands[leaf.operand] if isinstance(leaf, Given) else leaf)
        with torch.no_grad():
            for name in call.probe.written:
                subject.state[name].copy_(next(made))
        return pytree.tree_unflatten(leaves, call.probe.spec)

    # --- what is found out once ---

    def _new(
        self,
        key: tuple[Any, ...],
        program: Program,
        likes: tuple[TensorLike, ...],
        subject: Subject,
    ) -> _Call:
        probe = self._probe(program, likes, subject)
        flows = tuple(x.requires_grad for x in probe.made)
        program = replace(
            program, written=probe.written, gradients=flows, unseen=subject.said.result is not None
        )
        same = sum(leaf.name == subject.name for leaf in self.found)
        said = subject.said
        leaf = Leaf(
            name=subject.name,
            number=same,
            rule=said.rule,
            sums=said.sums,
            gradients=flows,
            work=self._declared_work(probe.work, said, likes),
            program=program,
        )
        trust = self._trust(leaf, key, probe, likes, subject) if said.rule else ""
        call = _Call(key=key, number=len(self.found), program=program, probe=probe, trust=trust)
        self.found.append(leaf)
        self.places.append(subject.place)
        self.calls.append(call)
        return call

    def _trust(
        self,
        leaf: Leaf,
        key: tuple[Any, ...],
        probe: Probe,
        likes: tuple[TensorLike, ...],
        subject: Subject,
    ) -> str:
        """Why the rule is taken on trust, if it is; checked once in a process."""
        tried = _TRIED.setdefault(subject.kind, {})
        call = hash(tuple(repr(x) if isinstance(x, pytree.TreeSpec) else x for x in key))
        if call not in tried:
            first = len(likes) - len(subject.state)
            places = {name: first + k for k, name in enumerate(subject.state)}
            written = [likes[places[name]] for name in probe.written]
            tried[call] = check_rule(
                leaf, likes, [*probe.made, *written], runs=probe.runs, random=bool(probe.random)
            )
        return tried[call]

    def _probe(self, program: Program, likes: tuple[TensorLike, ...], subject: Subject) -> Probe:
        grad, result = torch.is_grad_enabled(), subject.said.result
        if result is not None:
            if subject.positions:  # nobody looks whether its forward uses its position
                raise Irregular(f"{subject.place} is not run while it is traced")
            return apart(lambda: by_result(program, likes, result), grad=grad)
        try:
            return apart(lambda: on_fakes(program, likes), grad=grad)
        except (LeafError, Irregular):
            raise
        except Exception as error:  # noqa: BLE001 - whatever fakes can't do, real numbers may
            first = error
        try:
            if subject.positions:
                raise Irregular(f"{subject.place} is not run on fake tensors")
            return apart(lambda: for_real(program, likes, subject.weights), grad=grad)
        except Irregular:
            raise
        except Exception as error:  # noqa: BLE001 - nor on real ones, whatever it is
            where = f"{subject.place} ({subject.name})" if subject.place else subject.name
            lines = (str(e).strip().splitlines() or [type(e).__name__] for e in (first, error))
            on_fake, on_real = (line[0][:200] for line in lines)
            message = (
                f"{where} can't be kept as a leaf, because nothing tells the shapes it makes: on "
                f"fake tensors, {type(first).__name__}: {on_fake}; on random numbers, "
                f"{type(error).__name__}: {on_real}. Way out: meshwright.leaf("
                f"{subject.name}, result=lambda *args: ...), which gives tensors like its results"
            )
            raise LeafError(message) from first

    def _declared_work(self, work: Work, said: Declaration, likes: Sequence[TensorLike]) -> Work:
        """Numbers of the declaration in place of those found."""

        def amount(given: Amount) -> int:
            shapes = (x.shape for x in likes)
            return int(given(*shapes) if callable(given) else given * self.scale)

        if said.flops is not None:
            work = replace(work, flops=amount(said.flops), source="declared")
        if said.saved_bytes is not None:
            work = replace(work, saved_bytes=amount(said.saved_bytes), source="declared")
        return work

    # --- what is reported ---

    def notes(self) -> tuple[str, ...]:
        """Which leaves there are, why, and how they run; those of one class in one line."""
        alike: dict[tuple[str, str, str, str], list[int]] = {}
        for k, (leaf, place) in enumerate(zip(self.found, self.places, strict=True)):
            why = self.kept.get(place, "")
            alike.setdefault((leaf.name, leaf.rule, why, self.calls[k].trust), []).append(k)
        lines = []
        for (name, rule, why, trust), numbers in alike.items():
            place, work = self.places[numbers[0]], self.found[numbers[0]].work
            where = f"{place} ({name}) and its like are" if place else f"calls of {name} are"
            because = f", because {why}" if why else ""
            how = f'split by "{rule}"' if rule else "run in full on every rank"
            how += f", a rule taken on trust, because {trust}" if trust else ""
            lines.append(
                f"{where} kept as one node each{because}; {how}; {work.kernels} kernels, "
                f"{work.flops:.3g} FLOPs, {work.saved_bytes:.3g} bytes saved inside: {work.source}"
            )
        return tuple(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is called, a function or a module of a class (`kind`): its own tensors as traced
    (`state`) and as the user has them (`weights`); `positions`: an attribute holds its place in a
    stack, and tells when it is used."""

    name: str
    place: str
    function: Callable[..., Any]
    module: nn.Module | None
    kind: Any
    identity: Any
    state: Mapping[str, torch.Tensor]
    weights: Mapping[str, torch.Tensor]
    said: Declaration
    positions: bool


def _comparable(leaf: Any) -> Any:
    return type(leaf), repr(leaf) if isinstance(leaf, (float, complex)) else leaf

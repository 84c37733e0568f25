"""Recording of leaves while a model is traced: each call becomes one operator of the program, of
one `Leaf` for all calls that differ by values of tensors alone, so that equal layers stay equal."""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.costmodel import user_rules
from meshwright.costmodel.graph import Op, TensorMeta
from meshwright.costmodel.memo import Memo
from meshwright.costmodel.rules import (
    LEAF,
    RANDOM_LEAF,
    Dims,
    Leaf,
    Misfit,
    OpFactors,
    Work,
    given_factors,
)
from meshwright.planner.errors import ModelError, Untraceable, enclosing_modules
from meshwright.planner.operators import Applied, Operand, Program, UnseenWrite, state_of, to_meta
from meshwright.planner.tracing import user_module
from meshwright.planner.tracing.leaves.probe import (
    LeafError,
    Probe,
    in_plain_thread,
    probe_by_result,
    probe_on_fakes,
    probe_on_random,
)
from meshwright.planner.tracing.similar import Irregular, comparable, identifiers_of, overridden
from meshwright.planner.tracing.values import TensorLike

# --- the operators that stand for a leaf's call in an exported program ----------------------------
#
#     leaf(operands, number, ranks, sizes, strides, dtypes) -> results
#
# `number` counts the `Leaf`s of the trace; shape and stride of result k are the next `ranks[k]`
# elements of `sizes` and `strides`. `random_leaf` is the one of a leaf that draws random numbers.


_SCHEMA = (
    "(Tensor[] operands, int leaf, int[] ranks, int[] sizes, int[] strides, ScalarType[] dtypes) "
    "-> Tensor[]"
)
torch.library.define(f"meshwright::{LEAF}", _SCHEMA)
torch.library.define(
    f"meshwright::{RANDOM_LEAF}", _SCHEMA, tags=(torch.Tag.nondeterministic_seeded,)
)
LEAF_OPERATORS = (torch.ops.meshwright.leaf.default, torch.ops.meshwright.random_leaf.default)


def _empty_results(
    operands: list[torch.Tensor],
    leaf: int,
    ranks: list[int],
    sizes: list[int],
    strides: list[int],
    dtypes: list[torch.dtype],
) -> list[torch.Tensor]:
    size, stride, device = iter(sizes), iter(strides), operands[0].device
    return [
        torch.empty_strided(
            [*islice(size, rank)], [*islice(stride, rank)], dtype=dtype, device=device
        )
        for rank, dtype in zip(ranks, dtypes, strict=True)
    ]


for _operator in LEAF_OPERATORS:
    torch.library.register_fake(_operator, _empty_results)


# class or function -> hash of a call's key (which keeps nothing alive) -> the reason why the rule
# is taken on trust there, "" where it was tried in this process
_CHECKED: WeakKeyDictionary[Any, Memo[int, str]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subject:
    """The callee of a leaf: the module `fqn`, or a function.

    `kind` is the module's class, or the function; equal `identity` (hashable) means equal but for
    weights. `state` are its tensors as traced, `weights` as the user has them. `identified`: it
    holds its position in a stack of similar layers, or its name, which raises when it is used.
    """

    name: str
    function: Callable[..., Any]
    kind: Any
    identity: Any
    declaration: user_module.Declaration
    fqn: str = ""
    module: nn.Module | None = None
    state: Mapping[str, torch.Tensor] = field(default_factory=dict)
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    identified: bool = False

    @staticmethod
    def of_module(
        fqn: str, module: nn.Module, original: nn.Module, declaration: user_module.Declaration
    ) -> _Subject:
        """The traced copy `module` of the user's module `original`."""
        parts, integers = user_module.describe(original)
        watched = identifiers_of(module)
        known = {path: n for path, n in integers.items() if path not in watched}
        return _Subject(
            name=type(original).__name__,
            fqn=fqn,
            function=module,
            module=module,
            kind=type(original),
            identity=(tuple(parts), frozenset(known.items()), user_module.hooks_in(original)),
            state=state_of(module),
            weights=state_of(original),
            declaration=declaration,
            identified=bool(watched),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recorded:
    """Calls that can't be told apart: their common `key` and `Leaf`, the `fqn` of the first call's
    module ("" for a function), new tensors and then new values of buffers (`results`), and the
    reason why the rule is taken on trust, "" where it was tried."""

    key: tuple[Any, ...]
    leaf: Leaf
    fqn: str
    probe: Probe
    results: Sequence[TensorLike]
    trust: str


class LeafRecorder:
    """Records the leaves of one model while it is exported once. `reasons` are those of modules, by
    FQN, that are leaves because they can't be traced; `scale` is the traced batch over the sample
    batch."""

    def __init__(self, model: nn.Module, reasons: Mapping[str, str], scale: float) -> None:
        self.model = model
        self.reasons = reasons
        self.scale = scale
        self.calls: list[_Recorded] = []
        self.classes: list[tuple[nn.Module, type, dict[str, Any]]] = []  # and their hooks
        if user_module.declared(model) is not None:
            raise ModelError(
                f"{type(model).__name__} is the whole model, of which nothing would be left to "
                "plan",
                place="leaf",
                way_out="declare the modules in it that can't be traced",
            )

    @property
    def leaves(self) -> list[Leaf]:
        """The leaves by their number in the program."""
        return [call.leaf for call in self.calls]

    # --- the copy ---

    def instrument(self, copied: nn.Module, spared: Sequence[str]) -> None:
        """Replace the forwards of the leaves in a copy by recording ones, but for modules inside of
        `spared`, which are stand-ins. Raises `LeafError` for a forward that can't be replaced."""
        for fqn, original in self.model.named_modules():
            declaration = user_module.declared(original)
            inside = any(fqn == name or fqn.startswith(f"{name}.") for name in spared)
            if inside or (declaration is None and fqn not in self.reasons):
                continue
            module = copied.get_submodule(fqn)
            self._instrument(fqn, module, original, declaration or user_module.Declaration())

    def _instrument(
        self, fqn: str, module: nn.Module, original: nn.Module, declaration: user_module.Declaration
    ) -> None:
        cls = type(module)
        if "forward" in vars(module):
            raise LeafError(
                f"{fqn} ({cls.__name__}) has a forward of its own in place of its class's, which "
                "may hold on to the model's own weights; a leaf is run by its class's forward. Way "
                "out: override forward in a subclass"
            )
        hooks = user_module.taken_hooks(module)  # the leaf's call runs them
        self.classes.append((module, cls, hooks))

        def forward(proxy: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if user_module.TRACE.get() is not self:
                return cls.forward(proxy, *args, **kwargs)
            with user_module.hooked(module, hooks):
                subject = _Subject.of_module(fqn, module, original, declaration)
                try:
                    return self._call(subject, args, kwargs)
                except LeafError as error:
                    if fqn not in self.reasons:
                        raise
                    outer, reason = enclosing_modules(fqn)[1:], self.reasons[fqn]
                    raise Untraceable(str(error), modules=outer, reason=reason) from error

        module.__class__ = overridden(cls, forward)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context in which calls of leaves are recorded here."""
        token = user_module.TRACE.set(self)
        try:
            yield
        finally:
            user_module.TRACE.reset(token)

    def restore(self) -> None:
        """After the export: give the copy's leaves, which the executor runs, their own forwards
        back, and their tensors to the meta device."""
        for module, cls, hooks in self.classes:
            module.__class__ = cls
            vars(module).update(hooks)
        for module, _, _ in self.classes:
            to_meta(module)

    # --- calls ---

    def function(self, subject: Any, args: Any, kwargs: Any) -> Any:
        """Record a call of a declared function or of an autograd.Function; its results."""
        callee = _Subject(
            name=subject.__qualname__,
            function=Applied(subject) if isinstance(subject, type) else subject,
            kind=subject,
            identity=("function", subject),
            declaration=user_module.declared(subject) or user_module.Declaration(),
        )
        return self._call(callee, args, kwargs)

    def _call(self, subject: _Subject, args: Any, kwargs: Any) -> Any:
        """Record one call; its results, of the shapes that a probe of its like found."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors: list[torch.Tensor] = []
        template: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                template.append(Operand(len(tensors)))
                tensors.append(leaf)
            elif isinstance(leaf, (*user_module.PLAIN, enum.Enum)):
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
            subject.declaration,
            tuple(map(comparable, template)),
            spec,
            likes,
            cast,
            torch.is_grad_enabled(),
        )
        call = next((c for c in self.calls if c.key == key), None)
        if call is None:
            call = self._new(key, program, likes, subject)
        return self._apply(call, operands, subject)

    def _apply(self, call: _Recorded, operands: list[torch.Tensor], subject: _Subject) -> Any:
        """Call the operator; the forward's output, made of the operator's results."""
        results = iter(
            LEAF_OPERATORS[call.probe.random is not False](  # seeded where nobody knows
                operands,
                self.calls.index(call),
                [len(x.shape) for x in call.results],
                [n for x in call.results for n in x.shape],
                [n for x in call.results for n in x.stride],
                [x.dtype for x in call.results],
            )
        )
        leaves: list[Any] = []
        for leaf in call.probe.leaves:
            if isinstance(leaf, TensorLike):
                tensor = next(results)
                flows = leaf.requires_grad or not tensor.requires_grad
                leaves.append(tensor if flows else tensor.detach())
            else:
                leaves.append(operands[leaf.number] if isinstance(leaf, Operand) else leaf)
        with torch.no_grad():
            for name in call.probe.written:
                subject.state[name].copy_(next(results))
        return pytree.tree_unflatten(leaves, call.probe.spec)

    def _new(
        self, key: tuple[Any, ...], program: Program, likes: Sequence[TensorLike], subject: _Subject
    ) -> _Recorded:
        """Probe and check the first of the calls that can't be told apart."""
        declaration = subject.declaration
        probe = self._probe(program, likes, subject)
        flows = tuple(x.requires_grad for x in probe.outputs)
        unseen = declaration.result is not None
        program = replace(program, written=probe.written, gradients=flows, unseen=unseen)
        leaf = Leaf(
            name=subject.name,
            number=sum(leaf.name == subject.name for leaf in self.leaves),
            rule=declaration.rule,
            gradients=flows,
            work=self._declared_work(probe.work, declaration, likes),
            program=program,
        )
        state = dict(zip(subject.state, likes[len(likes) - len(subject.state) :], strict=True))
        results = [*probe.outputs, *(state[name] for name in probe.written)]
        trust = ""
        if declaration.rule:
            trust = _CHECKED.setdefault(subject.kind, Memo()).of(
                hash(tuple(repr(x) if isinstance(x, pytree.TreeSpec) else x for x in key)),
                lambda: check_rule(
                    leaf, likes, results, runs=probe.runs, random=bool(probe.random)
                ),
            )
        call = _Recorded(
            key=key, leaf=leaf, fqn=subject.fqn, probe=probe, results=results, trust=trust
        )
        self.calls.append(call)
        return call

    def _probe(self, program: Program, likes: Sequence[TensorLike], subject: _Subject) -> Probe:
        """The first probe that works: by the declared result, on fake tensors, on random numbers.
        Raises `LeafError` where none does, and `Irregular` for what a stand-in can't tell."""
        grad, result = torch.is_grad_enabled(), subject.declaration.result
        if result is not None:
            if subject.identified:  # nobody looks whether its forward uses that
                raise Irregular(f"{subject.fqn} is not run while it is traced")
            return in_plain_thread(lambda: probe_by_result(program, likes, result), grad=grad)
        try:
            return in_plain_thread(lambda: probe_on_fakes(program, likes), grad=grad)
        except (LeafError, Irregular):
            raise
        except Exception as error:  # noqa: BLE001 - whatever fakes can't do, real numbers may
            first = error
        if subject.identified:
            raise Irregular(f"{subject.fqn} is not run on fake tensors")
        try:
            return in_plain_thread(
                lambda: probe_on_random(program, likes, subject.weights), grad=grad
            )
        except Irregular:
            raise
        except Exception as error:  # noqa: BLE001 - nor on real ones, whatever it is
            where = f"{subject.fqn} ({subject.name})" if subject.fqn else subject.name
            lines = (str(e).strip().splitlines() or [type(e).__name__] for e in (first, error))
            on_fake, on_real = (line[0][:200] for line in lines)
            message = (
                f"{where} can't be kept as a leaf, because nothing tells the shapes it makes: on "
                f"fake tensors, {type(first).__name__}: {on_fake}; on random numbers, "
                f"{type(error).__name__}: {on_real}. Way out: meshwright.leaf("
                f"{subject.name}, result=lambda *args: ...), which gives tensors like its results"
            )
            raise LeafError(message) from first

    def _declared_work(
        self, work: Work, declaration: user_module.Declaration, likes: Sequence[TensorLike]
    ) -> Work:
        """The work of a probe, with the FLOPs and saved bytes that were declared."""
        shapes = [x.shape for x in likes]
        amounts = {"flops": declaration.flops, "saved_bytes": declaration.saved_bytes}
        declared: dict[str, Any] = {
            name: int(amount(*shapes) if callable(amount) else amount * self.scale)
            for name, amount in amounts.items()
            if amount is not None
        }
        return replace(work, **declared, source="declared" if declared else work.source)

    def notes(self) -> tuple[str, ...]:
        """A line for each class of leaves: why they are leaves, how they run, what they cost."""
        lines = dict[tuple[str, ...], str]()
        for call in self.calls:
            fqn, name, rule, work = call.fqn, call.leaf.name, call.leaf.rule, call.leaf.work
            reason = self.reasons.get(fqn, "")
            where = f"{fqn} ({name}) and its like are" if fqn else f"calls of {name} are"
            because = f", because {reason}" if reason else ""
            how = f'split by "{rule}"' if rule else "run in full on every rank"
            how += f", a rule taken on trust, because {call.trust}" if call.trust else ""
            lines.setdefault(
                (name, rule, reason, call.trust),
                f"{where} kept as one node each{because}; {how}; {work.kernels} kernels, "
                f"{work.flops:.3g} FLOPs, {work.saved_bytes:.3g} bytes saved inside: {work.source}",
            )
        return tuple(lines.values())


# --- check of a leaf's rule -----------------------------------------------------------------------

# Check of a leaf's rule: the forward runs on parts of fake tensors for each letter that may be
# split, then on small random tensors, forward and backward.


Likes = Sequence[TensorLike]


def check_rule(leaf: Leaf, operands: Likes, results: Likes, *, runs: bool, random: bool) -> str:
    """The reason why the rule is taken on trust; empty where its numbers were tried and hold.

    Raises `LeafError` where the rule does not fit its tensors, where a forward that `runs` on fake
    tensors does not work on parts, and where the parts do not make up the whole.
    """
    op = Op(name=leaf.name, target=f"meshwright.{LEAF}.default", args=(), kwargs={}, results=())
    sides = [[TensorMeta(shape=x.shape, dtype=x.dtype) for x in xs] for xs in (operands, results)]
    terms = [len(side.split(",")) for side in leaf.rule.split("->")]
    takes = f"it takes {_shapes(operands)}, gives {_shapes(results)}"
    for verb, count, tensors in zip(("takes", "gives"), terms, (operands, results), strict=True):
        if count > len(tensors):
            raise LeafError(
                f"rule {leaf.rule!r} has {count} terms for what it {verb}, which are "
                f"{len(tensors)} tensors ({takes})",
                place=f"leaf {leaf.name}",
                legal=f"{len(tensors)} terms",
            )
    try:
        factors = given_factors(leaf.rule, op, *sides)
    except Misfit as error:
        raise LeafError(
            f"rule {leaf.rule!r} does not fit: {error}",
            place=f"leaf {leaf.name}",
            legal=takes,
            way_out="change the rule",
        ) from None
    for letter, kind in factors.kinds.items():
        if runs and kind != "whole":
            _check_part(leaf, factors, letter, operands, results)
    if random:
        return "it draws random numbers"
    return _try_rule(leaf, factors, operands, results, runs=runs)


def _check_part(
    leaf: Leaf, factors: OpFactors, letter: str, operands: Likes, results: Likes
) -> None:
    """Raise `LeafError` unless the forward makes a part of its results of a part of a letter."""
    program = _program(leaf)
    size = factors.sizes[letter]
    parts = next(p for p in range(2, size + 1) if size % p == 0)
    sizes = {**factors.sizes, letter: factors.sizes[letter] // parts}
    operand_parts = _resized(operands, factors.operands, sizes)
    result_parts = _resized(results, factors.results, sizes)
    expected = _shapes(result_parts[: len(results) - len(program.written)])
    try:
        shapes = _shapes(
            in_plain_thread(lambda: probe_on_fakes(program, operand_parts), grad=True).outputs
        )
    except Exception as error:  # noqa: BLE001 - whatever it raises, it does not work on a part
        problem = f"raises {user_rules.first_line(error)}"
    else:
        if shapes == expected:
            return
        problem = f"gives {shapes} where {expected} is a part of what it gives"
    raise LeafError(
        f"rule {leaf.rule!r} splits {letter!r}, but on one of {parts} parts "
        f"({_shapes(operand_parts)}) the forward {problem}",
        place=f"leaf {leaf.name}",
        legal="a letter that the forward can be split by",
        way_out=(
            "take sizes from the tensors (x.shape), not from attributes or arguments, or write "
            "_ for a dim that stays whole"
        ),
    )


def _program(leaf: Leaf) -> Program:
    assert isinstance(leaf.program, Program)
    return leaf.program


def _shapes(tensors: Likes) -> list[list[int]]:
    return [list(x.shape) for x in tensors]


def _resized(tensors: Likes, dims: Sequence[Dims], sizes: Mapping[str, int]) -> Likes:
    return [x.resized(names, sizes) for x, names in zip(tensors, dims, strict=True)]


# --- the trial on numbers ------------------------------------------------------------------------
#
# The forward and its backward run once on random numbers and once on each of two parts per letter,
# and are compared (`user_rules.py`). Letters that may be split are made small; dims that
# stay whole are as traced where a run costs little, else small where the forward works on that.
# Weights are random too, so that models on the meta device are tried like others.


SMALL = 4  # elements of a letter: two parts of two, which do not broadcast
MAX_KERNELS = 2**11  # of one forward, and so for what follows
LONG_KERNELS = 2**8  # a loop, most likely over a dim that stays whole
MAX_FLOPS = 2**30
MAX_BYTES = 2**28  # read and written by its kernels, at the traced dtypes
DTYPES = (torch.float64, torch.float32, None)  # None: as traced


def _try_rule(
    leaf: Leaf, factors: OpFactors, operands: Likes, results: Likes, *, runs: bool
) -> str:
    """The reason why the rule, on the traced tensors `factors`, can't be tried on numbers; "" where
    it was and holds. Raises `LeafError` where it does not hold."""
    traced = {
        name: max(SMALL, factors.sizes[name] // 2 * 2)
        for name, kind in factors.kinds.items() if kind != "whole"
    }  # fmt: skip
    if not traced:
        return ""

    def faults_at(sizes: Mapping[str, int]) -> list[user_rules.Fault] | str:
        wanted = _resized(results, factors.results, sizes)
        return _first_trial(leaf, _resized(operands, factors.operands, sizes), wanted, runs=runs)

    def stands(fault: user_rules.Fault, sizes: Mapping[str, int]) -> bool:
        """Whether it is a fault also where its letter is as wide as traced: the letter may be made
        of heads of a fixed size."""
        wide = {**sizes, fault.factor: traced[fault.factor]}
        again = faults_at(wide) if wide != sizes else ""
        return isinstance(again, str) or fault.factor in {other.factor for other in again}

    reason = ""
    loops = leaf.work.kernels > LONG_KERNELS
    for sizes in _trial_sizes(factors.sizes, traced, shrinks=runs, loops=loops):
        outcome = faults_at(sizes)
        if isinstance(outcome, str):
            reason = outcome
            continue
        if wrong := [fault for fault in outcome if stands(fault, sizes)]:
            raise LeafError(_wrong(leaf, wrong))
        return ""
    return reason


def _trial_sizes(
    sizes: Mapping[str, int], traced: Mapping[str, int], *, shrinks: bool, loops: bool
) -> Iterator[dict[str, int]]:
    """Distinct sizes to try: all letters small; where the forward `shrinks`, also the dims that
    stay whole (first where it `loops` over them); each letter as traced; all letters as traced."""
    small = {**sizes, **dict.fromkeys(traced, SMALL)}
    tiny = {name: min(size, SMALL) for name, size in small.items()}
    trials = [small, tiny] if shrinks else [small]
    if loops:
        trials.reverse()
    trials += [{**small, name: size} for name, size in traced.items()]
    trials.append({**small, **traced})
    yield from (trial for k, trial in enumerate(trials) if trial not in trials[:k])


def _first_trial(
    leaf: Leaf, operands: Likes, wanted: Likes, *, runs: bool
) -> list[user_rules.Fault] | str:
    """The faults on tensors like `operands`, in the first dtype that works, or the reason why that
    can't be told."""
    try:
        work = _work(leaf, operands, wanted, runs=runs)
    except Exception as error:  # noqa: BLE001 - the forward's own, whatever it is
        return user_rules.first_line(error)
    limits = (
        ("kernels", work.kernels, MAX_KERNELS),
        ("FLOPs", work.flops, MAX_FLOPS),
        ("bytes", work.passed, MAX_BYTES),
    )
    if over := [f"{n:,} {unit} (at most {limit:,})" for unit, n, limit in limits if n > limit]:
        return f"its forward takes {', '.join(over)}"
    outcome: list[user_rules.Fault] | str = ""
    for dtype in DTYPES:
        run = functools.partial(_faults, leaf, operands, wanted, dtype)
        try:
            outcome = in_plain_thread(run, grad=torch.is_grad_enabled())
        except UnseenWrite as error:
            raise LeafError(str(error)) from None
        except Exception as error:  # noqa: BLE001 - the forward's own; other dtypes may do
            outcome = user_rules.first_line(error)
        if not isinstance(outcome, str):
            break
    return outcome


def _work(leaf: Leaf, operands: Likes, wanted: Likes, *, runs: bool) -> Work:
    """The work of a forward of these sizes: counted on fake tensors, or scaled from the traced.
    Raises ValueError where it makes other shapes than the rule says."""
    if not runs:
        share = math.prod(wanted[0].shape) / leaf.work.numel if wanted else 1.0
        nbytes = max(int(leaf.work.passed * share), sum(x.nbytes for x in (*operands, *wanted)))
        return replace(leaf.work, flops=int(leaf.work.flops * share), nbytes=nbytes, taken=())
    program = _program(leaf)
    probe = in_plain_thread(lambda: probe_on_fakes(program, operands), grad=torch.is_grad_enabled())
    if [x.shape for x in probe.outputs] != [x.shape for x in wanted[: len(probe.outputs)]]:
        raise ValueError("its results don't follow the sizes of its tensors")
    return probe.work


def _faults(
    leaf: Leaf, operands: Likes, wanted: Likes, dtype: torch.dtype | None
) -> list[user_rules.Fault] | str:
    """The faults on random numbers of a dtype, or the reason why that can't be told."""
    if dtype is not None:
        leaf = replace(leaf, program=replace(_program(leaf), autocast=None))
    op = Op(
        name=leaf.name, target=f"meshwright.{LEAF}.default", args=(leaf,), kwargs={}, results=()
    )
    metas = [TensorMeta(shape=x.shape, dtype=x.dtype) for x in operands]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        coarsest = _CoarsestDtype()
        with coarsest:
            trial = user_rules.Trial.of(
                op, user_rules.random_operands(metas, dtype), [x.requires_grad for x in operands]
            )
        outputs = trial.whole.results
        if [tuple(y.shape) for y in outputs] != [x.shape for x in wanted]:
            return "its results don't follow the sizes of its tensors"
        if not trial.repeats():
            return "two equal calls differ: it draws random numbers"
        floating = [x for x in (*outputs, *trial.whole.gradients) if x is not None]
        if not all(x.isfinite().any() for x in floating if x.numel()):
            return "it makes nothing finite of random numbers"
        sides = [list(map(user_rules.meta_of, xs)) for xs in (trial.operands, outputs)]
        local = given_factors(leaf.rule, op, *sides)
        trial = replace(trial, tolerance=max(trial.tolerance, coarsest.tolerance))
        return user_rules.faults(trial, local)


class _CoarsestDtype(TorchDispatchMode):
    """Notes the `tolerance` of the least precise dtype computed in: a forward may cast."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tolerance = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self.tolerance = max(self.tolerance, user_rules.TOLERANCES.get(x.dtype, 0.0))
        return result


def _wrong(leaf: Leaf, wrong: Sequence[user_rules.Fault]) -> str:
    """The message of the `LeafError` about these faults."""
    program = _program(leaf)
    count = len(program.dense) - len(program.state)
    names = [f"{count + k} is {name}" for k, name in enumerate(program.state)]
    names += [
        f"result {len(leaf.gradients) + k} the new value of {name}"
        for k, name in enumerate(program.written)
    ]
    legend = f" (operand {', '.join(names)})" if names else ""
    listed = "; ".join(f"{f.factor!r}: {f.what}" for f in wrong)
    return (
        f"leaf {leaf.name}: rule {leaf.rule!r} does not hold: run in two parts, forward and "
        f"backward, and put together, {listed}{legend}. Ways out: write _ for the dims of a letter "
        "along which the forward mixes, or that its parts can't be added up over (a letter that no "
        "result has); what every part would add in full (a bias) belongs "
        "outside of the leaf"
    )

"""Check of a leaf's rule: the forward runs on parts of fake tensors for each letter that may be
split, then on small random tensors, forward and backward."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.costmodel import user_rules
from meshwright.costmodel.graph import Op, TensorMeta
from meshwright.costmodel.rules import LEAF, Dims, Leaf, Misfit, OpFactors, Work, factors_of_spec
from meshwright.planner.operators import Program, UnseenWrite
from meshwright.planner.tracing.leaves.probe import LeafError, in_plain_thread, probe_on_fakes
from meshwright.planner.tracing.values import TensorLike

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
        factors = factors_of_spec(leaf.rule, leaf.sums, op, *sides)
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
# and are compared (`user_rules/verify.py`). Letters that may be split are made small; dims that
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
        local = factors_of_spec(leaf.rule, leaf.sums, op, *sides)
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
        "along which the forward mixes; leave out of the results, and list in sums=, a letter "
        "whose parts are to be added up; what every part would add in full (a bias) belongs "
        "outside of the leaf"
    )

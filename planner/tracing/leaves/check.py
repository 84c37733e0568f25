"""A leaf's rule tried out: whether it fits the tensors, and whether the forward works on parts.

For every letter that may be split, the forward runs on fake tensors of which that letter's dims are
a part; it must make parts of its results. That their numbers are those of the whole is tried on
small random tensors, forward and backward (`leaf_trial.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.costmodel.graph import Op, TensorMeta
from meshwright.costmodel.rules.language import Misfit, OpFactors
from meshwright.costmodel.rules.leaf import LEAF, Leaf, factors_of_spec
from meshwright.planner.operators.leaf import Program
from meshwright.planner.tracing.leaves.probe import LeafError, TensorLike, apart, on_fakes
from meshwright.planner.tracing.leaves.trial import try_rule


def check_rule(
    leaf: Leaf,
    operands: Sequence[TensorLike],
    results: Sequence[TensorLike],
    *,
    runs: bool,
    random: bool,
) -> str:
    """Why the rule's numbers are taken on trust; empty where they were tried and hold.

    Raises LeafError for a rule that does not fit its tensors; where the forward `runs` on fake
    tensors, for one by which it does not work on parts; and for one by which the parts are not
    those of the whole. What draws `random` numbers can't be compared.
    """
    op = Op(name=leaf.name, target=f"meshwright.{LEAF}.default", args=(), kwargs={}, results=())
    sides = [[TensorMeta(shape=x.shape, dtype=x.dtype) for x in xs] for xs in (operands, results)]
    left, right = (side.split(",") for side in leaf.rule.split("->"))
    takes = f"it takes {_shapes(operands)}, gives {_shapes(results)}"
    for what, terms, tensors in (("takes", left, operands), ("gives", right, results)):
        if len(terms) > len(tensors):
            raise LeafError(
                f"leaf {leaf.name}: rule {leaf.rule!r} has {len(terms)} terms for what it {what}, "
                f"which are {len(tensors)} tensors ({takes})"
            )
    try:
        made = factors_of_spec(leaf.rule, leaf.sums, op, *sides)
    except Misfit as error:
        raise LeafError(
            f"leaf {leaf.name}: rule {leaf.rule!r} does not fit: {error}; {takes}"
        ) from None
    assert isinstance(leaf.program, Program)
    if runs:
        for letter, size in made.sizes.items():
            if made.kinds[letter] != "whole":
                _check_part(leaf, leaf.program, made, letter, _divisor(size), operands, results)
    if random:
        return "it draws random numbers"
    return try_rule(leaf, made, operands, results, runs=runs)


def _check_part(
    leaf: Leaf,
    program: Program,
    made: OpFactors,
    letter: str,
    parts: int,
    operands: Sequence[TensorLike],
    results: Sequence[TensorLike],
) -> None:
    sizes = {**made.sizes, letter: made.sizes[letter] // parts}
    given = [x.resized(dims, sizes) for x, dims in zip(operands, made.operands, strict=True)]
    wanted = [x.resized(dims, sizes) for x, dims in zip(results, made.results, strict=True)]
    expected = _shapes(wanted[: len(results) - len(program.written)])
    try:
        found = _shapes(apart(lambda: on_fakes(program, given), grad=True).made)
    except Exception as error:  # noqa: BLE001 - whatever it raises, it does not work on a part
        line = (str(error).strip().splitlines() or [""])[0][:200]
        problem = f"raises {type(error).__name__}: {line}"
    else:
        if found == expected:
            return
        problem = f"gives {found} where {expected} is a part of what it gives"
    raise LeafError(
        f"leaf {leaf.name}: rule {leaf.rule!r} splits {letter!r}, but on one of {parts} parts "
        f"({_shapes(given)}) the forward {problem}; take sizes from the tensors "
        "(x.shape), not from attributes or arguments, or write _ for a dim that stays whole"
    )


def _shapes(tensors: Sequence[TensorLike]) -> list[list[int]]:
    return [list(x.shape) for x in tensors]


def _divisor(size: int) -> int:
    return next(p for p in range(2, size + 1) if size % p == 0)

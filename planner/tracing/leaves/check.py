"""The check of a leaf's rule: it fits the tensors, and the forward works on parts of them.

For every letter that may be split, the forward runs on fake tensors of which that letter's dims are
a part; it must make parts of its results. That their numbers are those of the whole is tried on
small random tensors, forward and backward (`trial.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.costmodel.graph import Op, TensorMeta
from meshwright.costmodel.rules import LEAF, Leaf, Misfit, OpFactors, factors_of_spec
from meshwright.planner.operators import Program
from meshwright.planner.tracing.leaves.probe import (
    LeafError,
    TensorLike,
    in_plain_thread,
    probe_on_fakes,
)
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

    Raises `LeafError` where the rule does not fit its tensors, where a forward that `runs` on fake
    tensors does not work on parts, and where the parts do not make up the whole. A forward that
    draws `random` numbers can't be compared.
    """
    op = Op(name=leaf.name, target=f"meshwright.{LEAF}.default", args=(), kwargs={}, results=())
    sides = [[TensorMeta(shape=x.shape, dtype=x.dtype) for x in xs] for xs in (operands, results)]
    left, right = (side.split(",") for side in leaf.rule.split("->"))
    takes = f"it takes {_shapes(operands)}, gives {_shapes(results)}"
    for what, terms, tensors in (("takes", left, operands), ("gives", right, results)):
        if len(terms) > len(tensors):
            raise LeafError(
                f"rule {leaf.rule!r} has {len(terms)} terms for what it {what}, which are "
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
    assert isinstance(leaf.program, Program)
    if runs:
        for letter, size in factors.sizes.items():
            if factors.kinds[letter] != "whole":
                _check_part(leaf, leaf.program, factors, letter, _divisor(size), operands, results)
    if random:
        return "it draws random numbers"
    return try_rule(leaf, factors, operands, results, runs=runs)


def _check_part(
    leaf: Leaf,
    program: Program,
    factors: OpFactors,
    letter: str,
    parts: int,
    operands: Sequence[TensorLike],
    results: Sequence[TensorLike],
) -> None:
    """Raise `LeafError` unless the forward makes part of its results of the first of `parts`."""
    sizes = {**factors.sizes, letter: factors.sizes[letter] // parts}
    operand_parts = [
        x.resized(dims, sizes) for x, dims in zip(operands, factors.operands, strict=True)
    ]
    result_parts = [
        x.resized(dims, sizes) for x, dims in zip(results, factors.results, strict=True)
    ]
    expected = _shapes(result_parts[: len(results) - len(program.written)])
    try:
        shapes = _shapes(
            in_plain_thread(lambda: probe_on_fakes(program, operand_parts), grad=True).outputs
        )
    except Exception as error:  # noqa: BLE001 - whatever it raises, it does not work on a part
        line = (str(error).strip().splitlines() or [""])[0][:200]
        problem = f"raises {type(error).__name__}: {line}"
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


def _shapes(tensors: Sequence[TensorLike]) -> list[list[int]]:
    return [list(x.shape) for x in tensors]


def _divisor(size: int) -> int:
    """The least divisor of `size` from 2."""
    return next(p for p in range(2, size + 1) if size % p == 0)

"""Leaves: modules and functions kept as one operator, what they cost and how they may be split.

A leaf's rule is a spec of `language.py`, one term for each tensor it takes (arguments, then
parameters, then buffers, each in their order) and for each tensor it makes:

    "b s d, d n -> b s d"   every letter is a dim that may be split wherever it stands
    _                       a dim that stays whole (a scan's sequence: "b _ d, d _ -> b _ d")
    *d                      any number of dims ("*d -> *d": pointwise)

A letter that no result has stays whole, unless it is declared as summed: only then is a part's
result a part of the sum. Operands and results without a term are whole. Nothing is split of a leaf
without a rule: it runs in full on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from meshwright.costmodel.graph import Op
from meshwright.costmodel.rules.language import Metas, OpFactors, Rule, factors, replicated, words

LEAF, RANDOM_LEAF = "leaf", "random_leaf"  # names of the operators
LEAVES = frozenset((LEAF, RANDOM_LEAF))


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Work of one call at the traced shapes: `kernels` launched in the forward, their FLOPs, the
    bytes they read and write, of each tensor `taken` and of others (`nbytes`), and the bytes kept
    for the backward (`saved_bytes`) besides tensors of the call (`saves`: operand i as i, result k
    as -1-k). All grows with the `numel` of the first result, but what is taken with each tensor.
    `source` of the numbers."""

    kernels: int
    flops: int
    nbytes: int
    taken: tuple[int, ...]
    saves: tuple[int, ...]
    saved_bytes: int
    numel: int
    source: str

    @property
    def passed(self) -> int:
        """All bytes read and written."""
        return self.nbytes + sum(self.taken)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """The first argument of a leaf's operator. `number` tells leaves of one name apart; `sums` are
    the letters of `rule` that are summed; `gradients` tells which results carry one, those beyond
    its end (new values of buffers) do not. `program` runs it on its operands, outside planning."""

    name: str
    number: int
    rule: str
    sums: str
    gradients: tuple[bool, ...]
    work: Work
    program: Callable[[Sequence[Any]], Sequence[Any]] = field(repr=False, compare=False)


def leaf_of(op: Op) -> Leaf:
    """The leaf that an operator of `LEAVES` runs."""
    leaf: Leaf = op.args[0]
    return leaf


def rule_of_leaf(op: Op, operands: Metas, results: Metas) -> OpFactors:
    leaf = leaf_of(op)
    if not leaf.rule:
        return replace(replicated(op, operands, results), known=True)
    return factors_of_spec(leaf.rule, leaf.sums, op, operands, results)


def factors_of_spec(spec: str, sums: str, op: Op, operands: Metas, results: Metas) -> OpFactors:
    """The factors of a leaf's call; Misfit where the spec does not fit it."""
    inputs, outputs = (side.split(",") for side in spec.split("->"))
    numbers = count()

    def filled(terms: Sequence[str], metas: Metas) -> str:
        missing = (" ".join("_" * len(meta.shape)) for meta in metas[len(terms) :])
        both = ", ".join((*terms, *missing))
        return re.sub(r"(?<!\w)_(?!\w)", lambda _: f"_{next(numbers)}", both)

    unsplit = _letters(inputs) - _letters(outputs) - set(sums.split())
    patterns = [r"_\d+", *(re.sub(r"^\*(.*)", r"\1\\d+", x) for x in unsplit)]
    named = f"{filled(inputs, operands)} -> {filled(outputs, results)}"
    return factors(named, op, operands, results, whole=" ".join(patterns))


def summable(spec: str) -> set[str]:
    """The letters that may be listed as summed: those that no result has."""
    inputs, outputs = (_letters(side.split(",")) for side in spec.split("->"))
    return inputs - outputs - {"_"}


def _letters(terms: Sequence[str]) -> set[str]:
    """The names in some terms; those of any number of dims with their star."""
    return {n for term in terms for word in words(term) for n in word.strip("()").split()}


LEAF_RULES: Mapping[str, Rule] = {f"meshwright.{name}": rule_of_leaf for name in LEAVES}

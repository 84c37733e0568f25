"""Leaves: modules and functions kept as one operator, what they cost and how they may be split.

A leaf's rule is a spec of `language.py` as users give it, one term for each tensor it takes
(arguments, then parameters, then buffers, each in their order) and for each tensor it makes.
Nothing is split of a leaf without a rule: it runs in full on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.costmodel.graph import Op
from meshwright.costmodel.rules.language import Metas, OpFactors, Rule, given_factors, replicated

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
    """The first argument of a leaf's operator. `number` tells leaves of one name apart; `gradients`
    tells which results carry one, those beyond its end (new values of buffers) do not. `program`
    runs it on its operands, outside planning."""

    name: str
    number: int
    rule: str
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
    return given_factors(leaf.rule, op, operands, results)


LEAF_RULES: Mapping[str, Rule] = {f"meshwright.{name}": rule_of_leaf for name in LEAVES}

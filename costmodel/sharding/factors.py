"""Factors across the graph: which dims of which tensors are the same thing.

Every dim starts as one unknown; a union-find with splitting merges those that share a factor by the
operators' rules. What remains are atoms: batch, sequence, heads, head dim, ffn, vocabulary; a fused
projection's output is (parts × heads × head dim), so that it can be split by heads.

An operator without a rule runs in full on every rank. Where it takes the batch in dim 0 and gives
as many elements there, its result's dim 0 is seen as the batch again: each rank goes on with its
rows, which is right whatever they are.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshwright.costmodel import rules
from meshwright.costmodel.graph import Graph, Op, map_refs
from meshwright.costmodel.memo import Memo
from meshwright.costmodel.sharding.sequence import AtomDims, SequenceFactor, sequence_factor


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorTable:
    """Per value and dim its atoms, major to minor; per operator its factors and their atoms.

    `sizes` are atom sizes as traced; `batch` is the atom that the batch dim is split by (None when
    the graph was traced with one row or has no batched input); `tokens` the sequence that the
    context axis splits, or why none is; `experts` are the atoms that count the matrices of grouped
    products, `copies` the values that experts work on; `alone` those that need not be cut into
    equal parts, being all of every dim they are in.
    """

    dims: Mapping[str, AtomDims]
    ops: Mapping[str, rules.OpFactors]
    letters: Mapping[str, Mapping[str, tuple[int, ...]]]
    sizes: Mapping[int, int]
    batch: int | None
    tokens: SequenceFactor
    experts: frozenset[int] = frozenset()
    copies: frozenset[str] = frozenset()
    alone: frozenset[int] = frozenset()

    @property
    def sequence(self) -> int | None:
        """The atom that the context axis splits."""
        return self.tokens.atom

    @property
    def length(self) -> int:
        """Tokens of the sequence that the context axis, or slices, split; 0 where there is none."""
        return 0 if self.sequence is None else self.sizes[self.sequence]

    @property
    def context(self) -> frozenset[int]:
        """Atoms of the sequence, as it is and shifted by a token; none where cp can't split it."""
        return self.tokens.shifted.union(() if self.sequence is None else (self.sequence,))

    def find(self, value: str, atom: int) -> tuple[int, int] | None:
        """(dim, product of the atoms before it there) of an atom in a value; None if absent."""
        for d, atoms in enumerate(self.dims[value]):
            if atom in atoms:
                return d, math.prod(self.sizes[a] for a in atoms[: atoms.index(atom)])
        return None

    def has_experts(self, value: str) -> bool:
        """Whether a value has a part for each expert."""
        dims = self.dims[value]
        return bool(self.experts) and any(not self.experts.isdisjoint(atoms) for atoms in dims)

    def has_batch(self, value: str) -> bool:
        return self.batch is not None and any(self.batch in atoms for atoms in self.dims[value])


class _Atoms:
    """Union-find over factors that can be split into (major, minor)."""

    def __init__(self) -> None:
        self.parent: list[int] = []
        self.size: list[int] = []
        self.parts: dict[int, tuple[int, int]] = {}

    def new(self, size: int) -> int:
        self.parent.append(len(self.parent))
        self.size.append(size)
        return len(self.parent) - 1

    def root(self, x: int) -> int:
        while self.parent[x] != x:
            self.parent[x] = self.parent[self.parent[x]]
            x = self.parent[x]
        return x

    def leaves(self, x: int) -> list[int]:
        x = self.root(x)
        if x not in self.parts:
            return [x]
        major, minor = self.parts[x]
        return self.leaves(major) + self.leaves(minor)

    def split(self, x: int, major_size: int) -> None:
        self.parts[x] = (self.new(major_size), self.new(self.size[x] // major_size))

    def unify(self, left: list[int], right: list[int]) -> bool:
        """Merge two lists of factors; False (and what nests merged) where they don't nest."""
        if len(left) == len(right) == 1:  # nearly always
            x, y = self.root(left[0]), self.root(right[0])
            if x == y:
                return True
            if self.size[x] == self.size[y] and x not in self.parts and y not in self.parts:
                self.parent[x] = y
                return True
        a, b = self._expand(left), self._expand(right)
        while a and b:
            x, y = a.pop(0), b.pop(0)
            if x == y:
                continue
            if self.size[x] == self.size[y]:
                self.parent[x] = y
            elif self.size[x] > self.size[y] and self.size[x] % self.size[y] == 0:
                self.split(x, self.size[y])
                a, b = self.leaves(x) + a, [y, *b]
            elif self.size[y] > self.size[x] and self.size[y] % self.size[x] == 0:
                self.split(y, self.size[x])
                a, b = [x, *a], self.leaves(y) + b
            else:
                return False
            a, b = self._expand(a), self._expand(b)
        return not a and not b

    def _expand(self, items: list[int]) -> list[int]:
        return [leaf for item in items for leaf in self.leaves(item)]


def analyse(graph: Graph) -> FactorTable:
    """The factor table of a traced graph."""
    atoms = _Atoms()
    dims = {
        name: tuple([atoms.new(size)] if size != 1 else [] for size in meta.shape)
        for name, meta in graph.values.items()
    }
    batched = [dims[name][0] for name in graph.inputs if name in graph.batched]
    for other in batched[1:]:
        atoms.unify(batched[0], other)
    ops: dict[str, rules.OpFactors] = {}
    letters: dict[str, dict[str, int]] = {}
    broken: dict[str, set[str]] = {}
    known = Memo[Hashable, rules.OpFactors]()
    for op in (*graph.derived, *graph.ops):
        ops[op.name] = _factors(graph, op, known)
        letters[op.name], bad = _link(op, ops[op.name], dims, atoms)
        if bad:
            broken[op.name] = bad
        if batched and batched[0] and not has_rule(op, ops[op.name]):
            _pass_batch(graph, op, dims, atoms, batched[0][0])
    for name, bad in broken.items():
        unsplit: dict[str, rules.Kind] = dict.fromkeys(bad, "whole")
        ops[name] = replace(ops[name], kinds={**ops[name].kinds, **unsplit})
    flat = {name: tuple(tuple(atoms._expand(list(d))) for d in ds) for name, ds in dims.items()}
    table = {
        name: {letter: tuple(atoms.leaves(var)) for letter, var in variables.items()}
        for name, variables in letters.items()
    }
    batch = atoms.leaves(batched[0][0])[0] if batched and batched[0] else None
    used = {a for ds in flat.values() for d in ds for a in d}
    used |= {a for of_op in table.values() for leaves in of_op.values() for a in leaves}
    experts = frozenset(
        atom
        for op in graph.ops
        if rules.traits_of(op).experts == "product"
        for atom in table[op.name].get(rules.EXPERT_FACTOR, ())
    )
    return FactorTable(
        dims=flat,
        ops=ops,
        letters=table,
        sizes={a: atoms.size[a] for a in used},
        batch=batch,
        tokens=_sequence_factor(graph, flat, ops, table, batch),
        experts=experts,
        copies=rules.copies_of(graph.ops),
        alone=frozenset(used) - _bound(graph, flat, ops, table) - experts - {batch},
    )


def _sequence_factor(graph: Graph, *tables: Any) -> SequenceFactor:
    """The sequence of a graph; None, with the error, where an operator is not as the analysis takes
    it to be: it only adds context parallelism to a search."""
    try:
        return sequence_factor(graph, *tables)
    except Exception as error:  # noqa: BLE001 - of any kind
        what = f"{type(error).__name__}: {error!s:.200}"
        return SequenceFactor(atom=None, why=f"the analysis of sequences ends with {what}")


def has_rule(op: Op, factors: rules.OpFactors) -> bool:
    """Whether more is known of a call than that it runs in full on every rank."""
    return factors.known and not (rules.traits_of(op).leaf and not rules.leaf_of(op).rule)


def _pass_batch(
    graph: Graph, op: Op, dims: Mapping[str, tuple[list[int], ...]], atoms: _Atoms, batch: int
) -> None:
    """Merge dim 0 of an operator's operands and results of one size that has the batch."""
    (first, *_) = atoms.leaves(batch)
    carry = {
        graph.values[v].shape[0]: dims[v][0]
        for v in op.operands
        if dims[v] and atoms._expand(list(dims[v][0]))[:1] == [first]
    }
    for value in op.results:
        size = graph.values[value].shape[:1]
        if size and size[0] in carry and value not in graph.updates.values():
            atoms.unify(list(dims[value][0]), list(carry[size[0]]))


def _bound(
    graph: Graph,
    dims: Mapping[str, AtomDims],
    ops: Mapping[str, rules.OpFactors],
    letters: Mapping[str, Mapping[str, tuple[int, ...]]],
) -> set[int]:
    """Atoms that have to be cut into equal parts: those that share a dim or a factor with another,
    that an argument counts, whose elements travel to experts, or that a rule wants so."""
    products = [atoms for of_value in dims.values() for atoms in of_value]
    products += [atoms for of_op in letters.values() for atoms in of_op.values()]
    bound = {a for atoms in products if len(atoms) > 1 for a in atoms}
    for op in graph.ops:
        exchanged = rules.traits_of(op).experts in ("dispatch", "combine")
        factors = ops[op.name]
        equal = letters[op.name] if exchanged or factors.equal else factors.counts.values()
        bound |= {a for letter in equal for a in letters[op.name].get(letter, ())}
    return bound


def _factors(graph: Graph, op: Op, known: Memo[Hashable, rules.OpFactors]) -> rules.OpFactors:
    """Factors of an operator, `known` of calls that differ in names alone."""
    operands = tuple(graph.values[n] for n in op.operands)
    results = tuple(graph.values[n] for n in op.results)
    if rules.traits_of(op).leaf:
        return rules.factors_of(op, operands, results)
    call = repr(map_refs((op.args, op.kwargs), lambda _: ...))
    key = op.target, call, operands, results
    return known.of(key, lambda: rules.factors_of(op, operands, results))


def _link(
    op: Op, factors: rules.OpFactors, dims: Mapping[str, tuple[list[int], ...]], atoms: _Atoms
) -> tuple[dict[str, int], set[str]]:
    """Merge one operator's factors into the table: (their atoms, factors whose dims don't nest)."""
    letters = {name: atoms.new(size) for name, size in factors.sizes.items() if size != 1}
    bad: set[str] = set()
    sides = [
        *zip(op.operands, factors.operands, strict=True),
        *zip(op.results, factors.results, strict=True),
    ]
    for value, named in sides:
        for var, dim in zip(dims[value], named, strict=True):
            known = [letters[f] for f in dim if f in letters]
            if var and known and not atoms.unify(list(var), known):
                bad |= set(dim)
    return letters, bad

"""Sharding rules of look-ups and writes by index.

What is looked up in, or written to, by position must be whole in that dim; its other dims map. The
dims of the indices map in a look-up. In a write they do only where all writes add up: each rank
then adds its own part, and the parts are to be summed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from meshwright.costmodel.graph import Op, Ref, argument
from meshwright.costmodel.rules.language import Metas, OpFactors, Rule, ein


def _entries(rank: int, places: Sequence[int]) -> list[str]:
    """The dims of a table: `v` where it is indexed, `e` elsewhere."""
    return [f"{'v' if d in places else 'e'}{d}" for d in range(rank)]


def _looked_up(entries: Sequence[str], places: Sequence[int]) -> str:
    """Dims of a look-up's result: the indices' at the first indexed dim, or first of all."""
    rest = [name for name in entries if name[0] == "e"]
    adjacent = list(places) == list(range(places[0], places[-1] + 1))
    at = places[0] if adjacent else 0
    return " ".join([*rest[:at], "*i", *rest[at:]])


def _indices(op: Op) -> list[int]:
    return [d for d, index in enumerate(op.args[1]) if isinstance(index, Ref)]


def index_rule(op: Op, operands: Metas, results: Metas) -> OpFactors | None:
    """`x[:, i, j]`: a look-up; one by flags has as many results as flags are up, and no rule."""
    import torch

    places, table = _indices(op), operands[0]
    if any(meta.dtype in (torch.bool, torch.uint8) for meta in operands[1:]):
        return None
    entries = _entries(len(table.shape), places)
    spec = ", ".join([" ".join(entries), *["*i"] * len(places)])
    return ein(f"{spec} -> {_looked_up(entries, places)}", whole="v.*")(op, operands, results)


def index_put_rule(op: Op, operands: Metas, results: Metas) -> OpFactors | None:
    """`x[:, i, j] = values`, or `+=`; under flags a single number alone, which any part writes."""
    import torch

    table, *indices, values = operands
    rank, places = len(table.shape), _indices(op)
    flagged = [meta for meta in indices if meta.dtype in (torch.bool, torch.uint8)]
    entries = _entries(rank, places)
    if flagged:
        if len(indices) > 1 or values.numel != 1:
            return None
        entries = [f"e{d}" for d in range(rank)]
        flags = entries[places[0] : places[0] + len(flagged[0].shape)]
        spec = f"{' '.join(entries)}, {' '.join(flags)}, *one -> {' '.join(entries)}"
        return ein(spec)(op, operands, results)
    written = _looked_up(entries, places) if values.numel != 1 else "*one"
    spec = ", ".join([" ".join(entries), *["*i"] * len(indices), written])
    adds = bool(argument(op, 3, "accumulate", False))
    return ein(
        f"{spec} -> {' '.join(entries)}",
        whole="v.*" if adds else "v.* i.*",
        pinned=(0,) if adds else (),
    )(op, operands, results)


def _along(op: Op, rank: int) -> int:
    return int(argument(op, 1, "dim", 0)) % rank


def index_select_rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
    entries = _entries(rank := len(operands[0].shape), [dim := _along(op, rank)])
    selected = " ".join([*entries[:dim], "i", *entries[dim + 1 :]])
    return ein(f"{' '.join(entries)}, i -> {selected}", whole="v.*")(op, operands, results)


def _index_write(*, adds: bool = False, fills: bool = False) -> Rule:
    """index_add, index_copy, index_fill: rows of one dim written by their numbers."""

    def rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
        entries = _entries(rank := len(operands[0].shape), [dim := _along(op, rank)])
        table = " ".join(entries)
        rows = " ".join([*entries[:dim], "i", *entries[dim + 1 :]])
        terms = [table, "i", "" if fills else rows][: len(operands)]
        return ein(
            f"{', '.join(terms)} -> {table}",
            whole="v.*" if adds else "v.* i",
            pinned=(0,) if adds else (),
        )(op, operands, results)

    return rule


def _scatter(*, adds: bool) -> Rule:
    """Elements written along one dim; other dims of which indices take a corner are whole."""

    def rule(op: Op, operands: Metas, results: Metas) -> OpFactors | None:
        table, index, *sources = (meta.shape for meta in operands)
        if not index:
            return None
        names = _entries(rank := len(table), [dim := _along(op, rank)])
        cornered = {d for d in range(rank) if d != dim and table[d] != index[d]}
        cornered |= {d for s in sources for d in range(len(s)) if s[d] != index[d]}
        inner = [f"c{d}" if d in cornered else "i" if d == dim else n for d, n in enumerate(names)]
        outer = [f"v{d}" if d in cornered else n for d, n in enumerate(names)]
        source = [f"s{d}" if d in cornered else n for d, n in enumerate(inner)]
        spec = ", ".join(" ".join(t) for t in (outer, inner, *[source] * len(sources)))
        return ein(
            f"{spec} -> {' '.join(outer)}",
            whole="v.* c.* s.*" + ("" if adds else " i"),
            pinned=(0,) if adds else (),
        )(op, operands, results)

    return rule


INDEXING: Mapping[str, Rule] = MappingProxyType({
    "index": index_rule,
    "index_put": index_put_rule,
    "index_select": index_select_rule,
    "index_add": _index_write(adds=True),
    "index_copy": _index_write(),
    "index_fill": _index_write(fills=True),
    "scatter_add": _scatter(adds=True),
    **dict.fromkeys(("scatter", "scatter_reduce"), _scatter(adds=False)),
    "bucketize": ein("*b, v -> *b", whole="v"),
    "isin": ein("*b, *v -> *b", whole="v.*"),
    "one_hot": ein("*b -> *b n", whole="n"),
})  # fmt: skip

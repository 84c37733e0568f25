"""Which degrees divide what, counted rank by rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshwright.costmodel.graph import TensorMeta
from meshwright.costmodel.sharding.factors import FactorTable
from meshwright.costmodel.sharding.sequence import SequenceFactor
from meshwright.costmodel.sharding.strategies import (
    Placement,
    R,
    can_hold,
    divides,
    largest_part,
    splitting_degrees,
)
from tests.costmodel.traces import analysed

MOST = 12
MAJOR, MINOR = 2, 4
WORDS, WIDTH = 40, 16


def table(sizes: dict[int, int], *, alone: bool) -> FactorTable:
    """A value `x` whose one dim these factors make up."""
    return FactorTable(
        dims={"x": (tuple(sizes),)},
        ops={},
        letters={},
        sizes=sizes,
        batch=None,
        tokens=SequenceFactor(atom=None),
        alone=frozenset(sizes) if alone else frozenset(),
    )


@pytest.mark.parametrize("size", range(1, MOST))
def test_every_rank_has_a_part_of_what_is_divided(size: int) -> None:
    """An even one; of a factor that stands alone the last part may be smaller, not empty."""
    for degree in range(1, MOST):
        each = largest_part(size, degree)
        assert each * degree >= size > (each - 1) * degree
        parts = [range(size)[k * each : (k + 1) * each] for k in range(degree)]
        even = {len(part) for part in parts} == {each}
        assert divides(table({0: size}, alone=False), 0, degree) == even
        assert divides(table({0: size}, alone=True), 0, degree) == all(map(len, parts))


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_an_inner_factor_is_held_where_each_of_the_outer_parts_divides(degree: int) -> None:
    meta = TensorMeta(shape=(MAJOR * MINOR,), dtype=torch.float32)
    graph: Any = SimpleNamespace(values={"x": meta})
    found = table({0: MAJOR, 1: MINOR}, alone=True)
    inner, outer = Placement("S", 0, MAJOR), Placement("S", 0)
    assert can_hold(graph, found, "x", inner, degree) == (MINOR % degree == 0)
    assert can_hold(graph, found, "x", outer, degree) == (MAJOR * MINOR % degree == 0)
    assert can_hold(graph, found, "x", R, degree)
    assert not can_hold(graph, found, "x", Placement("S", 1), degree)


def test_degrees_that_an_error_offers_are_those_that_split() -> None:
    graph, found = analysed("gpt2")
    head = [op for op in graph.ops if op.short in ("linear", "addmm")][-1]
    sizes = found.ops[head.name].sizes
    for letter in ("in", "out"):
        offered = splitting_degrees(graph, found, head, letter, most=MOST)
        size = sizes[letter]
        (atom,) = found.letters[head.name][letter]
        wanted = [d for d in range(2, size + 1) if divides(found, atom, d)]
        assert offered == tuple(wanted[:MOST]) and len(wanted) > 2
    assert splitting_degrees(graph, found, head, "in", most=999)[-1] == sizes["in"]
    assert splitting_degrees(graph, found, head, "no letter") == ()

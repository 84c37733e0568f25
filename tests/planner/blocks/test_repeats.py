"""Cuts from the operator graph alone, against definitions written out."""

from __future__ import annotations

import itertools
from functools import cache

import torch
from torch import nn

from meshwright.costmodel.graph import Graph
from meshwright.planner.blocks.repeats import (
    bytes_at_cuts,
    merge_light,
    structural_hash,
    structural_starts,
)
from meshwright.planner.tracing.trace import trace

LAYERS = 6


class Skips(nn.Module):
    """Layers of two widths in turn, all of whose inputs are read again by the next layer's sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 4)
        self.up = nn.ModuleList(nn.Linear(4, 16) for _ in range(LAYERS))
        self.down = nn.ModuleList(nn.Linear(16, 4) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.relu(up(x)))
        return x.square().mean()


@cache
def graph() -> Graph:
    return trace(Skips(), (torch.rand(3, 8),), repeats=False)


def work() -> list[float]:
    return [float(op.short == "linear") for op in graph().ops]


def test_bytes_at_cuts_are_made_before_and_read_after() -> None:
    ops = graph().ops
    for i, nbytes in enumerate(bytes_at_cuts(graph())):
        made = {r for op in ops[:i] for r in op.results}
        read = {name for op in ops[i:] for name in op.operands}
        assert nbytes == sum(graph().values[name].nbytes for name in made & read)


def test_layers_have_one_hash_and_the_first_operator_another() -> None:
    starts = [i for i, op in enumerate(graph().ops) if op.module.startswith("up.")]
    hashes = {structural_hash(graph(), graph().ops[i : i + 4]) for i in starts}
    assert len(hashes) == 1
    assert structural_hash(graph(), graph().ops[:4]) not in hashes


def test_each_period_of_a_repeat_is_a_block() -> None:
    starts = sorted(structural_starts(graph(), work()))
    sizes = [b - a for a, b in itertools.pairwise(starts)]
    assert sizes.count(4) >= LAYERS - 1


def test_runs_without_work_join_the_block_before_them() -> None:
    starts = {0: "a", 2: "b", 3: "c", 5: "d"}
    load = [0.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    assert merge_light(starts, load, set()) == {0: "b", 5: "d"}
    assert merge_light(starts, load, {3}) == {0: "b", 3: "c", 5: "d"}

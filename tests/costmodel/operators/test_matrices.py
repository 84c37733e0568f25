"""Parameters that an optimizer steps as matrices, by hand and by what ranks do."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright.costmodel.kernels.compute import matmul_seconds
from meshwright.costmodel.memory.optimizers import Sides, optimizer_named
from meshwright.costmodel.operators.matrices import (
    ends_of,
    fullest,
    matrices_of,
    mean_moments,
    owners_of,
)
from meshwright.costmodel.operators.pricing import Pricer
from meshwright.costmodel.sharding.strategies import Placement, R
from meshwright.profiles.cluster import Cluster
from tests.helpers.planning import Traced, cut, problem_of, setting_on

WORDS, WIDTH, INNER = 24, 8, 32


class Model(nn.Module):
    """A table, two layers with a stack of matrices between them, and a head."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.stack = nn.Parameter(torch.zeros(3, INNER, INNER))
        self.down = nn.Linear(INNER, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.up(self.table(x)))
        return self.head(self.down((y @ self.stack.sum(0)).tanh()))


def traced(*, tied: bool = False) -> Traced:
    with torch.device("meta"):
        x = torch.zeros(4, 6, dtype=torch.long)
        labels = torch.zeros(4, 6, dtype=torch.long)
        return cut(
            Model(tied=tied), (x, labels), lambda y, of: F.cross_entropy(y.mT, of), precision="fp32"
        )


def pricer_of(optimizer: str, on: Cluster | None = None, **mesh: int) -> Pricer:
    of = traced()
    graph, table = of.graph, of.table
    on = on or Cluster.from_catalog("h100-sxm", devices_per_node=8)
    setting = setting_on(on, graph=graph, factors=table, optimizer=optimizer, **mesh)
    return Pricer(graph=graph, table=table, setting=setting)


def named(pricer: Pricer, fqn: str) -> str:
    return next(value for value, name in pricer.graph.parameters.items() if name == fqn)


def test_sides_of_shapes() -> None:
    assert Sides.of((3, 4)) == (1, 3, 4)
    assert Sides.of((2, 3, 4)) == (2, 3, 4)
    assert Sides.of((8, 4, 3, 3)) == (1, 8, 36)  # a convolution
    assert Sides.of((8, 4, 3, 3), flat=False) == (32, 3, 3)  # as torch's Adafactor has it
    assert Sides.of((7,)) is Sides.of(()) is Sides.of((3, 0)) is None


@pytest.mark.parametrize("tied", [False, True])
def test_tables_and_the_last_products_weights_are_no_matrices_of_muon(tied: bool) -> None:
    graph = traced(tied=tied).graph
    names = {graph.parameters[value] for value in ends_of(graph)}
    assert names == ({"table.weight"} if tied else {"table.weight", "head.weight"})
    found = {graph.parameters[v] for v in matrices_of(graph, optimizer_named("muon"))}
    assert found == {"up.weight", "stack", "down.weight"}
    every = {graph.parameters[v] for v in matrices_of(graph, optimizer_named("shampoo"))}
    assert every == found | names
    assert not matrices_of(graph, optimizer_named("adamw"))


def test_heads_are_found_behind_views_and_what_no_product_reads_is_no_matrix() -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(WORDS, WIDTH)
            self.places = nn.Parameter(torch.zeros(1, 6, WIDTH))
            self.layer = nn.Linear(WIDTH, WIDTH)
            self.head = nn.Parameter(torch.zeros(WORDS, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.table(x) + self.places) @ (0.5 * self.head).T

    with torch.device("meta"):
        batch = torch.zeros(2, 4, 6, dtype=torch.long).unbind()
        graph = cut(Other(), batch, lambda y, of: F.cross_entropy(y.mT, of), precision="fp32").graph
    assert {graph.parameters[v] for v in ends_of(graph)} == {"table.weight", "head"}
    found = matrices_of(graph, optimizer_named("muon"))
    assert {graph.parameters[v] for v in found} == {"layer.weight"}


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_owners_have_alike_many_elements(ranks: int) -> None:
    """The fullest has at most the mean and the largest."""
    sizes = [7.0, 3.0, 9.0, 1.0, 4.0, 4.0, 2.0]
    owners = owners_of(sizes, ranks)
    loads = [sum(s for s, o in zip(sizes, owners, strict=True) if o == k) for k in range(ranks)]
    assert sum(loads) == sum(sizes)
    assert fullest(sizes, owners) == max(loads) <= sum(sizes) / ranks + max(sizes)
    assert owners_of([2, 16, 8, 9, 9], 2) == [1, 0, 0, 1, 1]  # the largest first


def test_norms_of_parts_are_summed() -> None:
    """LAMB's two numbers of a parameter, over the ranks that hold parts of it."""
    found = pricer_of("lamb", dp=4, tp=2)
    value = named(found, "up.weight")
    for placement, column, calls in (
        (R, "optimizer_s", 0), (R, "shard_s", 2), (Placement("S", 0), "optimizer_s", 2),
        (Placement("S", 0), "shard_s", 4),
    ):  # fmt: skip
        entries, _ = found.parameters.priced(value, placement)
        sums = [e for e in entries if e.column == column and e.collective == "all_reduce"]
        assert sum(entry.calls for entry in sums) == calls


def test_moments_by_shape() -> None:
    """Words: Adafactor's rows and columns, Muon's one moment, Shampoo's four roots and sums."""
    adafactor, muon, shampoo = map(optimizer_named, ("adafactor", "muon", "shampoo"))
    sides = Sides(2, 30, 50)
    assert adafactor.moment_bytes(3000, sides) == 4 * 2 * (30 + 50)
    assert muon.moment_bytes(3000, sides) == 4 * 3000
    assert shampoo.moment_bytes(3000, sides) == 4 * 2 * (1500 + 2 * 30**2 + 2 * 50**2)
    assert [x.moment_bytes(30, None) for x in (adafactor, muon, shampoo)] == [120, 240, 240]
    assert optimizer_named("muon", 2).moment_bytes(3000, sides) == 2 * 3000  # pure bf16
    # a side is cut into parts of 8192
    long = shampoo.moment_bytes(16384 * 10, Sides(1, 16384, 10))
    assert long == 4 * (16384 * 10 + 2 * 16384 * 8192 + 2 * 10**2)


def test_flops_of_the_iteration() -> None:
    """Five times X Xᵀ, its square, and their sum with X, of the shorter side."""
    record = optimizer_named("muon").matrices
    assert record is not None
    for rows, columns in ((30, 50), (50, 30)):
        flops = sum(2 * m * n * k * batch for m, n, k, batch in record.products(rows, columns))
        assert flops == 5 * (4 * 30 * 30 * 50 + 2 * 30**3)


@pytest.mark.parametrize(
    ("mesh", "sharded", "gathered", "owned"),
    [
        ({}, False, [0, 0], [False, False]),
        ({"dp": 8}, False, [0, 2], [True, True]),
        ({"tp": 2}, False, [0, 0], [True, True]),
        ({"dp": 4, "tp": 2}, True, [2, 4], [True, True]),
    ],
)
def test_entries_of_a_whole_matrix(
    mesh: dict[str, int], sharded: bool, gathered: list[int], owned: list[bool]
) -> None:
    """Without and with ZeRO: gathers of weights and gradients where ranks hold parts, products
    shared out, and what is sent back."""
    found, placement = pricer_of("muon", **mesh), Placement("S", 0) if sharded else R
    value = named(found, "up.weight")
    entries, _ = found.parameters.priced(value, placement)
    numel, device = WIDTH * INNER, found.setting.cluster.device
    record = optimizer_named("muon").matrices
    assert record is not None
    for column, calls, whole in zip(("optimizer_s", "shard_s"), gathered, owned, strict=True):
        own = [entry for entry in entries if entry.column == column]
        kinds = Counter[str]()
        for entry in own:
            kinds[entry.collective or entry.kind] += int(entry.calls) or 1
        sent = sum(e.sent_bytes for e in own if e.collective == "broadcast")
        assert kinds["all_gather"] == calls
        (step,) = [entry for entry in own if entry.kind == "optimizer"]
        if not whole:
            assert not sent
            continue
        axes = [n for n in mesh.values() if n > 1]
        assert sent == pytest.approx(4 * numel * len(axes))
        flops = 5 * (4 * WIDTH**2 * INNER + 2 * WIDTH**3)
        # of three matrices the stack is one owner's, most of all elements
        share = 3 * INNER**2 / (3 * INNER**2 + 2 * numel)
        if mesh == {"tp": 2}:  # one of four stages, of less than three matrices
            share = 1.0
        assert step.flops == pytest.approx(flops * share)
        products_s = sum(
            matmul_seconds(device, "bf16", m, n, k, batch, 2 * batch * (m * k + k * n + m * n))
            for m, n, k, batch in record.products(INNER, WIDTH)
        )
        assert step.seconds > products_s * share


def test_vectors_and_whole_tensors_without_products_are_stepped_in_place() -> None:
    found = pricer_of("adafactor", dp=8)
    for fqn, whole in (("up.bias", 0.0), ("up.weight", 0.0)):
        owned = found.parameters.owned_numel(named(found, fqn), R, divided=False)
        assert owned == whole
    value = named(found, "up.weight")
    assert found.parameters.owned_numel(value, R, divided=True) == WIDTH * INNER
    assert found.parameters.moment_bytes(value, R) == (
        4 * (WIDTH + INNER), 4 * (WIDTH + INNER) / 8,
    )  # fmt: skip


@pytest.mark.parametrize("optimizer", ["muon", "shampoo", "adafactor", "adamw"])
def test_the_mean_is_that_of_all_trained(optimizer: str) -> None:
    found = pricer_of(optimizer)
    given: Any = found.graph.parameters
    kept = sum(found.parameters.moment_bytes(value, R)[0] for value in given)
    problem = problem_of(traced(), found.setting.cluster, "fp32", optimizer=optimizer)
    assert mean_moments(problem) * found.graph.num_trained() == pytest.approx(kept)

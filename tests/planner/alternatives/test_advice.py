"""Advice with the numbers that it rests on: other margins, batches, devices, sizes and losses."""

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.planner.alternatives import answers as module
from meshwright.planner.alternatives import what_if
from meshwright.planner.alternatives.answers import advice, next_batches
from meshwright.planner.overrides.overrides import Overrides
from meshwright.planner.search.search import Search
from meshwright.profiles.cluster import Cluster
from tests.helpers.planning import Traced, cluster, cut, gpt2, linears, problem_of
from tests.helpers.tiers import second_tier


@pytest.mark.parametrize(
    ("batch", "devices", "offered"),
    [
        (100, 64, [128, 64, 96]),
        (128, 64, []),
        (3, 4, [4, 2]),
        (100, 24, [96, 120, 108]),
        (5, 1, []),
        (8, 16, []),  # shares out as far as eight rows can
    ],
)
def test_batches_that_share_out_over_more_devices(
    batch: int, devices: int, offered: list[int]
) -> None:
    assert next_batches(batch, devices) == offered
    assert all(math.gcd(n, devices) > math.gcd(batch, devices) for n in offered)


def rows(of: Traced, batch: int, devices: int = 8, **given: Any) -> list[dict[str, Any]]:
    search = Search(problem_of(of, cluster(devices)), batch, Overrides(**given))
    return advice(search, search.run())


def test_a_batch_that_does_not_divide_is_told_a_better_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six rows on four devices: two of them at most have rows of their own."""
    monkeypatch.setattr(module, "SEARCH_S", 60.0)
    of = linears(512, 4, 8)
    found = [row for row in rows(of, 6, 4) if row["kind"] == "batch"]
    best = found[0]
    assert best["global_batch_size"] == 8
    ours = Search(problem_of(of, cluster(4)), 6, Overrides()).run().best
    equal = Overrides(forbid=["unequal_meshes"])
    theirs = Search(problem_of(of, cluster(4)), 8, equal).run().best
    assert best["rows_per_s"] == pytest.approx(8 / theirs.step_time_s)
    assert all(row["rows_per_s"] > 6 / ours.step_time_s for row in found)
    assert f"batch 8: {8 / theirs.step_time_s:.4g} rows/s" in best["advice"]
    assert rows(of, 8, 4) == []


@pytest.mark.parametrize(
    ("of", "on", "batch", "told"),
    [
        pytest.param(
            lambda: gpt2(2, 320, 5, 50304, 64),
            cluster(7, bandwidth=3e9),
            256,
            ("batch 252: ", "6 of 7 devices of each node: "),
            marks=second_tier("longer searches; advice on fewer nodes stays"),
        ),
        (
            lambda: linears(256, 4, 8, 64),
            cluster(2, nodes=3, node_bandwidth=2e8),
            12,
            ("1 of 3 nodes: ",),
        ),
    ],
    ids=["devices", "nodes"],
)
def test_what_trains_more_rows_on_less_is_found_again(
    of: Callable[[], Traced],
    on: Cluster,
    batch: int,
    told: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By who follows: with another batch, or with a cluster of those nodes and devices."""
    monkeypatch.setattr(module, "SEARCH_S", 60.0)
    search = Search(problem_of(of(), on), batch, Overrides(), objective="robust")
    result = search.run()
    found = advice(search, result)
    for said in told:
        (row,) = [row for row in found if row["advice"].startswith(said)]
        part = {name: row[name] for name in ("num_nodes", "devices_per_node") if name in row}
        rows = row.get("global_batch_size", batch)
        there = problem_of(of(), replace(on, **part))
        best = Search(there, rows, Overrides(), objective="robust").run().best
        assert best.step_time_s == pytest.approx(row["step_time_s"], rel=0.03)
        assert row["rows_per_s"] == rows / row["step_time_s"] > batch / result.best.step_time_s


@second_tier("nodes that do not pay stay")
def test_nodes_that_compute_most_of_the_step_are_not_left_idle() -> None:
    on = cluster(2, nodes=2, bandwidth=1e13, node_bandwidth=1e13)
    search = Search(problem_of(linears(512, 4, 8, 512), on), 8, Overrides())
    assert not [*module._fewer(search, search.run())]


@second_tier("the next size of a vocabulary stays")
def test_sizes_that_do_not_divide_are_told_the_next_that_do() -> None:
    told = rows(gpt2(2, 320, 5, 50257, 64), 8, 4, tp=4)
    found = {row["factor"]: row for row in told if row["kind"] == "size"}
    (heads,) = [row for name, row in found.items() if "heads" in name]
    assert heads["next_sizes"] == [4, 8] and "4 or 8" in heads["advice"]
    words = found["transformer.wte.weight"]
    assert (words["size"], words["next_sizes"]) == (50257, [50304])
    even = rows(gpt2(2, 320, 8, 50304, 64), 8, 4, tp=4)
    assert not [row for row in even if row["kind"] == "size"]


def test_a_vocabulary_is_padded_to_what_kernels_and_the_tensor_axis_divide() -> None:
    """Three ranks and 64: the next multiple of 192. Full precision takes any vocabulary."""
    of = gpt2(2, 320, 8, 50001, 64)
    search = Search(problem_of(of, cluster(1)), 2, Overrides())
    stages = [SimpleNamespace(tp=3)]
    result: Any = SimpleNamespace(best=SimpleNamespace(plan=SimpleNamespace(stages=stages)))
    (row,) = module._words(search, result)
    assert (row["size"], row["next_sizes"]) == (50001, [50112])
    search = Search(problem_of(of, cluster(1), precision="fp32"), 2, Overrides())
    assert not [row for row in advice(search, search.run()) if row["kind"] == "size"]


class Classifier(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 64), nn.Linear(64, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.relu(self.body(x)))


@second_tier("logits that fill the memory stay")
@pytest.mark.parametrize(("classes", "named"), [(4096, True), (16, False)])
def test_logits_that_fill_the_memory_are_named(classes: int, named: bool) -> None:
    """They are kept in bf16 and as probabilities, and their gradients are held: 4 bytes at least
    and no more than 12 an element, but for what else passes at the peak."""
    tokens = 4096
    with torch.device("meta"):
        batch = (torch.empty(tokens, 64), torch.empty(tokens, dtype=torch.long))
        of = cut(Classifier(classes), batch, F.cross_entropy)
    search = Search(problem_of(of, cluster(1)), tokens, Overrides(num_microbatches=1))
    result = search.run()
    (peak,) = result.best.evaluation.prediction.peak_memory_bytes
    found = [row for row in advice(search, result) if row["kind"] == "logits"]
    assert bool(found) == named
    for row in found:
        assert 4 <= row["logits_bytes"] / (tokens * classes) <= 12.5
        left = peak - row["logits_bytes"] * (1 - 1 / what_if.CHUNKS)
        assert row["peak_bytes_without"] == pytest.approx(left)
        assert "chunked" in row["advice"]

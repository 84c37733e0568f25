"""The outer search: its limits, memory, overrides, and what it finds for known cases."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.costmodel.target import Target
from meshwright.costmodel.targets import EAGER
from meshwright.planner.drafts.candidates import Candidate
from meshwright.planner.overrides.overrides import Overrides
from meshwright.planner.overrides.values import OverrideError
from meshwright.planner.plan.infeasible import InfeasibleError
from meshwright.planner.search.result import SearchResult
from meshwright.planner.search.search import Search
from meshwright.planner.stages.programs import BlockPrograms
from meshwright.profiles.cluster import Cluster
from tests.helpers.enumeration import Enumeration, instance, limited
from tests.helpers.planning import SUMMED, Traced, case, cluster, cut, gpt2, linears, problem_of
from tests.helpers.tiers import second_tier, tiered

BATCH = 4
AMPLE = 2.0**40

# What is dear on it decides what pays: splitting rows, splitting weights, or a pipeline.
CLUSTERS: Mapping[str, Cluster] = {
    "fast wires": cluster(4, flops=1e12, bandwidth=1e11),
    "slow wires": cluster(4, flops=1e12, bandwidth=2e8),
    "slow starts": cluster(4, flops=1e13, bandwidth=1e10, latency_s=2e-5, launch_s=1e-5),
    "two nodes": cluster(2, nodes=2, flops=1e12, bandwidth=1e10, node_bandwidth=2e8),
}


def model() -> Traced:
    """Three linear layers and the loss: four blocks."""
    return linears(128, 3, BATCH, 64)


def search(
    on: Cluster,
    of: Traced | None = None,
    *,
    batch: int = BATCH,
    time_limit_s: float | None = None,
    **given: Any,
) -> SearchResult:
    return searching(on, of, batch=batch, time_limit_s=time_limit_s, **given).run()


def searching(
    on: Cluster,
    of: Traced | None = None,
    *,
    batch: int = BATCH,
    time_limit_s: float | None = None,
    programs: BlockPrograms | None = None,
    target: Target = EAGER,
    allow: tuple[str, ...] = (),
    **given: Any,
) -> Search:
    of = of or model()
    overrides = Overrides(**given)
    return Search(
        problem_of(of, on, target=target, allow=allow),
        batch,
        overrides,
        time_limit_s=time_limit_s,
        programs=programs,
    )


class Skipping(nn.Module):
    """The first layer's output goes to the second, and to the head over all stages between."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = y = torch.relu(self.layers[0](x))
        for layer in self.layers[1:]:
            y = torch.relu(layer(y))
        return y + first


def test_what_leaves_a_stage_is_whole_though_the_next_block_reads_it_first() -> None:
    """The plan as written gives the solved layouts back; the search itself checks that."""
    rows = torch.empty(BATCH, 64, device="meta")
    of = cut(Skipping(64), (rows, rows), F.mse_loss)
    slow = cluster(4, flops=1e9, bandwidth=1e7, node_bandwidth=1e7)
    plan = search(slow, of, tp=2, pp=2).best.plan
    assert any(stage.shardings for stage in plan.stages)


class Moving(nn.Module):
    """A buffer of fewer dims than what it is updated beside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 64), nn.Linear(64, 64)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y.mean(), alpha=0.1)
        return self.outer(torch.relu(y))


def test_a_buffers_new_value_is_whole_whatever_crosses_beside_it() -> None:
    rows = torch.empty(BATCH, 8, 64, device="meta")
    of = cut(Moving().to("meta"), (rows, rows), F.mse_loss)
    assert any(len(block.outputs) > 1 for block in of.graph.blocks)
    plan = search(CLUSTERS["fast wires"], of, tp=4).best.plan
    assert any(stage.shardings for stage in plan.stages)


# --- memory --------------------------------------------------------------------------------------


def ladder(on: Cluster, of: Traced, batch: int, shrink: float) -> list[Candidate]:
    """The best plans as memory falls, each time below what the last one needs, until none fits."""
    found: list[Candidate] = []
    memory_bytes = AMPLE
    while True:
        try:
            best = search(limited(on, memory_bytes), of, batch=batch, forbid=["offload"]).best
        except InfeasibleError:
            return found
        peak_bytes = max(best.evaluation.prediction.peak_memory_bytes)
        assert peak_bytes <= memory_bytes
        found.append(best)
        memory_bytes = peak_bytes * shrink


@pytest.mark.parametrize(
    ("of", "shrink"),
    [
        (lambda: linears(64, 4, 8, 512), 0.92),
        pytest.param(
            lambda: case("llama"), 0.85,
            marks=second_tier("a search for each step down; linear layers go down, too"),
        ),
    ],
)  # fmt: skip
def test_time_is_paid_for_memory(of: Callable[[], Traced], shrink: float) -> None:
    plans = ladder(cluster(4, bandwidth=1e9), of(), 8, shrink)
    steps = [c.step_time_s for c in plans]
    assert len(plans) > 4
    assert steps[0] == min(steps)
    assert steps[-1] > 1.5 * steps[0]
    # a lower limit may lead the program to a plan that simulates faster, but hardly so
    assert all(later >= earlier * 0.97 for earlier, later in itertools.pairwise(steps))
    again = [any(p != "none" for s in c.plan.stages for p in s.policies) for c in plans]
    assert not again[0]
    assert again[-1]


def test_nothing_is_recomputed_where_all_fits() -> None:
    for on in CLUSTERS.values():
        for candidate in search(on).candidates:
            assert {s.recompute for s in candidate.plan.stages} == {"none"}


def test_states_are_sharded_or_split_where_one_device_is_too_small() -> None:
    of = linears(512, 4, 8)
    states = 18 * of.graph.num_parameters()
    tight = limited(cluster(4, bandwidth=1e9), states / 3)
    plan = search(tight, of, batch=8).best.plan
    assert all(s.tp > 1 or s.zero or len(s.blocks) < len(of.graph.blocks) for s in plan.stages)
    data_parallel = search(limited(tight, states * 0.9), of, batch=8, forbid=["tp", "pp"]).best
    assert [(s.dp, s.zero) for s in data_parallel.plan.stages] == [(4, 1)]


def test_what_does_not_fit_says_by_how_much_and_what_would() -> None:
    of = linears(512, 4, 8)
    states = 18 * of.graph.num_parameters()
    memory_bytes = states / 4 * 0.9
    with pytest.raises(InfeasibleError, match=r"does not fit .* lacks .*Way out: 2 nodes") as no:
        search(limited(cluster(4), memory_bytes), of, batch=8, forbid=["offload"])
    worst = max(no.value.shortfall_bytes)
    assert states / 4 * 0.1 <= worst <= states / 4 * 0.2
    again = pickle.loads(pickle.dumps(no.value))
    assert (str(again), again.shortfall_bytes) == (str(no.value), no.value.shortfall_bytes)
    wider = dataclasses.replace(limited(cluster(4), memory_bytes), num_nodes=2)
    assert search(wider, of, batch=8).best.fits


# --- overrides -----------------------------------------------------------------------------------

BLOCKS = ("layers.0", "layers.1", "layers.2", "head")


@pytest.mark.parametrize(
    "given",
    [
        {"tp": 2},
        {"dp": 2},
        {"pp": 3},
        {"microbatch_size": 2},
        {"num_microbatches": 2},
        {"schedule": "gpipe"},
        {"zero": 0},
        {"zero": 1},
        {"recompute": "full"},
        {"dp": 2, "tp": 2},
        {"stages": [BLOCKS[:1], BLOCKS[1:]]},
        {"forbid": ["tp"]},
        {"forbid": ["dp", "pp"]},
        {"forbid": ["1f1b", "recompute", "zero"]},
    ],
    ids=str,
)
def test_overrides_hold_in_every_candidate(given: dict[str, Any]) -> None:
    rules = Overrides(**given)
    forbidden = {"tp": "tp", "dp": "dp"}
    for candidate in search(CLUSTERS["slow wires"], **given).candidates:
        plan = candidate.plan
        assert rules.pp in (None, len(plan.stages))
        assert "pp" not in rules.forbid or len(plan.stages) == 1
        assert rules.schedule in (None, plan.schedule)
        assert plan.schedule not in rules.forbid
        assert rules.num_microbatches in (None, plan.num_microbatches)
        if rules.stages is not None:
            assert [s.blocks for s in plan.stages] == [tuple(names) for names in rules.stages]
        for stage in plan.stages:
            for name in forbidden:
                assert getattr(rules, name) in (None, getattr(stage, name))
                assert name not in rules.forbid or getattr(stage, name) == 1
            assert rules.microbatch_size in (None, plan.microbatch_rows // stage.dp)
            assert stage.zero == rules.zero or rules.zero is None or stage.dp == 1
            assert rules.recompute in (None, stage.recompute)
            assert "zero" not in rules.forbid or stage.zero == 0


def test_shardings_hold_and_cost() -> None:
    on = CLUSTERS["fast wires"]
    free = search(on).best
    forced = search(on, tp=2, shardings={"layers.0": "rowwise", "layers.1": "colwise"}).best
    chosen = {
        name: s.name for found in forced.assignments for a in found.values()
        for name, s in a.strategies.items() if s.split_factor
    }  # fmt: skip
    linear = [op.name for op in model().graph.ops if op.short == "linear"]
    assert [chosen[name] for name in linear[:2]] == ["rowwise", "colwise"]
    assert forced.step_time_s > free.step_time_s


@pytest.mark.parametrize(
    "given",
    [
        {"tp": 3},
        {"dp": 8},
        {"pp": 4},
        {"tp": 4, "pp": 2},
        {"num_microbatches": 4, "dp": 2},
        {"num_microbatches": 3},
        {"microbatch_size": 3},
    ],
    ids=str,
)
def test_overrides_that_leave_no_plan_are_named(given: dict[str, Any]) -> None:
    with pytest.raises(OverrideError) as refused:
        search(CLUSTERS["fast wires"], **given)
    assert all(name in str(refused.value) for name in given)


# --- what the field knows ------------------------------------------------------------------------

H100 = Cluster.from_catalog("h100-sxm")


def test_a_small_model_on_one_node_is_data_parallel() -> None:
    """GPT-2 124M on 8 H100: no tensor parallelism, no pipeline, nothing recomputed."""
    found = search(H100, gpt2(12, 768, 12, 50257, 1024), batch=64)
    (stage,) = found.best.plan.stages
    assert (stage.dp, stage.tp, stage.recompute) == (8, 1, "none")
    assert found.best.plan.num_microbatches == 1
    assert 0.1 < found.best.evaluation.prediction.mfu < 0.6


def test_many_rows_through_few_weights_are_data_parallel() -> None:
    found = search(H100, linears(1024, 4, 8192), batch=8192)
    assert [(s.dp, s.tp) for s in found.best.plan.stages] == [(8, 1)]


def test_few_rows_through_many_weights_are_tensor_parallel() -> None:
    found = search(H100, linears(8192, 4, 64), batch=64)
    assert all(s.dp == 1 and s.tp > 1 for s in found.best.plan.stages)


def test_a_split_stage_comes_with_a_proof() -> None:
    found = search(H100, linears(8192, 4, 64), batch=64)
    assert {"layers.0", "layers.1", "head"} <= set(found.certificates)
    for proof in found.certificates.values():
        assert proof.gap == pytest.approx(0, abs=1e-6)


def test_candidates_differ_and_the_best_comes_first() -> None:
    found = search(CLUSTERS["two nodes"])
    steps = [c.step_time_s for c in found.candidates]
    assert steps == sorted(steps)
    shapes = [
        (
            c.plan.schedule,
            *((s.dp, s.cp, s.tp, s.zero, s.dp_shard, s.hpz, s.policies[0]) for s in c.plan.stages),
        )
        for c in found.candidates
    ]
    assert len(set(map(str, shapes))) == len(shapes) > 1


# --- again, and in time --------------------------------------------------------------------------


def same(first: SearchResult, second: SearchResult) -> bool:
    return [c.plan for c in first.candidates] == [c.plan for c in second.candidates] and (
        first.bound_s,
        first.best.evaluation.prediction,
        first.notes,
    ) == (second.bound_s, second.best.evaluation.prediction, second.notes)


@pytest.mark.parametrize(
    "name", tiered(CLUSTERS, lambda name: name.endswith("starts"), "six searches more on each")
)
def test_what_was_priced_before_changes_nothing(name: str) -> None:
    """One coster through searches with other overrides, shardings among them."""
    others: list[dict[str, Any]] = [
        {"tp": 2, "shardings": {"layers.0": "rowwise"}},
        {"recompute": {"layers.1": "full"}},
        {"stages": [BLOCKS[:1], BLOCKS[1:]]},
        {"forbid": ["tp"], "zero": 1},
        {},
    ]
    before = searching(CLUSTERS[name])
    assert same(before.run(), search(CLUSTERS[name]))
    for given in others:
        again = searching(CLUSTERS[name], programs=before.programs, **given)
        assert same(again.run(), search(CLUSTERS[name], **given))
        before = again


def test_a_search_out_of_time_says_so() -> None:
    """Whatever the limit, there is a plan that fits and a bound that holds."""
    for seed in range(4):
        of, on, batch, rng = instance(seed)
        plans = Enumeration(of=of, cluster=on, batch=batch)
        memory_bytes = rng.choice([int(AMPLE), *plans.peaks(8)[2:]])
        fastest = plans.fastest(memory_bytes)
        assert fastest is not None
        small = limited(on, memory_bytes)
        asked: dict[str, Any] = {"batch": batch, "target": SUMMED}
        free = search(small, of, **asked)
        hurried = search(small, of, time_limit_s=0.0, **asked)
        patient = search(small, of, time_limit_s=1e6, **asked)
        assert same(free, patient)
        assert free.complete and not hurried.complete
        assert max(hurried.best.evaluation.prediction.peak_memory_bytes) <= memory_bytes
        assert hurried.best.step_time_s >= free.best.step_time_s * (1 - 1e-9)
        assert hurried.bound_s <= fastest.prediction.step_time_s * (1 + 1e-6)
        assert hurried.bound_s <= hurried.best.step_time_s

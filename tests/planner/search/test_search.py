"""The outer search: memory, overrides, what it finds for known cases, limits of time."""

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.costmodel.compressed import OFFERED
from meshwright.costmodel.target import Target
from meshwright.costmodel.targets import EAGER
from meshwright.planner.drafts.candidates import Candidate, PlanDraft
from meshwright.planner.overrides.overrides import OverrideError, Overrides
from meshwright.planner.plan.infeasible import InfeasibleError
from meshwright.planner.search.search import Search, SearchResult
from meshwright.planner.stages.programs import BlockPrograms
from meshwright.profiles.cluster import Cluster
from tests.helpers.enumeration import instance, limited
from tests.helpers.planning import SUMMED, Traced, cluster, cut, gpt2, linears, problem_of
from tests.helpers.tiers import second_tier

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


def search(on: Cluster, of: Traced | None = None, **given: Any) -> SearchResult:
    return searching(on, of, **given).run()


def searching(
    on: Cluster,
    of: Traced | None = None,
    *,
    batch: int = BATCH,
    programs: BlockPrograms | None = None,
    target: Target = EAGER,
    allow: tuple[str, ...] = (),
    **given: Any,
) -> Search:
    problem = problem_of(of or model(), on, target=target, allow=allow)
    return Search(problem, batch, Overrides(**given), programs=programs)


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


@second_tier("memory that falls asks for more recompute in test_recompute, too")
def test_time_is_paid_for_memory() -> None:
    """The best plans as memory falls, each time below what the last one needs, until none fits."""
    of, on, plans = linears(64, 4, 8, 512), cluster(4, bandwidth=1e9), list[Candidate]()
    memory_bytes = AMPLE
    with contextlib.suppress(InfeasibleError):
        while True:
            plans.append(search(limited(on, memory_bytes), of, batch=8, forbid=["offload"]).best)
            peak_bytes = max(plans[-1].evaluation.prediction.peak_memory_bytes)
            assert peak_bytes <= memory_bytes
            memory_bytes = peak_bytes * 0.92
    steps = [c.step_time_s for c in plans]
    assert len(plans) > 4
    assert steps[0] == min(steps)
    assert steps[-1] > 1.5 * steps[0]
    # a lower limit may lead the program to a plan that simulates faster, but hardly so
    assert all(later >= earlier * 0.97 for earlier, later in itertools.pairwise(steps))
    again = [any(p != "none" for s in c.plan.stages for p in s.policies) for c in plans]
    assert not again[0] and again[-1]


@second_tier("what is gathered is kept unless memory binds (test_recompute)")
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
    assert [(s.dp, s.zero in (1, 2)) for s in data_parallel.plan.stages] == [(4, True)]


def test_what_does_not_fit_says_by_how_much() -> None:
    of = linears(512, 4, 8)
    states, made = (each * of.graph.num_parameters() for each in (18, 4))  # in AdamW's step
    memory_bytes = states / 4 * 0.9
    with pytest.raises(InfeasibleError, match=r"does not fit .* takes .* more ") as no:
        search(limited(cluster(4), memory_bytes), of, batch=8, forbid=["offload"])
    worst = max(no.value.shortfall_bytes)
    assert states / 4 * 0.1 <= worst <= (states * 0.1 + made) / 4
    wider = dataclasses.replace(limited(cluster(4), memory_bytes), num_nodes=2)
    assert search(wider, of, batch=8).best.fits


# --- overrides -----------------------------------------------------------------------------------

BLOCKS = ("layers.0", "layers.1", "layers.2", "head")


@pytest.mark.parametrize(
    "given",
    [
        {"dp": 2, "tp": 2},
        {"pp": 3, "schedule": "gpipe"},
        {"microbatch_size": 2, "recompute": "full"},
        {"num_microbatches": 2, "zero": 1},
        {"stages": [BLOCKS[:1], BLOCKS[1:]], "zero": 0},
        {"forbid": ["tp"]},
        {"forbid": ["dp", "pp"]},
        {"forbid": ["1f1b", "recompute", "zero"]},
    ],
    ids=str,
)
def test_overrides_hold_in_every_candidate(given: dict[str, Any]) -> None:
    rules = Overrides(**given)
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
            for name in ("tp", "dp"):
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
    [{"tp": 3}, {"pp": 4}, {"tp": 4, "pp": 2}, {"num_microbatches": 4, "dp": 2},
     {"microbatch_size": 3}],
    ids=str,
)  # fmt: skip
def test_overrides_that_leave_no_plan_are_named(given: dict[str, Any]) -> None:
    with pytest.raises(OverrideError) as refused:
        search(CLUSTERS["fast wires"], **given)
    assert all(name in str(refused.value) for name in given)


def test_stages_that_draw_in_a_way_of_their_own_have_one_device() -> None:
    """What no two ranks would draw alike is known before plans are made for them."""
    model = nn.Sequential(nn.Linear(64, 64), nn.AlphaDropout(0.3), nn.Linear(64, 64))
    given = cut(model, (torch.randn(BATCH, 64), torch.randn(BATCH, 64)), F.mse_loss)
    found = search(cluster(2), given)
    assert [len(stage.ranks) for stage in found.best.plan.stages] == [1, 1]
    assert any("alpha_dropout" in note for note in found.notes)
    for wanted in ({"dp": 2}, {"tp": 2}, {"pp": 1}):
        with pytest.raises(OverrideError, match=r"alpha_dropout.* differ from rank to rank"):
            search(cluster(2), given, **wanted)
    with pytest.raises(OverrideError, match=r"alpha_dropout.* every stage has one device"):
        search(cluster(4), given)


# --- what the field knows ------------------------------------------------------------------------

H100 = Cluster.from_catalog("h100-sxm")


@second_tier("many rows through few weights stay")
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


def test_few_rows_through_many_weights_are_tensor_parallel_with_a_proof() -> None:
    found = search(H100, linears(8192, 4, 64), batch=64)
    assert all(s.dp == 1 and s.tp > 1 for s in found.best.plan.stages)
    assert {"layers.0", "layers.1", "head"} <= set(found.certificates)
    for proof in found.certificates.values():
        assert proof.gap == pytest.approx(0, abs=1e-6)


GATHERED: dict[str, Any] = {"dp": 4, "zero": 3, "dp_shard": 4, "recompute": "none"}


def test_secondary_shards_are_kept_where_nodes_are_far_and_memory_is_left() -> None:
    """ZeRO-3 alone fits; a backward that gathers within its node is faster while that fits, too."""
    far = cluster(2, nodes=2, bandwidth=1e11, node_bandwidth=2e8)

    def chosen(on: Cluster, **more: Any) -> tuple[int | None, float]:
        best = search(on, **GATHERED, **more).best
        return best.plan.stages[0].hpz, max(best.evaluation.prediction.peak_memory_bytes)

    kept, peak = chosen(far)
    none, less = chosen(far, forbid=["hpz"])
    assert kept == 2 and none is None and less < peak
    assert chosen(limited(far, (peak + less) // 2))[0] is None
    assert chosen(cluster(4, bandwidth=1e11))[0] is None


def test_blocks_are_quantised_where_that_is_allowed_and_links_are_slow() -> None:
    slow = cluster(2, nodes=2, bandwidth=1e9, node_bandwidth=1e8)

    def chosen(on: Cluster, **more: Any) -> str:
        return search(on, **GATHERED, **more).best.plan.stages[0].quantized

    assert chosen(slow) == "none"
    assert chosen(slow, allow=("quantized",)) == "both"
    assert chosen(slow, allow=("quantized",), forbid=["quantized"]) == "none"
    fast = cluster(4, flops=1e9, memory_bandwidth=1e9, bandwidth=1e13)
    assert chosen(fast, allow=("quantized",)) == "none"


def test_gradients_are_compressed_where_that_is_allowed_and_links_are_slow() -> None:
    slow = cluster(2, nodes=2, bandwidth=1e9, node_bandwidth=1e8)

    def chosen(on: Cluster, **more: Any) -> str:
        given = {"dp": 4, "recompute": "none"}
        return search(on, **given, **more).best.plan.stages[0].compressed

    assert chosen(slow) == "none"
    assert chosen(slow, allow=("quantized",)) == "none"
    assert chosen(slow, allow=("compressed",)) in ("powersgd-4", "topk-0.1")
    assert chosen(slow, allow=("compressed",), forbid=["compressed"]) == "none"
    assert chosen(slow, allow=("compressed",), compressed="powersgd-1") == "powersgd-1"
    fast = cluster(4, flops=1e9, memory_bandwidth=1e9, bandwidth=1e13)
    assert chosen(fast, allow=("compressed",)) == "none"
    # what one block asks for is its stage's, and offered to no other
    one = {"dp": 2, "pp": 2, "recompute": "none", "compressed": {"head": "powersgd-1"}}
    first, last = search(slow, **one, allow=("compressed",)).best.plan.stages
    assert (first.compressed in OFFERED, last.compressed) == (True, "powersgd-1")


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


def test_plans_are_written_until_no_draft_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    written, plain = list[Candidate](), Search.written

    def slower_at_first(own: Search, draft: PlanDraft) -> Candidate:
        found = plain(own, draft)
        if not written:
            priced, late_s = found.evaluation, 3 * found.step_time_s
            late = dataclasses.replace(priced.prediction, step_time_s=late_s)
            found = dataclasses.replace(
                found, evaluation=dataclasses.replace(priced, prediction=late)
            )
        written.append(found)
        return found

    monkeypatch.setattr(Search, "written", slower_at_first)
    best = search(CLUSTERS["two nodes"]).best
    assert len(written) > 1 and best.step_time_s == min(c.step_time_s for c in written)


# --- again, and in time --------------------------------------------------------------------------


def same(first: SearchResult, second: SearchResult) -> bool:
    return [c.plan for c in first.candidates] == [c.plan for c in second.candidates] and (
        first.bound_s,
        first.best.evaluation.prediction,
        first.notes,
    ) == (second.bound_s, second.best.evaluation.prediction, second.notes)


@second_tier("prices after others stay (test_order), and searches after a hurried one")
def test_what_was_priced_before_changes_nothing() -> None:
    """One coster through searches with other overrides, shardings among them."""
    on = CLUSTERS["slow starts"]
    others: list[dict[str, Any]] = [
        {"tp": 2, "shardings": {"layers.0": "rowwise"}},
        {"recompute": {"layers.1": "full"}},
        {"stages": [BLOCKS[:1], BLOCKS[1:]]},
        {"forbid": ["tp"], "zero": 1},
        {},
    ]
    before = searching(on)
    assert same(before.run(), search(on))
    for given in others:
        again = searching(on, programs=before.programs, **given)
        assert same(again.run(), search(on, **given))
        before = again


@pytest.mark.parametrize(
    ("seed", "tight"), [(1, False), pytest.param(4, True, marks=second_tier("ample memory stays"))]
)
def test_time_may_end_anywhere(seed: int, tight: bool) -> None:
    """On a clock that goes on by a second whenever it is read: limits end while bounds are found,
    while blocks are solved, while plans are explored. There is a plan that fits all the same, and a
    bound that holds or none."""
    of, on, batch, _ = instance(seed)
    problem = problem_of(of, on, target=SUMMED)
    free = Search(problem, batch, Overrides()).run()
    if tight:
        on = limited(on, max(free.best.evaluation.prediction.peak_memory_bytes) - 1)
        problem = problem_of(of, on, target=SUMMED)
        free = Search(problem, batch, Overrides()).run()
    bounded, complete = [], []
    for limit_s in (0.0, 3.0, 10.0, 30.0, 1e6):
        hurried = Search(problem, batch, Overrides(), time_limit_s=limit_s)
        hurried.programs.time.clock = itertools.count(0.0).__next__
        found = hurried.run()
        assert max(found.best.evaluation.prediction.peak_memory_bytes) <= on.device.memory_bytes
        assert found.best.step_time_s >= free.best.step_time_s * (1 - 1e-9)
        assert found.bound_s <= free.best.step_time_s * (1 + 1e-9)
        assert math.isinf(found.gap) is (found.bound_s == 0)
        bounded.append(found.bound_s > 0)
        complete.append(found.complete)
        hurried.programs.time.clock = time.monotonic  # nothing solved in a hurry is left
        again = Search(problem, batch, Overrides(), programs=hurried.programs).run()
        assert again.best.plan == free.best.plan
    assert same(free, found)
    assert (bounded[0], bounded[-1], complete[0], complete[-1]) == (False, True, False, True)
    assert complete == sorted(complete)

"""Communication by axis and collective, and memory by what holds it, are the price's own sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from meshwright.costmodel.operators import Problem
from meshwright.costmodel.sharding import Assignment
from meshwright.planner.plan import check_plan
from meshwright.planner.pricing import (
    Evaluation,
    StageCoster,
    evaluate,
    memory_parts,
    priced_work,
    traffic,
)
from meshwright.profiles.cluster import Cluster
from tests.parity.parity_cells import Cell, plan_of

CELLS = """
gpt2_tied    dp2              1f1b m2
gpt2_untied  dp4              1f1b m2 zero2 shard2 bf16
llama        dp2xtp2          1f1b m2 zero3 full
llama        dp2xtp2          1f1b m2 zero1 sequence
llama        pp2xtp2          zb_v m4
gpt2_untied  pp2xdp2          1f1b m4 mixed
moe          dp2              1f1b m2
resnet       tp2              1f1b m2
bert         tp4              1f1b m2
"""
CLUSTERS = {
    "local": Cluster.local(4, measure=False),
    "dgx-a100": Cluster.from_catalog("dgx-a100", num_nodes=1),
}


@pytest.fixture(params=[(c, n) for c in CELLS.strip().splitlines() for n in CLUSTERS], ids=str)
def priced(
    request: pytest.FixtureRequest,
) -> tuple[Evaluation, Problem, Sequence[Mapping[str, Assignment]]]:
    line, name = request.param
    plan, of = plan_of(Cell.parse(line))
    problem = Problem(
        graph=of.graph, factors=of.table, cluster=CLUSTERS[name], precision=plan.precision
    )
    assignments = check_plan(plan, of.graph, of.table)
    return evaluate(plan, problem, assignments), problem, assignments


def test_rows_add_up_to_what_is_priced(
    priced: tuple[Evaluation, Problem, Sequence[Mapping[str, Assignment]]],
) -> None:
    evaluation, problem, assignments = priced
    plan, rows = evaluation.plan, traffic(*priced)
    for k, costs in enumerate(evaluation.stages):
        own = [row for row in rows if row.stage == k and row.axis != "pipeline"]
        inside = plan.num_microbatches * (costs.forward_comm_s + costs.backward_comm_s)
        exposed, whole = inside + costs.reduce_s, sum(row.seconds for row in own)
        # copies of weights are in the price, too, and no communication
        assert sum(row.exposed_s for row in own) == pytest.approx(min(exposed, whole), rel=1e-6)
    for ranks, work in zip(plan.devices, priced_work(plan, problem, assignments), strict=True):
        of_group = [row for row in rows if plan.stages[row.stage].ranks == ranks]
        sent = sum(row.sent_bytes for row in of_group)
        assert sent == pytest.approx(sum(work.sent_bytes.values()), rel=1e-6)
    assert len({(row.stage, row.axis, row.collective, row.link) for row in rows}) == len(rows)
    for row in rows:
        assert row.calls > 0
        assert row.sent_bytes > 0
        assert 0 <= row.exposed_s <= row.seconds * (1 + 1e-9)


def test_parts_of_memory_add_up_to_the_peak(
    priced: tuple[Evaluation, Problem, Sequence[Mapping[str, Assignment]]],
) -> None:
    evaluation, problem, assignments = priced
    found = memory_parts(evaluation, StageCoster(problem), assignments)
    peaks = evaluation.prediction.peak_memory_bytes
    assert [sum(parts.as_dict().values()) for parts in found] == pytest.approx(peaks, abs=1)
    assert all(min(parts.as_dict().values()) >= 0 for parts in found)

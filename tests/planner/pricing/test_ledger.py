"""The lines of a ledger add up to what stages cost, on plans of every knob."""

from collections import defaultdict

import pytest

from meshwright.costmodel.operators import Problem
from meshwright.planner.plan.check import check_plan
from meshwright.planner.pricing import Ledger
from meshwright.planner.pricing.evaluate import Evaluation, evaluate
from meshwright.profiles.cluster import Cluster
from tests.parity.parity_cells import Cell, plan_of
from tests.parity.parity_matrix import ALL

CLUSTERS = (
    Cluster.from_catalog("dgx-h100", num_nodes=2),
    Cluster.from_catalog("pcie-8-rtx-4090", num_nodes=2),
    Cluster.local(8, measure=False),
)


def priced(cell: Cell, on: Cluster) -> Evaluation:
    plan, of = plan_of(cell)
    problem = Problem(graph=of.graph, factors=of.table, cluster=on, precision=plan.precision)
    return evaluate(plan, problem, check_plan(plan, of.graph, of.table))


@pytest.mark.parametrize("number", range(len(CLUSTERS)))
def test_lines_add_up_to_costs(number: int) -> None:
    for cell in ALL[number :: len(CLUSTERS)]:
        found = priced(cell, CLUSTERS[number])
        for own, lines in zip(found.priced, Ledger.of(found).stages, strict=True):
            m, costs = own.setting.batch.microbatches, own.costs
            seconds: dict[str, float] = defaultdict(float)
            said: dict[str, float] = defaultdict(float)
            for line in lines:
                seconds[line.where] += line.exposed_s
                beside = line.entry.column not in ("forward_s", "backward_s", "issue_s")
                said[line.where] += line.exposed_s * bool(line.entry.axis or beside)
            assert seconds["forward"] == pytest.approx(m * costs.forward_s, rel=1e-9), cell.name
            assert seconds["backward"] == pytest.approx(m * costs.backward_s, rel=1e-9), cell.name
            assert seconds["step"] == pytest.approx(costs.reduce_s, rel=1e-9, abs=1e-15), cell.name
            assert seconds["optimizer"] == pytest.approx(costs.optimizer_s, rel=1e-9), cell.name
            assert said["forward"] == pytest.approx(m * costs.forward_comm_s, rel=1e-9, abs=1e-15)
            assert said["backward"] == pytest.approx(m * costs.backward_comm_s, rel=1e-9, abs=1e-15)

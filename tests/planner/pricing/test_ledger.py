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
        evaluation = priced(cell, CLUSTERS[number])
        stages = Ledger.of(evaluation).stages
        for own, costs, lines in zip(evaluation.priced, evaluation.stages, stages, strict=True):
            m = own.setting.batch.microbatches
            found_s, said_s = defaultdict[str, float](float), defaultdict[str, float](float)
            for line in lines:
                found_s[line.where] += line.exposed_s
                beside = line.entry.column not in ("forward_s", "backward_s", "issue_s")
                said_s[line.where] += line.exposed_s * bool(line.entry.axis or beside)
            for found, wanted in (
                (found_s["forward"], m * costs.forward_s),
                (found_s["backward"], m * costs.backward_s),
                (found_s["step"], costs.reduce_s),
                (found_s["optimizer"], costs.optimizer_s),
                (said_s["forward"], m * costs.forward_comm_s),
                (said_s["backward"], m * costs.backward_comm_s),
            ):
                assert found == pytest.approx(wanted, rel=1e-9, abs=1e-15), cell.name

"""Lines of a ledger add up to what stages cost, its rows to its work, parts of memory to the peak,
on plans of every knob."""

from collections import defaultdict
from functools import cache

import pytest

from meshwright.costmodel.operators import Problem
from meshwright.costmodel.target import Target
from meshwright.costmodel.targets import EAGER
from meshwright.planner.plan.plan import Plan
from meshwright.planner.pricing import Evaluation, Evaluator, Ledger
from meshwright.planner.pricing.ledger import PASSES
from meshwright.profiles.cluster import Cluster
from tests.helpers.tiers import tiered
from tests.parity.parity_cells import Cell, plan_of
from tests.parity.parity_matrix import ALL

CLUSTERS = (
    Cluster.from_catalog("dgx-h100", num_nodes=2),
    Cluster.from_catalog("pcie-8-rtx-4090", num_nodes=2),
    Cluster.local(8, measure=False),
)
NUMBERS = range(len(CLUSTERS))
CHECKED = tiered(NUMBERS, (0).__eq__, "the other cells on other links; a third of them stays")


def problem_of(cell: Cell, on: Cluster, target: Target = EAGER) -> tuple[Plan, Problem]:
    plan, of = plan_of(cell)
    return plan, Problem(
        graph=of.graph, factors=of.table, cluster=on, precision=plan.precision, target=target
    )


@cache
def priced(number: int) -> list[tuple[str, Evaluation, Problem]]:
    """A part of all cells on one of the clusters."""
    cells = [(cell, *problem_of(cell, CLUSTERS[number])) for cell in ALL[number :: len(CLUSTERS)]]
    return [(cell.name, Evaluator(own).price(plan), own) for cell, plan, own in cells]


@pytest.mark.parametrize("number", CHECKED)
def test_lines_add_up_to_costs(number: int) -> None:
    for name, evaluation, _ in priced(number):
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
                assert found == pytest.approx(wanted, rel=1e-9, abs=1e-15), name


@pytest.mark.parametrize("number", CHECKED)
def test_rows_and_parts_of_memory_add_up(number: int) -> None:
    for name, evaluation, own in priced(number):
        plan, ledger = evaluation.plan, Ledger.of(evaluation)
        rows = ledger.traffic(own)
        for ranks, work in zip(plan.devices, ledger.work(), strict=True):
            of_group = [row for row in rows if plan.stages[row.stage].ranks == ranks]
            sent = sum(row.sent_bytes for row in of_group if row.axis != "host")
            assert sent == pytest.approx(sum(work.sent_bytes.values()), rel=1e-6), name
        assert len({(row.stage, row.axis, row.collective, row.link) for row in rows}) == len(rows)
        for row in rows:
            assert row.calls > 0 and row.sent_bytes > 0, (name, row)
            assert 0 <= row.exposed_s <= row.seconds * (1 + 1e-9), (name, row)
        found = [peak.by_part for peak in evaluation.prediction.peaks]
        peaks = evaluation.prediction.peak_memory_bytes
        assert [sum(parts.values()) for parts in found] == pytest.approx(peaks, abs=1), name
        assert all(min(parts.values()) >= 0 for parts in found), name


@pytest.mark.parametrize("number", CHECKED)
def test_communication_beside_passes_is_that_of_the_rows(number: int) -> None:
    """Of all axes but the pipeline's, whose messages are by themselves, and what copies of the
    model exchange."""
    for name, evaluation, own in priced(number):
        ledger, m = Ledger.of(evaluation), evaluation.plan.passes
        rows = [row for row in ledger.traffic(own) if row.axis != "pipeline"]
        for k, passes in enumerate(ledger.beside_passes()):
            of_stage = [row for row in rows if row.stage == k]
            times = {pass_: m if pass_ in PASSES else 1 for pass_ in passes}
            exposed_s, hidden_s = (
                sum(seconds[part] * times[pass_] for pass_, seconds in passes.items())
                for part in (0, 1)
            )
            copies = evaluation.exchanges.get(k)
            copies_s = copies.seconds if copies else 0.0
            said_s = copies_s + sum(row.exposed_s for row in of_stage)
            assert exposed_s == pytest.approx(said_s), name
            total_s = copies_s + sum(row.seconds for row in of_stage)
            assert exposed_s + hidden_s == pytest.approx(total_s), name

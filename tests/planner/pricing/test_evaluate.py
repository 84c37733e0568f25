"""A plan's price from its stages' components: what crosses devices, what adds up on one device, its
terms and their parts, communication by axis and memory by what holds it."""

import itertools
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meshwright.costmodel.operators import Batch, Mesh, Problem
from meshwright.costmodel.sharding import Assignment
from meshwright.costmodel.sharding.context_axis import CONTEXT_KINDS
from meshwright.costmodel.sharding.strategies import replicated
from meshwright.costmodel.target import Target
from meshwright.costmodel.targets import EAGER
from meshwright.planner.plan.check import check_plan
from meshwright.planner.plan.flow import crossings, spread_of
from meshwright.planner.plan.plan import Plan, StagePlan, recompute_of
from meshwright.planner.pricing import Evaluator, Ledger, Traffic, priced_terms, terms_of
from meshwright.planner.pricing.evaluate import Evaluation, evaluate, price_stages, transfer
from meshwright.planner.pricing.stage_costs import StageCoster
from meshwright.profiles import steps
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.profile import no_profile
from tests.costmodel.operators import test_pricing as operators
from tests.helpers.planning import cluster, problem_of
from tests.helpers.tiers import second_tier
from tests.helpers.tiny import cut, host, net, plan_for
from tests.parity.parity_cells import Cell, plan_of
from tests.planner.plan.test_check import model

NODE = cluster(4, bandwidth=1e6)
NODES = cluster(2, nodes=2, bandwidth=1e9, node_bandwidth=1e4)


def problem(on: Cluster, precision: str = "fp32", target: Target = EAGER) -> Problem:
    graph, factors = model()
    return Problem(graph=graph, factors=factors, cluster=on, precision=precision, target=target)


def virtual(schedule: str, owners: tuple[int, ...]) -> Plan:
    """Four stages on two groups of two ranks; `owners` are the groups of the stages."""
    base = plan_for(model()[0], dp=2, tp=1)
    ranks = [((0, 1), (2, 3))[owner] for owner in owners]
    return cut_up(base, ranks, schedule=schedule)


def cut_up(plan: Plan, ranks: Sequence[tuple[int, ...]], **whole: Any) -> Plan:
    """Stages like the plan's first one: the first two blocks, one each, the rest."""
    names, count = plan.stages[0].blocks, len(ranks)
    bounds = [0, *range(2, count + 1), len(names)] if count == 4 else [0, 3, len(names)]
    stages = tuple(
        replace(plan.stages[0], blocks=names[i:j], ranks=own)
        for (i, j), own in zip(itertools.pairwise(bounds), ranks, strict=True)
    )
    return replace(plan, stages=stages, **whole)


def priced(plan: Plan, on: Cluster = NODE) -> Evaluation:
    return evaluate(plan, problem(on), check_plan(plan, *model()))


def test_stages_of_one_device_send_nothing() -> None:
    """The V turns on the last device: between its two stages there is no link."""
    seconds = sends(virtual("zb_v", (0, 1, 1, 0)), NODE)
    assert seconds.pop((1, 2)) == 0
    assert seconds.keys() >= {(0, 1), (2, 3)} and all(seconds.values())


def sends(plan: Plan, on: Cluster) -> dict[tuple[int, int], float]:
    coster = StageCoster(problem(on, plan.precision))
    return {
        edge: transfer(plan, coster, edge, values).seconds
        for edge, values in crossings(plan, model()[0]).items()
    }


def test_pairs_overlap_only_where_software_and_experts_make_them() -> None:
    """Half of each pass is communication: `train_step` hides none of it, torch's schedules what
    goes with an exchange of tokens."""
    graph, table = model()
    plan = replace(virtual("dualpipe_v", (0, 1, 1, 0)), num_microbatches=4)
    assignments = check_plan(plan, graph, table)
    costs = [
        replace(own, forward_comm_s=own.forward_s / 2, backward_comm_s=own.backward_s / 2)
        for own in evaluate(plan, problem(NODE), assignments).stages
    ]

    def busy_s(overlap_passes: bool, ep: int) -> float:
        target = replace(EAGER, overlap_passes=overlap_passes)
        shared = tuple(replace(stage, ep=ep) for stage in plan.stages)
        coster = StageCoster(problem(NODE, plan.precision, target))
        made = price_stages(replace(plan, stages=shared), coster, costs)
        return sum(made.timeline.busy_s)

    apart = plan.num_microbatches * sum(own.forward_s + own.backward_s for own in costs)
    assert busy_s(False, 1) == busy_s(False, 2) == busy_s(True, 1) == pytest.approx(apart)
    assert busy_s(True, 2) < apart * 0.95


def test_virtual_stages_of_one_device_cost_what_one_stage_does() -> None:
    """One micro-batch: all forwards, then all backwards; cut or whole, the device does the same."""
    whole = plan_for(model()[0], dp=1, tp=1, num_microbatches=1)
    pieces = cut_up(whole, [(0,)] * 4, schedule="interleaved_1f1b")
    on = cluster(1)
    one, four = (priced(plan, on).prediction for plan in (whole, pieces))
    assert four.peak_memory_bytes == pytest.approx(one.peak_memory_bytes, abs=1)
    assert four.step_time_s == pytest.approx(one.step_time_s)


def only(plan: Plan, on: Cluster = NODE, **changes: Any) -> Evaluation:
    (stage,) = plan.stages
    return priced(replace(plan, stages=(replace(stage, **changes),)), on)


def test_each_block_runs_again_by_its_own_policy() -> None:
    """Seconds and bytes of recompute add up over blocks, whichever others do it as well."""
    plan = plan_for(model()[0], dp=1, tp=1)
    names = plan.stages[0].blocks

    def backward_and_kept(*full: str) -> np.ndarray:
        policies = ["full" if name in full else "none" for name in names]
        (stage,) = only(plan, cluster(1), recompute=recompute_of(names, policies)).stages
        return np.array([stage.backward_s, stage.activation_bytes])

    keep = backward_and_kept()
    alone = [backward_and_kept(name) - keep for name in names]
    assert backward_and_kept(*names) - keep == pytest.approx(sum(alone))
    assert backward_and_kept(names[1], names[3]) - keep == pytest.approx(alone[1] + alone[3])
    assert alone[1][0] > 0 > alone[1][1]
    (whole,) = only(plan, cluster(1), recompute="full").stages
    assert backward_and_kept(*names) == pytest.approx([whole.backward_s, whole.activation_bytes])


def test_shards_within_a_node_take_more_memory_and_less_network() -> None:
    plan = plan_for(model()[0], dp=4, tp=1)
    inside, whole = (only(plan, NODES, zero=1, dp_shard=shards) for shards in (2, 4))
    assert inside.stages[0].static_bytes > whole.stages[0].static_bytes
    assert inside.stages[0].reduce_s < whole.stages[0].reduce_s
    assert only(plan, NODES, zero=1).stages == whole.stages


@pytest.mark.parametrize(
    ("ranks", "dp", "cp", "tp", "spread"),
    [
        (range(8), 4, 1, 2, 1),
        (range(1, 16, 4), 4, 1, 1, 4),
        ((0, 1, 8, 9, 16, 17, 24, 25), 4, 1, 2, 4),
        ((0, 1, 8, 9, 16, 17, 24, 25), 2, 2, 2, 4),
        ((0, 1, 4, 5, 16, 17, 20, 21), 4, 1, 2, 1),  # no one distance
        ((0, 2, 4, 6), 2, 1, 2, 1),  # a tensor axis of its own kind
    ],
)
def test_spread_of_the_data_axis(ranks: Any, dp: int, cp: int, tp: int, spread: int) -> None:
    stage = StagePlan(blocks=("x",), ranks=tuple(ranks), dp=dp, cp=cp, tp=tp)
    assert spread_of(stage) == spread


def test_a_pipeline_inside_the_nodes_sends_there_and_reduces_between() -> None:
    on = cluster(2, nodes=2, bandwidth=1e9, node_bandwidth=1e5)
    base = plan_for(model()[0], dp=2, tp=1)
    between, inside = (cut_up(base, groups) for groups in (((0, 1), (2, 3)), ((0, 2), (1, 3))))
    reduced = [priced(plan, on).stages[0].reduce_s for plan in (between, inside)]
    assert reduced[1] > 100 * reduced[0]
    assert sum(sends(between, on).values()) > 100 * sum(sends(inside, on).values())


def test_the_cheapest_kind_of_context_parallelism_is_taken() -> None:
    """Free sends: a ring's are hidden; a network alone: all-to-all moves least of many heads."""
    of, on = operators.net(), operators.talking()
    (attention,) = (o for o in of.graph.ops if o.short == "scaled_dot_product_attention")
    costs = {
        kind: operators.pricer(of, on, cp=2, cp_kind=kind).op_cost(attention, replicated(attention))
        for kind in CONTEXT_KINDS
    }
    seconds = {kind: cost.forward_s + cost.backward_s for kind, cost in costs.items()}
    coster = StageCoster(problem_of(of, on, "fp32"))
    found = coster.setting(Mesh(dp=1, tp=1, cp=2), Batch(rows=operators.ROWS)).mesh.kind
    assert seconds[found] == min(seconds.values())


DECIDING = ("pulp", *(f"meshwright.planner.{room}" for room in ("intra_op", "search", "tracing")))
WRITTEN = """
import sys
from meshwright.planner.pricing.evaluate import Evaluator
from meshwright.planner.pricing.stage_costs import StageCoster
print(*sys.modules)
"""


def test_prices_are_made_without_what_decides() -> None:
    command = [sys.executable, "-c", WRITTEN]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "meshwright.planner.pricing.evaluate" in loaded
    assert not [name for name in loaded if name.startswith(DECIDING)]


TENSOR, DATA, SENT = (
    steps.linked(what, crosses=False)
    for what in (steps.TENSOR_AXIS, steps.DATA_AXIS, steps.MESSAGES)
)
FACTORS = {steps.FORWARD: 1.5, steps.BACKWARD: 0.5, TENSOR: 3.0, DATA: 2.0, SENT: 4.0}
CORRECTIONS = steps.Corrections(
    found={name: steps.Correction(factor=f, plans=1, samples=9) for name, f in FACTORS.items()}
)


def small_problem(devices: int) -> Problem:
    graph, table = cut(net(), rows=4)
    return Problem(graph=graph, factors=table, cluster=host(devices), precision="fp32")


@pytest.mark.parametrize(
    ("stages", "dp", "tp", "zero"),
    [
        (1, 1, 1, 0),
        (1, 1, 2, 0),
        (1, 2, 2, 1),
        (1, 2, 2, 3),
        (2, 2, 1, 0),
        pytest.param(1, 2, 1, 0, marks=second_tier("every degree, stage and axis stays once")),
    ],
)
def test_corrected_prices_are_corrected_parts(stages: int, dp: int, tp: int, zero: int) -> None:
    own = small_problem(stages * dp * tp)
    plan = plan_for(own.graph, stages=stages, dp=dp, tp=tp)
    split = {"layers.*.up": "colwise", "layers.*.down": "rowwise"} if tp > 1 else {}
    plan = replace(plan, stages=tuple(replace(s, zero=zero, shardings=split) for s in plan.stages))
    empty = no_profile(own.cluster)
    terms = priced_terms(plan, own, empty)
    assert set(terms) == set(steps.TERMS)
    corrected = replace(own, profile=replace(empty, corrections=CORRECTIONS))
    found = terms_of(Evaluator(corrected).price(plan))
    plain = terms_of(Evaluator(own).price(plan))
    for term in steps.TERMS if stages == 1 else ("forward", "backward", "reduction"):
        parts = terms[term].parts
        assert terms[term].seconds == plain[term]
        changed = sum(
            (FACTORS[name] - 1) * seconds for name, seconds in parts.items() if name in FACTORS
        )
        assert found[term] == pytest.approx(plain[term] + changed, rel=1e-6, abs=1e-12)
    shown = {name for term in terms.values() for name in term.parts}
    assert {steps.FORWARD, steps.BACKWARD} <= shown
    assert (TENSOR in shown) == (tp > 1)
    assert (SENT in terms[steps.STEP].parts) == (stages > 1)
    if dp > 1:
        assert DATA in shown


def test_a_measured_step_ends_before_the_optimizers() -> None:
    """Which the device groups run at the same time."""
    own = small_problem(2)
    plan = plan_for(own.graph, stages=2, dp=1, tp=1)
    found = Evaluator(own).price(plan)
    stepping = sum(costs.optimizer_s for costs in found.stages) / 2
    assert stepping > 0
    assert terms_of(found)[steps.STEP] == pytest.approx(found.prediction.step_time_s - stepping)


def test_corrections_of_the_profile_change_nothing_of_what_is_kept() -> None:
    own = small_problem(2)
    plan, empty = plan_for(own.graph, dp=2, tp=1), no_profile(own.cluster)
    once = priced_terms(plan, own, empty)
    again = priced_terms(plan, own, replace(empty, corrections=CORRECTIONS))
    assert once == again


# --- communication by axis, memory by what holds it ----------------------------------------------

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


Audited = tuple[Evaluation, Problem, Sequence[Mapping[str, Assignment]]]


def audit(line: str, name: str) -> Audited:
    plan, of = plan_of(Cell.parse(line))
    problem = Problem(
        graph=of.graph, factors=of.table, cluster=CLUSTERS[name], precision=plan.precision
    )
    assignments = check_plan(plan, of.graph, of.table)
    return evaluate(plan, problem, assignments), problem, assignments


def traffic(audited: Audited) -> list[Traffic]:
    evaluation, problem, _ = audited
    return Ledger.of(evaluation).traffic(problem)


@pytest.fixture(
    scope="module", params=[(c, n) for c in CELLS.strip().splitlines() for n in CLUSTERS], ids=str
)
def audited(request: pytest.FixtureRequest) -> Audited:
    return audit(*request.param)


def test_rows_add_up_to_what_is_priced(audited: Audited) -> None:
    evaluation, *_ = audited
    plan, ledger, rows = evaluation.plan, Ledger.of(evaluation), traffic(audited)
    for ranks, work in zip(plan.devices, ledger.work(), strict=True):
        of_group = [row for row in rows if plan.stages[row.stage].ranks == ranks]
        sent = sum(row.sent_bytes for row in of_group)
        assert sent == pytest.approx(sum(work.sent_bytes.values()), rel=1e-6)
    assert len({(row.stage, row.axis, row.collective, row.link) for row in rows}) == len(rows)
    for row in rows:
        assert row.calls > 0
        assert row.sent_bytes > 0
        assert 0 <= row.exposed_s <= row.seconds * (1 + 1e-9)


def test_parts_of_memory_add_up_to_the_peak(audited: Audited) -> None:
    evaluation, *_ = audited
    found = [peak.by_part for peak in evaluation.prediction.peaks]
    peaks = evaluation.prediction.peak_memory_bytes
    assert [sum(parts.values()) for parts in found] == pytest.approx(peaks, abs=1)
    assert all(min(parts.values()) >= 0 for parts in found)

"""A plan against its model: globs over names, and everything that cannot hold."""

import contextlib
import dataclasses
import itertools
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.mesh import CONTEXT_KINDS, ContextKind
from meshwright.costmodel.recompute import RECOMPUTE
from meshwright.costmodel.schedules import SCHEDULES
from meshwright.costmodel.sharding.factors import FactorTable
from meshwright.costmodel.sharding.layouts import Entry
from meshwright.planner.plan.check import check_plan, check_runs, fingerprint, why_stepped_late
from meshwright.planner.plan.offload import away_blocks
from meshwright.planner.plan.plan import Plan, PlanError
from meshwright.planner.plan.shardings import express_shardings, resolve_shardings
from tests.helpers import planning
from tests.helpers.refusals import refusals, refused
from tests.helpers.stored import stored
from tests.helpers.tiers import tiered
from tests.helpers.tiny import VOCAB, WIDTH, cut, net, plan_for, with_stage
from tests.models import experts_models
from tests.models.experts_models import Library, batch, token_loss
from tests.models.models import Case, Traced, sgd, traced
from tests.parity.parity_cells import graph_of
from tests.planner.search.test_search import search

REFUSED = Path(__file__).with_name("refused.txt")

few = settings(max_examples=25)


@cache
def model() -> tuple[Graph, FactorTable]:
    return cut(net())


@cache
def tied() -> tuple[Graph, FactorTable]:
    return cut(net(tied=True))


def op_named(graph: Graph, key: str) -> str:
    return next(op.name for op in graph.ops if op.key == key)


def parameter_named(graph: Graph, fqn: str) -> str:
    return next(value for value, name in graph.parameters.items() if name == fqn)


def test_modules_operators_and_parameters_are_found() -> None:
    graph, _ = model()
    texts = {"layers.1.up": "colwise", "layers.2.norm:layer_norm": "-> S(1)"}
    found = resolve_shardings(graph, graph.blocks, {**texts, "head.weight": "S(0)@tp"})
    assert {name: str(entry) for name, entry in found.items()} == {
        op_named(graph, "layers.1.up:linear"): "colwise",
        op_named(graph, "layers.2.norm:layer_norm"): "-> S(1)",
        parameter_named(graph, "head.weight"): "-> S(0)",
    }


@pytest.mark.parametrize("order", [1, -1])
def test_the_longest_pattern_wins_in_any_order(order: int) -> None:
    graph, _ = model()
    texts = [("**", "follow"), ("layers.*.up", "colwise"), ("layers.1.up", "rowwise")][::order]
    found = resolve_shardings(graph, graph.blocks, dict(texts))
    said = [str(found[op_named(graph, f"layers.{i}.up:linear")]) for i in range(3)]
    assert said == ["colwise", "rowwise", "colwise"]


def test_follow_takes_a_decision_back() -> None:
    graph, _ = model()
    texts = {"layers.*.up": "colwise", "layers.1.up": "follow", "layers.*.up.weight": "follow"}
    found = resolve_shardings(graph, graph.blocks, texts)
    assert found[op_named(graph, "layers.1.up:linear")] == Entry()
    assert found[parameter_named(graph, "layers.0.up.weight")] == Entry()


def test_a_tied_parameter_answers_to_all_its_names() -> None:
    graph, _ = tied()
    names = ("embed.weight", "head.weight")
    found = [resolve_shardings(graph, graph.blocks, {name: "S(0)@tp"}) for name in names]
    assert found[0] == found[1] != {}


ENTRIES = st.sampled_from(["colwise", "rowwise", "replicate", "-> S(1)", "colwise -> R"])
STATES = st.sampled_from(["R", "S(0)", "S(1)"])


@few
@given(st.data())
def test_resolving_undoes_expressing(data: st.DataObject) -> None:
    graph, _ = data.draw(st.sampled_from([model(), tied()]))
    ops = [op.name for block in graph.blocks for op in block.ops]
    # few distinct decisions over many operators, so that repeats agree and differ
    entries = {
        name: Entry.parse(text)
        for name, text in data.draw(st.dictionaries(st.sampled_from(ops), ENTRIES)).items()
    }
    values = sorted({value for block in graph.blocks for value in block.parameters})
    entries |= {
        value: Entry.parse(f"-> {text}")
        for value, text in data.draw(st.dictionaries(st.sampled_from(values), STATES)).items()
    }
    texts = express_shardings(graph, graph.blocks, entries)
    assume(texts or not entries)
    found = resolve_shardings(graph, graph.blocks, texts)
    assert {name: entry for name, entry in found.items() if entry != Entry()} == entries


def test_a_decision_alike_in_all_repeats_is_one_line() -> None:
    graph, _ = model()
    ups = [op_named(graph, f"layers.{i}.up:linear") for i in range(3)]
    same = dict.fromkeys(ups, Entry.parse("colwise"))
    assert express_shardings(graph, graph.blocks, same) == {"layers.*.up:linear": "colwise"}
    odd = {**same, ups[1]: Entry.parse("rowwise")}
    said = {"layers.*.up:linear": "colwise", "layers.1.up:linear": "rowwise"}
    assert express_shardings(graph, graph.blocks, odd) == said


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_good_plan_gives_assignments_for_its_blocks(stages: int) -> None:
    graph, table = model()
    found = check_plan(plan_for(graph, stages=stages), graph, table)
    assert [name for part in found for name in part] == [block.name for block in graph.blocks]


def test_a_plan_holds_at_any_batch_size_and_precision() -> None:
    plan = plan_for(model()[0])
    for rows, precision in ((2, "fp32"), (7, "bf16")):
        graph, table = cut(net(), rows=rows, precision=precision)
        assert fingerprint(graph) == plan.model
        check_plan(plan, graph, table)


def test_data_ranks_divide_a_micro_batch_and_a_part_of_a_block_is_a_whole_one_away() -> None:
    graph, table = model()
    plan = plan_for(graph)  # 16 rows in 2 micro-batches, 5 blocks
    with pytest.raises(PlanError, match="dp=16 does not divide a micro-batch of 8 rows"):
        check_plan(with_stage(plan, dp=16, tp=1, ranks=tuple(range(16))), graph, table)
    parts = (0.2, 0.3, 1.0)
    away = [with_stage(plan, offload={"activations": part}).stages[0] for part in parts]
    assert [*map(away_blocks, away)] == [1, 2, 5]


def test_a_model_of_other_sizes_has_another_fingerprint() -> None:
    wider = net()
    wider.head = torch.nn.Linear(WIDTH, 2 * VOCAB, bias=False)
    assert fingerprint(cut(wider)[0]) != fingerprint(model()[0])


def test_other_models_have_other_fingerprints() -> None:
    graph, table = model()
    own, other = fingerprint(graph), fingerprint(tied()[0])
    assert own != other
    says = (
        f"plan: made for model={other}, but this model is {own} (other layers, sizes or "
        f"operators); legal: {own}; plan again, or use the model it was made for"
    )
    with refused(PlanError, says):
        check_plan(plan_for(tied()[0]), graph, table)


def of_model(name: str) -> Traced:
    if name == "net":
        graph, table = model()
        return Traced(graph=graph, table=table)
    if name != "experts":
        return graph_of(name, 4)
    case = Case(build=Library, batch=batch, optimizer=sgd, loss_fn=token_loss)
    return stored("Library", 4, make=lambda: traced(case, 4), models=(experts_models,))


def changed(graph: Graph, *given: dict[str, Any]) -> Plan:
    """A plan with changes to each stage, and the last ones to the whole."""
    *stages, whole = given
    plan = plan_for(graph, stages=max(1, len(stages)))
    for k, changes in enumerate(stages):
        plan = with_stage(plan, k, **changes)
    return dataclasses.replace(plan, **whole)


@pytest.mark.parametrize(
    ("of", "given", "says"),
    [
        pytest.param(of, *case.values, id=f"{of} {case.id}")
        for of in ("net", "experts", "llama", "resnet")
        for case in refusals(REFUSED, of)
    ],
)
def test_what_cannot_hold_is_refused(of: str, given: tuple[dict[str, Any]], says: str) -> None:
    found = of_model(of)
    with refused(PlanError, says):
        check_plan(changed(found.graph, *given), found.graph, found.table)


@pytest.mark.parametrize(("given", "says"), refusals(REFUSED, "runs"))
def test_what_does_not_run_is_priced_and_refused(given: tuple[dict[str, Any]], says: str) -> None:
    with refused(PlanError, says):
        check_runs(changed(model()[0], *given))


def test_a_degree_must_leave_every_rank_a_part_of_what_it_splits() -> None:
    graph, table = model()
    for pattern, text, size in (("head", "colwise", VOCAB), ("layers.0.up", "rowwise", WIDTH)):
        for tp in (2, 3, 5, 8, 9, 13):
            plan = plan_for(graph, dp=1, tp=tp)
            plan = with_stage(plan, shardings={pattern: text})
            if (tp - 1) * math.ceil(size / tp) < size:
                check_plan(plan, graph, table)
            else:
                with pytest.raises(PlanError, match=rf"{pattern}.*not possible with tp={tp}"):
                    check_plan(plan, graph, table)


@pytest.mark.parametrize("kind", CONTEXT_KINDS)
def test_a_sequence_may_be_split(kind: ContextKind) -> None:
    graph, table = model()
    plan = with_stage(plan_for(graph), cp=2, cp_kind=kind, tp=1)
    check_plan(plan, graph, table)
    check_runs(plan)
    # what torch gets wrong is priced
    check_plan(with_stage(plan_for(graph, schedule="zb_h1"), zero=3), graph, table)


def test_every_schedule_runs_with_every_recompute() -> None:
    flushing = [name for name, record in SCHEDULES.items() if record.flushes]
    for schedule, recompute in itertools.product(flushing, RECOMPUTE):
        plan = plan_for(model()[0], schedule=schedule)
        check_runs(with_stage(plan, recompute=recompute, zero=2))


def test_stages_may_lie_on_spread_ranks() -> None:
    graph, table = model()
    for first, second in (((0, 1, 4, 5), (2, 3, 6, 7)), ((0, 2, 4, 6), (1, 3, 5, 7))):
        check_plan(changed(graph, {"ranks": first}, {"ranks": second}, {}), graph, table)


def test_virtual_stages_share_the_ranks_of_their_device() -> None:
    """Stage k of p · v runs on device k mod p; `devices` are the distinct groups of ranks."""
    graph, table = model()
    names = tuple(block.name for block in graph.blocks)
    groups = ((0, 1), (2, 3))
    parts = (names[:2], names[2:3], names[3:4], names[4:])
    stages = [{"blocks": p, "ranks": groups[k % 2], "tp": 1} for k, p in enumerate(parts)]
    plan = changed(graph, *stages, {"schedule": "interleaved_1f1b"})
    assert (plan.devices, plan.num_ranks) == (groups, 4)
    check_plan(plan, graph, table)


class ReadTwice(torch.nn.Module):
    """Reads a weight without a gradient, or a view of it, before it is trained on."""

    def __init__(self, *, detached: bool) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.detached = detached

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.last.weight.t()
        x = self.first(x) + x @ (weight.detach() if self.detached else weight)
        return self.last(x).square().mean()


@pytest.mark.parametrize(
    "detached", tiered([False, True], bool, "what is refused stays, beside plans that are stepped")
)
def test_a_weight_read_without_gradient_is_not_stepped_in_the_backward(detached: bool) -> None:
    of = planning.cut(ReadTwice(detached=detached), (torch.randn(4, 8),))
    assert why_stepped_late(of.graph).startswith("last.weight is also read without") is detached
    plan = search(planning.cluster(1), of, batch=4, num_microbatches=1).best.plan
    stepped = dataclasses.replace(plan, optimizer_in_backward=True)
    says = r"optimizer_in_backward=True: last\.weight is also read without a gradient"
    with pytest.raises(PlanError, match=says) if detached else contextlib.nullcontext():
        check_plan(stepped, of.graph, of.table)

"""A plan against its model: globs over names, and everything that cannot hold."""

from __future__ import annotations

import dataclasses
import math
from functools import cache
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meshwright.costmodel.blocks.policies import RECOMPUTE
from meshwright.costmodel.graph import Graph
from meshwright.costmodel.schedules.schedule import SCHEDULES
from meshwright.costmodel.sharding.context_axis import CONTEXT_KINDS, ContextKind
from meshwright.costmodel.sharding.factors import FactorTable
from meshwright.costmodel.sharding.layouts import Entry
from meshwright.planner.plan.check import check_plan, check_runs, fingerprint
from meshwright.planner.plan.plan import Plan, PlanError
from meshwright.planner.plan.shardings import express_shardings, glob, resolve_shardings
from tests.helpers.planning import linears
from tests.helpers.tiny import VOCAB, WIDTH, cut, net, plan_for, with_stage

few = settings(deadline=None, max_examples=40)


@cache
def model() -> tuple[Graph, FactorTable]:
    return cut(net())


@cache
def tied() -> tuple[Graph, FactorTable]:
    return cut(net(tied=True))


# --- globs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("h.*.up", ["h.0.up", "h.11.up"], ["h.0.mlp.up", "h.0.up.weight", "x.h.0.up", "h.up"]),
        ("h.**", ["h.0", "h.0.up", "h.0.mlp.up:addmm"], ["head", "g.h.0"]),
        ("**.up", ["h.0.up", "h.0.mlp.up"], ["up", "h.0.up2"]),
        ("h.?", ["h.0", "h.9"], ["h.10", "h."]),
        ("h.*:addmm", ["h.0:addmm"], ["h.0.up:addmm", "h.0:addmm#1"]),
        ("a+b[0]", ["a+b[0]"], ["aab0", "a+b0"]),
    ],
)
def test_star_stays_within_a_component(pattern: str, matching: list[str], other: list[str]) -> None:
    assert [n for n in matching + other if glob(pattern).match(n)] == matching


def op_named(graph: Graph, key: str) -> str:
    return next(op.name for op in graph.ops if op.key == key)


def parameter_named(graph: Graph, fqn: str) -> str:
    return next(value for value, name in graph.parameters.items() if name == fqn)


def test_modules_operators_and_parameters_are_found() -> None:
    graph, _ = model()
    found = resolve_shardings(
        graph,
        graph.blocks,
        {"layers.1.up": "colwise", "layers.2.norm:layer_norm": "-> S(1)", "head.weight": "S(0)@tp"},
    )
    assert {name: str(entry) for name, entry in found.items()} == {
        op_named(graph, "layers.1.up:linear"): "colwise",
        op_named(graph, "layers.2.norm:layer_norm"): "-> S(1)",
        parameter_named(graph, "head.weight"): "-> S(0)",
    }


@pytest.mark.parametrize("reverse", [False, True])
def test_the_longest_pattern_wins_in_any_order(reverse: bool) -> None:
    graph, _ = model()
    texts = {"**": "follow", "layers.*.up": "colwise", "layers.1.up": "rowwise"}
    if reverse:
        texts = dict(reversed(texts.items()))
    found = resolve_shardings(graph, graph.blocks, texts)
    assert [str(found[op_named(graph, f"layers.{i}.up:linear")]) for i in range(3)] == [
        "colwise",
        "rowwise",
        "colwise",
    ]


def test_follow_takes_a_decision_back() -> None:
    graph, _ = model()
    texts = {"layers.*.up": "colwise", "layers.1.up": "follow", "layers.*.up.weight": "follow"}
    found = resolve_shardings(graph, graph.blocks, texts)
    assert found[op_named(graph, "layers.1.up:linear")] == Entry()
    assert found[parameter_named(graph, "layers.0.up.weight")] == Entry()


def test_a_tied_parameter_answers_to_all_its_names() -> None:
    graph, _ = tied()
    found = [
        resolve_shardings(graph, graph.blocks, {name: "S(0)@tp"})
        for name in ("embed.weight", "head.weight")
    ]
    assert found[0] == found[1] != {}


@pytest.mark.parametrize(
    ("pattern", "text", "says"),
    [
        (
            "layers.*.upp",
            "colwise",
            r"'layers\.\*\.upp' matches nothing; .*nearest: layers\.\*\.up",
        ),
        ("layers.0.up:lineer", "colwise", "nearest: layers.0.up:linear"),
        ("haed.weight", "S(0)@tp", "nearest: head.weight"),
        ("layers.0.norm", "colwise", "with a matrix product.*layers.0.norm:layer_norm"),
        ("head.weight", "S(0)@dp", "'head.weight': placement 'S\\(0\\)@dp'"),
        ("head.weight", "colwise", "'head.weight': placement 'colwise'"),
        ("head", "colwise -> Q", "'head': placement 'Q'"),
        ("head", " ", "'head' is empty; legal"),
    ],
)
def test_bad_patterns_and_decisions_are_named(pattern: str, text: str, says: str) -> None:
    graph, _ = model()
    with pytest.raises(PlanError, match=says) as caught:
        resolve_shardings(graph, graph.blocks, {pattern: text}, "here")
    assert str(caught.value).startswith("here: ")


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
    assert express_shardings(graph, graph.blocks, odd) == {
        "layers.*.up:linear": "colwise",
        "layers.1.up:linear": "rowwise",
    }


# --- the check -----------------------------------------------------------------------------------


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


def test_other_models_have_other_fingerprints() -> None:
    assert fingerprint(model()[0]) != fingerprint(tied()[0])


BLOCKS = ("embed", "layers.0", "layers.1", "layers.2", "head")


BAD_PLANS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("model", {"model": "feed"}, {}, "made for model=feed, but this model is .*plan again"),
    ("schedule", {"schedule": "1b1f"}, {}, "schedule='1b1f'; legal: .*1f1b"),
    ("precision", {"precision": "fp4"}, {}, "precision='fp4'; legal: fp32, bf16, fp16, fp8"),
    ("m", {"num_microbatches": 3}, {}, "num_microbatches=3 does not divide.*=16; legal: 1, 2, 4"),
    ("m zero", {"num_microbatches": 0}, {}, "num_microbatches=0; legal: an integer from 1"),
    ("batch", {"global_batch_size": True}, {}, "global_batch_size=True; legal"),
    ("no stages", {"stages": ()}, {}, "no stages"),
    ("zero", {}, {"zero": 4}, "stage 0: zero=4; legal: 0, 1, 2, 3"),
    ("zero bool", {}, {"zero": True}, "stage 0: zero=True; legal: 0, 1, 2, 3"),
    ("hpz", {}, {"zero": 3, "hpz": 4, "dp": 4, "tp": 1}, "hpz=4 is no part of the 4.*legal: 2"),
    ("hpz parts", {}, {"zero": 3, "hpz": 3, "dp": 4, "tp": 1}, "hpz=3 is no part.*or drop hpz"),
    ("quantized", {}, {"zero": 3, "quantized": "int8"}, "quantized='int8'; legal: none, weights"),
    (
        "quantized fp16",
        {"precision": "fp16"},
        {"zero": 3, "quantized": "both"},
        "quantized='both' with precision='fp16'.*or precision bf16",
    ),
    (
        "validated alone",
        {"post_validation": True},
        {},
        "post_validation=true: there is one device group.*legal: false, .*drop post_validation",
    ),
    ("quantized zero", {}, {"zero": 2, "quantized": "both"}, "with zero=2.*legal: none, or zero=3"),
    ("hpz zero", {}, {"zero": 2, "hpz": 2, "dp": 4, "tp": 1}, "hpz=2 with zero=2.*zero=3 and ep"),
    ("recompute", {}, {"recompute": "some"}, "recompute='some'; legal: none, .*selective, .*full"),
    ("cp", {}, {"cp": 0}, "stage 0: cp=0; legal: an integer from 1"),
    (
        "cp length",
        {},
        {"cp": 4, "tp": 1, "dp": 1},
        "cp=4 does not divide sequences of 6; legal: 1, 2, 3, 6",
    ),
    ("ep", {}, {"ep": 0}, "stage 0: ep=0; legal: an integer from 1"),
    ("cp ranks", {}, {"cp": 2}, "its mesh dp=2 × cp=2 × tp=2 needs 8"),
    ("dp", {}, {"dp": 0}, "stage 0: dp=0; legal"),
    ("tp", {}, {"tp": "2"}, "stage 0: tp='2'; legal"),
    (
        "dp and rows",
        {},
        {"dp": 3, "tp": 1, "ranks": (0, 1, 2)},
        "dp=3 does not divide a micro-batch of 8 rows .*legal: 1, 2, 4, 8, or fewer micro-batches",
    ),
    ("mesh", {}, {"ranks": (0, 1, 2)}, "ranks 0-2 are 3, its mesh dp=2 × cp=1 × tp=2 needs 4"),
    ("no ranks", {}, {"ranks": ()}, "ranks none are 0"),
    ("twice", {}, {"ranks": (0, 1, 2, 2)}, "ranks used twice: 2; missing: 3; legal: 0 to 3"),
    ("gap", {}, {"ranks": (0, 1, 2, 4)}, "used twice: none; missing: 3"),
    ("no blocks", {}, {"blocks": ()}, "stage 0: no blocks"),
    ("missing", {}, {"blocks": BLOCKS[:-1]}, f"'missing', expected '{BLOCKS[-1]}'"),
    ("double", {}, {"blocks": (*BLOCKS, BLOCKS[0])}, f"is '{BLOCKS[0]}', expected 'nothing'"),
    ("order", {}, {"blocks": (BLOCKS[1], BLOCKS[0], *BLOCKS[2:])}, "once, in order: position 0"),
    ("unknown", {}, {"blocks": (*BLOCKS[:-1], "layres.2")}, "'layres.2'.*nearest: layers.2"),
    ("pattern", {}, {"shardings": {"layer.*.up": "colwise"}}, "stage 0: sharding 'layer.*.up'"),
    ("strategy", {}, {"shardings": {"head": "colwize"}}, "'colwize'.*legal: .*mean 'colwise'"),
    (
        "axis",
        {},
        {"shardings": {"head.weight": "S(3)"}},
        r"S\(3\) of head.weight.*legal: R, S\(0\)",
    ),
    ("partial", {}, {"shardings": {"head.weight": "P"}}, "state P of head.weight.*legal: R"),
    ("state", {}, {"shardings": {"layers.0.up": "-> S(9)"}}, r"S\(9\) of layers.0.up:linear"),
]


@pytest.mark.parametrize(
    ("plan_changes", "stage_changes", "says"),
    [case[1:] for case in BAD_PLANS],
    ids=[case[0] for case in BAD_PLANS],
)
def test_what_cannot_hold_is_refused(
    plan_changes: dict[str, Any], stage_changes: dict[str, Any], says: str
) -> None:
    graph, table = model()
    plan = with_stage(plan_for(graph), **stage_changes)
    with pytest.raises(PlanError, match=says) as caught:
        check_plan(dataclasses.replace(plan, **plan_changes), graph, table)
    assert str(caught.value).startswith("plan: ")


def test_stages_must_not_share_ranks() -> None:
    graph, table = model()
    plan = with_stage(plan_for(graph, stages=2), 1, ranks=(2, 3, 4, 5))
    with pytest.raises(PlanError, match=r"used twice: 2-3; missing: 6-7"):
        check_plan(plan, graph, table)


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


def test_a_model_without_sequences_has_no_context_axis() -> None:
    of = linears(8, 2, 8)
    plan = with_stage(plan_for(of.graph, dp=1, tp=1), cp=2, ranks=(0, 1))
    with pytest.raises(
        PlanError, match=r"stage 0: cp=2 .*: no input has a sequence dim.*; legal: 1"
    ):
        check_plan(plan, of.graph, of.table)


def test_a_model_without_experts_has_none_to_share_out() -> None:
    graph, table = model()
    with pytest.raises(PlanError, match=r"stage 0: ep=2: the model has no experts; legal: 1"):
        check_plan(with_stage(plan_for(graph), ep=2), graph, table)


# --- context parallelism -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CONTEXT_KINDS)
def test_a_sequence_may_be_split(kind: ContextKind) -> None:
    graph, table = model()
    plan = with_stage(plan_for(graph), cp=2, cp_kind=kind, tp=1)
    check_plan(plan, graph, table)
    check_runs(plan)


# --- what can be priced but not run --------------------------------------------------------------


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_every_schedule_runs_with_every_recompute(recompute: str) -> None:
    graph, _ = model()
    for schedule in SCHEDULES:
        check_runs(with_stage(plan_for(graph, schedule=schedule), recompute=recompute, zero=2))


def test_what_torch_gets_wrong_is_priced_and_refused_with_the_reason() -> None:
    graph, table = model()
    plan = with_stage(plan_for(graph, schedule="zb_h1"), zero=3)
    check_plan(plan, graph, table)
    says = (
        "plan: stage 0: zero=3 with schedule='zb_h1' .*torch loses gradients .*legal: zero 0, 1 or "
        "2, or a schedule with a whole backward: gpipe, 1f1b"
    )
    with pytest.raises(PlanError, match=says):
        check_runs(plan)


def test_stages_may_lie_on_spread_ranks_but_regular_ones() -> None:
    graph, table = model()
    plan = plan_for(graph, stages=2)
    for first, second in (((0, 1, 4, 5), (2, 3, 6, 7)), ((0, 2, 4, 6), (1, 3, 5, 7))):
        spread = with_stage(with_stage(plan, 0, ranks=first), 1, ranks=second)
        check_plan(spread, graph, table)
    for first, second, axis in (
        ((0, 1, 3, 4), (2, 5, 6, 7), "stage 1: ranks 2,5-7, .*neighbours on dp are 2, 4 apart"),
        ((2, 3, 0, 1), (4, 5, 6, 7), "stage 0: ranks 2-3,0-1, .*neighbours on dp are -2 apart"),
    ):
        odd = with_stage(with_stage(plan, 0, ranks=first), 1, ranks=second)
        with pytest.raises(PlanError, match=axis):
            check_plan(odd, graph, table)
    wide = plan_for(graph, stages=2, dp=4, tp=1)
    uneven = with_stage(with_stage(wide, 0, ranks=(0, 1, 3, 4)), 1, ranks=(2, 5, 6, 7))
    with pytest.raises(PlanError, match=r"neighbours on dp are 1, 2 apart; legal: one distance"):
        check_plan(uneven, graph, table)


def test_virtual_stages_share_the_ranks_of_their_device() -> None:
    """Stage k of p · v runs on device k mod p; `devices` are the distinct groups of ranks."""
    graph, table = model()
    names = [block.name for block in graph.blocks]
    groups = ((0, 1), (2, 3))
    base = plan_for(graph, dp=2, tp=1)
    stages = tuple(
        dataclasses.replace(base.stages[0], blocks=blocks, ranks=groups[k % 2])
        for k, blocks in enumerate([names[:2], names[2:3], names[3:4], names[4:]])
    )
    stages = tuple(dataclasses.replace(s, blocks=tuple(s.blocks)) for s in stages)
    plan = dataclasses.replace(base, schedule="interleaved_1f1b", stages=stages)
    assert (plan.devices, plan.num_ranks) == (groups, 4)
    check_plan(plan, graph, table)
    swapped = with_stage(with_stage(plan, 2, ranks=groups[1]), 3, ranks=groups[0])
    with pytest.raises(PlanError, match=r"stage 2: ranks 2-3: schedule='interleaved_1f1b' runs"):
        check_plan(swapped, graph, table)
    with pytest.raises(PlanError, match=r"stage 3: dp=1 × cp=1 × tp=2 on the ranks of stage 1, wh"):
        check_plan(with_stage(plan, 3, dp=1, tp=2), graph, table)
    with pytest.raises(PlanError, match=r"plan: .*1f1b"):
        check_plan(dataclasses.replace(plan, schedule="1f1b"), graph, table)


def test_a_checked_plan_survives_its_file() -> None:
    graph, table = model()
    plan = plan_for(graph, stages=2)
    plan = with_stage(plan, shardings={"layers.*.up": "colwise", "embed": "vocab"})
    assert check_plan(Plan.from_json(plan.to_json()), graph, table) == check_plan(
        plan, graph, table
    )

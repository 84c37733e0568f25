"""The report: the first screen, the sums, what is named, what is data."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright import Cluster, Overrides, ParallelModel
from meshwright.planner.plan.words import describe, layout_words, megatron_layout, seconds
from meshwright.planner.report.components import Components, why_slower
from meshwright.planner.report.tensor_axis import ulysses_notes
from meshwright.planner.search.search import Search
from tests.helpers.planning import cluster, large_llama, problem_of
from tests.helpers.tiny import batch, net, planned, slow_host


class Odd(nn.Module):
    """Operators without a rule, and a width of 15."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 15)
        self.b = nn.Linear(15, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        x = x @ torch.linalg.matrix_exp(0.01 * x.T @ x)
        x = x @ torch.linalg.inv(torch.eye(15) + 0.01 * x.T @ x)
        return self.b(x)


@cache
def searched() -> ParallelModel:
    return planned(net(), cluster=slow_host(4))


@cache
def overridden() -> ParallelModel:
    overrides = Overrides(pp=2, schedule="gpipe", num_microbatches=2)
    return planned(net(), cluster=slow_host(4), overrides=overrides)


@cache
def odd() -> ParallelModel:
    example = (torch.zeros(4, 16), torch.zeros(4, dtype=torch.long))
    return planned(Odd(), 2, example_inputs=example, loss_fn=F.cross_entropy)


MADE = pytest.mark.parametrize("make", [searched, overridden, odd])


# --- the text ------------------------------------------------------------------------------------


def test_the_first_screen_has_what_matters() -> None:
    result = searched()
    report, first = result.report, "\n".join(str(result.report).splitlines()[:40])
    assert f"Chosen: {describe(result.plan)}" in first
    assert f"step {seconds(result.prediction.step_time_s)}" in first
    assert f"{result.prediction.mfu:.1%}" in first
    for word in ("compute", "exposed communication", "bubble", "peak memory", "GiB"):
        assert word in first
    assert re.search(r"^  stage +blocks +ranks +mesh .*memory$", first, re.MULTILINE)
    for k in range(len(result.plan.stages)):
        assert re.search(rf"^  {k} ", first, re.MULTILINE)
    assert f"no plan of the space is faster than {seconds(report.summary['bound_s'])}" in first
    assert f"gap {report.summary['gap']:.1%}" in first and "time limit" not in first
    assert "Why not something else" in first
    for assumption in report.assumptions:
        assert f"  - {assumption}" in report.text(full=True)
    assert "Assumed" in first


def test_the_layout_of_a_pipeline_is_shown() -> None:
    own = overridden()
    summary, notation = own.report.summary, megatron_layout(own.plan)
    assert summary["layout"] == [[len(stage.blocks)] for stage in own.plan.stages]
    assert notation and summary["megatron_layout"] == notation
    told = str(own.report)
    assert f"blocks of stages by device group: {layout_words(own.plan)}\n" in told
    assert f'  Megatron: --pipeline-model-parallel-layout "{notation}"\n' in told
    without = replace(own.report, summary={**summary, "megatron_layout": None})
    assert "Megatron:" not in str(without) and layout_words(own.plan) in str(without)
    assert "layout" not in searched().report.summary


@MADE
def test_lines_fit_a_screen(make: Callable[[], ParallelModel]) -> None:
    text = make().report.text(full=True)
    first, *others = text.split("\n\n")[:3]
    assert all(len(line) <= 180 for line in first.splitlines())
    assert all(len(line) <= 160 for part in others for line in part.splitlines())
    assert not any(line != line.rstrip() for line in text.splitlines())


def test_shardings_and_proofs_are_shown() -> None:
    result = searched()
    text = result.report.text(full=True)
    (stage,) = result.plan.stages
    assert stage.tp > 1 and stage.shardings
    for name, decision in stage.shardings.items():
        assert f"{name}: {decision}" in text
    assert "proved by the solver" in text
    assert all(s["gap"] < 1e-6 for s in result.report.solver)
    assert "gap -" not in text


# --- the numbers ---------------------------------------------------------------------------------


@MADE
def test_components_sum_to_the_step_time_and_all_is_json(make: Callable[[], ParallelModel]) -> None:
    result = make()
    parts = result.report.components.as_dict()
    assert math.isclose(sum(parts.values()), result.prediction.step_time_s, rel_tol=1e-9)
    assert all(value >= 0 for value in parts.values())
    data = json.loads(json.dumps(result.report.to_dict(), allow_nan=False))
    assert data["plan"] == json.loads(result.plan.to_json())
    assert data["components_s"] == pytest.approx(parts)
    busiest_s = max(stage["forward_s"] + stage["backward_s"] for stage in data["stages"])
    busy_s = parts["compute"] + parts["exposed communication"]
    assert busy_s == pytest.approx(result.plan.num_microbatches * busiest_s)
    assert data["summary"]["step_time_s"] == result.prediction.step_time_s
    assert len(data["stages"]) == len(result.plan.stages)
    assert [s["memory_bytes"] for s in data["stages"]] == result.prediction.peak_memory_bytes
    assert set(data) >= {
        "runners_up", "alternatives", "overrides", "solver", "assumptions", "notes", "planning_s"
    }  # fmt: skip


def test_runners_up_are_no_faster_and_differ() -> None:
    report = searched().report
    times = [r["step_time_s"] for r in report.runners_up]
    assert times == sorted(times)
    best = report.summary["step_time_s"]
    for runner in report.runners_up:
        assert runner["slower"] == pytest.approx(runner["step_time_s"] / best - 1)
        assert runner["slower"] >= 0
        assert runner["plan"] != report.summary["chosen"]


def test_a_time_limit_is_told() -> None:
    result = planned(net(), cluster=slow_host(4), time_limit_s=0)
    summary = result.report.summary
    assert not summary["complete"] and summary.get("gap", 0.0) >= 0
    assert "the time limit ended the search" in str(result.report)
    assert summary.get("bound_s", 0.0) <= searched().report.summary["step_time_s"] * (1 + 1e-9)


def test_what_cannot_be_run_is_priced_and_told_where_it_would_run() -> None:
    plan = searched().replan(Overrides(pp=2, schedule="zb_h1", zero=2)).plan
    plan = replace(plan, stages=tuple(replace(stage, zero=3) for stage in plan.stages))
    result = planned(net(), cluster=slow_host(4), plan=plan)
    assert result.report.summary["step_time_s"] > 0
    with pytest.raises(RuntimeError, match=r"zero=3 with schedule='zb_h1' can be.*plan again for"):
        result.train_step(batch(8))


# --- what is named -------------------------------------------------------------------------------


def test_a_precision_without_units_is_noted() -> None:
    def notes(precision: str | None) -> str:
        volta = Cluster.from_catalog("dgx-1-v100", devices_per_node=1)
        return " ".join(planned(net(), cluster=volta, precision=precision).report.notes)

    says = "has no units for bf16: products are priced at fp32's rate; precision='fp16' has 8 times"
    assert says in notes(None)
    assert "has no units" not in notes("fp16")


def test_operators_without_a_rule_are_named() -> None:
    (note,) = [n for n in odd().report.notes if "no sharding rule" in n]
    for target in ("aten.linalg_matrix_exp", "aten.linalg_inv"):
        assert target in note
    assert note in str(odd().report)
    assert not any("no sharding rule" in n for n in searched().report.notes)


def test_assumptions_tell_where_numbers_come_from() -> None:
    assumptions = searched().report.assumptions
    assert any("memory" in a and "is assumed" in a for a in assumptions)
    assert any("100% follow from the catalog" in a for a in assumptions)
    assert any(a.startswith("target eager: kernels fused: none") for a in assumptions)


def test_numbers_that_change_are_told() -> None:
    said, overrides = "the training's numbers change", Overrides(dp=4, compressed="powersgd-1")
    found = planned(net(), cluster=slow_host(4), allow=["compressed"], overrides=overrides)
    (line,) = (a for a in found.report.assumptions if a.startswith(said))
    assert line.startswith(f"{said} with compressed=powersgd-1; ")
    assert not any(a.startswith(said) for a in searched().report.assumptions)


def test_the_trace_is_the_simulated_step(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    overridden().report.trace(path)
    events = json.loads(path.read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    end_us = max(e["ts"] + e["dur"] for e in spans)
    assert end_us * 1e-6 == pytest.approx(overridden().prediction.step_time_s, rel=1e-6)
    assert len({(e["pid"], e["tid"]) for e in spans}) >= 2
    assert all(e["dur"] >= 0 for e in spans)


# --- why ---


def components(**changes: float) -> Components:
    base = dict.fromkeys(
        ("forward_s", "forward_comm_s", "waiting_s", "gradient_reduction_s", "optimizer_s"), 1.0
    ) | {"forward_s": 2.0, "backward_s": 0.0, "backward_comm_s": 0.0}
    return Components(**{**base, **changes})


def test_the_reason_names_the_largest_losses_and_a_gain() -> None:
    worse = components(forward_comm_s=1.5, waiting_s=1.25, optimizer_s=1.01)
    assert why_slower(components(), worse) == (
        "+500 ms exposed communication; +250 ms waiting; -500 ms compute"
    )
    assert why_slower(components(), components()) == "equal in every component"


# --- rows that meet -------------------------------------------------------------------------------


class TwoTowers(nn.Module):
    """Every row of one tower against every row of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores = self.left(x) @ self.right(y).T
        return F.cross_entropy(scores, torch.arange(len(scores)))


@pytest.mark.parametrize(
    ("microbatches", "how"), [(1, "its loss exact"), (2, "each of 2 micro-batches by itself")]
)
def test_a_loss_over_pairs_of_rows_is_noted_where_micro_batches_part_them(
    microbatches: int, how: str
) -> None:
    result = planned(
        TwoTowers(), example_inputs=(torch.zeros(4, 16), torch.zeros(4, 16)), loss_fn=None,
        overrides=Overrides(num_microbatches=microbatches), rows_meet="per_microbatch",
    )  # fmt: skip
    assert any("rows meet in :matmul" in note and how in note for note in result.report.notes)
    assert "rows meet" not in str(overridden().report)


# --- Ulysses -------------------------------------------------------------------------------------

ATTENTION = "model.layers.*.self_attn"


def notes(**shardings: str) -> list[str]:
    of = large_llama()
    overrides = Overrides(tp=4, pp=1, num_microbatches=2, zero=0, shardings=shardings)
    best = Search(problem_of(of, cluster(4)), 8, overrides).run().best
    return ulysses_notes(best.evaluation.priced)


def test_attention_by_heads_between_projections_by_tokens_is_ulysses() -> None:
    tokens = {f"{ATTENTION}.*_proj:linear": "b0"}  # b0 is the sequence, beside the batch
    (note,) = notes(**tokens, **{f"{ATTENTION}:scaled_dot_product_attention": "heads"})
    assert note.startswith("Ulysses") and "tp 4" in note and "in 2 of 2 blocks" in note
    heads = {f"{ATTENTION}.{name}_proj:linear": "colwise" for name in "qkv"}
    assert notes(**heads, **{f"{ATTENTION}.o_proj:linear": "rowwise"}) == []

"""Experts shared out over four ranks equal the dense model on one device; what can't be is refused.

Oracles: every expert for every token, masked, by plain PyTorch; torch's norm of whole gradients;
closed forms for what a rank holds and sends; DCP read without Meshwright.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from meshwright.costmodel.sharding.factors import analyse
from meshwright.executor.ranks.meshes import stage_meshes
from meshwright.moe import GroupedLinear, combine, dispatch, grouped_linear
from meshwright.planner.blocks.cut import cut_blocks
from meshwright.planner.plan.check import check_plan, check_runs
from meshwright.planner.plan.plan import PlanError
from meshwright.planner.tracing.trace import trace
from tests.executor.experts.experts_worker import (
    EVEN,
    ROWS,
    RUNS,
    SPLIT,
    TOKENS,
    Run,
    graph_of,
    plan_of,
)
from tests.helpers.launching import launch
from tests.models.experts_models import (
    EXPERTS,
    INNER,
    LAYERS,
    SEQUENCE,
    TOPK,
    WIDTH,
    batch,
    language_model,
    token_loss,
)
from tests.models.models import Traced

WORKER = Path(__file__).with_name("experts_worker.py")
TOLERANCE = {"fp32": 1e-5, "bf16": 0.05}  # bf16 keeps 8 bits: 0.4 % each operator


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """All runs and checks in one launch, and its folder."""
    folder = tmp_path_factory.mktemp("experts")
    done = launch(WORKER, str(folder), ranks=4, timeout_s=420)
    assert done.ok, done.tail()
    return json.loads((folder / "results.json").read_text()), folder


def result(launched: tuple[dict[str, Any], Path], name: str) -> dict[str, Any]:
    found = launched[0][name]
    assert "failed" not in found, found["failed"]
    return found


@pytest.mark.parametrize("name", RUNS)
def test_losses_gradients_and_weights_are_those_of_the_dense_model(
    launched: tuple[dict[str, Any], Path], name: str
) -> None:
    found, tolerance = result(launched, name), TOLERANCE[RUNS[name].precision]
    assert found["loss"] < tolerance
    assert found["gradient"][0] < tolerance, found["gradient"]
    assert found["state"][0] < tolerance, found["state"]
    assert not found["names"]


@pytest.mark.parametrize("name", RUNS)
def test_every_rank_finds_the_norm_of_the_whole_gradient(
    launched: tuple[dict[str, Any], Path], name: str
) -> None:
    for rank in result(launched, name)["ranks"]:
        norm, whole = rank["norm"]
        assert norm == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("name", [name for name, run in RUNS.items() if max(run.ep) > 1])
def test_a_rank_holds_its_share_of_the_experts(
    launched: tuple[dict[str, Any], Path], name: str
) -> None:
    """1/ep of them; of that, 1/tp where the tensor axis splits matrices, and ZeRO's part of the
    ranks that hold the same."""
    run = RUNS[name]
    for rank, found in enumerate(result(launched, name)["ranks"]):
        ep = run.ep[rank // (run.dp * run.tp) % len(run.ep)]
        whole = EXPERTS * WIDTH * INNER / ep
        holders = run.dp * run.tp // ep // (run.tp if run.shardings == SPLIT else 1)
        if run.zero and ep > 1:
            whole /= min(holders, run.dp_shard or holders)
        for fqn, numel in found["held"].items():
            split = run.shardings == SPLIT
            assert numel == whole / (run.tp if split else 1), fqn
        assert bool(found["held"]) == (ep > 1)


def test_the_bytes_sent_are_those_that_are_priced(launched: tuple[dict[str, Any], Path]) -> None:
    """(ep-1)/ep of b·s·k·h elements, out and back in both passes of each layer and micro-batch, as
    `test_moe_pricing.py` has it of the price."""
    (ep,) = EVEN.ep
    copies = ROWS // EVEN.microbatches // EVEN.dp * SEQUENCE * TOPK
    each = copies * WIDTH * 4 * (ep - 1) // ep
    for rank in result(launched, "exchanged")["ranks"]:
        assert rank["sent"] == 4 * LAYERS * EVEN.microbatches * each


def test_a_checkpoint_goes_on_under_any_other_plan(launched: tuple[dict[str, Any], Path]) -> None:
    found = result(launched, "checkpoints")
    others = {name: x for name, x in found.items() if name in RUNS}
    assert len(others) == 4
    for name, other in others.items():
        assert other["same"], name
        assert other["losses"] == pytest.approx(found["on"], rel=1e-5), name


def test_a_checkpoint_is_read_on_one_device(launched: tuple[dict[str, Any], Path]) -> None:
    result(launched, "checkpoints")
    folder = launched[1]
    model = language_model("dense", "none", seed=9)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder / "checkpoint")
    saved = torch.load(folder / "state.pt")
    assert set(saved) == set(state["model"])
    for name, x in saved.items():
        assert torch.equal(state["model"][name], x), name


def test_the_search_shares_out_experts_of_the_librarys_layer(
    launched: tuple[dict[str, Any], Path],
) -> None:
    found = result(launched, "library")
    assert set(found["ep"]) == {2}
    assert found["same"]
    assert found["gradient"][0] < TOLERANCE["fp32"], found["gradient"]


# --- what can't run -------------------------------------------------------------------------------


def refused(model: nn.Module, run: Run) -> str:
    """The message with which all ranks refuse a plan of a model."""
    graph = trace(model, batch(4, 0), batch_size=4, loss_fn=token_loss)
    table = analyse(graph)
    of = Traced(graph=cut_blocks(graph, table), table=table)
    plan = plan_of(run, of)
    chosen = check_plan(plan, of.graph, of.table)
    with pytest.raises(PlanError) as error:
        stage_meshes(plan, of.graph, of.table, chosen)
    return str(error.value)


class Layer(nn.Module):
    """Experts, with a function of (layer, copies, experts, weights) between dispatch and
    combine."""

    def __init__(self, between: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.between = between
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = GroupedLinear(EXPERTS, WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(TOPK)
        return x + combine(self.between(self, dispatch(x, chosen), chosen, weights))


class Custom(nn.Module):
    """Two such layers."""

    def __init__(self, between: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, WIDTH)
        self.layers = nn.ModuleList([Layer(between), Layer(between)])
        self.out = nn.Linear(WIDTH, 48)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


REFUSED: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "over copies": (
        lambda m, x, e, w: m.up(x, e).softmax(2) * w.unsqueeze(-1),
        "does not work on each copy alone",
    ),
    "by place": (
        lambda m, x, e, w: m.up(x, e) * torch.ones(SEQUENCE, 1, 1, device=x.device),
        "has some of the copies' dims",
    ),
    "moved dims": (
        lambda m, x, e, w: m.up(x, e).transpose(1, 2).exp().transpose(1, 2),
        "not the copies' dims",
    ),
    "other experts": (
        lambda m, x, e, w: m.up(x, (e + 1) % EXPERTS),
        "other experts",
    ),
    "no product": (
        lambda m, x, e, w: m.up(dispatch(combine(x), e), e),
        "no grouped product",
    ),
    "made weights": (
        lambda m, x, e, w: grouped_linear(x, m.up.weight * 2, e),
        "grouped products alone read",
    ),
    "read twice": (
        lambda m, x, e, w: m.up(x, e) * m.up.weight.mean(),
        "grouped products alone read",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_copies_is_refused(name: str) -> None:
    between, why = REFUSED[name]
    assert why in refused(Custom(between), Run(dp=4, ep=(2,)))


def test_ep_beyond_the_data_axis_asks_for_split_tokens() -> None:
    of = graph_of(4, "fp32")
    run = Run(dp=2, tp=2, ep=(4,), shardings=TOKENS)
    plan = plan_of(run, of)
    meshes = stage_meshes(plan, of.graph, of.table, check_plan(plan, of.graph, of.table))
    assert meshes[0].folded and meshes[0].expert_parts == 2
    with pytest.raises(PlanError, match=r"ep=4 does not divide the 2 ranks that have tokens"):
        check_plan(plan_of(replace(run, shardings={}), of), of.graph, of.table)


def test_a_mesh_that_neither_axis_carries_is_refused() -> None:
    of = graph_of(4, "fp32")
    plan = plan_of(Run(dp=1, tp=4, ep=(2,), shardings=TOKENS), of)
    check_plan(plan, of.graph, of.table)
    with pytest.raises(PlanError, match=r"ep=2 can be priced, but not run yet.*dp·cp=1.*tp=4"):
        check_runs(plan)


def test_experts_stored_split_are_not_shared_out_over_tensor_ranks() -> None:
    """Tensor ranks with tokens of their own may share experts out only if each holds whole ones."""
    of = graph_of(4, "fp32")
    for shardings, folded in ((TOKENS, True), ({**SPLIT, **TOKENS}, False)):
        plan = plan_of(Run(dp=2, tp=2, ep=(2,), shardings=shardings), of)
        chosen = check_plan(plan, of.graph, of.table)
        assert stage_meshes(plan, of.graph, of.table, chosen)[0].folded is folded


def test_copies_of_tokens_stay_with_their_experts() -> None:
    of = graph_of(4, "fp32")
    split = {**TOKENS, "layers.*.experts:grouped_linear": "out"}
    run = Run(dp=2, tp=2, ep=(2,), shardings=split)
    with pytest.raises(PlanError, match=r"goes from S\(1\) to .* but copies of tokens stay"):
        check_plan(plan_of(run, of), of.graph, of.table)
    check_plan(plan_of(replace(run, ep=(1,)), of), of.graph, of.table)


def test_dp_shard_and_ep_must_nest() -> None:
    of = graph_of(4, "fp32")
    plan = plan_of(Run(dp=4, ep=(2,), zero=1), of)
    stage = replace(plan.stages[0], ranks=tuple(range(12)), dp=12, ep=4, dp_shard=6)
    with pytest.raises(PlanError, match=r"dp_shard=6 with ep=4"):
        stage_meshes(replace(plan, stages=(stage,)), of.graph, of.table, [{}])


def test_the_operators_are_single_nodes_of_the_trace() -> None:
    shorts = [op.short for op in graph_of(4, "fp32").graph.ops]
    assert shorts.count("dispatch") == shorts.count("combine") == LAYERS
    assert shorts.count("grouped_linear") == 3 * LAYERS

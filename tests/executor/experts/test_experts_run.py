"""Experts shared out over four ranks equal the dense model on one device; what can't be is refused.

Oracles: every expert for every token, masked, by plain PyTorch; torch's norm of whole gradients;
closed forms for what a rank holds and sends; DCP read without Meshwright.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright import OverrideError, Overrides, ParallelModel
from meshwright.executor.checkpoint import checkpoint
from meshwright.executor.files import LocalChunks, open_source
from meshwright.executor.parameters import norms
from meshwright.executor.ranks import launch
from meshwright.executor.ranks.meshes import StageMesh, stage_meshes
from meshwright.executor.runtime.runtime import RunOptions, Runtime
from meshwright.executor.stages import CheckedPlan
from meshwright.moe import GroupedLinear, combine, dispatch, grouped_linear
from meshwright.planner.plan.check import check_plan
from meshwright.planner.plan.plan import Plan, PlanError
from tests.helpers.plan_building import Knobs, build_plan
from tests.helpers.ranks import on_ranks
from tests.helpers.single_device import initialised
from tests.helpers.stored import stored
from tests.helpers.tiers import second_tier, tiered
from tests.helpers.tiny import planned
from tests.models import experts_models
from tests.models.experts_models import (
    EXPERTS,
    INNER,
    SEQUENCE,
    TOPK,
    WIDTH,
    Library,
    batch,
    language_model,
    token_loss,
)
from tests.models.models import Case, Traced, adamw, traced
from tests.parity.parity_cells import Cell
from tests.parity.parity_reference import Reference, compare, difference, trained
from tests.user_code.user_runs import free_links

ROWS, STEPS, MICROBATCHES = 8, 3, 2
SPLIT = {"layers.*.experts.gate": "S(2)", "layers.*.experts.up": "S(2)",
         "layers.*.experts.down": "S(1)"}  # the matrices  # fmt: skip
TOKENS = {"layers.*:add": "-> S(1)", "layers.*.experts:dispatch": "s"}  # the sequence


@dataclass(frozen=True, slots=True)
class Run:
    """A plan on four ranks: the words of a cell of the parity matrix, and of this file: `ep2` ranks
    share the experts of each device group (`ep2,1` of one after the other), `matrices` or `tokens`
    are split over the tensor axis, tokens go to `even` or `skewed` experts, `compiled`."""

    line: str

    @property
    def words(self) -> list[str]:
        return self.line.split()

    @property
    def cell(self) -> Cell:
        cell = Cell.parse(" ".join(["moe", *(x for x in self.words if not OWN.fullmatch(x))]))
        return cell if "m4" in self.words else replace(cell, microbatches=MICROBATCHES)

    @property
    def ep(self) -> tuple[int, ...]:
        found = [x.removeprefix("ep") for x in self.words if x.startswith("ep")] or ["1"]
        return tuple(map(int, found[0].split(",")))

    @property
    def spread(self) -> str:
        return "one" if "skewed" in self.words else "even" if "even" in self.words else "none"

    @property
    def shardings(self) -> dict[str, str]:
        split = SPLIT if "matrices" in self.words else {}
        return split | (TOKENS if "tokens" in self.words else {})


OWN = re.compile(r"ep\S+|skewed|even|matrices|tokens|compiled")
RUNS = ("dp4 ep4 zero1 skewed", "dp4 zero1 shard2 ep2", "dp2xtp2 zero1 ep4 tokens")
MORE = (
    "dp4 ep4 zero3", "pp2xdp2 m4 zero1 full ep2", "dp2xtp2 ep2 matrices", "tp4 ep4 tokens",
    "pp2xdp2 m4 zb_h1 zero1 ep2", "pp2xdp2 m4 zero2 ep2,1", "dp4 zero1 bf16 ep2 even",
    "dp4", "dp4 skewed", "tp4 matrices", "tp4 tokens", "dp2xtp2 matrices", "dp4 ep2", "dp4 ep4",
    "dp4 ep2 skewed", "dp4 zero1 ep2", "dp4 zero2 ep2", "dp4 zero3 ep2", "dp4 zero2 shard2 ep4",
    "dp4 full ep2", "dp4 selective ep2", "pp2xdp2 m4 ep2", "dp2xtp2 ep2 tokens",
    "dp2xtp2 zero1 ep2 tokens", "pp2xdp2 m4 interleaved_1f1b v2 ep2", "dp4 compiled",
    "dp4 ep2 compiled",
)  # fmt: skip


def loss_fn(made: tuple[torch.Tensor, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    logits, balance = made
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + 0.1 * balance


def graph_of(rows: int = ROWS // MICROBATCHES, precision: str = "fp32") -> Traced:
    def model() -> nn.Module:
        return language_model("routed", "none")

    case = Case(build=model, batch=batch, optimizer=adamw, loss_fn=loss_fn)
    return stored(
        "experts", rows, precision, make=lambda: traced(case, rows, precision),
        models=(experts_models,),
    )  # fmt: skip


def plan_of(run: Run, of: Traced) -> Plan:
    cell = run.cell
    knobs = Knobs(
        meshes=cell.meshes, rows=ROWS, num_microbatches=cell.microbatches, zero=cell.zero,
        dp_shard=cell.dp_shard, recompute=cell.recompute, shardings=run.shardings,
        schedule=cell.schedule, virtual=cell.virtual, precision=cell.precision,
    )  # fmt: skip
    plan = build_plan(of.graph, knobs)
    stages = zip(plan.stages, cycle(run.ep), strict=False)
    return replace(plan, stages=tuple(replace(stage, ep=ep) for stage, ep in stages))


WORLD = 4
TOLERANCE = {"fp32": 1e-5, "bf16": 0.05}  # bf16 keeps 8 bits: 0.4 % each operator


def build(run: Run) -> Runtime:
    of = graph_of(ROWS // run.cell.microbatches, run.cell.precision)
    checked = CheckedPlan.of(plan_of(run, of), of.graph, of.table)
    options = RunOptions(compile="aot_eager" if "compiled" in run.words else False)
    return Runtime(checked, language_model("routed", run.spread), options=options)


def train(runtime: Runtime, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> Reference:
    losses, gradients = [], []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(float(runtime.train_step(batch(ROWS, step))))
        gradients.append(runtime.full_gradients())
        optimizer.step()
    return Reference(losses=losses, gradients=gradients, state=runtime.full_state_dict())


def dense(run: Run) -> Reference:
    """The dense model on one device, in the same micro-batches (the balance is no mean over
    tokens)."""
    model, parts = language_model("dense", run.spread), run.cell.microbatches

    def loss(step: int, k: int) -> torch.Tensor:
        ids, targets = (x.chunk(parts)[k] for x in batch(ROWS, step))
        return loss_fn(model(ids), targets)

    return trained(model, adamw(model.parameters()), loss, steps=STEPS, parts=parts)


def trains_as_the_dense_model(run: Run) -> None:
    """Losses, gradients and weights; every rank finds the norm of the whole gradients, and holds
    its share of the experts."""
    runtime = build(run)
    found = train(runtime, adamw(runtime.parameters()))
    norm = norms.clip_(runtime.stage_parameters, runtime.place, float("inf"))
    whole = torch.stack([g.double().norm() for g in found.gradients[-1].values()]).norm()
    assert float(norm) == pytest.approx(float(whole), rel=1e-5)
    held = {p.fqn: p.stored.numel() for p in runtime.stage_parameters if p.experts}
    share = share_of(run, launch.rank())
    assert bool(held) == bool(share)
    assert all(numel == share for numel in held.values()), (held, share)
    if launch.rank() == 0:
        differences, tolerance = compare(found, dense(run)), TOLERANCE[run.cell.precision]
        assert differences["loss"] < tolerance
        assert differences["gradient"][0] < tolerance, differences
        assert differences["state"][0] < tolerance, differences
        assert not differences["names"]


def share_of(run: Run, rank: int) -> float:
    """Elements of a weight of experts on a rank that has not all of them: 1/ep; of that, 1/tp where
    the tensor axis splits matrices, and ZeRO's part of the ranks that hold the same."""
    cell, (dp, tp) = run.cell, run.cell.meshes[0]
    ep = run.ep[rank // (dp * tp) % len(run.ep)]
    if ep == 1:
        return 0
    whole = EXPERTS * WIDTH * INNER / ep
    split = tp if run.shardings == SPLIT else 1
    holders = dp * tp // ep // split
    return whole / (min(holders, cell.dp_shard or holders) if cell.zero else 1) / split


@pytest.mark.parametrize(
    "line",
    tiered(
        (*RUNS, *MORE),
        RUNS.__contains__,
        "experts over data ranks, and over data and tensor ranks, are kept",
    ),
)
def test_losses_gradients_and_weights_are_those_of_the_dense_model(line: str) -> None:
    run = Run(line)
    graph_of(ROWS // run.cell.microbatches, run.cell.precision)
    on_ranks(WORLD, trains_as_the_dense_model, run)


def checkpoints(folder: Path) -> dict[str, Any]:
    """A run saved with its optimizer goes on under other plans as it does under its own. Returns
    what was saved."""
    runtime = build(Run("dp4 zero1 ep2"))
    optimizer = adamw(runtime.parameters())
    train(runtime, optimizer)
    checkpoint.save(runtime, folder, optimizer)
    state = runtime.full_state_dict()
    on = train(runtime, optimizer).losses
    for name in ("dp4 zero3 ep2", "dp2xtp2 zero1 ep4 tokens"):
        second = build(Run(name))
        again = adamw(second.parameters())
        checkpoint.load(second, folder, again)
        read = second.full_state_dict()
        assert read.keys() == state.keys()
        assert all(torch.equal(read[n], x) for n, x in state.items()), name
        assert train(second, again).losses == pytest.approx(on, rel=1e-5), name
    return {name: x.numpy() for name, x in state.items()}


@second_tier("checkpoints of other models, and boxes of any layout in them, are kept")
def test_a_checkpoint_goes_on_under_any_other_plan_and_on_one_device(tmp_path: Path) -> None:
    saved = on_ranks(WORLD, checkpoints, tmp_path / "checkpoint")
    state = language_model("dense", "none", seed=9).state_dict()
    source = open_source(tmp_path / "checkpoint")
    source.fill([r for n, x in state.items() for r in LocalChunks.of(x).reads(f"model.{n}")])
    assert set(saved) == set(state)
    for name, x in saved.items():
        assert torch.equal(state[name], torch.from_numpy(x)), name


def planned_library(plan: Plan | None = None) -> ParallelModel:
    with torch.device("meta"):
        model = Library()
    given = {"example_inputs": batch(2, 0), "loss_fn": token_loss, "plan": plan, "profile": False}
    overrides = None if plan else Overrides(ep=2, dp=4, zero=1)
    return planned(model, WORLD, global_batch_size=ROWS, overrides=overrides, **given)


def library(plan: Plan) -> None:
    """The library's layer on meta, initialised by shards, trained a step."""
    made = planned_library(plan)
    made.init_weights(seed=5)
    alone = Library()
    started = initialised(alone, 5)
    alone.load_state_dict(started)
    found = made.full_state_dict()
    assert found.keys() == started.keys()
    assert all(torch.equal(found[n], x) for n, x in started.items())
    ids, targets = batch(ROWS, 0)
    token_loss(alone(ids), targets).backward()
    made.train_step((ids, targets))
    wanted = {name: p.grad for name, p in alone.named_parameters()}
    assert difference(made.runtime.full_gradients(), wanted)[0] < TOLERANCE["fp32"]


@second_tier("trained ranks with parts of the experts, and the search's refusals, are kept")
def test_the_search_shares_out_experts_of_the_librarys_layer() -> None:
    plan = planned_library().plan
    assert {stage.ep for stage in plan.stages} == {2}
    on_ranks(WORLD, library, plan)


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


def mixing(between: Callable[..., torch.Tensor]) -> nn.Module:
    layers = Layer(between), Layer(between)
    return nn.Sequential(nn.Embedding(48, WIDTH), *layers, nn.Linear(WIDTH, 48))


REFUSED: tuple[tuple[Callable[..., torch.Tensor], str], ...] = (
    (lambda m, x, e, w: m.up(x, e).softmax(2) * w.unsqueeze(-1), "not work on each copy alone"),
    (
        lambda m, x, e, w: m.up(x, e) * torch.ones(SEQUENCE, 1, 1, device=x.device),
        "has some of the copies' dims",
    ),
    (lambda m, x, e, w: m.up(x, e).transpose(1, 2).exp().transpose(1, 2), "not the copies' dims"),
    (lambda m, x, e, w: m.up(x, (e + 1) % EXPERTS), "other experts"),
    (lambda m, x, e, w: m.up(dispatch(combine(x), e), e), "no grouped product"),
    (lambda m, x, e, w: F.dropout(m.up(x, e), 0.5), "its mask is by token"),
    (lambda m, x, e, w: grouped_linear(x, m.up.weight * 2, e), "grouped products alone read"),
    (lambda m, x, e, w: m.up(x, e) * m.up.weight.mean(), "grouped products alone read"),
)


DEAR = second_tier("other mixtures of copies are kept")


@pytest.mark.parametrize(
    ("between", "why"),
    [pytest.param(*of, marks=DEAR if of[1] == "no grouped product" else ()) for of in REFUSED],
)
def test_what_mixes_copies_is_refused(between: Callable[..., torch.Tensor], why: str) -> None:
    of = traced(Case(build=partial(mixing, between), batch=batch, optimizer=adamw,
                     loss_fn=token_loss), 4)  # fmt: skip
    plan = plan_of(Run("dp4 ep2"), of)
    chosen = check_plan(plan, of.graph, of.table)
    with pytest.raises(PlanError, match=why):
        stage_meshes(plan, of.graph, of.table, chosen)


@second_tier("the refusals that the search hears of are kept")
def test_the_search_knows_beforehand_what_experts_can_not_do() -> None:
    between, why = next(case for case in REFUSED if "mask" in case[1])
    given = {"cluster": free_links(4), "example_inputs": batch(8, 0), "loss_fn": token_loss}
    found = planned(mixing(between), **given)
    assert all(stage.ep == 1 for stage in found.plan.stages)
    assert any(why in note for note in found.report.notes)
    with pytest.raises(OverrideError, match=why):
        planned(mixing(between), overrides=Overrides(ep=2), **given)


def checked(line: str) -> list[StageMesh]:
    of = graph_of()
    plan = plan_of(Run(line), of)
    return stage_meshes(plan, of.graph, of.table, check_plan(plan, of.graph, of.table))


def test_tensor_ranks_with_tokens_share_out_experts_that_each_holds_whole() -> None:
    """Plans that cannot be run so are in tests/planner/plan/refused.txt."""
    (mesh,) = checked("dp2xtp2 ep4 tokens")
    assert mesh.folded and mesh.expert_parts == 2
    assert checked("dp2xtp2 ep2 tokens")[0].folded
    assert not checked("dp2xtp2 ep2 tokens matrices")[0].folded


def test_dp_shard_and_ep_must_nest() -> None:
    of = graph_of()
    plan = plan_of(Run("dp4 zero1 ep2"), of)
    stage = replace(plan.stages[0], ranks=tuple(range(12)), dp=12, ep=4, dp_shard=6)
    with pytest.raises(PlanError, match=r"ep=4 can be priced.* no part of the 6 that ZeRO"):
        stage_meshes(replace(plan, stages=(stage,)), of.graph, of.table, [{}])

"""Pipelines without a flush train what one device trains that steps with gradients so many steps
late: losses of all batches, weights and moments after draining."""

import contextlib
import io
import json
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import fields, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn, optim

from meshwright import OverrideError, Overrides, ParallelModel, PlanError, auto_parallelize, fit
from meshwright.cli import main
from meshwright.costmodel.schedules import Pipeline
from meshwright.costmodel.stages import StageCosts, device_peaks, used_bytes
from meshwright.executor.errors import BatchError, StateError
from meshwright.executor.ranks import launch
from meshwright.planner.drafts.fills import held_at_peak
from meshwright.planner.plan.plan import Plan
from tests.helpers import tiny
from tests.helpers.ranks import on_ranks
from tests.helpers.tiers import second_tier
from tests.models.models import CASES, Case, Traced, parallelize
from tests.parity.parity_cells import Cell, plan_of
from tests.parity.parity_reference import difference

STEPS = 5
OPTIMIZERS: Mapping[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": lambda parameters: optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: optim.AdamW(parameters, lr=3e-3, eps=1e-3),
}
CELLS = (
    "gpt2_untied pp2 pipedream_2bw m4",
    "gpt2_untied pp3 pipedream_2bw m4",
    "gpt2_untied pp3 pipedream_2bw m2",
    "gpt2_untied pp4 pipedream m1",
    "gpt2_untied pp3 pipedream m4",
    "gpt2_untied pp4 pipedream m2",
    "llama pp2xdp2 pipedream_2bw m4",
    "llama pp2xdp2 pipedream_2bw m4 zero1 full",
    "llama pp2xtp2 pipedream_2bw m4",
    "llama pp2xtp2 pipedream m2 mixed",
)


def queued(case: Case, rows: int, late: Mapping[str, int], kind: str) -> tuple[list[float], Any]:
    """Losses and weights of one device, where the gradient of a parameter is stepped with so many
    steps late."""
    model = case.model()
    optimizer, named = OPTIMIZERS[kind](model.parameters()), dict(model.named_parameters())
    losses: list[float] = []
    waiting: list[dict[str, torch.Tensor]] = []
    for step in range(STEPS + max(late.values())):
        optimizer.zero_grad()
        if step < STEPS:
            loss = case.loss(model, case.batch(rows, step))
            made = torch.autograd.grad(loss, [*named.values()])
            waiting.append(dict(zip(named, made, strict=True)))
            losses.append(float(loss.detach()))
        for name, p in named.items():
            if 0 <= (of := step - late[name]) < STEPS:
                p.grad = waiting[of][name].clone()
        optimizer.step()
    return losses, {n: x.detach().clone() for n, x in model.state_dict().items()}


def trained(cell: Cell, kind: str, plan: Plan, of: Traced) -> tuple[list[float], Any]:
    """Losses as they come, and weights after draining."""
    case = CASES[cell.case]
    runtime = parallelize(case.model(), plan, of)
    optimizer = OPTIMIZERS[kind]([*runtime.parameters()] or [nn.Parameter(torch.zeros(()))])
    losses: list[float] = []

    def stepped(loss: torch.Tensor | None) -> torch.Tensor | None:
        if loss is not None:
            losses.append(float(loss))
            optimizer.step()
            optimizer.zero_grad()
        return loss

    for step in range(STEPS):
        stepped(runtime.train_step(case.batch(cell.rows, step)))
    while stepped(runtime.drain()) is not None:
        pass
    return losses, runtime.full_state_dict()


def delays(plan: Plan, of: Traced) -> dict[str, int]:
    """By parameter: 1 under PipeDream-2BW, of PipeDream the micro-batches that are under way behind
    a stage, in whole steps."""
    found = {}
    for k, stage in enumerate(plan.stages):
        behind = len(plan.stages) - 1 - k
        late = 1 if plan.schedule == "pipedream_2bw" else -(-behind // plan.num_microbatches)
        for block in of.graph.blocks:
            if block.name in stage.blocks:
                found |= {of.graph.parameters[value]: late for value in block.parameters}
    return found


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("line", CELLS)
def test_trains_with_gradients_of_earlier_steps(line: str, kind: str) -> None:
    cell = Cell.parse(line)
    plan, of = plan_of(cell)
    losses, state = queued(CASES[cell.case], cell.rows, delays(plan, of), kind)
    found, weights = on_ranks(cell.world, trained, cell, kind, plan, of)
    first, rest = found[: plan.staleness], found[plan.staleness :]
    assert all(map(math.isnan, first)) and len(first) == plan.staleness > 0
    assert rest == pytest.approx(losses, rel=1e-5)
    assert difference(weights, state)[0] < 1e-5


def test_gradients_of_two_steps_are_summed_apart_in_half_precision() -> None:
    """They are added up in fp32 beside those that are delivered; what is learned is near."""
    cell = Cell.parse("gpt2_untied pp3 pipedream_2bw m4 bf16")
    plan, of = plan_of(cell)
    case = CASES[cell.case]
    _, state = queued(case, cell.rows, delays(plan, of), "sgd")
    _, weights = on_ranks(cell.world, trained, cell, "sgd", plan, of)
    before = dict(case.model().state_dict())
    learned, wanted = (
        torch.cat([(x[name] - w).flatten() for name, w in before.items() if w.is_floating_point()])
        for x in (weights, state)
    )
    assert (learned - wanted).norm() < 0.05 * wanted.norm()


# --- between steps --------------------------------------------------------------------------------

SMALL = Cell.parse("gpt2_untied pp2 pipedream_2bw m4")


def between(cell: Cell, plan: Plan, of: Traced) -> dict[str, Any]:
    """A run with an evaluation, refused loads and batches in the midst; what it said."""
    case, refused = CASES[cell.case], dict[str, str]()
    runtime = parallelize(case.model(), plan, of)
    optimizer = OPTIMIZERS["sgd"](runtime.parameters())
    evaluated: list[float] = []
    for step in range(3):
        runtime.train_step(case.batch(cell.rows, step))
        evaluated.append(float(runtime.eval_step(case.batch(cell.rows, 50))))
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(StateError) as error:
        runtime.check_drained("save_checkpoint")
    refused["save"] = str(error.value)
    versions = [p.versions for p in runtime.stage_parameters]
    counts = {len(leaves) for leaves in versions}
    while runtime.drain() is not None:
        optimizer.step()
        optimizer.zero_grad()
    runtime.check_drained("save_checkpoint")
    assert runtime.drain() is None
    return {
        "evaluated": evaluated, "refused": refused, "counts": counts,
        "state": runtime.full_state_dict(), "after": float(runtime.train_step(case.batch(16, 7))),
    }  # fmt: skip


def test_evaluations_read_the_newest_weights_and_leave_passes_alone() -> None:
    """Also after a step without gradients yet; a save is refused until the pipeline is drained."""
    cell, case = SMALL, CASES[SMALL.case]
    plan, of = plan_of(cell)
    found = on_ranks(cell.world, between, cell, plan, of)
    model = case.model()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    waiting, wanted = list[Any](), list[float]()
    for step in range(4):
        if step < 3:
            loss = case.loss(model, case.batch(cell.rows, step))
            waiting.append(torch.autograd.grad(loss, [*model.parameters()]))
            with torch.no_grad():
                wanted.append(float(case.loss(model, case.batch(cell.rows, 50))))
        if step:
            for p, gradient in zip(model.parameters(), waiting[step - 1], strict=True):
                p.grad = gradient
            optimizer.step()
    assert found["evaluated"] == pytest.approx(wanted, rel=1e-5)
    assert difference(found["state"], dict(model.state_dict()))[0] < 1e-5
    assert "call `while result.drain() is not None:`" in found["refused"]["save"]
    assert found["counts"] == {2}  # versions on the first stage
    assert math.isnan(found["after"])  # as at first


def not_finite(cell: Cell, plan: Plan, of: Traced) -> tuple[list[bool], int]:
    """Whether the first stage got gradients in each call, of which the second batch's are NaN."""
    case = CASES[cell.case]
    runtime = parallelize(case.model(), plan, of)
    got, kept = [], list[torch.Tensor]()
    for step in range(4):
        runtime.guard.warned = True
        with torch.no_grad():
            for p in runtime.parameters():
                p.mul_(math.nan if step == 1 else 1.0)
        kept = [p.detach().clone() for p in runtime.parameters()] if step == 0 else kept
        runtime.train_step(case.batch(cell.rows, step))
        with torch.no_grad():
            for p, x in zip(runtime.parameters(), kept, strict=True):
                p.copy_(x)
        got.append(any(p.grad is not None for p in runtime.parameters()))
        for p in runtime.parameters():
            p.grad = None
    while runtime.drain() is not None:
        pass
    return got, runtime.guard.skipped_steps


def test_gradients_that_are_not_finite_are_dropped_on_all_groups() -> None:
    plan, of = plan_of(SMALL)
    got, skipped = on_ranks(SMALL.world, not_finite, SMALL, plan, of)
    assert got == [False, True, False, True] and skipped == 1


def other_shapes(cell: Cell, plan: Plan, of: Traced) -> str:
    case = CASES[cell.case]
    runtime = parallelize(case.model(), plan, of)
    runtime.late.check_step(runtime.planned)
    runtime.train_step(case.batch(cell.rows, 0))
    with pytest.raises(BatchError) as error:
        runtime.late.check_step(replace(runtime.planned))
    while runtime.drain() is not None:
        pass
    runtime.late.check_step(replace(runtime.planned))
    with pytest.raises(BatchError, match="takes 4 a step"):
        fewer = replace(runtime.plan, num_microbatches=2)
        runtime.late.check_step(replace(runtime.planned, plan=fewer))
    return str(error.value)


def test_a_batch_of_another_shape_waits_for_draining() -> None:
    plan, of = plan_of(SMALL)
    said = on_ranks(SMALL.world, other_shapes, SMALL, plan, of)
    assert "another shape than the last one, of which passes are under way" in said


FITTED = 5


def fitted(allow: list[str]) -> tuple[float, list[float], Any]:
    """`fit` on two ranks: the last loss, those that were logged, and weights."""
    result = auto_parallelize(
        tiny.net(), tiny.host(2), global_batch_size=8, example_inputs=tiny.batch(4),
        loss_fn=tiny.loss, allow=allow, overrides=Overrides(
            pp=2, schedule="pipedream_2bw", num_microbatches=4
        ),
    )  # fmt: skip
    logged: list[float] = []
    done = fit(
        result, [tiny.batch(8, seed) for seed in range(FITTED)], steps=FITTED,
        optimizer=lambda result: optim.SGD(result.parameters(), lr=0.1), max_grad_norm=0.5,
        log_to=lambda numbers: logged.append(numbers["loss"]), log_every=1, progress=False,
    )  # fmt: skip
    assert not result.runtime.outstanding and result.drain() is None
    return float(done.loss), logged, result.full_state_dict()


def test_fit_drains_at_its_end() -> None:
    last, logged, state = on_ranks(2, fitted, [])
    model = tiny.net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    losses, waiting = list[float](), list[Any]()
    for step in range(FITTED + 1):
        if step < FITTED:
            ids, targets = tiny.batch(8, step)
            loss = tiny.loss(model(ids), targets)
            losses.append(float(loss.detach()))
            waiting.append(torch.autograd.grad(loss, [*model.parameters()]))
        if step:
            for p, gradient in zip(model.parameters(), waiting[step - 1], strict=True):
                p.grad = gradient.clone()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    assert logged[1:] == pytest.approx(losses[:-1], rel=1e-5) and last == pytest.approx(losses[-1])
    assert difference(state, dict(model.state_dict()))[0] < 1e-5


# --- priced, and allowed --------------------------------------------------------------------------


def planned(**given: Any) -> ParallelModel:
    return auto_parallelize(
        tiny.net(), tiny.slow_host(4), global_batch_size=16, example_inputs=tiny.batch(4),
        loss_fn=tiny.loss, **given,
    )  # fmt: skip


OTHER = second_tier("waiting gradients and versions stay, of even delays")


@pytest.mark.parametrize(
    ("schedule", "asked"),
    [
        ("pipedream_2bw", {"pp": 2, "dp": 2, "zero": 1, "num_microbatches": 4}),
        pytest.param("pipedream", {"pp": 4, "num_microbatches": 1}, marks=OTHER),
    ],
)
def test_memory_is_that_of_a_rehearsed_step(schedule: str, asked: dict[str, int]) -> None:
    """Behind as many as it takes until gradients come: versions of weights, activations in flight
    and what waits; no rank waits for ever."""
    result = planned(overrides=Overrides(schedule=schedule, **asked))
    rehearsal = result.rehearse(every=True)
    assert not rehearsal.mismatches and rehearsal.estimate is None
    priced = dict(enumerate(rehearsal.priced.peak_bytes))
    for rank, log in rehearsal.logs.items():
        ratio = log.peak_bytes / priced[rehearsal.group_of[rank]]
        assert 0.85 < ratio < 1.03, (rank, ratio)  # gradients wait in a part of the step alone
    flushed = planned(overrides=Overrides(schedule="1f1b", **asked)).prediction
    assert result.prediction.step_time_s < flushed.step_time_s
    peaks = result.prediction.peak_memory_bytes, flushed.peak_memory_bytes
    assert peaks[0][0] > peaks[1][0]
    assert all(late >= less for late, less in zip(*peaks, strict=True))  # the last has one version


def test_nothing_comes_late_without_permission() -> None:
    """Nor where a plan file has it; asking for it is permission."""
    asked = planned(overrides=Overrides(pp=2, staleness=1))
    assert asked.plan.staleness == 1 and not asked.plan.record.flushes
    assert "gradients 1 step late" in str(asked.report)
    assert planned(overrides=Overrides(pp=2)).plan.staleness == 0
    assert planned(overrides=Overrides(pp=2), allow=["quantized"]).plan.staleness == 0
    assert planned(overrides=Overrides(pp=2), allow=["stale"]).plan.staleness > 0
    forbidden = Overrides(pp=2, forbid=["staleness"])
    assert planned(overrides=forbidden, allow=["stale"]).plan.staleness == 0
    with pytest.raises(PlanError, match=r'staleness=1: .*give allow=\["stale"\]'):
        planned(plan=asked.plan)
    again = Plan.from_json(asked.plan.to_json())
    assert again == asked.plan and planned(plan=again, allow=["stale"]).plan == again
    for wrong, legal in ((0, 1), (2, 1)):
        with pytest.raises(PlanError, match=rf"plan: staleness={wrong}.*; legal: {legal};"):
            planned(plan=replace(again, staleness=wrong), allow=["stale"])


def test_what_meets_at_a_common_end_is_refused() -> None:
    late = Overrides(pp=2, schedule="pipedream_2bw")
    with pytest.raises(OverrideError, match=r"several blocks read embed\.weight"):
        auto_parallelize(
            tiny.net(tied=True), tiny.slow_host(4), global_batch_size=16, overrides=late,
            example_inputs=tiny.batch(4), loss_fn=tiny.loss,
        )  # fmt: skip
    with pytest.raises(OverrideError, match=r"fp16 would scale gradients with the loss of another"):
        planned(overrides=late, precision="fp16")
    with pytest.raises(OverrideError, match=r"muon steps each matrix whole"):
        planned(overrides=late, optimizer="muon")
    with pytest.raises(OverrideError, match=r"legal: 3 or more micro-batches"):
        planned(overrides=replace(late, pp=4, num_microbatches=2))


# --- skipping edges, draining, and other ends -----------------------------------------------------


class Skip(nn.Module):
    """A head that reads the first stage's output beside the last one's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(tiny.VOCAB, tiny.WIDTH)
        self.layers = nn.ModuleList(tiny.Layer() for _ in range(4))
        self.head = nn.Linear(tiny.WIDTH, tiny.VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = first = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x + first)


def skip() -> nn.Module:
    torch.manual_seed(3)
    return Skip()


def clipped(rows: list[int]) -> tuple[list[float], dict[str, int], Any]:
    """Losses, delays and weights of PipeDream with one micro-batch, clipped in each call."""
    result = tiny.planned(
        skip(), 3, overrides=Overrides(pp=3, schedule="pipedream", num_microbatches=1)
    )
    optimizer = OPTIMIZERS["adamw"](result.parameters())
    losses = list[float]()
    for step, n in enumerate(rows):
        batch = tiny.batch(n, step)
        losses.append(float(result.train_step(batch, optimizer=optimizer, max_grad_norm=0.3)))
    while (loss := result.drain(optimizer, max_grad_norm=0.3)) is not None:
        losses.append(float(loss))
    graph, plan = result._problem.graph, result.plan
    late = {
        graph.parameters[value]: len(plan.stages) - 1 - k
        for k, stage in enumerate(plan.stages)
        for block in graph.blocks
        if block.name in stage.blocks
        for value in block.parameters
    }
    return losses, late, result.full_state_dict()


def test_an_edge_that_skips_stages_keeps_nobody_waiting_in_a_clip() -> None:
    """Two stages away, a gradient is sent two micro-batches before it is needed; a call has one,
    and behind it all ranks meet."""
    losses, late, state = on_ranks(3, clipped, [8, 8, 8, 8], timeout_s=60)
    model = skip()
    optimizer, named = OPTIMIZERS["adamw"](model.parameters()), dict(model.named_parameters())
    waiting, wanted = list[dict[str, torch.Tensor]](), list[float]()
    assert {*late.values()} == {0, 1, 2}
    for step in range(4 + 2):
        optimizer.zero_grad()
        if step < 4:
            ids, targets = tiny.batch(8, step)
            loss = tiny.loss(model(ids), targets)
            wanted.append(float(loss.detach()))
            made = torch.autograd.grad(loss, [*named.values()])
            waiting.append(dict(zip(named, made, strict=True)))
        for name, p in named.items():
            if 0 <= (of := step - late[name]) < 4:
                p.grad = waiting[of][name].clone()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
    assert all(map(math.isnan, losses[:2])) and losses[2:] == pytest.approx(wanted, rel=1e-5)
    assert difference(state, dict(model.state_dict()))[0] < 1e-5


def in_part() -> str:
    result = tiny.planned(
        tiny.net(), 3, overrides=Overrides(pp=3, schedule="pipedream", num_microbatches=1)
    )
    optimizer = OPTIMIZERS["sgd"](result.parameters())
    for step in range(3):
        result.train_step(tiny.batch(8, step), optimizer=optimizer)
    result.drain(optimizer)
    with pytest.raises(StateError) as error:
        result.train_step(tiny.batch(8, 3), optimizer=optimizer)
    while result.drain(optimizer) is not None:
        pass
    result.train_step(tiny.batch(8, 3), optimizer=optimizer)
    while result.drain(optimizer) is not None:
        pass
    return str(error.value)


def test_a_pipeline_that_is_drained_in_part_takes_no_batch() -> None:
    assert "drained in part" in on_ranks(3, in_part, timeout_s=60)


def two_bw(model: nn.Module, **changes: Any) -> ParallelModel:
    late = Overrides(pp=2, schedule="pipedream_2bw", num_microbatches=4)
    return tiny.planned(model, 2, overrides=late, **changes)


def goes_on(kind: str, shortest: int) -> tuple[list[float], Any, dict[str, str]]:
    """Two runs with zeros in place of no gradients, each drained; losses, weights, and what else
    was refused in the second."""
    model = tiny.net()
    result, losses = two_bw(model), list[float]()
    optimizer, refused = OPTIMIZERS[kind](result.parameters()), dict[str, str]()

    def stepped(loss: torch.Tensor | None) -> bool:
        if loss is None:
            return False
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        losses.append(float(loss))
        return True

    for run in range(2):
        for step, rows in enumerate((8, 8, shortest)):
            stepped(result.train_step(tiny.batch(rows, 10 * run + step)))
        if run:
            for who, ask in (
                ("again", lambda: two_bw(model)),
                ("whole", lambda: result.whole_tensor_optimizer(optim.SGD, lr=0.1)),
            ):
                with pytest.raises(ValueError) as error:
                    ask()
                refused[who] = str(error.value)
        while stepped(result.drain()):
            pass
    return losses, result.full_state_dict(), refused


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_call_that_delivers_nothing_moves_no_weights(kind: str) -> None:
    """Though `.grad` was zeroed in place: momentum and decay stay as they were. The last batch of
    an epoch may have fewer rows."""
    losses, state, refused = on_ranks(2, goes_on, kind, 4, timeout_s=60)
    model = tiny.net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    wanted = list[float]()
    for run in range(2):
        waiting = list[Any]()
        for step in range(4):
            if step < 3:
                ids, targets = tiny.batch((8, 8, 4)[step], 10 * run + step)
                loss = tiny.loss(model(ids), targets)
                wanted.append(float(loss.detach()))
                waiting.append(torch.autograd.grad(loss, [*model.parameters()]))
            if step:
                for p, gradient in zip(model.parameters(), waiting[step - 1], strict=True):
                    p.grad = gradient.clone()
                optimizer.step()
    came = [loss for loss in losses if not math.isnan(loss)]
    assert len(losses) == 8 and came == pytest.approx(wanted, rel=1e-5)
    assert difference(state, dict(model.state_dict()))[0] < 1e-5
    assert "the model was parallelized before" in refused["again"]
    assert "step whole tensors" in refused["whole"]


def evaluated(folder: str) -> tuple[float, float]:
    """The number of the best evaluation, and that of the weights that `fit` gives back."""
    result = two_bw(tiny.net())
    batches = [tiny.batch(8, seed) for seed in range(4)]
    done = fit(
        result, batches, steps=4, evaluation=[tiny.batch(8, 50)], evaluate_every=2,
        save_every="best", folder=folder, load_best=True, progress=False,
        optimizer=lambda result: optim.SGD(result.parameters(), lr=0.1),
    )  # fmt: skip
    assert done.eval_loss is not None
    return done.eval_loss, float(result.eval_step(tiny.batch(8, 50)))


def test_the_best_weights_are_those_that_were_evaluated(tmp_path: Any) -> None:
    best, given_back = on_ranks(2, evaluated, str(tmp_path), timeout_s=60)
    assert given_back == pytest.approx(best, rel=1e-6)


def commanded(plan: str) -> str:
    """What `meshwright run --json` writes on two ranks, which stay for other cases."""
    written, stays = io.StringIO(), mock.patch.object(launch, "distributed", nullcontext)
    with contextlib.redirect_stdout(written), stays:
        assert main([
            "run", f"{__name__}:target", "--cluster", "local:2", "--batch", "8",
            "--plan", plan, "--allow", "stale", "--precision", "fp32", "--steps", "3", "--json",
        ]) == 0  # fmt: skip
    return written.getvalue()


def target() -> tuple[Any, ...]:
    return tiny.net(), tiny.batch(4), tiny.loss


def test_the_command_drains_and_tells_the_losses_of_its_steps(tmp_path: Any) -> None:
    """Valid JSON, without the NaN of calls before there is a loss."""
    two_bw(tiny.net()).plan.save(tmp_path / "plan.json")
    said = on_ranks(2, commanded, str(tmp_path / "plan.json"), timeout_s=90)
    losses = json.loads(said, parse_constant=pytest.fail)
    assert len(losses["losses"]) == 3 and all(map(math.isfinite, losses["losses"]))
    assert losses["losses"] == sorted(losses["losses"], reverse=True)  # one batch again and again


def test_of_pipelines_as_late_the_one_that_drops_what_is_not_finite_is_taken() -> None:
    asked = Overrides(pp=2, staleness=1, num_microbatches=1)
    assert planned(overrides=asked).plan.schedule == "pipedream_2bw"
    later = Overrides(pp=4, staleness=3, num_microbatches=1)
    assert planned(overrides=later).plan.schedule == "pipedream"


@pytest.mark.parametrize(("schedule", "m"), [("pipedream_2bw", 4), ("pipedream", 1)])
def test_memory_of_drafts_goes_by_the_place_of_a_stage(schedule: str, m: int) -> None:
    """The first stage has a version of the weights for each step under way, the last has one."""
    pipeline = Pipeline(schedule, 4, m, 4)
    held = held_at_peak(pipeline)
    further = {"pipedream_2bw": [1, 1, 1, 0], "pipedream": [3, 2, 1, 0]}[schedule]
    waiting = {"pipedream_2bw": [1, 1, 1, 1], "pipedream": [0, 0, 0, 0]}[schedule]
    assert [at.versions for at in held] == further
    assert [at.waiting for at in held] == waiting
    none = dict.fromkeys((each.name for each in fields(StageCosts)), 0.0)
    late = {"version_bytes": 100.0, "copied_bytes": 10.0, "waiting_bytes": 1.0}
    costs = StageCosts(**{**none, **late})
    wanted = [100 * n + 10 * (n > 0) + w for n, w in zip(further, waiting, strict=True)]
    assert [float(used_bytes(costs, at)) for at in held] == wanted
    assert [peak.nbytes for peak in device_peaks([costs] * 4, pipeline)] == wanted

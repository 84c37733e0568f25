"""Steps that are validated afterwards train what clipping first trains, to the bit: schedules,
ZeRO, buffers, parameters of two stages, clipped gradients, and in fp16 not finite ones.
"""

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.optim.lr_scheduler import LambdaLR

from meshwright import fit
from meshwright.executor.errors import StateError
from meshwright.executor.parameters.loss_scale import LossScale
from meshwright.executor.parameters.norms import clip_
from meshwright.executor.parameters.optimizer_steps import UndoableStep
from meshwright.executor.parameters.whole_tensors import WholeTensors
from meshwright.executor.ranks import launch
from meshwright.executor.runtime.runtime import Runtime
from meshwright.executor.runtime.step import PendingScalar
from tests.executor.trained_cells import cells
from tests.helpers import tiny
from tests.helpers.ranks import on_ranks
from tests.helpers.tiers import second_tier
from tests.models.models import CASES, parallelize
from tests.parity.parity_cells import Cell, plan_of
from tests.parity.parity_reference import difference

STEPS = 8
# buffers that forwards write; parameters of two stages on different ranks; an overflowing scale
CELLS = cells(
    "resnet pp2 gpipe m4",
    """
    gpt2_tied pp2xdp2 m4 zero2
    gpt2_untied pp2 zb_h2 m4 fp16
    gpt2_untied pp4 zb_h2 m8 fp16
    llama pp2xdp2 zb_v m4 zero1
    gpt2_untied pp4 zb_h2 m8
    llama pp2xtp2 interleaved_1f1b v2 m4 bf16
    """,
    "a pipeline whose forwards write buffers is kept, and undone steps on one process",
)
FITTED = Cell.parse("gpt2_untied pp2 zb_h2 m4")


class Run:
    """A model's training under a plan; `validated` afterwards, or clipped first."""

    def __init__(self, cell: Cell, *, validated: bool) -> None:
        self.case, self.cell, self.validated = CASES[cell.case], cell, validated
        plan, of = plan_of(cell)
        plan = replace(plan, post_validation=validated)
        self.runtime: Runtime = parallelize(self.case.model(), plan, of)
        if self.runtime.guard.scale is not None:  # soon too large, again and again
            self.runtime.guard.scale = LossScale(value=2.0**24, growth_interval=2)
        self.optimizer = optim.AdamW(self.runtime.parameters(), lr=3e-3)
        self.schedule = LambdaLR(self.optimizer, lambda k: 1 / (1 + k))
        self.losses: list[Any] = []
        self.norms: list[Any] = []

    def step(self, k: int, max_norm: float | None) -> None:
        batch = self.case.batch(self.cell.rows, k)
        self.optimizer.zero_grad()  # as users do, before the last step is validated, too
        if self.validated:
            loss, norm = self.runtime.validation.step(batch, self.optimizer, max_norm=max_norm)
        else:
            loss = self.runtime.train_step(batch)
            parameters, place = self.runtime.stage_parameters, self.runtime.place
            norm = clip_(parameters, place, math.inf if max_norm is None else max_norm)
            self.optimizer.step()
        self.schedule.step()
        self.losses.append(loss.detach())
        self.norms.append(norm)

    def read(self) -> dict[str, Any]:
        """Numbers of all steps."""
        self.runtime.validation.settle()
        return {
            "losses": [float(x).hex() for x in self.losses],
            "norms": [float(x) for x in self.norms],
            "skipped": self.runtime.guard.skipped_steps,
            "rates": [group["lr"] for group in self.optimizer.param_groups],
            "scale": self.runtime.guard.scale and self.runtime.guard.scale.value,
        }

    def states(self) -> dict[str, torch.Tensor]:
        """Weights, buffers, and moments of this rank's shards."""
        found = self.runtime.full_state_dict()
        for name, p in self.runtime.named_parameters():
            for moment, x in self.optimizer.state[p].items():
                found[f"{name} {moment}"] = x.to_local() if hasattr(x, "to_local") else x
        return found


def trains_the_same(cell: Cell) -> None:
    """Both, with clipping by a norm that some gradients exceed; an evaluation in between."""
    half = cell.precision == "fp16"
    steps = 3 * STEPS if half else STEPS
    probe = Run(cell, validated=False)
    for k in range(steps):
        probe.step(k, None)
    norms = sorted(float(x) for x in probe.norms[3:] if 0 < float(x) < math.inf)
    max_norm = norms[-2] * 0.999  # below the two largest
    runs = [Run(cell, validated=validated) for validated in (False, True)]
    evaluated = []
    for run in runs:
        for k in range(steps):
            run.step(k, max_norm)
            if k == steps // 2:
                run.runtime.validation.settle()
                evaluated.append(_evaluated(run))
    first, after = (run.read() for run in runs)
    assert after == first  # losses, norms, skipped steps, rates, the scale
    assert evaluated[0] == evaluated[1]
    wanted, found = (run.states() for run in runs)
    assert difference(found, wanted)[0] == 0  # weights, buffers and moments
    norms = first["norms"]
    assert min(x for x in norms if x) < max_norm < max(norms)
    validation = runs[1].runtime.validation
    decided = validation.ahead_steps, validation.undone_steps
    assert decided[0] > decided[1] > 0
    everywhere: list[Any] = [None] * cell.world
    dist.all_gather_object(everywhere, decided)
    assert everywhere == [decided] * cell.world
    if half:  # a gradient that leaves fp16 undoes a step, too
        assert after["skipped"] > 4
        assert decided[1] > sum(x > max_norm for x in norms)


def _evaluated(run: Run) -> str:
    if run.case.batch_statistics:
        return ""
    return float(run.runtime.eval_step(run.case.batch(run.cell.rows, 99))).hex()


@pytest.mark.parametrize("cell", CELLS)
def test_what_is_trained_is_the_same(cell: Cell) -> None:
    plan_of(cell)
    on_ranks(cell.world, trains_the_same, cell)


def fits_the_same(folder: Path) -> None:
    """Logged losses and norms, checkpoints, and a run that goes on from one, under a plan with and
    without."""
    case = CASES[FITTED.case]
    batches = [case.batch(FITTED.rows, k) for k in range(6)]
    ended, rows = [], []
    for name, validated in (("one", True), ("two", False), ("one", True)):
        again = len(ended) == 2
        rows.append(list[dict[str, float]]())
        if again and launch.rank() == 0:
            for later in sorted((folder / name).glob("step-*"))[1:]:
                shutil.rmtree(later)
        dist.barrier()
        result = tiny.planned(
            case.model(), FITTED.world, example_inputs=batches[0], global_batch_size=FITTED.rows,
            loss_fn=case.loss_fn, profile=False,
            plan=replace(plan_of(FITTED)[0], post_validation=validated),
        )  # fmt: skip
        fitted = fit(
            result, batches[2:] if again else batches, steps=6, max_grad_norm=0.7,
            optimizer=lambda result: optim.AdamW(result.parameters(), lr=3e-3),
            schedule=lambda optimizer: LambdaLR(optimizer, lambda k: 1 / (1 + k)),
            folder=folder / name, save_every=2, keep=3, log_to=rows[-1].append, log_every=1,
        )  # fmt: skip
        ended.append((fitted, fitted.result.full_state_dict()))
    logged = [[(row["loss"], row.get("grad_norm")) for row in of] for of in rows]
    assert ended[0][0].loss == ended[1][0].loss
    assert logged[0] == logged[1]
    assert logged[0][2:] == logged[2]
    for _, state in (ended[0], ended[2]):
        assert difference(state, ended[1][1])[0] == 0
    ahead = [of.result.runtime.validation.ahead_steps for of, _ in ended[:2]]
    assert ahead[0] > 0 == ahead[1]


@second_tier("steps that are validated afterwards are kept, of which a run is made")
def test_a_run_is_the_same(tmp_path: Path) -> None:
    on_ranks(FITTED.world, fits_the_same, tmp_path)


def refused() -> None:
    run = Run(FITTED, validated=True)
    held, place = run.runtime.stage_parameters, run.runtime.place
    chosen = [p for p in run.runtime.parameters() if p.requires_grad]
    whole = WholeTensors(optim.AdamW, chosen, held=held, place=place, options={})
    with pytest.raises(ValueError, match="train_step: optimizer"):
        run.runtime.validation.step(run.case.batch(FITTED.rows, 0), whole, max_norm=None)


def test_an_optimizer_of_whole_tensors_is_refused() -> None:
    on_ranks(FITTED.world, refused)


# --- on one process ------------------------------------------------------------------------------


@pytest.mark.parametrize("tensor_rate", [False, True])
def test_a_step_is_undone_and_made_again(tensor_rate: bool) -> None:
    """With the gradients and the rate of then, whatever a schedule made of it since."""

    def made() -> tuple[nn.Module, optim.Optimizer, LambdaLR]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        rate = torch.tensor(0.1) if tensor_rate else 0.1
        optimizer = optim.AdamW(model.parameters(), lr=rate, weight_decay=0.1, foreach=False)
        schedule = LambdaLR(optimizer, lambda k: 1 / (1 + k))
        for k in range(2):
            _gradients(model, k, 1.0)
            optimizer.step()
            schedule.step()
        return model, optimizer, schedule

    (model, optimizer, schedule), (other, its, its_schedule) = made(), made()
    step = UndoableStep.of(optimizer)
    _gradients(model, 2, 1.0)
    step.step()
    schedule.step()
    step.undo()
    _gradients(model, 2, 0.5)
    step.step_again()
    _gradients(other, 2, 0.5)
    its.step()
    its_schedule.step()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        for name, x in optimizer.state[ours].items():
            assert torch.equal(x, its.state[theirs][name])
    assert optimizer.param_groups[0]["lr"] == its.param_groups[0]["lr"]


def test_gradients_of_a_step_are_its_own() -> None:
    """Whatever was made of `.grad` since; but not if their memory was written."""
    model = nn.Linear(3, 2)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    _gradients(model, 0, 1.0)
    mine = [p.grad for p in model.parameters()]
    step = UndoableStep.of(optimizer)
    step.step()
    optimizer.zero_grad()
    with step.own_gradients():
        assert all(p.grad is own for p, own in zip(model.parameters(), mine, strict=True))
    assert all(p.grad is None for p in model.parameters())
    mine[0].zero_()
    with pytest.raises(StateError, match="were written before"), step.own_gradients():
        raise AssertionError


def _gradients(model: nn.Module, k: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(k)
    for p in model.parameters():
        p.grad = scale * torch.randn(p.shape, generator=generator)


def test_a_number_on_its_way_is_waited_for_when_it_is_read() -> None:
    asked: list[int] = []

    def read() -> torch.Tensor:
        asked.append(1)
        return torch.tensor(2.5)

    loss = PendingScalar.of(read)
    assert isinstance(loss, torch.Tensor)
    kept = loss.detach()
    assert not asked
    assert float(kept) == 2.5
    assert float(loss * 2) == float(2 * loss) == 5.0
    assert loss.item() == 2.5
    assert (loss.shape, loss.dtype) == ((), torch.float32)
    assert torch.stack([loss, loss]).tolist() == [2.5, 2.5]
    assert f"{loss:.1f}" == "2.5"
    assert asked

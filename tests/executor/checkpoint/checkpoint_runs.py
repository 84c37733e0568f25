"""Runs that are saved under one plan and loaded under another, on one device or on ranks.

Every plan trains GPT-2 (a tied embedding, a fused projection) by AdamW with two groups and a
learning-rate schedule, or a ResNet (running statistics) by SGD with momentum: `BEFORE` steps, a
save, `AFTER` more. A load starts from other weights, an optimizer that has made no step and whose
groups are the other way round.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.executor.checkpoint import checkpoint
from meshwright.executor.ranks import launch
from meshwright.executor.runtime.runtime import Runtime
from meshwright.planner.plan.plan import Plan
from tests.models.models import CASES, GLOBAL_BATCH, Traced, parallelize
from tests.parity import parity_cells
from tests.parity.parity_cells import Cell

GPT2 = "gpt2_tied"
BEFORE, AFTER = 2, 1
TOLERANCE = 1e-5
DECAY = 0.5  # of the learning rate, per step
PLANS: Mapping[str, str] = {  # as the parity matrix says them
    "alone": "1", "dp2": "dp2 zero1", "pp2": "pp2", "dp2tp2": "dp2xtp2 zero1", "pp4": "pp4",
    "tp4": "tp4", "zero2": "dp4 zero2", "zero3": "dp2xtp2 zero3", "hybrid": "dp4 zero1 shard2",
    "virtual": "pp2xdp2 zero2 interleaved_1f1b v2", "uneven": "1|dp2|1 zero1",
    "pp2dp2tp2": "pp2xdp2xtp2 zero1",
}  # fmt: skip


def cell_of(case: str, plan: str) -> Cell:
    return Cell.parse(f"{case} {PLANS[plan]} m2")


def plan_of(case: str, plan: str) -> tuple[Plan, Traced]:
    return parity_cells.plan_of(cell_of(case, plan))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    case: str
    runtime: Runtime
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler

    def steps(self, first: int, count: int) -> list[float]:
        losses = []
        for step in range(first, first + count):
            self.optimizer.zero_grad()
            batch = CASES[self.case].batch(GLOBAL_BATCH, step)
            losses.append(float(self.runtime.train_step(batch)))
            self.optimizer.step()
            self.scheduler.step()
        return losses

    def save(self, path: Path, asynchronous: bool = False) -> checkpoint.Saving:
        extra, of = {"scheduler": self.scheduler}, self.optimizer
        return checkpoint.save(self.runtime, path, of, extra=extra, asynchronous=asynchronous)

    def load(self, path: Path) -> None:
        checkpoint.load(self.runtime, path, self.optimizer, extra={"scheduler": self.scheduler})

    def state(self) -> dict[str, torch.Tensor]:
        """Everything that a checkpoint holds as whole tensors: weights, buffers, the optimizer's
        states, and with steps and seed the `lr` of every group, empty or not."""
        found = self.runtime.full_state_dict()
        for fqn, p in self.runtime.named_parameters():
            for name, x in self.optimizer.state.get(p, {}).items():
                whole = x.full_tensor() if isinstance(x, DTensor) else x
                found[f"{fqn}:{name}"] = whole.detach().cpu()
        rates = sorted(group["lr"] for group in self.optimizer.param_groups)
        numbers = (*rates, self.runtime.steps, self.runtime.seed)
        every: list[Any] = [(found, numbers)]
        if self.runtime.plan.num_ranks > 1:
            every = [None] * dist.get_world_size()
            dist.all_gather_object(every, (found, numbers))
        merged = {name: x.clone() for part, _ in every for name, x in part.items()}
        alike = sorted({numbers for _, numbers in every})  # one row if the same on all ranks
        return merged | {"numbers": torch.tensor(alike, dtype=torch.float64)}


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """All losses of a run, its state at the save and after the last step."""

    losses: list[float]
    at_save: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]


def optimize(
    case: str, parameters: Mapping[str, torch.Tensor], reverse: bool = False
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Weights and the rest in two groups of different options; the second may be empty."""
    weights = [p for p in parameters.values() if p.ndim > 1]
    rest = [p for p in parameters.values() if p.ndim <= 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": rest, "lr": 5e-4}]
    if reverse:
        groups = [{"params": group["params"][::-1], "lr": 1.0} for group in groups[::-1]]
    if case == "resnet":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(groups, lr=1e-3, eps=1e-3)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, DECAY)


def start(case: str, plan: str, *, other: bool = False) -> Run:
    """A new run; with `other`, one whose weights, seed and options a load has to replace."""
    model = CASES[case].model(seed=11 if other else 0)
    torch.manual_seed(23 if other else 7)
    runtime = parallelize(model, *plan_of(case, plan))
    optimizer, scheduler = optimize(case, dict(runtime.named_parameters()), reverse=other)
    return Run(case=case, runtime=runtime, optimizer=optimizer, scheduler=scheduler)


def on_meta(line: str) -> tuple[Cell, Runtime, nn.Module]:
    """A cell of one micro-batch, whose model is on meta, and the model."""
    cell = Cell.parse(f"{line} m1 rows12")
    plan, of = parity_cells.plan_of(cell)
    with torch.device("meta"):
        model = CASES[cell.case].build()
    return cell, parallelize(model, plan, of), model


def resume(case: str, plan: str, path: Path) -> Run:
    run = start(case, plan, other=True)
    run.load(path)
    return run


def differing(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of what is not equal bit for bit."""
    return sorted(
        name
        for name in {*found, *wanted}
        if name not in found or name not in wanted or not torch.equal(found[name], wanted[name])
    )


def distance(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    """Largest difference, relative to the largest element of each tensor."""
    return max(
        float((found[name] - x).abs().max() / x.abs().max().clamp(1e-3))
        for name, x in wanted.items()
    )


def saves(path: Path, case: str, plan: str) -> History:
    run = start(case, plan)
    losses = run.steps(0, BEFORE)
    run.save(path)
    at_save = run.state()
    losses += run.steps(BEFORE, AFTER)
    return History(losses=losses, at_save=at_save, after=run.state())


def goes_on(path: Path, saved: History, case: str, plan: str, exactly: bool) -> None:
    """A load gives the state at the save bit by bit, and what follows is what followed it."""
    run = resume(case, plan, path)
    assert differing(run.state(), saved.at_save) == []
    losses, after = run.steps(BEFORE, AFTER), run.state()
    assert losses == pytest.approx(saved.losses[BEFORE:], rel=TOLERANCE)
    assert set(after) == set(saved.after) and distance(after, saved.after) <= TOLERANCE
    if exactly:
        assert losses == saved.losses[BEFORE:]
        assert differing(after, saved.after) == []


def saves_beside_training(folder: Path) -> None:
    run = start(GPT2, "dp2")
    run.steps(0, 1)
    first, at_first = run.save(folder / "first", asynchronous=True), run.state()
    losses = run.steps(1, 1)
    run.save(folder / "second", asynchronous=True)
    at_second = run.state()
    run.steps(2, 1)
    first.wait()
    loaded = resume(GPT2, "dp2", folder / "first")  # waits for the second save
    assert differing(loaded.state(), at_first) == []
    assert loaded.steps(1, 1) == losses
    assert differing(resume(GPT2, "pp2", folder / "second").state(), at_second) == []


def saves_beside_another_start(folder: Path) -> None:
    """The second rank writes when all have begun another run, the first one at once."""
    run, begun, write = start(GPT2, "dp2"), threading.Event(), checkpoint.write_tensors

    def late(*given: Any) -> Mapping[str, int]:
        assert launch.rank() == 0 or begun.wait(60)
        return write(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "write_tensors", late)
        saving, saved = run.save(folder / "one", asynchronous=True), run.state()
        start(GPT2, "dp2", other=True)
        begun.set()
        saving.wait()
    assert differing(resume(GPT2, "dp2", folder / "one").state(), saved) == []


def mistakes(folder: Path, path: Path, of_another: Path) -> dict[str, list[str]]:
    """What every rank of two is told, per mistake; all of them go on afterwards. `path` and
    `of_another` are checkpoints of this model and of another."""
    run = start(GPT2, "pp2")
    second = launch.rank() == 1
    named = dict(run.runtime.named_parameters())
    sgd = torch.optim.SGD([{"params": [*named.values()]}], lr=0.1)
    foreign = _foreign() if second else run.optimizer
    other = {"sampler": run.scheduler}
    made = {
        "missing": lambda: run.load(folder / "nowhere"),
        "no checkpoint": lambda: run.load(folder / "other"),
        "not replaced": lambda: run.save(folder / "other"),
        "other model": lambda: run.load(of_another),
        "other optimizer": lambda: checkpoint.load(run.runtime, path, sgd),
        "no such extra": lambda: checkpoint.load(run.runtime, path, extra=other),
        "foreign state": lambda: checkpoint.save(run.runtime, folder / "never", foreign),
    }
    said = {}
    for name, mistake in made.items():
        told = "nothing was raised"
        try:
            mistake()
        except (ValueError, RuntimeError, FileNotFoundError) as error:
            told = f"{type(error).__name__}: {error}"
        said[name] = [""] * launch.world_size()
        dist.all_gather_object(said[name], told)
    run.save(folder / "afterwards")
    return said


def _foreign() -> torch.optim.Optimizer:
    p = torch.nn.Parameter(torch.zeros(5))
    optimizer = torch.optim.AdamW([p])
    p.grad = torch.ones(5)
    optimizer.step()
    return optimizer

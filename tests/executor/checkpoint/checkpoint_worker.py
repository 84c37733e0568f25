"""Checkpoints on one rank of a launch: saved under some plans, loaded under others.

Every plan trains GPT-2 (a tied embedding, a fused projection) by AdamW with two groups and a
learning-rate schedule, or a ResNet (running statistics) by SGD with momentum: `BEFORE` steps, a
save, `AFTER` more. A load starts from other weights, an optimizer that has made no step and whose
groups are the other way round. Rank 0 writes what the tests compare.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from meshwright.executor.checkpoint import checkpoint
from meshwright.executor.files import dcp_writes
from meshwright.executor.ranks import launch
from meshwright.executor.runtime.runtime import Runtime
from meshwright.planner.plan.plan import Plan
from tests.helpers.plan_building import Knobs, build_plan
from tests.models.models import CASES, GLOBAL_BATCH, Traced, parallelize, traced

BEFORE, AFTER = 2, 2
DECAY = 0.5  # of the learning rate, per step
MICROBATCHES = 4
# build_plan's arguments; the ranks that each takes are those of its meshes
PLANS: Mapping[str, Mapping[str, Any]] = {
    "alone": {"meshes": ((1, 1),)},
    "dp2": {"meshes": ((2, 1),), "zero": 1},
    "pp2": {"meshes": ((1, 1), (1, 1))},
    "dp2tp2": {"meshes": ((2, 2),), "zero": 1},
    "pp4": {"meshes": ((1, 1),) * 4},
    "tp4": {"meshes": ((1, 4),)},
    "zero2": {"meshes": ((4, 1),), "zero": 2},
    "zero3": {"meshes": ((2, 2),), "zero": 3},
    "hybrid": {"meshes": ((4, 1),), "zero": 1, "dp_shard": 2},
    "virtual": {"meshes": ((2, 1),) * 2, "virtual": 2, "schedule": "interleaved_1f1b", "zero": 2},
    "uneven": {"meshes": ((1, 1), (2, 1), (1, 1)), "zero": 1},
    "pp2dp2tp2": {"meshes": ((2, 2),) * 2, "zero": 1},
}
FOUR = ("dp2tp2", "pp4", "tp4", "zero2", "zero3", "hybrid", "virtual", "uneven")
PAIRS = (
    *(("gpt2_tied", plan, plan) for plan in FOUR),
    *(("gpt2_tied", "dp2tp2", plan) for plan in FOUR[1:]),
    *(("gpt2_tied", plan, "dp2tp2") for plan in FOUR[1:]),
    ("gpt2_tied", "zero3", "virtual"),
    ("resnet", "dp2tp2", "dp2tp2"),
    ("resnet", "dp2tp2", "virtual"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A plan that trains."""

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
        return checkpoint.save(
            self.runtime,
            path,
            self.optimizer,
            extra={"scheduler": self.scheduler},
            asynchronous=asynchronous,
        )

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
        if dist.is_initialized():
            every = [None] * dist.get_world_size()
            dist.all_gather_object(every, (found, numbers))
        merged = {name: x for part, _ in every for name, x in part.items()}
        alike = sorted({numbers for _, numbers in every})  # one row if the same on all ranks
        return merged | {"numbers": torch.tensor(alike, dtype=torch.float64)}


@cache
def _traced(case: str) -> Traced:
    return traced(CASES[case], GLOBAL_BATCH // MICROBATCHES)


def plan_of(case: str, name: str) -> tuple[Plan, Traced]:
    of = _traced(case)
    plan = build_plan(
        of.graph,
        Knobs(
            rows=GLOBAL_BATCH,
            num_microbatches=MICROBATCHES,
            shardings=CASES[case].shardings,
            **PLANS[name],
        ),
    )
    return plan, of


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


# --- saved under one plan, loaded under others ----------------------------------------------------


def save_all(folder: Path) -> None:
    """Train and save under each source; its state at the save and what follows go beside it."""
    for case, source in sorted({(case, source) for case, source, _ in PAIRS}):
        run = start(case, source)
        run.steps(0, BEFORE)
        run.save(folder / f"{case}-{source}")
        at_save = run.state()
        losses = run.steps(BEFORE, AFTER)
        after = run.state()
        if launch.rank() == 0:
            torch.save((at_save, losses, after), folder / f"{case}-{source}.expected")
    launch.agree_on(lambda: None)


def follow(folder: Path, case: str, source: str, target: str) -> dict[str, Any]:
    """Load under `target`, train on, and compare with what `source` did."""
    at_save, losses, after = torch.load(folder / f"{case}-{source}.expected")
    run = resume(case, target, folder / f"{case}-{source}")
    return {
        "loaded": differing(run.state(), at_save),
        "losses": run.steps(BEFORE, AFTER),
        "expected": losses,
        "changed": differing(run.state(), after),
        "distance": distance(run.state(), after),
    }


# --- further checks of four ranks -----------------------------------------------------------------


def asynchronously(folder: Path) -> dict[str, Any]:
    """Saves beside training: each holds the state at its call."""
    run = start("gpt2_tied", "dp2tp2")
    run.steps(0, 1)
    first, at_first = run.save(folder / "async", asynchronous=True), run.state()
    losses = run.steps(1, 1)
    run.save(folder / "async2", asynchronous=True)
    at_second = run.state()
    run.steps(2, 1)
    first.wait()
    loaded = resume("gpt2_tied", "dp2tp2", folder / "async")  # waits for the second save
    found = {"first": differing(loaded.state(), at_first), "losses": loaded.steps(1, 1)}
    second = resume("gpt2_tied", "pp4", folder / "async2")
    found |= {"second": differing(second.state(), at_second), "expected": losses}
    return found


def errors(folder: Path) -> dict[str, Any]:
    """What every rank is told, per mistake; all of them go on afterwards."""
    run = start("gpt2_tied", "pp4")
    (folder / "other").mkdir(exist_ok=True)
    (folder / "other" / "file").write_text("not a checkpoint")
    path = folder / "gpt2_tied-dp2tp2"
    named = dict(run.runtime.named_parameters())
    mistakes: dict[str, Callable[[], Any]] = {
        "missing": lambda: run.load(folder / "nowhere"),
        "no checkpoint": lambda: run.load(folder / "other"),
        "not replaced": lambda: run.save(folder / "other"),
        "other model": lambda: run.load(folder / "resnet-dp2tp2"),
        "other optimizer": lambda: checkpoint.load(
            run.runtime, path, torch.optim.SGD([{"params": [*named.values()]}], lr=0.1)
        ),
        "no such extra": lambda: checkpoint.load(
            run.runtime, path, extra={"sampler": run.scheduler}
        ),
        "foreign state on rank 2": lambda: checkpoint.save(
            run.runtime, folder / "never", _foreign() if launch.rank() == 2 else run.optimizer
        ),
        "full disk on rank 1": lambda: _full_disk(run, folder / "never"),
        "full disk on rank 1, later": lambda: _full_disk(run, folder / "never", asynchronous=True),
    }
    said = {}
    for name, mistake in mistakes.items():
        heard: list[Any] = [None] * dist.get_world_size()
        try:
            mistake()
            dist.all_gather_object(heard, "nothing was raised")
        except (ValueError, RuntimeError, FileNotFoundError) as error:
            dist.all_gather_object(heard, f"{type(error).__name__}: {error}")
        said[name] = heard
    return {"said": said, "exists": (folder / "never").exists()}


def _foreign() -> torch.optim.Optimizer:
    p = torch.nn.Parameter(torch.zeros(5))
    optimizer = torch.optim.AdamW([p])
    p.grad = torch.ones(5)
    optimizer.step()
    return optimizer


def _full_disk(run: Run, path: Path, asynchronous: bool = False) -> None:
    real = dcp_writes.ChunkPlanner.lookup_object

    def fail(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    if launch.rank() == 1:
        dcp_writes.ChunkPlanner.lookup_object = fail  # type: ignore[method-assign]
    try:
        run.save(path, asynchronous=asynchronous).wait()
    finally:
        dcp_writes.ChunkPlanner.lookup_object = real  # type: ignore[method-assign]


def killed(folder: Path) -> None:
    """Rank 1 dies while it writes; what was saved before must survive."""
    run = start("gpt2_tied", "dp2")
    run.steps(0, 1)
    run.save(folder / "precious")
    state = run.state()
    if launch.rank() == 0:
        torch.save(state, folder / "precious.expected")
    run.steps(1, 1)
    if launch.rank() == 1:

        def die(*_: Any) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

        dcp_writes.ChunkPlanner.lookup_object = die  # type: ignore[method-assign]
    run.save(folder / "precious")


# --- the launches ---------------------------------------------------------------------------------


def main(folder: Path) -> None:
    world = dist.get_world_size()
    results: dict[str, Any] = {}

    def note(name: str, result: Any) -> None:
        results[name] = result
        if launch.rank() == 0:
            (folder / f"results{world}.json").write_text(json.dumps(results))

    if world == 4:
        save_all(folder)
        for case, source, target in PAIRS:
            note(f"{case}-{source}-{target}", follow(folder, case, source, target))
        note("asynchronously", asynchronously(folder))
        note("errors", errors(folder))
        unfinished = start("gpt2_tied", "zero2")
        unfinished.save(folder / "unfinished", asynchronous=True)  # nobody waits for it
    for target in {2: ("dp2", "pp2"), 8: ("pp2dp2tp2",)}.get(world, ()):
        note(f"gpt2_tied-dp2tp2-{target}", follow(folder, "gpt2_tied", "dp2tp2", target))
    if world == 2:
        killed(folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)  # every plan makes groups of its own
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    warnings.simplefilter("ignore", FutureWarning)
    with launch.distributed("gloo"):
        main(Path(sys.argv[1]))

"""Steps that are validated afterwards beside those that clip first, on one of four ranks."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import optim
from torch.optim.lr_scheduler import LambdaLR

from meshwright import Cluster, auto_parallelize, fit
from meshwright.executor.parameters.loss_scale import LossScale
from meshwright.executor.parameters.norms import clip_
from meshwright.executor.parameters.whole_tensors import WholeTensors
from meshwright.executor.ranks import launch
from meshwright.executor.runtime.runtime import Runtime
from tests.models.models import CASES, parallelize
from tests.parity.parity_cells import Cell, plan_of
from tests.parity.parity_launch import on_ranks, run_all
from tests.parity.parity_reference import difference, load_graph

WORLD = 4
STEPS = 8
LINES = (
    "gpt2_untied pp4 zb_h2 m8",
    "llama pp2xdp2 zb_v m4 zero1",
    "gpt2_tied pp2xdp2 m4 zero2",  # a parameter of two stages on different ranks
    "llama pp2xtp2 interleaved_1f1b v2 m4 bf16",
    "resnet pp4 gpipe m4",  # buffers that forwards write
)
HALF = "gpt2_untied pp4 zb_h2 m8 fp16"
CELLS = tuple(map(Cell.parse, (*LINES, HALF)))


class Run:
    """A model's training under a plan; `validated` afterwards, or clipped first."""

    def __init__(self, folder: Path, cell: Cell, *, validated: bool) -> None:
        self.case, self.cell, self.validated = CASES[cell.case], cell, validated
        plan, of = plan_of(cell, load_graph(folder, cell))
        self.runtime: Runtime = parallelize(
            self.case.model(), replace(plan, post_validation=validated), of
        )
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


def trained(folder: Path, cell: Cell) -> dict[str, Any]:
    """Both, with clipping by a norm that some gradients exceed; an evaluation in between."""
    steps = STEPS if cell.precision != "fp16" else 3 * STEPS
    probe = Run(folder, cell, validated=False)
    for k in range(steps):
        probe.step(k, None)
    norms = sorted(float(x) for x in probe.norms[3:] if 0 < float(x) < math.inf)
    max_norm = norms[-2] * 0.999  # below the two largest
    runs = [Run(folder, cell, validated=validated) for validated in (False, True)]
    evaluated = []
    for run in runs:
        for k in range(steps):
            run.step(k, max_norm)
            if k == steps // 2:
                run.runtime.validation.settle()
                evaluated.append(_evaluated(run))
    first, after = (run.read() for run in runs)
    wanted, found = (run.states() for run in runs)
    validation = runs[1].runtime.validation
    own = difference(found, wanted)[0]
    all_ranks: list[Any] = [None] * WORLD
    dist.all_gather_object(all_ranks, (own, validation.ahead_steps, validation.undone_steps))
    return {
        "first": first, "after": after, "evaluated": evaluated, "max_norm": max_norm,
        "state": max(x for x, *_ in all_ranks), "ahead": [n for _, n, _ in all_ranks],
        "undone": [n for *_, n in all_ranks],
    }  # fmt: skip


def _evaluated(run: Run) -> str:
    if run.case.batch_statistics:
        return ""
    return float(run.runtime.eval_step(run.case.batch(run.cell.rows, 99))).hex()


def fitted(folder: Path) -> dict[str, Any]:
    """Runs of `fit` under a plan with and without, which save in between; the first one's metrics,
    and a run that goes on from its first checkpoint."""
    cell, found, states = CELLS[0], dict[str, Any](), list[dict[str, torch.Tensor]]()
    case = CASES[cell.case]
    batches = [case.batch(cell.rows, k) for k in range(6)]
    plan, _ = plan_of(cell, load_graph(folder, cell))
    for name, validated in (("one", True), ("two", False), ("one", True)):
        rows: list[dict[str, float]] = []
        again = len(states) == 2
        if again and launch.rank() == 0:
            for later in sorted((folder / name).glob("step-*"))[1:]:
                shutil.rmtree(later)
        dist.barrier()
        ended = fit(
            auto_parallelize(
                case.model(),
                Cluster.local(WORLD),
                example_inputs=case.batch(cell.rows, 0),
                global_batch_size=cell.rows,
                loss_fn=case.loss_fn,
                precision="fp32",
                plan=replace(plan, post_validation=validated),
                profile=False,
            ),
            batches[2:] if again else batches,
            optimizer=lambda result: optim.AdamW(result.parameters(), lr=3e-3),
            schedule=lambda optimizer: LambdaLR(optimizer, lambda k: 1 / (1 + k)),
            steps=6,
            max_grad_norm=0.7,
            folder=folder / name,
            save_every=2,
            keep=3,
            log_to=rows.append,
            log_every=1,
        )
        states.append(ended.result.full_state_dict())
        found[f"{name}{again * ' again'}"] = {
            "loss": ended.loss, "rows": [(row["loss"], row.get("grad_norm")) for row in rows],
            "ahead": ended.result.runtime.validation.ahead_steps,
        }  # fmt: skip
    found["state"] = difference(states[0], states[1])[0]
    found["state again"] = difference(states[2], states[1])[0]
    return found


def refused(folder: Path) -> dict[str, Any]:
    """What an optimizer of whole tensors is told."""
    run = Run(folder, CELLS[0], validated=True)
    held, place = run.runtime.stage_parameters, run.runtime.place
    chosen = [p for p in run.runtime.parameters() if p.requires_grad]
    whole = WholeTensors(optim.AdamW, chosen, held=held, place=place, options={})
    try:
        run.runtime.validation.step(run.case.batch(run.cell.rows, 0), whole, max_norm=None)
    except ValueError as error:
        return {"said": str(error)}
    return {}


def main(folder: Path) -> None:
    work: dict[str, Callable[[], dict[str, Any]]] = {
        cell.name: partial(trained, folder, cell) for cell in CELLS
    }
    work |= {"fit": partial(fitted, folder), "refused": partial(refused, folder)}
    run_all(work, folder, "-validation")


if __name__ == "__main__":
    on_ranks(main)

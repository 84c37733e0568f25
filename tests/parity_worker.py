"""The parity matrix on one rank: every cell trains three steps, compared with the single device.

A cell is a model on a (pp, dp, tp) mesh under one schedule. What is compared, at every step: the
loss; every gradient `g` against the reference `r`, as

    max|g - r| / max(max|r|, 1e-2 · the largest of all references)

where the floor is for gradients that are zero in exact arithmetic; at the end, the whole state.
Rank 0 writes the results after each cell, so that a crash says which cell it was.
"""

from __future__ import annotations

import copy
import json
import resource
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from models import CASES, GLOBAL_BATCH, Traced, make_plan, parallelize, traced
from torch import nn
from torch.distributed.tensor import DTensor

from executor import launch
from executor.runtime import Runtime
from planner.plan import Plan, PlanError

STEPS = 3
FLOOR = 1e-2  # of the largest reference: below it, differences are rounding of larger numbers
DROPOUT_SEED = 7
MATRIX = ("gpt2_tied", "gpt2_untied", "llama", "bert", "resnet", "mlp")
MESHES = ((1, 1, 4), (1, 2, 2), (1, 4, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1))
OTHERS = (
    ("gpt2_tied", (1, 1, 4), "none"),
    ("gpt2_tied", (2, 1, 2), "none"),
    ("bert", (1, 2, 2), "none"),
    ("resnet", (1, 1, 4), "none"),
    ("gpt2_tied", (1, 1, 4), "sequence"),
    ("gpt2_tied", (1, 2, 2), "sequence"),
    ("gpt2_tied", (2, 1, 2), "sequence"),
    ("llama", (1, 2, 2), "sequence"),
    ("plain_gpt", (1, 1, 4), "megatron"),
    ("plain_gpt", (2, 2, 1), "megatron"),
    ("plain_gpt", (2, 1, 2), "megatron"),
    ("plain_gpt", (1, 1, 4), "none"),
)
SEQUENCE_SPLIT = {
    "gpt2_tied": {"transformer.h.*:add": "-> S(1)", "transformer.h.*:add#1": "-> S(1)"},
    "llama": {"model.layers.*:add": "-> S(1)", "model.layers.*:add#1": "-> S(1)"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run of the matrix. `shardings` is "megatron" (the case's own), "none" or "sequence" (the
    case's own, with activations between layers split along the sequence). `heavy` is the end of the
    pipeline whose stage takes the blocks that are left."""

    case: str
    pp: int
    dp: int
    tp: int
    schedule: str
    num_microbatches: int
    recompute: str
    zero: int
    heavy: str
    shardings: str = "megatron"

    @property
    def name(self) -> str:
        mesh = f"pp{self.pp}-dp{self.dp}-tp{self.tp}"
        return (
            f"{self.case}-{mesh}-{self.schedule}-m{self.num_microbatches}-{self.shardings}"
            f"-recompute_{self.recompute}-zero{self.zero}"
        )

    def patterns(self) -> dict[str, str]:
        own = dict(CASES[self.case].shardings)
        extra = SEQUENCE_SPLIT.get(self.case, {})
        return {"megatron": own, "none": {}, "sequence": own | extra}[self.shardings]


def cells() -> list[Cell]:
    """The whole matrix, recompute, ZeRO and the heavy end of the pipeline spread over it; then
    cells with other shardings."""
    found = []
    for c, case in enumerate(MATRIX):
        for k, (pp, dp, tp) in enumerate(MESHES):
            for s, (schedule, m) in enumerate((("gpipe", 2), ("1f1b", 4))):
                found.append(
                    Cell(
                        case=case, pp=pp, dp=dp, tp=tp, schedule=schedule, num_microbatches=m,
                        recompute=("none", "full")[(c + k + s) % 2], zero=(c // 2 + k + s) % 2,
                        heavy=("first", "last")[(c + s) % 2],
                    )
                )  # fmt: skip
    for i, (case, (pp, dp, tp), shardings) in enumerate(OTHERS):
        found.append(
            Cell(
                case=case, pp=pp, dp=dp, tp=tp, schedule="1f1b", num_microbatches=2, heavy="first",
                recompute=("some", "full")[i % 2], zero=i // 2 % 2, shardings=shardings,
            )
        )  # fmt: skip
    return found


# --- the single device ----------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Reference:
    """What an ordinary training loop gives: losses and gradients per step, and the final state."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)


@cache
def reference(name: str, parts: int) -> Reference:
    """Three steps of plain PyTorch, in `parts` micro-batches of equal weight."""
    case = CASES[name]
    model = case.model()
    optimizer = case.optimizer(model.parameters())
    found = Reference()
    rows = GLOBAL_BATCH // parts
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        batch = case.batch(GLOBAL_BATCH, step)
        for k in range(parts):
            loss = case.loss(model, _rows(batch, k * rows, (k + 1) * rows)) / parts
            loss.backward()
            total += float(loss.detach())
        found.losses.append(total)
        found.gradients.append(
            {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        )
        optimizer.step()
    found.state = {n: x.detach().clone() for n, x in model.state_dict().items()}
    return found


def _rows(batch: Any, start: int, stop: int) -> Any:
    if isinstance(batch, Mapping):
        return {name: x[start:stop] for name, x in batch.items()}
    return tuple(x[start:stop] for x in batch)


# --- one cell -------------------------------------------------------------------------------------


@cache
def graph_of(name: str, rows: int, precision: str = "fp32") -> Traced:
    return traced(CASES[name], rows, precision)


def plan_of(cell: Cell, precision: str = "fp32") -> tuple[Plan, Traced]:
    of = graph_of(cell.case, GLOBAL_BATCH // cell.num_microbatches, precision)
    plan = make_plan(
        of.graph, pp=cell.pp, dp=cell.dp, tp=cell.tp, num_microbatches=cell.num_microbatches,
        shardings=cell.patterns(), schedule=cell.schedule, zero=cell.zero,
        recompute="none" if cell.recompute == "some" else cell.recompute,
        heavy=cell.heavy, precision=precision,
    )  # fmt: skip
    if cell.recompute == "some":  # every other block
        stages = [replace(stage, recompute={"full": stage.blocks[::2]}) for stage in plan.stages]
        plan = replace(plan, stages=tuple(stages))
    return plan, of


def difference(
    found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]
) -> tuple[float, str]:
    """Largest relative difference over all tensors, and whose it is."""
    largest = max(float(x.abs().max()) for x in wanted.values() if x.is_floating_point())
    worst = (0.0, "")
    for name, x in wanted.items():
        if name not in found or found[name].shape != x.shape:
            return float("inf"), f"{name} missing or misshapen"
        scale = max(float(x.abs().max()), FLOOR * largest)
        worst = max(worst, (float((found[name] - x).abs().max()) / scale, name))
    return worst


def train(runtime: Runtime, name: str, steps: int = STEPS) -> list[float]:
    """Losses of an ordinary training loop over a runtime."""
    case = CASES[name]
    optimizer = case.optimize(runtime)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(float(runtime.train_step(case.batch(GLOBAL_BATCH, step))))
        optimizer.step()
    return losses


def run_cell(cell: Cell) -> dict[str, Any]:
    """Train a cell on all ranks, compare on rank 0."""
    started = time.monotonic()
    case = CASES[cell.case]
    plan, of = plan_of(cell)
    model = case.model()
    runtime = parallelize(model, plan, of)
    optimizer = case.optimize(runtime)
    losses, gradients = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(float(runtime.train_step(case.batch(GLOBAL_BATCH, step))))
        gradients.append(runtime.full_gradients())
        optimizer.step()
    state = runtime.full_state_dict()
    result: dict[str, Any] = {"losses": losses}
    if launch.rank() == 0:
        ref = reference(cell.case, cell.num_microbatches if case.batch_statistics else 1)
        pairs = zip(gradients, ref.gradients, strict=True)
        result |= {
            "loss": max(abs(a - b) / abs(b) for a, b in zip(losses, ref.losses, strict=True)),
            "gradient": max(difference(a, b) for a, b in pairs),
            "state": difference(state, ref.state),
            "names": sorted(set(state) ^ set(ref.state)),
        }
    result["time_s"] = time.monotonic() - started
    return result


# --- further checks in the same launch ------------------------------------------------------------


def _cell(case: str, pp: int, dp: int, tp: int, m: int, **more: Any) -> Cell:
    given: dict[str, Any] = {
        "schedule": "1f1b",
        "recompute": "none",
        "zero": 0,
        "heavy": "first",
    } | more
    return Cell(case=case, pp=pp, dp=dp, tp=tp, num_microbatches=m, **given)


def saved_plan(folder: Path) -> dict[str, Any]:
    """Losses of a plan and of the same plan after a file."""
    plan, of = plan_of(_cell("gpt2_tied", 2, 1, 2, 2, zero=1))
    path = folder / "plan.json"
    if launch.rank() == 0:
        plan.save(path)
    launch.agree_on(lambda: None)
    loaded = Plan.load(path)
    case = CASES["gpt2_tied"]
    losses = [train(parallelize(case.model(), p, of), "gpt2_tied") for p in (plan, loaded)]
    return {"losses": losses, "equal": loaded == plan}


def dropout(folder: Path) -> dict[str, Any]:
    """Losses with dropout on several meshes, against those of one rank that the folder holds."""
    meshes = {"dp4": (1, 4, 1, 2), "tp4": (1, 1, 4, 1), "pp2dp2": (2, 2, 1, 4)}
    found = {}
    for name, (pp, dp, tp, m) in meshes.items():
        recompute = "full" if pp > 1 else "none"
        plan, of = plan_of(_cell("gpt2_dropout", pp, dp, tp, m, recompute=recompute))
        model = CASES["gpt2_dropout"].model()
        torch.manual_seed(DROPOUT_SEED)
        found[name] = train(parallelize(model, plan, of), "gpt2_dropout")
    return {"losses": found, "reference": json.loads((folder / "dropout.json").read_text())}


def half_precision(folder: Path) -> dict[str, Any]:
    """bf16 compute on fp32 master weights."""
    plan, of = plan_of(_cell("gpt2_untied", 1, 2, 2, 2, zero=1), precision="bf16")
    runtime = parallelize(CASES["gpt2_untied"].model(), plan, of)
    losses = train(runtime, "gpt2_untied")
    parameters = runtime.stage.parameters
    return {
        "losses": losses,
        "reference": reference("gpt2_untied", 1).losses,
        "compute": sorted({str(p.leaf.dtype) for p in parameters}),
        "master": sorted({str(x.dtype) for p in parameters for x in (p.api, p.api.grad)}),
    }


def state_round_trip(folder: Path) -> dict[str, Any]:
    """A trained state goes to the user's model, to another plan, and to a model without weights."""
    names = ("gpt2_tied", "resnet", "llama", "bert")
    found: dict[str, Any] = {}
    for name in names:
        case = CASES[name]
        plan, of = plan_of(_cell(name, 1, 2, 2, 2, zero=1))
        runtime = parallelize(case.model(), plan, of)
        train(runtime, name)
        state = runtime.full_state_dict()
        whole = case.model(seed=5)
        keys = whole.load_state_dict(state, strict=True)
        other, of_other = plan_of(_cell(name, 2, 1, 2, 2))
        targets = {"other_plan": case.model(seed=5), "meta": parameters_on_meta(case.model(seed=6))}
        batch = case.batch(GLOBAL_BATCH, STEPS)
        loss = float(runtime.train_step(batch))
        found[name] = {"strict": str(keys), "loss": loss}
        for kind, source in targets.items():
            second = parallelize(source, other, of_other)
            second.load_state_dict(state)
            again = second.full_state_dict()
            same = all(torch.equal(again[n], x) for n, x in state.items())
            found[name][kind] = {
                "same": same and set(again) == set(state),
                "loss": float(second.train_step(batch)),
            }
    return found


def parameters_on_meta(model: nn.Module) -> nn.Module:
    """The same modules without weights; buffers stay, because not all are in a state dict."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.to("meta")) for p in model.parameters()}
    return copy.deepcopy(model, memo)


def zero_shares(folder: Path) -> dict[str, Any]:
    """Elements that ZeRO-1 leaves on a rank, of parameters and of optimizer states."""
    found = {}
    for zero in (0, 1):
        plan, of = plan_of(_cell("gpt2_untied", 1, 4, 1, 2, zero=zero))
        runtime = parallelize(CASES["gpt2_untied"].model(), plan, of)
        parameters = [p for _, p in runtime.named_parameters()]
        optimizer = torch.optim.AdamW(parameters)
        runtime.train_step(CASES["gpt2_untied"].batch(GLOBAL_BATCH, 0))
        optimizer.step()
        found[str(zero)] = {
            "parameters": sum(_local(p).numel() for p in parameters),
            "gradients": sum(_local(p.grad).numel() for p in parameters if p.grad is not None),
            "moments": sum(_local(s["exp_avg"]).numel() for s in optimizer.state.values()),
            "all": sum(p.numel() for p in parameters),
        }
    return found


def shared_modules(folder: Path) -> dict[str, Any]:
    """How many different lowered modules stand for the equal layers of a stage."""
    plan, of = plan_of(_cell("llama", 1, 2, 2, 2))
    blocks = parallelize(CASES["llama"].model(), plan, of).stage.program.blocks
    layers = [block for block in blocks if block.name.startswith("model.layers.")]
    return {"layers": len(layers), "modules": len({id(block.module) for block in layers})}


def _local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


CHECKS = (saved_plan, dropout, half_precision, state_round_trip, zero_shares, shared_modules)


# --- the launch -----------------------------------------------------------------------------------


def main(folder: Path, only: str = "") -> None:
    results: dict[str, Any] = {}
    work: dict[str, Callable[[], dict[str, Any]]] = {}
    work |= {cell.name: partial(run_cell, cell) for cell in cells()}
    work |= {check.__name__: partial(check, folder) for check in CHECKS}
    for name, run in work.items():
        if only not in name:
            continue
        try:
            results[name] = run()
        except PlanError as error:  # the same on every rank, before anything is sent
            results[name] = {"refused": str(error)}
        if launch.rank() == 0:
            (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    torch.set_num_threads(1)
    # every plan makes process groups of its own, and torch's DTensor caches forbid to destroy them
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    warnings.simplefilter("ignore", FutureWarning)
    with launch.distributed("gloo"):
        main(Path(sys.argv[1]), *sys.argv[2:])

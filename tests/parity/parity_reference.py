"""What the cells of the parity matrix are compared with, made on one device, once.

fp32 cells have an ordinary training loop over the user's model, those of pure bf16 the same over
its parameters in bf16. Half precision rounds every operator's result, so that a loop of other
operators (autocast's) differs by more than any plan does: mixed bf16's and fp16's cells have the
lowered model on one device, in the same micro-batches.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.executor.ranks import launch
from meshwright.executor.runtime.runtime import Runtime
from meshwright.planner.plan.plan import Plan
from tests.helpers.ranks import on_ranks
from tests.helpers.stored import MAKING, stored
from tests.models import architectures, branching_models, models, sequence_models
from tests.models.models import CASES, GLOBAL_BATCH, Case, Traced, parallelize
from tests.parity.parity_cells import Cell, plan_of

STEPS = 2
# fp32: two orders of one sum, of any element. Half precision: 32 roundings of 2^-8 or 2^-11, of the
# norm of a tensor; what a plan loses or counts twice is a micro-batch's or a rank's part of it.
# 8 bits: each rank scales what it has; a sum rounded otherwise may fall to the other side of a
# rounding, so the tolerance is that of bf16.
TOLERANCE = {
    "fp32": 1e-5, "bf16": 32 * 2**-8, "bf16_pure": 32 * 2**-8, "fp16": 32 * 2**-11,
    "fp8": 32 * 2**-8, "fp8_rowwise": 32 * 2**-8, "mxfp8": 32 * 2**-8,
    "nvfp4": 32 * 2**-7,
}  # fmt: skip
LOSS_TOLERANCE = (
    TOLERANCE | dict.fromkeys(("fp8", "fp8_rowwise", "mxfp8"), 2**-8) | {"nvfp4": 2**-7}
)
PLAIN = {"fp32": torch.float32, "bf16_pure": torch.bfloat16}  # against the user's own model
FLOOR = 1e-2  # of the largest reference: below it, differences are rounding of larger numbers

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Losses and gradients of each step, and the state after the last."""

    losses: list[float]
    gradients: list[Tensors]
    state: Tensors


def plain_loop(
    case: Case, rows: int, *, parts: int = 1, dtype: torch.dtype = torch.float32
) -> Reference:
    """Ordinary PyTorch on one device, parameters in `dtype`, a batch of `rows` in `parts`
    micro-batches of equal weight."""
    model = case.model()
    for p in model.parameters():
        p.data = p.data.to(dtype)
    part = rows // parts

    def loss(step: int, k: int) -> torch.Tensor:
        return case.loss(model, _rows(case.batch(rows, step), k * part, (k + 1) * part))

    return trained(model, case.optimizer(model.parameters()), loss, steps=STEPS, parts=parts)


def trained(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[int, int], torch.Tensor],
    *,
    steps: int,
    parts: int,
) -> Reference:
    """An ordinary training loop; `loss_of` a step and one of its `parts` micro-batches, of equal
    weight."""
    losses, gradients = [], []
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for k in range(parts):
            loss = loss_of(step, k) / parts
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        gradients.append(
            {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        )
        optimizer.step()
    state = {n: x.detach().clone() for n, x in model.state_dict().items()}
    return Reference(losses=losses, gradients=gradients, state=state)


def runtime_loop(case: Case, plan: Plan, of: Traced, *, compile: bool | str = False) -> Reference:
    """The same under a plan: collective over its ranks."""
    runtime = parallelize(case.model(), plan, of, compile=compile)
    optimizer = case.optimize(runtime)
    losses, gradients = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(float(runtime.train_step(case.batch(plan.global_batch_size, step))))
        gradients.append(runtime.full_gradients())
        optimizer.step()
    return Reference(losses=losses, gradients=gradients, state=runtime.full_state_dict())


def built(cell: Cell, model: nn.Module | None = None) -> Runtime:
    """A runtime of the cell's plan over its case's model, or another of the same kind."""
    return parallelize(model or CASES[cell.case].model(), *plan_of(cell))


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


def _rows(batch: Any, start: int, stop: int) -> Any:
    if isinstance(batch, Mapping):
        return {name: x[start:stop] for name, x in batch.items()}
    return tuple(x[start:stop] for x in batch)


# --- made once ------------------------------------------------------------------------------------


def reference_of(cell: Cell) -> Reference:
    """What a cell has to give: a test makes it, the ranks find it in the store."""
    parts, lowered = _parts(cell), cell.precision not in PLAIN
    return stored(
        "reference",
        STEPS,
        cell.case,
        cell.rows,
        parts,
        cell.precision,
        make=lambda: _made(cell),
        models=(models, architectures, branching_models, sequence_models),
        rooms=(*MAKING, "executor", "planner/plan") if lowered else (),
    )


def _made(cell: Cell) -> Reference:
    case = CASES[cell.case]
    if dtype := PLAIN.get(cell.precision):
        return plain_loop(case, cell.rows, parts=_parts(cell), dtype=dtype)
    return runtime_loop(case, *plan_of(cell.alone))


def _parts(cell: Cell) -> int:
    """The micro-batches of a reference, where its result depends on them."""
    depends = cell.precision not in PLAIN or CASES[cell.case].batch_statistics
    return cell.microbatches if depends else 1


# --- comparison -----------------------------------------------------------------------------------


def difference(
    found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], norm: float = math.inf
) -> tuple[float, str]:
    """Largest relative difference over all tensors, and whose it is: of `g` against the reference
    `r`, ‖g - r‖ / max(‖r‖, FLOOR · the largest of all references), where the floor is for gradients
    that are zero in exact arithmetic."""
    sizes = {n: _norm(x, norm) for n, x in wanted.items()}
    floor = FLOOR * max(sizes[n] for n, x in wanted.items() if x.is_floating_point())
    worst = (0.0, "")
    for name, x in wanted.items():
        if name not in found or found[name].shape != x.shape:
            return math.inf, f"{name} missing or misshapen"
        error = _norm(found[name] - x, norm) / max(sizes[name], floor)
        worst = max(worst, (math.inf if math.isnan(error) else error, name))
    return worst


def _norm(x: torch.Tensor, norm: float) -> float:
    return float(torch.linalg.vector_norm(x.double(), norm))


def compare(found: Reference, wanted: Reference, norm: float = math.inf) -> dict[str, Any]:
    """Largest relative differences of losses, gradients (and where) and state (and where), and the
    names that only one of the two states has."""
    pairs = zip(found.gradients, wanted.gradients, strict=True)
    losses = zip(found.losses, wanted.losses, strict=True)
    errors = [abs(a - b) / abs(b) for a, b in losses]
    return {
        "loss": math.inf if any(map(math.isnan, errors)) else max(errors),
        "gradient": max(difference(a, b, norm) for a, b in pairs),
        "state": difference(found.state, wanted.state, norm),
        "names": sorted(set(found.state) ^ set(wanted.state)),
    }


def on_its_ranks(cell: Cell) -> dict[str, Any]:
    """Train a cell on its ranks, and compare it with its reference."""
    reference_of(cell)
    return on_ranks(cell.world, compared, cell)


def compared(cell: Cell) -> dict[str, Any]:
    """Train a cell on all ranks, compare on rank 0. In half precision single elements are noise, in
    fp32 they are not."""
    found = runtime_loop(CASES[cell.case], *plan_of(cell))
    norm = math.inf if cell.precision == "fp32" else 2
    return {} if launch.rank() else compare(found, reference_of(cell), norm)


def assert_equal(found: dict[str, Any], precision: str) -> None:
    """What `compared` found lies within the rounding of a precision."""
    assert found["loss"] <= LOSS_TOLERANCE[precision]
    for what in ("gradient", "state"):
        error, where = found[what]
        assert error <= TOLERANCE[precision], f"{what} of {where}: {error:.1e}"
    assert found["names"] == [], "names that only one of the two state dicts has"

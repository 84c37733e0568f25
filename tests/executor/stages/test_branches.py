"""Plans whose branches lie apart train as one device does: towers on device groups of their own, of
other meshes each, the trunk beside one of them or alone."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.costmodel.operators import Problem
from meshwright.executor.checkpoint import checkpoint
from meshwright.executor.ranks import launch
from meshwright.executor.rehearsal import rehearse
from meshwright.executor.rehearsal.events import link_bytes
from meshwright.executor.runtime.runtime import Runtime
from meshwright.executor.stages.checked import CheckedPlan
from meshwright.planner.branches import branches_of
from meshwright.planner.plan import Plan
from meshwright.planner.pricing import Evaluator, Ledger, bytes_beside_tensors
from tests.helpers.plan_building import Knobs, apart, build_plan
from tests.helpers.ranks import on_ranks
from tests.helpers.tiers import tiered
from tests.helpers.tiny import host
from tests.models.models import Traced, adamw, parallelize, traced
from tests.models.tower_models import TOWERS
from tests.parity.parity_reference import assert_equal, compare, plain_loop, runtime_loop

ROWS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """A model with a stage for each branch (the first one cut in `first`) and the trunk, on these
    meshes, the trunk's on the devices of stage `host`, if there is one."""

    case: str
    meshes: tuple[tuple[int, int], ...]
    host: int | None = None
    schedule: str = "1f1b"
    microbatches: int = 4
    first: int = 1
    zero: int = 0
    recompute: str = "none"

    def __str__(self) -> str:
        meshes = "|".join(f"dp{dp}xtp{tp}" for dp, tp in self.meshes)
        return f"{self.case}-{meshes}-{self.schedule}-m{self.microbatches}-host{self.host}"

    def plan(self, of: Traced) -> Plan:
        image, text = branches_of(of.graph, of.table)
        cuts = [image.start + len(image) * k // self.first for k in range(1, self.first)]
        meshes = self.meshes if self.host is None else (*self.meshes, (1, 1))
        knobs = Knobs(
            meshes=meshes,
            rows=ROWS,
            num_microbatches=self.microbatches,
            schedule=self.schedule,
            cut=(*cuts, text.start, text.stop),
            zero=self.zero,
            recompute=self.recompute,
            shardings=TOWERS[self.case].shardings,
        )
        return apart(build_plan(of.graph, knobs), of.graph, self.host)


CELLS = [
    Apart(case="towers", meshes=((1, 1), (1, 1)), host=1),
    Apart(case="towers", meshes=((1, 1), (1, 1)), host=0, schedule="gpipe"),
    Apart(case="pairs", meshes=((2, 1), (1, 1)), host=1, microbatches=1),
    Apart(case="clip", meshes=((1, 2), (1, 1)), host=1, microbatches=1),
    Apart(case="towers", meshes=((1, 1), (1, 1), (2, 1)), first=1, schedule="zb_h1", zero=1),
    Apart(case="towers", meshes=((1, 1), (1, 1), (1, 2)), first=2, host=2, recompute="full"),
    Apart(case="pairs", meshes=((1, 2), (2, 1)), host=0, microbatches=1, zero=1),
    Apart(case="clip", meshes=((2, 1), (2, 1)), host=0, microbatches=1, zero=2),
    Apart(case="clip", meshes=((1, 1), (1, 1), (1, 2)), microbatches=1, recompute="full"),
    Apart(case="towers", meshes=((2, 1), (1, 1)), host=0, schedule="eager_1f1b", zero=3),
    Apart(case="towers", meshes=((1, 2), (1, 1)), host=1, schedule="zb_h2", zero=0),
    Apart(case="shallow", meshes=((1, 1), (1, 1)), host=1, microbatches=2),
]


def compared(cell: Apart, plan: Plan, of: Traced) -> dict[str, Any]:
    """Where a loss is of all pairs of rows, whose gradients cancel, single elements are noise."""
    case = TOWERS[cell.case]
    found, norm = runtime_loop(case, plan, of), math.inf if cell.case == "towers" else 2.0
    return {} if launch.rank() else compare(found, plain_loop(case, ROWS), norm)


@pytest.mark.parametrize(
    "cell",
    tiered(CELLS, lambda cell: cell in CELLS[:4], "other meshes and schedules of the same towers"),
)
def test_apart_trains_as_one_device(cell: Apart) -> None:
    of = traced(TOWERS[cell.case], ROWS // cell.microbatches)
    plan = cell.plan(of)
    assert Plan.from_json(plan.to_json()) == plan
    assert_equal(on_ranks(plan.num_ranks, compared, cell, plan, of), "fp32")


@pytest.mark.parametrize("cell", tiered(CELLS[:2], CELLS[1].__eq__, "1f1b stays of two schedules"))
def test_rehearsed_ranks_do_send_and_hold_what_is_priced(cell: Apart) -> None:
    of = traced(TOWERS[cell.case], ROWS // cell.microbatches)
    plan = cell.plan(of)
    checked = CheckedPlan.of(plan, of.graph, of.table)
    case = TOWERS[cell.case]
    found = rehearse(checked, case.model(), lambda: case.batch(ROWS, 0), adamw)
    problem = Problem(
        graph=of.graph, factors=of.table, cluster=host(plan.num_ranks), precision="fp32"
    )
    priced = Evaluator(problem).price(plan)
    works = Ledger.of(priced).work()
    for rank, log in found.logs.items():
        work = works[found.group_of[rank]]
        # the first product of pixels has no gradient to give
        assert sum(log.flops.values()) == pytest.approx(work.flops, rel=0.02)
        nbytes = sum(link_bytes(log).values())
        assert nbytes == pytest.approx(sum(work.sent_bytes.values()), rel=1e-3, abs=400)
    beside = bytes_beside_tensors(plan, priced.priced)
    peaks = zip(priced.prediction.peak_memory_bytes, beside, found.peak_bytes, strict=True)
    for peak, less, rehearsed in peaks:
        assert peak - less == pytest.approx(rehearsed, rel=0.02)


# --- draws, and a run that goes on in a chain -----------------------------------------------------

SEED, BEFORE, AFTER = 5, 2, 1


def started(plan: Plan, of: Traced) -> tuple[Runtime, torch.optim.Optimizer]:
    case = TOWERS["dropping"]
    torch.manual_seed(SEED)  # of which the runtime draws its own
    runtime = parallelize(case.model(), plan, of)
    return runtime, case.optimize(runtime)


def losses_of(
    runtime: Runtime, optimizer: torch.optim.Optimizer, first: int, count: int
) -> list[float]:
    losses = []
    for step in range(first, first + count):
        optimizer.zero_grad()
        losses.append(float(runtime.train_step(TOWERS["dropping"].batch(ROWS, step)).detach()))
        optimizer.step()
    return losses


def trained(plan: Plan, of: Traced) -> list[float]:
    return losses_of(*started(plan, of), 0, BEFORE + AFTER)


def saved(plan: Plan, of: Traced, path: Path) -> list[float]:
    runtime, optimizer = started(plan, of)
    losses = losses_of(runtime, optimizer, 0, BEFORE)
    checkpoint.save(runtime, path, optimizer)
    return losses


def resumed(plan: Plan, of: Traced, path: Path) -> list[float]:
    runtime, optimizer = started(plan, of)
    losses_of(runtime, optimizer, BEFORE, 1)  # which the checkpoint undoes
    checkpoint.load(runtime, path, optimizer)
    return losses_of(runtime, optimizer, BEFORE, AFTER)


def chain(of: Traced, stages: int) -> Plan:
    knobs = Knobs(meshes=((1, 1),) * stages, rows=ROWS, num_microbatches=4)
    return build_plan(of.graph, knobs)


DROPPING = [
    Apart(case="dropping", meshes=((1, 1), (1, 1)), host=0),
    Apart(case="dropping", meshes=((2, 1), (1, 1)), host=1, recompute="full"),
]


@pytest.mark.parametrize(
    "cell", tiered(DROPPING, lambda cell: cell is DROPPING[0], "two device groups stay")
)
def test_dropout_of_towers_is_that_of_one_device_and_goes_on_in_a_chain(
    cell: Apart, tmp_path: Path
) -> None:
    of = traced(TOWERS[cell.case], ROWS // cell.microbatches)
    plan, alone = cell.plan(of), trained(chain(of, 1), of)
    losses = on_ranks(plan.num_ranks, saved, plan, of, tmp_path / "saved")
    losses += on_ranks(2, resumed, chain(of, 2), of, tmp_path / "saved")
    assert losses == pytest.approx(alone, rel=1e-5)


def evaluated(cell: Apart, plan: Plan, of: Traced) -> None:
    case = TOWERS[cell.case]
    runtime, batch = parallelize(case.model(), plan, of), case.batch(ROWS, 0)
    with torch.no_grad():
        alone = float(case.loss(case.model(), batch))
    assert float(runtime.eval_step(batch)) == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("cell", [CELLS[1], CELLS[2]], ids=str)
def test_apart_evaluates_as_one_device(cell: Apart) -> None:
    of = traced(TOWERS[cell.case], ROWS // cell.microbatches)
    plan = cell.plan(of)
    on_ranks(plan.num_ranks, evaluated, cell, plan, of)

"""Plans whose branches lie apart train as one device does: towers on device groups of their own, of
other meshes each, the trunk beside one of them or alone."""

import math
from dataclasses import dataclass
from typing import Any

import pytest

from meshwright.executor.ranks import launch
from meshwright.planner.branches import branches_of
from meshwright.planner.plan import Plan
from tests.helpers.plan_building import Knobs, apart, build_plan
from tests.helpers.ranks import on_ranks
from tests.helpers.tiers import tiered
from tests.models.models import Traced, traced
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

"""Cells of the parity matrix rehearsed, priced, and run on real ranks under the same recorder."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from meshwright.costmodel.operators import Problem
from meshwright.costmodel.sharding import Assignment
from meshwright.executor.ranks import launch
from meshwright.executor.rehearsal import (
    Event,
    Kind,
    RankLog,
    Recorder,
    Rehearsal,
    rank_log,
    rehearse,
    run_steps,
)
from meshwright.executor.runtime import RunOptions, Runtime
from meshwright.executor.stages import CheckedPlan, why_not_evaluable
from meshwright.planner.plan import Plan, check_plan
from meshwright.profiles.cluster import Cluster
from tests.helpers.plan_building import Knobs, build_plan
from tests.helpers.stored import stored
from tests.models import experts_models
from tests.models.branching_models import moe_loss
from tests.models.models import CASES, GLOBAL_BATCH, Case, Traced, adamw, traced
from tests.parity.parity_cells import Cell, plan_of

RUNS = 8
EXPERTS = Case(
    build=lambda: experts_models.language_model("routed", "none"),
    batch=experts_models.batch, optimizer=adamw, loss_fn=moe_loss,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A cell's plan, checked, with its graph, and an empty batch for it."""

    case: Case
    plan: Plan
    of: Traced
    checked: CheckedPlan
    example: Any

    def batch(self) -> Any:
        return pytree.tree_map(torch.empty_like, self.example)

    def rehearse(self, **options: Any) -> Rehearsal:
        return rehearse(self.checked, self.case.model(), self.batch, adamw, **options)

    def rank_log(self, rank: int, **options: Any) -> RankLog:
        given = {"evaluates": not why_not_evaluable(self.of.graph), **options}
        return rank_log(self.checked, self.case.model(), self.batch, adamw, rank=rank, **given)

    def real_log(self, *, evaluates: bool) -> RankLog:
        """What this rank really does."""
        recorder = Recorder()
        with recorder.following_resizes(), recorder:
            options = RunOptions(device=torch.device("cpu"))
            runtime = Runtime(self.checked, self.case.model(), options=options)
            run_steps(runtime, lambda: self.example, adamw, recorder, evaluates=evaluates)
        return recorder.log(launch.rank() if dist.is_initialized() else 0)

    def priced_on(
        self, cluster: Cluster
    ) -> tuple[Plan, Problem, Sequence[Mapping[str, Assignment]]]:
        """What prices a plan: itself, the problem, and its assignments."""
        given = {"cluster": cluster, "precision": self.plan.precision}
        problem = Problem(graph=self.of.graph, factors=self.of.table, **given)
        return self.plan, problem, check_plan(self.plan, self.of.graph, self.of.table)


@cache
def checked(line: str) -> Checked:
    cell = Cell.parse(line)
    plan, of = plan_of(cell)
    return _checked(CASES[cell.case], plan, of)


def checked_experts(layout: str, ep: int, shardings: Mapping[str, str]) -> Checked:
    """Routed experts, each of `ep` ranks with a part of them."""
    cell = Cell.parse(f"experts {layout}")
    rows = GLOBAL_BATCH // cell.microbatches
    of = stored("experts", rows, make=lambda: traced(EXPERTS, rows), models=(experts_models,))
    knobs = Knobs(
        meshes=cell.meshes, rows=GLOBAL_BATCH, num_microbatches=cell.microbatches,
        recompute=cell.recompute, shardings=shardings,
    )  # fmt: skip
    plan = build_plan(of.graph, knobs)
    plan = replace(plan, stages=tuple(replace(stage, ep=ep) for stage in plan.stages))
    return _checked(EXPERTS, plan, of)


def _checked(case: Case, plan: Plan, of: Traced) -> Checked:
    made, example = CheckedPlan.of(plan, of.graph, of.table), case.batch(GLOBAL_BATCH, 0)
    return Checked(case=case, plan=plan, of=of, checked=made, example=example)


@cache
def rehearsal(line: str, every: bool = True) -> Rehearsal:
    return checked(line).rehearse(every=every)


def done(events: Iterable[Event]) -> list[Event]:
    """Events without waits, and without the number of the step in this process."""
    return [replace(e, where="") for e in events if e.kind is not Kind.WAIT]


def does_what_was_rehearsed(line: str, logs: Mapping[int, RankLog]) -> None:
    """From the making of the runtime to an evaluation: the same events, saves and peak bytes.

    The peak is the least of several runs, since gloo's threads hold the tensors of a collective for
    a moment after it was awaited, the longer the busier the machine; and messages that a peer has
    not taken yet are beyond it: in a rehearsal they leave at once.
    """
    of, expected = checked(line), logs[launch.rank()]
    sent = sum(e.nbytes for e in expected.events if e.kind is Kind.SEND)
    peaks: list[int] = []
    fits = [False] * launch.world_size()
    while not all(fits):
        assert len(peaks) < RUNS, (peaks, expected.peak_bytes, sent)
        log = of.real_log(evaluates=not why_not_evaluable(of.of.graph))
        for k, (a, b) in enumerate(zip(done(log.events), done(expected.events), strict=False)):
            assert a == b, f"event {k}: {a}, and in the rehearsal {b}"
        assert len(done(log.events)) == len(done(expected.events)) > 0
        assert log.saved == expected.saved and any(x.boxes for x in log.saved)
        peaks.append(log.peak_bytes)
        fit = 0.99 * expected.peak_bytes <= min(peaks) <= 1.01 * expected.peak_bytes + sent
        dist.all_gather_object(fits, fit)

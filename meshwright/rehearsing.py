"""`result.rehearse()`: a plan's own steps for ranks that are not there, from a traced model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from meshwright.costmodel.memory import optimizer_named
from meshwright.costmodel.operators import Problem
from meshwright.decisions import Decision
from meshwright.executor.errors import RehearsalError
from meshwright.executor.parameters import BY_NAME
from meshwright.executor.prices import Prices
from meshwright.executor.rehearsal import (
    Estimate,
    MakeOptimizer,
    Priced,
    Rehearsal,
    link_bytes,
    rehearse,
)
from meshwright.executor.stages import CheckedPlan
from meshwright.planner import pricing
from meshwright.planner.batch import input_leaves
from meshwright.planner.report import Rehearsed, Report, device_groups, memory_summary
from meshwright.profiles.cluster import Cluster
from meshwright.shell import Progress
from meshwright.traced import TracedModel

LEAST_MORE = 0.01  # of a device's memory, left free after a rehearsal that did not fit


def rehearse_plan(
    checked: CheckedPlan,
    problem: Problem,
    traced: TracedModel,
    *,
    optimizer: MakeOptimizer | None,
    every: bool,
    report: Report,
    compiled: bool,
) -> Rehearsal:
    """Rehearse a checked plan, of which there is a `report`; `compiled` if its blocks are to
    be, which a rehearsal doesn't do. Raises ValueError for a planned
    optimizer that torch doesn't have: give one."""
    if optimizer is not None and not callable(optimizer):
        raise RehearsalError(
            f"={type(optimizer).__name__}(...) is no function",
            place="rehearse: optimizer",
            legal=(
                "one that makes an optimizer of a rank's parameters, e.g. lambda params: "
                "torch.optim.AdamW(params, lr=1e-3), or None"
            ),
        )
    owned = problem.stepped.matrices is not None
    make = optimizer or (None if owned else BY_NAME.get(problem.optimizer))
    if make is None:
        why = "the owners of whole matrices are not rehearsed" if owned else "torch has none"
        known = [name for name in sorted(BY_NAME) if optimizer_named(name).matrices is None]
        raise RehearsalError(
            f"optimizer {problem.optimizer!r}: {why}",
            place="rehearse",
            legal=f"{known}, or give yours: rehearse(optimizer=lambda params: ...)",
            way_out="plan with one of those" if owned else "give yours",
        )
    details = report.details
    priced = details.evaluation if details else pricing.Evaluator(problem).price(checked.plan)
    beside = pricing.bytes_beside_tensors(priced.plan, priced.priced)
    peaks = priced.prediction.peak_memory_bytes
    with Progress() as said:
        rehearsal = rehearse(
            checked,
            traced.model,
            lambda: _batch(traced, checked.plan.global_batch_size),
            make,
            every=every,
            priced=Priced(
                peak_bytes=[peak - less for peak, less in zip(peaks, beside, strict=True)],
                step=_priced_step(priced),
                prices=Prices(cluster=problem.cluster, host_scale=problem.target.host_scale),
            ),
            said=said,
            backend=problem.cluster.backend,
        )
    if compiled:
        said_of = "what torch.compile makes of the blocks: they ran uncompiled"
        rehearsal = replace(rehearsal, left_out=(*rehearsal.left_out, said_of))
    return rehearsal


def _priced_step(priced: pricing.Evaluation) -> Estimate:
    """A plan's price as an estimate has it, by the busiest device group."""
    priced_groups = [
        {
            "forward": group.forward_s - group.forward_comm_s,
            "backward": group.backward_s - group.backward_comm_s,
            "optimizer": group.optimizer_s,
            "communication": group.communication_s + group.gradient_reduction_s,
        }
        for group in device_groups(priced)
    ]
    busiest = max(priced_groups, key=lambda parts: sum(parts.values()))
    return Estimate(step_s=priced.prediction.step_time_s, seconds=busiest)


def with_rehearsal(decision: Decision, rehearsal: Rehearsal, problem: Problem) -> Decision:
    """The decision with what a rehearsal of its plan found: the verdict on memory rests on that,
    with what a device reserves beside tensors."""
    assert rehearsal.plan == decision.plan
    peaks = decision.prediction.peak_memory_bytes
    memory = pricing.RehearsedMemory(
        tensor_bytes=rehearsal.peak_bytes,
        beside_bytes=[
            peak - priced_peak
            for peak, priced_peak in zip(peaks, rehearsal.priced_bytes, strict=True)
        ],
    )
    prediction = replace(decision.prediction, rehearsed=memory)
    report = replace(
        decision.report,
        rehearsed=Rehearsed(lines=rehearsal.short, data=as_data(rehearsal)),
        summary={**decision.report.summary, **memory_summary(prediction, problem.cluster)},
    )
    return replace(decision, report=report, prediction=prediction)


def exit_code(rehearsal: Rehearsal, report: Report) -> int:
    """1 where something doesn't match, 2 where the plan doesn't fit by what was rehearsed."""
    if not rehearsal.ok:
        return 1
    return 2 if report.summary["memory_verdict"] == "does not fit" else 0


def margin_needed(prediction: pricing.Prediction, margin: float, cluster: Cluster) -> float:
    """The part of a device's memory that a search should leave free, after one that left `margin`
    chose a plan that does not fit by its rehearsal: more by what that took beyond its price."""
    assert prediction.rehearsed is not None
    pairs = zip(prediction.rehearsed.peak_bytes, prediction.peak_memory_bytes, strict=True)
    more = max(rehearsed - priced for rehearsed, priced in pairs) / cluster.device.memory_bytes
    return margin + max(more, LEAST_MORE)


def as_data(rehearsal: Rehearsal) -> dict[str, Any]:
    """A rehearsal for JSON; of each rank that was rehearsed bytes at the peak of a step, its FLOPs,
    payload bytes of all that it sent, and bytes that it gives to links in a step."""
    stands_for = rehearsal.stands_for
    return {
        "mismatches": [str(m) for m in rehearsal.mismatches],
        "left_out": list(rehearsal.left_out),
        "seconds": rehearsal.seconds,
        "priced_bytes": list(rehearsal.priced_bytes),
        "step": {
            name: {"step_s": of.step_s, **of.parts}
            for name, of in (("estimated", rehearsal.estimate), ("priced", rehearsal.priced.step))
            if of is not None
        },
        "ranks": {
            rank: {
                "stands_for": stands_for[rank],
                "group": rehearsal.group_of[rank],
                "peak_bytes": log.peak_bytes,
                "peak_by_kind": dict(log.peak_by_kind),
                "sent_bytes": log.sent_bytes,
                "link_bytes": link_bytes(log),
                "flops": dict(log.flops),
            }
            for rank, log in sorted(rehearsal.logs.items())
        },
    }


def _batch(traced: TracedModel, rows: int) -> Any:
    """A global batch like the example; to be called where tensors have no values."""
    leaves, spec = input_leaves(traced.example)

    def made(path: str, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        shape = (rows, *x.shape[1:]) if path in traced.batched else x.shape
        return torch.empty(shape, dtype=x.dtype)

    return pytree.tree_unflatten([made(path, x) for path, x in leaves], spec)

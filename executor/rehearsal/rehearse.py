"""The rehearsal: the executor's own code, run for each kind of rank on tensors without values.

A process stands for one rank after the other (`steps.py`), or several do side by side
(`workers.py`). What they wrote down is compared (`proof.py`, `saves.py`) and priced again
(`estimate.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn

from meshwright.executor.devices import has_streams
from meshwright.executor.errors import RehearsalError
from meshwright.executor.ranks import stage_meshes, world_size
from meshwright.executor.rehearsal.estimate import NO_PRICE, Priced, estimate
from meshwright.executor.rehearsal.kinds import kinds_of_ranks, splits_of
from meshwright.executor.rehearsal.optimizers import MakeOptimizer
from meshwright.executor.rehearsal.proof import mismatches
from meshwright.executor.rehearsal.record import Recorder
from meshwright.executor.rehearsal.result import Rehearsal
from meshwright.executor.rehearsal.saves import unlike_saves
from meshwright.executor.rehearsal.steps import rank_log
from meshwright.executor.rehearsal.workers import logs_of
from meshwright.executor.runtime import why_not_evaluable
from meshwright.executor.stages import CheckedPlan
from meshwright.executor.stand_in import Known, device_for

log = logging.getLogger(__name__)


def rehearse(
    checked: CheckedPlan,
    model: nn.Module,
    batch: Callable[[], Any],
    optimizer: MakeOptimizer,
    *,
    every: bool = False,
    priced: Priced = NO_PRICE,
    said: Callable[[str], None] = log.info,
    backend: str = "gloo",
) -> Rehearsal:
    """Run the plan for one rank of each kind, or for `every` rank; the model is left as it is.

    `batch` makes a global batch; called where tensors have no values. `said` takes lines of
    progress. Ranks are rehearsed on the kind of device that communicates by `backend`: the host's,
    or a stand-in for a GPU (`executor/stand_in`). Raises ValueError where ranks are running, and
    for what can't be rehearsed: an operator or optimizer that reads values of tensors, or an
    operator that mixes tensors of devices.
    """
    if dist.is_initialized():
        raise RehearsalError(
            f"rehearse: {world_size()} ranks are running", way_out="start it without torchrun"
        )
    started = time.monotonic()
    plan = checked.plan
    meshes = stage_meshes(plan, checked.graph, checked.factors, checked.assignments)
    kind_of = kinds_of_ranks(meshes, splits_of(checked, meshes), every=every)
    chosen = sorted(set(kind_of.values()))
    why = why_not_evaluable(checked.graph, plan.num_microbatches)
    device, why_host = device_for(backend)

    run = partial(rank_log, checked, model, batch, optimizer, evaluates=not why)
    run = partial(run, recorder=partial(Recorder, device, priced.prices, Known()))

    said(f"rehearsing {len(chosen)} kinds of {plan.num_ranks} ranks")
    logs = {}
    for rank, found in logs_of(chosen, lambda rank: run(rank=rank)):
        logs[rank] = found
        said(f"rehearsed rank {rank}: {len(logs)} of {len(chosen)} kinds")
    unrun = {name: why_not for log in logs.values() for name, why_not in log.unrun.items()}
    groups = {rank: k for k, ranks in enumerate(plan.devices) for rank in ranks}
    unlike = (*mismatches(logs, kind_of), *unlike_saves(logs, kind_of))
    prices, blocking = None if unlike else priced.prices, not has_streams(device)
    return Rehearsal(
        plan=plan,
        logs=logs,
        kind_of=kind_of,
        mismatches=unlike,
        group_of=groups,
        priced=priced,
        estimate=estimate(logs, kind_of, prices, blocking=blocking) if prices else None,
        left_out=(
            *(x for x in (why, why_host) if x),
            *(_unrun_leaf(*leaf) for leaf in sorted(unrun.items())),
        ),
        seconds=time.monotonic() - started,
    )


def _unrun_leaf(name: str, why: str) -> str:
    return (
        f"the leaf {name}, which can't run on tensors without values ({why}): its results and what "
        "it keeps are as traced, its own operators are not in the record"
    )

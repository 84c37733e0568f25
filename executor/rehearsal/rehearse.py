"""The rehearsal: the executor's own code, run for each kind of rank on tensors without values.

A process stands for one rank after the other (`steps.py`), or several do side by side
(`logs_of`). What they wrote down is compared (`proof.py`) and priced again (`estimate.py`).
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache, partial
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.costmodel.graph import Graph, Op
from meshwright.costmodel.sharding import Assignment, Placement, Strategy, data_layout
from meshwright.executor.checkpoint import SavedTensor
from meshwright.executor.devices import has_streams
from meshwright.executor.errors import RehearsalError
from meshwright.executor.ranks import StageMesh, stage_meshes, world_size
from meshwright.executor.rehearsal.estimate import NO_PRICE, Priced, estimate
from meshwright.executor.rehearsal.events import RankLog
from meshwright.executor.rehearsal.optimizers import MakeOptimizer
from meshwright.executor.rehearsal.proof import SHOWN, Mismatch, mismatches
from meshwright.executor.rehearsal.record import Recorder
from meshwright.executor.rehearsal.result import Rehearsal
from meshwright.executor.rehearsal.steps import rank_log
from meshwright.executor.resharding import part_of
from meshwright.executor.stages import CheckedPlan, why_not_evaluable
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
    for rank, of_rank in logs_of(chosen, lambda rank: run(rank=rank)):
        logs[rank] = of_rank
        said(f"rehearsed rank {rank}: {len(logs)} of {len(chosen)} kinds")
    unrun = {name: why_not for log in logs.values() for name, why_not in log.unrun.items()}
    groups = {rank: k for k, ranks in enumerate(plan.devices) for rank in ranks}
    unlike = (*mismatches(logs, kind_of), *unlike_saves(logs, kind_of))
    closed = not unlike and plan.record.flushes  # no message of another step is in the step
    prices, blocking = priced.prices if closed else None, not has_streams(device)
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


# --- workers --------------------------------------------------------------------------------------

# Several ranks rehearsed at a time, each in a process of its own, where that is worth it.


WORTH_S = 20.0  # of work left, for processes to be started
MOST = 8  # processes: each holds the model's graph, and a log


class CannotForkError(RuntimeError):
    """The process that was forked has run backwards of its own on a device."""


_run: Callable[[int], RankLog] | None = None  # what a worker inherits


def logs_of(ranks: Sequence[int], run: Callable[[int], RankLog]) -> Iterator[tuple[int, RankLog]]:
    """`run` of each rank, as they end. The first is run here; how long it takes decides whether the
    others are shared out."""
    started = time.monotonic()
    for k, rank in enumerate(ranks):
        remaining = ranks[k:]
        if (
            k
            and len(remaining) > 1
            and _each_s(started, k) * len(remaining) > WORTH_S
            and _workers() > 1
        ):
            done = set()
            try:
                for rank, log in _shared(remaining, run):
                    done.add(rank)
                    yield rank, log
            except CannotForkError:
                yield from ((rank, run(rank)) for rank in remaining if rank not in done)
            return
        yield rank, run(rank)


def _each_s(started: float, done: int) -> float:
    return (time.monotonic() - started) / done


def _workers() -> int:
    """Processes that can run here: none but this where processes can't be forked."""
    if "fork" not in multiprocessing.get_all_start_methods():
        return 1
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1, MOST)


def _shared(ranks: Iterable[int], run: Callable[[int], RankLog]) -> Iterator[tuple[int, RankLog]]:
    global _run  # forked processes have it without being sent it
    _run = run
    context = multiprocessing.get_context("fork")
    try:
        with ProcessPoolExecutor(_workers(), context, _begin) as pool:
            ranks_of = {pool.submit(_log, rank): rank for rank in ranks}
            try:
                for future in as_completed(ranks_of):
                    yield ranks_of[future], future.result()
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
    finally:
        _run = None


def _begin() -> None:
    torch.set_num_threads(1)


def _log(rank: int) -> RankLog:
    assert _run is not None
    try:
        return _run(rank)
    except RuntimeError as error:
        if "fork-based multiprocessing" in str(error):
            raise CannotForkError(str(error)) from None
        raise


# --- kinds of ranks -------------------------------------------------------------------------------

# Which ranks of a plan do the same: one of each is rehearsed.
#
# Ranks of a device group run the same program. What differs is the length of their parts of dims
# that an axis doesn't divide, how many keys attention reads of a split sequence, and what an axis'
# first rank does for others. So ranks are alike that have the same tokens, with parts as long of
# each split dim, and that are both, or neither, first on each axis where they have a part, on
# equal meshes; and so are the first ranks of the groups in which they are, so that a group's
# members are of the same kinds for all that are alike, and one of each can be replayed.


# lengths of the dims that are split on the data axis, and on the tensor axis
Splits = tuple[frozenset[int], frozenset[int]]
NONE: Splits = (frozenset(), frozenset())


def splits_of(checked: CheckedPlan, meshes: Sequence[StageMesh]) -> Splits:
    """The lengths of the dims that a plan splits on each axis."""
    graph, on_data, on_tensor = checked.graph, set[int](), set[int]()
    for dp in {mesh.outer[0] for mesh in meshes}:
        layout = data_layout(graph, checked.factors, dp)
        for op in graph.ops:
            on_data |= _split(graph, _states(op, layout.strategies[op.name]))
    ops = {op.name: op for op in graph.ops}
    for assignment in _distinct(checked.assignments):
        on_tensor |= _split(graph, assignment.states.items())
        for name, strategy in assignment.strategies.items():
            on_tensor |= _split(graph, _states(ops[name], strategy))
    return frozenset(on_data), frozenset(on_tensor)


def _distinct(assignments: Sequence[Mapping[str, Assignment]]) -> Iterable[Assignment]:
    return {id(x): x for chosen in assignments for x in chosen.values()}.values()


def _states(op: Op, strategy: Strategy) -> Iterable[tuple[str, Placement]]:
    yield from zip(op.operands, strategy.operands, strict=True)
    yield from zip(op.results, strategy.results, strict=True)


def _split(graph: Graph, states: Iterable[tuple[str, Placement]]) -> set[int]:
    kinds = set()
    for value, placement in states:
        shape = graph.values[value].shape
        if placement.sharded and placement.dim < len(shape):  # others are of copies at experts
            kinds.add(shape[placement.dim])
    return kinds


def kinds_of_ranks(
    meshes: Sequence[StageMesh], splits: Splits = NONE, *, every: bool = False
) -> Mapping[int, int]:
    """Rank -> the lowest rank that does the same; each rank itself with `every`."""
    equal = len({(m.dp, m.cp, m.tp, m.shards, m.experts, m.folded) for m in meshes}) == 1
    if every or not equal:
        return {rank: rank for mesh in meshes for rank in mesh.ranks}

    @cache
    def parts(axis: int, size: int, position: int) -> tuple[int, ...]:
        uneven = sorted(length for length in splits[axis] if length % size)
        return tuple(part_of(length, size, position)[1] for length in uneven)

    kinds = {}
    for mesh in {m.ranks: m for m in reversed(meshes)}.values():
        first: dict[tuple[object, ...], int] = {}
        for place, rank in enumerate(mesh.ranks):
            d, t = divmod(place, mesh.tp)
            row, *tokens = mesh.outer_coordinate(d)
            heads = [d, *(d - d % n for n in mesh.cuts)]
            firsts = tuple(head % n == 0 for head in heads for n in mesh.cuts)
            tokens += [row == 0] * bool(tokens)  # all of one row's ranks stand for others'
            kind = (firsts, *tokens, t == 0, parts(0, mesh.outer[0], row), parts(1, mesh.tp, t))
            kinds[rank] = first.setdefault(kind, rank)
    return kinds


# --- saves ----------------------------------------------------------------------------------------

# What the ranks' plans for a checkpoint prove: every tensor is written, and every part of it once.
#
# Ranks that hold a tensor must agree on its shape and on who writes it; somebody must; the writers'
# layout must make up the whole; and what rehearsed ranks write must not overlap, nor leave out
# anything where all of the writers were rehearsed.


Views = Mapping[int, SavedTensor]  # of one tensor, by rank that holds it
Box = tuple[tuple[int, ...], tuple[int, ...]]
SEVERAL = 64  # boxes that are compared with each other; of more their volume is


def unlike_saves(logs: Mapping[int, RankLog], kind_of: Mapping[int, int]) -> list[Mismatch]:
    """Tensors of a checkpoint that are not written, or more than once; one mismatch for each."""
    views: dict[str, dict[int, SavedTensor]] = defaultdict(dict)
    for rank in sorted(logs):
        for saved in logs[rank].saved:
            views[saved.name][rank] = saved
    faults = []
    for name, of_ranks in sorted(views.items()):
        ranks, text = _judged(of_ranks, kind_of)
        if text:
            text = f"{name!r} of a checkpoint: {text}"
            faults.append(Mismatch(proof="checkpoint", ranks=ranks, text=text))
    return faults


def _judged(views: Views, kind_of: Mapping[int, int]) -> tuple[tuple[int, ...], str]:
    """Fault of a tensor, and its ranks; an empty text where there is none."""
    first, view = next(iter(views.items()))
    for rank, saved in views.items():
        if (saved.shape, saved.dtype) != (view.shape, view.dtype):
            text = f"{list(view.shape)} {view.dtype}, and {list(saved.shape)} {saved.dtype}"
            return (first, rank), text
        if saved.fault:
            return (rank,), saved.fault
    groups = {saved.group: rank for rank, saved in views.items()}
    if len(groups) > 1 and not view.merged:
        text = f"written by the ranks {_several(views[first].group)}, and by others"
        return tuple(groups.values()), text
    for group in groups:
        of_group = {r: s for r, s in views.items() if s.group == group and r in group}
        if not of_group:
            holders = {kind_of.get(rank, rank) for rank in group}
            text = f"left to the ranks {_several(group)}, which don't hold it: written by nobody"
            return (first, *sorted(holders)), text
        ranks, text = _of_group(of_group)
        if text:
            return ranks, text
    return (), ""


def _of_group(views: Views) -> tuple[tuple[int, ...], str]:
    """Fault of the writes of one group's ranks."""
    first, view = next(iter(views.items()))
    for rank, saved in views.items():
        if saved.writers != view.writers:
            text = f"to be written by {_several(view.writers)}, and by {_several(saved.writers)}"
            return (first, rank), text
        if saved.boxes and rank not in saved.writers:
            return (rank,), f"written twice: also by rank {rank}, beside {_several(view.writers)}"
    boxes = [(rank, box) for rank, saved in views.items() for box in saved.boxes]
    for (rank, a), (other, b) in combinations(boxes, 2) if len(boxes) <= SEVERAL else ():
        if _overlap(a, b):
            return (rank, other), f"written twice: {_said(a)}, and {_said(b)}"
    if set(view.writers) <= set(views):
        written = sum(math.prod(sizes) for _, (_, sizes) in boxes)
        if written != math.prod(view.shape):
            text = f"of {math.prod(view.shape)} elements {written} are written"
            return tuple(view.writers), text
    return (), ""


def _overlap(one: Box, other: Box) -> bool:
    return all(
        max(a, b) < min(a + n, b + m)
        for a, n, b, m in zip(one[0], one[1], other[0], other[1], strict=True)
    )


def _said(box: Box) -> str:
    offset, sizes = box
    return str([f"{a}:{a + n}" for a, n in zip(offset, sizes, strict=True)]).replace("'", "")


def _several(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:SHOWN]))
    return f"[{shown}{', ...' if len(ranks) > SHOWN else ''}]"

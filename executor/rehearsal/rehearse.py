"""The rehearsal: the executor's own code, run for each kind of rank on tensors without values.

One process stands for one rank after the other: torch's "fake" process group takes its part in
collectives that nobody else is in, and fake tensors have shapes, dtypes and memory. The optimizer
makes its states; then a step is taken as it would be any time later, with clipping and the
optimizer's step, a checkpoint is planned as far as that goes before the first file, and an
evaluation is run where the model has one. The recorder (`record.py`) writes down what passes.
"""

from __future__ import annotations

import copy
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils import _pytree as pytree

from meshwright.costmodel.schedules import Action, Instruction
from meshwright.executor.checkpoint import planned_save
from meshwright.executor.devices import HOST, has_streams
from meshwright.executor.host_values import noting_unrun
from meshwright.executor.parameters import clip_
from meshwright.executor.ranks import progress, stage_meshes, world_size
from meshwright.executor.rehearsal.estimate import NO_PRICE, Estimate, Priced, estimate
from meshwright.executor.rehearsal.events import RankLog
from meshwright.executor.rehearsal.kinds import kinds_of_ranks, splits_of
from meshwright.executor.rehearsal.memory import BUFFERS, SAVED, TRANSIENT
from meshwright.executor.rehearsal.optimizers import MakeOptimizer, line_of, made_of, step
from meshwright.executor.rehearsal.proof import Mismatch, mismatches
from meshwright.executor.rehearsal.record import Recorder
from meshwright.executor.rehearsal.repeat import NotSteadyError, RepeatingRun, Repeats
from meshwright.executor.rehearsal.saves import unlike_saves
from meshwright.executor.rehearsal.workers import logs_of
from meshwright.executor.runtime import RunOptions, Runtime, why_not_evaluable
from meshwright.executor.stages import CheckedPlan, Observer, Phase, PipelineRun
from meshwright.executor.stand_in import (
    Known,
    KnownFakes,
    MovingData,
    device_for,
    mixes_devices,
    parts_on_demand,
    standing_in,
)
from meshwright.planner.plan import Plan

log = logging.getLogger(__name__)

WEIGHTS, GRADIENTS, STATES, BATCH = "weights", "gradients", "optimizer states", "batch"
KINDS = (WEIGHTS, GRADIENTS, STATES, BATCH, SAVED, BUFFERS, TRANSIENT)
RECEIVES = (Action.RECV_ACTIVATION, Action.RECV_GRADIENT)
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """What a rehearsal found.

    It is of one `plan`, and of no other. `logs` are by rank, one of each kind, or all; `kind_of`
    names for every rank the one that stands for it. `group_of` gives a rank's device group,
    `priced` is what the plan's price says, `estimate` a second one of the step, from the logs (none
    without prices, or where something doesn't match). `left_out` says what was not rehearsed, and
    why.
    """

    plan: Plan
    logs: Mapping[int, RankLog]
    kind_of: Mapping[int, int]
    mismatches: tuple[Mismatch, ...]
    group_of: Mapping[int, int]
    priced: Priced = NO_PRICE
    estimate: Estimate | None = None
    left_out: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether everything matches."""
        return not self.mismatches

    @property
    def priced_bytes(self) -> Sequence[int]:
        """The peak that tensors of each group have at the plan's price; empty without one."""
        return self.priced.peak_bytes

    @property
    def stands_for(self) -> Counter[int]:
        """For each rank that was rehearsed, the number of ranks that do the same."""
        return Counter(self.kind_of.values())

    @property
    def peak_bytes(self) -> list[int]:
        """The largest peak of a rank of each device group."""
        peaks = [0] * (1 + max(self.group_of.values()))
        for rank, found in self.logs.items():
            group = self.group_of[rank]
            peaks[group] = max(peaks[group], found.peak_bytes)
        return peaks

    def __str__(self) -> str:
        return "\n".join([self.line, *self._table(), *self._notes()])

    @property
    def short(self) -> list[str]:
        """Lines for a report: as `str()`, but of each device group only the fullest rank."""
        fullest = {self.group_of[r]: r for r in sorted(self.logs, key=self._fullness)}
        return [self.line, *self._table(fullest.values()), *self._notes()]

    def _fullness(self, rank: int) -> tuple[int, int]:
        return self.logs[rank].peak_bytes, -rank

    @property
    def line(self) -> str:
        """The verdict: kinds of ranks, mismatches, peak bytes of tensors beside the price's."""
        count = len(self.mismatches)
        said = f"{count or 'no'} mismatch{'es' if count > 1 else ''}"
        priced = f" (price {max(self.priced_bytes) / GIB:.3g} GiB)" if self.priced_bytes else ""
        kinds, ranks = len(self.logs), len(self.kind_of)
        counts = f"{kinds} kind{'s' if kinds > 1 else ''} of {ranks} rank{'s' if ranks > 1 else ''}"
        return (
            f"rehearsed: {counts}, {said}, peak "
            f"{max(self.peak_bytes) / GIB:.3g} GiB{priced}, {self.seconds:.1f} s"
        )

    def _table(self, ranks: Collection[int] | None = None) -> list[str]:
        head = ["rank", "stands for", "group", "peak MiB", "priced", "TFLOP", "sent MiB"]
        rows, stands_for = [[*head, *KINDS]], self.stands_for
        for rank in sorted(self.logs if ranks is None else ranks):
            found, group = self.logs[rank], self.group_of[rank]
            priced = f"{self.priced_bytes[group] / 2**20:.1f}" if self.priced_bytes else "-"
            row = [str(rank), str(stands_for[rank]), str(group)]
            row += [f"{found.peak_bytes / 2**20:.1f}", priced]
            row += [f"{sum(found.flops.values()) / 1e12:.3g}"]
            row += [f"{sum(found.sent_bytes.values()) / 2**20:.1f}"]
            row += [f"{found.peak_by_kind.get(kind, 0) / 2**20:.1f}" for kind in KINDS]
            rows.append(row)
        widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
        return ["  ".join(x.rjust(w) for x, w in zip(r, widths, strict=True)) for r in rows]

    def _notes(self) -> list[str]:
        estimated, price = self.estimate, self.priced.step
        steps = [estimated.beside(price)] if estimated and price else []
        return [*map(str, self.mismatches), *steps, *(f"not rehearsed: {x}" for x in self.left_out)]


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
        raise ValueError(
            f"rehearse: {world_size()} ranks are running: rehearse in a process of its own, that "
            "torchrun did not start"
        )
    started = time.monotonic()
    plan = checked.plan
    meshes = stage_meshes(plan, checked.graph, checked.factors, checked.assignments)
    kind_of = kinds_of_ranks(meshes, splits_of(checked, meshes), every=every)
    chosen = sorted(set(kind_of.values()))
    why = why_not_evaluable(checked.graph)
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


def rank_log(
    checked: CheckedPlan,
    model: nn.Module,
    batch: Callable[[], Any],
    optimizer: MakeOptimizer,
    *,
    rank: int,
    evaluates: bool,
    recorder: Callable[[], Recorder] = Recorder,
    repeats: bool = True,
) -> RankLog:
    """The log of one rank, on a recorder's kind of device; where it `repeats`, micro-batches that
    do the same are run once."""
    made = recorder()
    known = made.known or Known()
    mode = made.fakes or KnownFakes(known.results)
    pipeline = partial(RepeatingRun, repeats=Repeats(made)) if repeats else PipelineRun
    options = RunOptions(device=made.device, pipeline=pipeline)
    on = standing_in() if has_streams(made.device) else nullcontext()
    with on, _standing_for(rank, checked.plan.num_ranks), known.layouts.of_rank():
        try:
            # autograd's threads are one per device that it found when it ran first
            threads = torch.autograd.set_multithreading_enabled(False)
            unrun = noting_unrun(made.unrun)
            with threads, unrun, parts_on_demand(), made.following_resizes(), mode, made:
                with MovingData() if has_streams(made.device) else nullcontext():
                    runtime = Runtime(checked, valueless(model, mode), options=options)
                run_steps(runtime, batch, optimizer, made, evaluates=evaluates)
        except DataDependentOutputException as error:
            raise ValueError(
                f"rehearse: {progress.activity.raised or 'the optimizer'} reads the value of a "
                f"tensor{line_of(error)} ({error}), and in a rehearsal tensors have none: "
                "rehearse another optimizer (optimizer=), or declare the part of the model that "
                "does as a leaf"
            ) from error
        except NotSteadyError:
            runtime = None
        except RuntimeError as error:
            if not mixes_devices(error):
                raise
            raise ValueError(
                f"rehearse: rank {rank}, {progress.activity}, block {made.block or '(none)'}: "
                f"a tensor was left on another device: {getattr(error, 'func', '')} {error}"
            ) from error
    if runtime is None:
        again = partial(rank_log, checked, model, batch, optimizer, rank=rank, recorder=recorder)
        return again(evaluates=evaluates, repeats=False)
    return made.log(rank)


def run_steps(
    runtime: Runtime,
    batch: Callable[[], Any],
    optimizer: MakeOptimizer,
    recorder: Recorder,
    *,
    evaluates: bool,
) -> None:
    """What is rehearsed of a runtime: also what a real run does for its log to be equal."""
    parameters = list(runtime.parameters())
    held = [p.stored for p in runtime.stage_parameters] + [
        p.leaf.detach() for p in runtime.stage_parameters
    ]
    recorder.memory.name(map(_local, held), WEIGHTS)
    steps = made_of(optimizer, [p for p in parameters if p.requires_grad])
    for stage in runtime.stages.values():
        _note_blocks(stage.program, recorder)
    given = batch()
    recorder.memory.name(
        (x for x in pytree.tree_leaves(given) if isinstance(x, torch.Tensor)), BATCH
    )
    _make_states(steps, parameters)
    recorder.memory.name(map(_local, _states(steps)), STATES)
    recorder.memory.begin()
    recorder.flops.clear()
    begin = len(recorder.events)
    with recorder.pricing():
        runtime.train_step(given, _observer(runtime, recorder))
        recorder.wait()
    recorder.memory.name((_local(p.grad) for p in parameters if p.grad is not None), GRADIENTS)
    clip_(runtime.stage_parameters, runtime.place, 1.0)
    with recorder.pricing():
        step(steps)
    recorder.memory.end()
    of_step, recorder.step = recorder.flops.copy(), (begin, len(recorder.events))
    recorder.saved = planned_save(runtime, steps)
    if evaluates:
        runtime.eval_step(given, _observer(runtime, recorder))
        recorder.wait()
    recorder.flops = of_step


def _make_states(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Have an optimizer make its states, as its first step does."""
    for p in parameters:
        if p.requires_grad:
            p.grad = torch.zeros_like(p)
    step(optimizer)
    optimizer.zero_grad()


def _states(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    states = (x for own in optimizer.state.values() for x in own.values())
    return (x for x in states if isinstance(x, torch.Tensor))


def _observer(runtime: Runtime, recorder: Recorder) -> Observer:
    """Runs instructions and phases, and writes down where they wait for receives."""

    def observe(what: Instruction | Phase, run: Callable[[], None]) -> None:
        run()
        recorder.enter("")
        if isinstance(what, Phase):
            recorder.wait()
        elif what.action in RECEIVES:
            assert what.peer is not None
            stage = runtime.planned.stages[what.stage]
            channels = stage.channels[what.action, what.peer].values()
            recorder.wait(sum(len(channel.incoming) for channel in channels))

    return observe


def _note_blocks(program: Any, recorder: Recorder) -> None:
    """Have the recorder know which block's forward runs."""
    ready = program.ready

    def noted(block: str) -> None:
        recorder.enter(block)
        if ready is not None:
            ready(block)

    program.ready = noted


def _local(x: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = x.to_local() if hasattr(x, "to_local") else x
    return local.detach()


# --- a world that is not there --------------------------------------------------------------------


@contextmanager
def _standing_for(rank: int, world: int) -> Iterator[None]:
    """This process is one rank of a world in which nobody else is."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    activity, stages = progress.activity, progress.stages
    progress.activity = type(progress)().activity
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
        progress.activity, progress.stages = activity, stages


def valueless(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy of a model whose parameters and buffers are fake tensors on the CPU, tied as they
    were; those on meta are like any others."""
    copies: dict[int, Any] = {}
    for x in (*model.parameters(), *model.buffers()):
        with mode:
            made = torch.empty(x.shape, dtype=x.dtype, device=HOST)
            if isinstance(x, nn.Parameter):
                made = nn.Parameter(made, requires_grad=x.requires_grad)
        copies[id(x)] = made
    return copy.deepcopy(model, copies)

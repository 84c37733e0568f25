"""One rank's part of a rehearsal, in a world where nobody else is.

torch's "fake" process group takes the rank's part in collectives; fake tensors have shapes, dtypes
and memory. The optimizer makes its states; then a step is taken as it would be any time later, with
clipping and the optimizer's step, a checkpoint is planned as far as that goes before the first
file, and an evaluation is run where the model has one. The recorder (`record.py`) writes it down.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils import _pytree as pytree

from meshwright.costmodel.schedules import Action, Instruction
from meshwright.executor import stand_in
from meshwright.executor.checkpoint import planned_save
from meshwright.executor.devices import HOST, has_streams
from meshwright.executor.errors import RehearsalError
from meshwright.executor.host_values import noting_unrun
from meshwright.executor.parameters import clip_
from meshwright.executor.ranks import progress
from meshwright.executor.rehearsal.events import RankLog
from meshwright.executor.rehearsal.optimizers import MakeOptimizer, line_of, made_of, step
from meshwright.executor.rehearsal.record import Recorder
from meshwright.executor.rehearsal.repeat import NotSteadyError, RepeatingRun, Repeats
from meshwright.executor.rehearsal.result import BATCH, GRADIENTS, STATES, WEIGHTS
from meshwright.executor.runtime import RunOptions, Runtime
from meshwright.executor.stages import CheckedPlan, Observer, Phase, PipelineRun

RECEIVES = (Action.RECV_ACTIVATION, Action.RECV_GRADIENT)


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
    known = made.known or stand_in.Known()
    mode = made.fakes or stand_in.KnownFakes(known.results)
    pipeline = partial(RepeatingRun, repeats=Repeats(made)) if repeats else PipelineRun
    options = RunOptions(device=made.device, pipeline=pipeline)
    on = stand_in.standing_in() if has_streams(made.device) else nullcontext()
    with on, _standing_for(rank, checked.plan.num_ranks), known.layouts.of_rank():
        try:
            # autograd's threads are one per device that it found when it ran first
            threads = torch.autograd.set_multithreading_enabled(False)
            unrun = noting_unrun(made.unrun)
            with threads, unrun, stand_in.parts_on_demand(), made.following_resizes(), mode, made:
                with stand_in.MovingData() if has_streams(made.device) else nullcontext():
                    runtime = Runtime(checked, valueless(model, mode), options=options)
                run_steps(runtime, batch, optimizer, made, evaluates=evaluates)
        except DataDependentOutputException as error:
            raise RehearsalError(
                f"rehearse: {progress.activity.raised or 'the optimizer'} reads the value of a "
                f"tensor{line_of(error)} ({error}), and in a rehearsal tensors have none",
                way_out="rehearse another optimizer (optimizer=), or make that part a leaf",
            ) from error
        except NotSteadyError:
            runtime = None
        except RuntimeError as error:
            if not stand_in.mixes_devices(error):
                raise
            raise RehearsalError(
                f"a tensor was left on another device: {getattr(error, 'func', '')} {error}",
                place=f"rehearse: rank {rank}, {progress.activity}, block {made.block or '(none)'}",
                way_out="make it on the device of what it meets",
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

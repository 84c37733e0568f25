"""The ranks of `bench_executor`: what runs in each process of a launch, and the launch itself.

Every function that measures returns plain data, which a rank writes as JSON for the parent.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from meshwright import Cluster, auto_parallelize
from meshwright.costmodel.graph import Graph
from meshwright.costmodel.operators import Problem
from meshwright.costmodel.sharding import FactorTable, analyse
from meshwright.executor.ranks import launch
from meshwright.executor.runtime import Runtime
from meshwright.executor.stages import CheckedPlan
from meshwright.planner.blocks import cut_blocks
from meshwright.planner.overrides import Overrides
from meshwright.planner.plan import Plan
from meshwright.planner.search import Search
from meshwright.planner.tracing import trace
from scripts.ranks.baselines import Batch, Setting, Trainer, adamw, loss_of

SIDES = ("ours", "theirs")
WARM_UP, MEMORY_STEPS = 2, 3
SMALL_HEAD_DIM, SMALL_VOCABULARY = 4, 64
PRECISION = "fp32"

# How the C library treats what is freed. Every larger allocation given back at once: what is
# resident is what is held. All of it kept: a step does not wait for the kernel to find pages.
RETURNS_FREED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
KEEPS_FREED = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**25),  # the most that glibc takes
    "MALLOC_TRIM_THRESHOLD_": str(2**33),
    "MALLOC_TOP_PAD_": str(2**26),
}

LOWER = "check, lower and make groups"

Make = Callable[[Setting], Trainer]
T = TypeVar("T")


# --- our trainer ---------------------------------------------------------------------------------


def ours(overrides: Overrides, *, compile: bool = False) -> Make:
    """The public API, on a plan that the overrides fix."""

    def made(setting: Setting) -> Trainer:
        result = auto_parallelize(
            setting.model(),
            _cluster(),
            example_inputs=setting.batch(2),
            global_batch_size=setting.rows,
            loss_fn=loss_of,
            precision=PRECISION,
            overrides=overrides,
            compile=compile,
            profile=False,
        )
        optimizer = adamw(result.parameters())

        def step(batch: Batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = result.train_step(batch)
            optimizer.step()
            return loss

        return Trainer(step=step)

    return made


def _cluster() -> Cluster:
    return Cluster.local(launch.world_size(), "cpu", measure=False)


def _barrier() -> None:
    if launch.running():
        dist.barrier()


# --- time ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step on one rank; the loss where the rank sees one."""

    wall_s: float
    cpu_s: float
    loss: float | None


def take_turns(trainers: Mapping[str, Trainer], batch: Batch, pairs: int) -> dict[str, list[Step]]:
    """A step of each trainer, `pairs` times after the warm-up, in alternating order."""
    found: dict[str, list[Step]] = {side: [] for side in trainers}
    for turn in range(WARM_UP + pairs):
        for side in sorted(trainers, reverse=bool(turn % 2)):
            _barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            loss = trainers[side].step(batch)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            value = None if loss is None else float(loss)
            found[side].append(Step(wall_s=wall, cpu_s=cpu, loss=value))
    return found


# --- memory --------------------------------------------------------------------------------------


def peak_bytes(side: str, makes: Mapping[str, Make], setting: Setting) -> int:
    """What a step of one side adds to the process at its peak, above what both sides' libraries
    and a small model leave behind."""
    small = dataclasses.replace(
        setting, hidden=SMALL_HEAD_DIM * setting.heads, vocabulary=SMALL_VOCABULARY
    )
    for make in makes.values():
        make(small).step(small.batch())
    gc.collect()
    before = resident_bytes("VmRSS")
    trainer, batch = makes[side](setting), setting.batch()
    gc.collect()
    peaks = []
    for turn in range(WARM_UP + MEMORY_STEPS):
        _barrier()
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        trainer.step(batch)
        if turn >= WARM_UP:
            peaks.append(resident_bytes("VmHWM") - before)
    return int(statistics.median(peaks))


def resident_bytes(field: str) -> int:
    """VmRSS, what is resident now, or VmHWM, its peak."""
    return status_bytes(Path("/proc/self/status").read_text(), field)


def status_bytes(status: str, field: str) -> int:
    """A field of /proc/<pid>/status, which counts in kB of 1024 bytes."""
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise ValueError(f"/proc/self/status has no {field!r}; memory is measured on Linux only")


# --- start-up ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Seconds of this rank."""

    wall_s: float
    cpu_s: float


def start_up(setting: Setting, overrides: Overrides) -> dict[str, Phase]:
    """What `auto_parallelize` does on every rank, timed phase by phase: trace, plan (rank 0, the
    others wait), trace at the plan's micro-batch, lower the plan and make its process groups."""
    model, example, found = setting.model(), setting.batch(2), {}

    def timed(name: str, phase: Callable[[], T]) -> T:
        _barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        result = phase()
        found[name] = Phase(wall_s=time.perf_counter() - wall, cpu_s=time.process_time() - cpu)
        return result

    def traced(rows: int) -> tuple[Graph, FactorTable]:
        graph = trace(model, example, loss_fn=loss_of, batch_size=rows, precision=PRECISION)
        table = analyse(graph)
        return cut_blocks(graph, table), table

    def planned() -> Plan:
        problem = Problem(graph=graph, factors=table, cluster=_cluster(), precision=PRECISION)
        return Search(problem, setting.rows, overrides).run().best.plan

    def lowered() -> Runtime:
        graph, table = at
        return Runtime(CheckedPlan.of(plan, graph, table), model)

    graph, table = timed("trace", lambda: traced(2))
    plan = timed("plan", lambda: launch.agree_on(planned))
    at = timed("trace at the micro-batch", lambda: traced(plan.microbatch_rows))
    timed(LOWER, lowered)
    return found


# --- the launch ----------------------------------------------------------------------------------


def run_ranks(
    arguments: Sequence[str],
    *,
    ranks: int,
    log: Path,
    timeout_s: float,
    link_gbit: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run a command on `ranks` ranks of one thread each: under torchrun, or with `link_gbit` each
    on an emulated host of its own. What they write goes to `log`; `environment` is added to theirs.

    RuntimeError, with the end of the log, where a rank fails or does not end in time.
    """
    command = [sys.executable, *arguments]
    if link_gbit is not None:
        emulated = str(Path(__file__).parent.with_name("emulated_cluster"))
        command = [emulated, "--hosts", str(ranks), "--gbit", f"{link_gbit:g}", "--", *command]
    elif ranks > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [sys.executable, *torchrun, *arguments]
    own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "MESHWRIGHT_TIMEOUT_S": "120"}
    own |= environment or {}
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **own},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"{command}: not done in {timeout_s:g} s\n{_end(log)}") from error
        finally:
            _stop(process)
    if process.returncode:
        raise RuntimeError(f"{command}: exit {process.returncode}\n{_end(log)}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """The launcher ends its ranks when asked to; what is left of it after that is killed."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(timeout=40)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _end(log: Path, characters: int = 4000) -> str:
    return log.read_text(errors="replace")[-characters:]

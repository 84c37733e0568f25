"""Timing of one operator call, forward and backward, as a training step would see it.

One repetition is a forward and, where a gradient flows, `torch.autograd.grad` of its results; both
are timed, and the median over the repetitions of a time budget is kept: noise adds time in a step
as well, so the best repetition would promise too much.

In a step, whatever an operator reads was pushed out of the nearest caches since it was written. So
repetitions walk through several sets of operands, `ROTATED_BYTES` together. Measured on one core
with 2 MiB of its own cache, as the sum over the operators of a GPT-2's forward and backward against
the eager step (229, 61 and 25 ms): one set in use all the time 0.84, 64 MiB of sets 0.87 to 1.04,
256 MiB 0.94 to 1.00.

On a GPU all sets of a repetition are enqueued between two events, so that the time is the device's
and not that of one launch. On a CPU one thread runs, as a rank has, in the company of the other
ranks (`neighbours`), by the clock on the wall: what a host takes away from a virtual machine is
missing in a step, too.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.profiles.inputs import ProfileError
from meshwright.profiles.inputs.errors import MeasuringError
from meshwright.profiles.op_signature import OpSignature, is_floating
from meshwright.profiles.timings import Timing, spread_of

log = logging.getLogger(__name__)

ROTATED_BYTES = 256 * 2**20
MAX_SETS = 64
MIN_REPETITIONS = 5
BUDGET_S = 0.2  # per operator, at most
MEMORY_FRACTION = 0.5  # of what is free, for one operator with its gradients
# operator -> the dim of its first operand that integer operands index
_INDEXED_DIM = {"embedding": 0, "cross_entropy_loss": 1, "nll_loss": 1, "nll_loss_nd": 1}


class TooLarge(ValueError):
    """An operator that would need more than `MEMORY_FRACTION` of the free memory."""


def measure(signature: OpSignature, device: torch.device, *, budget_s: float = BUDGET_S) -> Timing:
    """Time one call on `device`.

    Raises `TooLarge` where it needs more than `MEMORY_FRACTION` of the free memory, ValueError for
    an operator this torch does not have, and whatever the operator raises on these operands.
    """
    function = operator(signature.target)
    needed = check_memory(signature, function, device)
    with _one_thread(device):
        first = _Call(signature, function, device)
        _repetition([first], device)  # the first call allocates, pages in and picks kernels
        once_s = sum(_repetition([first], device))
        affordable = max(MIN_REPETITIONS, int(budget_s / max(once_s, 1e-9)))
        room = min(ROTATED_BYTES, int(MEMORY_FRACTION * free_bytes(device)))
        sets = max(1, min(MAX_SETS, room // max(1, needed), affordable))
        calls = [first, *(_Call(signature, function, device) for _ in range(sets - 1))]
        for call in calls:
            call.cotangents = first.cotangents
        groups = [calls] if device.type == "cuda" else [[call] for call in calls]
        pairs = _repeated(groups, device, budget_s)
    return Timing(
        forward_s=statistics.median(forward for forward, _ in pairs),
        backward_s=statistics.median(backward for _, backward in pairs),
        repetitions=len(pairs),
        spread=spread_of([forward + backward for forward, backward in pairs]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A call that was not measured, and why."""

    signature: OpSignature
    reason: str


def measure_all(
    signatures: Iterable[OpSignature], device: torch.device, *, deadline_s: float
) -> Iterator[tuple[OpSignature, Timing] | Skipped]:
    """Time each distinct call, in the order given, until `time.monotonic()` is `deadline_s`: what
    is left of the time is spread evenly over what is left to do."""
    distinct = list(dict.fromkeys(signatures))
    for done, one in enumerate(distinct):
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            yield Skipped(signature=one, reason="the time budget was spent")
            continue
        budget_s = min(BUDGET_S, left_s / (len(distinct) - done) / 2)  # as much again to prepare it
        try:
            yield one, measure(one, device, budget_s=budget_s)
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError) as error:
            # an operator that can't be timed alone is priced by the roofline, and said to be
            log.warning("%s is not measured: %s", one.target, error)
            yield Skipped(signature=one, reason=str(error))


def operator(target: str) -> Callable[..., Any]:
    """The operator of a name as `aten.add.Tensor`. Raises ValueError where torch has none."""
    namespace: Any = torch.ops
    for name in target.split("."):
        namespace = getattr(namespace, name, None)
    if not callable(namespace):
        raise ProfileError(
            f"torch {torch.__version__} has none of that name",
            place=f"operator {target!r}",
            legal="operators of this torch, e.g. aten.linear.default",
            way_out="drop the row, or measure with the torch that has it",
        )
    function: Callable[..., Any] = namespace
    return function


# --- memory ---------------------------------------------------------------------------------------


def check_memory(signature: OpSignature, function: Callable[..., Any], device: torch.device) -> int:
    """Bytes of one call (operands, results, and as much again for gradients); raises `TooLarge`."""
    shapes = _Call(signature, function, torch.device("meta"))
    results = sum(y.numel() * y.element_size() for y in shapes.forward())
    needed = (1 + signature.differentiable) * (signature.nbytes + results)
    room = MEMORY_FRACTION * free_bytes(device)
    if needed > room:
        raise TooLarge(
            f"{signature.target} needs {needed / 2**30:.2f} GiB with its gradients; "
            f"{MEMORY_FRACTION:.0%} of the free memory is {room / 2**30:.2f} GiB. Measure fewer "
            "rows, or free memory"
        )
    return needed


def free_bytes(device: torch.device) -> int:
    """Bytes of memory that are free, or can be freed without swapping."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            memory_info = dict(line.split(":") for line in lines)
        return int(memory_info["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # no Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


# --- one call -------------------------------------------------------------------------------------


class _Call:
    """One call with its operands allocated, and the gradients of its results (`cotangents`)."""

    def __init__(
        self, signature: OpSignature, function: Callable[..., Any], device: torch.device
    ) -> None:
        self.function = function
        self.device = device
        self.leaves: list[torch.Tensor] = []
        tensors = [
            self._operand(signature, dtype, shape, grad)
            for dtype, shape, grad in signature.operands
        ]
        self.args, self.kwargs = signature.call_arguments(tensors.__getitem__, device)
        self.cotangents: list[torch.Tensor] = []

    def _operand(
        self, signature: OpSignature, name: str, shape: Sequence[int], grad: bool
    ) -> torch.Tensor:
        dtype = getattr(torch, name)
        if is_floating(name):
            # positive: logarithms, roots and variances stay finite
            leaf = torch.rand(shape, device=self.device).to(dtype).requires_grad_(grad)
            if grad:
                self.leaves.append(leaf)
            return leaf
        if dtype == torch.bool:
            return torch.ones(shape, dtype=dtype, device=self.device)
        return torch.randint(0, _index_bound(signature), tuple(shape), device=self.device).to(dtype)

    def forward(self) -> list[torch.Tensor]:
        """Run the operator; returns its tensor results."""
        with torch.set_grad_enabled(bool(self.leaves)):
            results = self.function(*self.args, **self.kwargs)
        if isinstance(results, torch.Tensor):
            return [results]
        return [y for y in results or () if isinstance(y, torch.Tensor)]

    def backward(self, results: Sequence[torch.Tensor]) -> None:
        """Compute the gradients of the operands that have one."""
        roots = [y for y in results if y.requires_grad]
        if not self.cotangents:
            self.cotangents = [torch.rand_like(y) for y in roots]
        torch.autograd.grad(roots, self.leaves, self.cotangents, allow_unused=True)


def _index_bound(signature: OpSignature) -> int:
    """An exclusive upper bound of integer operands that is legal for every dim they may index."""
    floating = [shape for dtype, shape, _ in signature.operands if is_floating(dtype)]
    dim = _INDEXED_DIM.get(signature.short)
    if dim is not None and floating and dim < len(floating[0]):
        return max(1, floating[0][dim])
    return max(1, min((size for shape in floating for size in shape), default=1))


# --- timing ---------------------------------------------------------------------------------------


def _repeated(
    groups: Sequence[Sequence[_Call]], device: torch.device, budget_s: float
) -> list[tuple[float, float]]:
    """(forward, backward) seconds of repetitions over one group after the other, until the budget
    is spent."""
    deadline = time.perf_counter() + budget_s
    pairs: list[tuple[float, float]] = []
    while len(pairs) < MIN_REPETITIONS or time.perf_counter() < deadline:
        pairs.append(_repetition(groups[len(pairs) % len(groups)], device))
    return pairs


def _repetition(calls: Sequence[_Call], device: torch.device) -> tuple[float, float]:
    """Seconds per call of all forwards, then of all backwards."""
    before = _stamp(device)
    results = [call.forward() for call in calls]
    between = _stamp(device)
    if not any(y.requires_grad for y in results[0]):
        return _seconds(before, between) / len(calls), 0.0
    if not calls[0].cotangents:
        calls[0].backward(results.pop(0))
        return _repetition(calls, device)
    started = _stamp(device)
    for call, outputs in zip(calls, results, strict=True):
        call.backward(outputs)
    ended = _stamp(device)
    return _seconds(before, between) / len(calls), _seconds(started, ended) / len(calls)


Stamp = float | torch.cuda.Event


def _stamp(device: torch.device) -> Stamp:
    """The time on the device's own clock: seconds, or an event on the GPU's stream."""
    if device.type != "cuda":
        return time.perf_counter()
    make_event: Any = torch.cuda.Event  # untyped
    event: torch.cuda.Event = make_event(enable_timing=True)
    event.record()
    return event


def _seconds(start: Stamp, end: Stamp) -> float:
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    assert isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


@contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """One thread on a CPU, as a rank has, and no garbage collection inside."""
    threads, collecting = torch.get_num_threads(), gc.isenabled()
    if device.type == "cpu":
        torch.set_num_threads(1)
    gc.disable()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if collecting:
            gc.enable()


# --- neighbours -----------------------------------------------------------------------------------

# Background load on the other cores while operators are timed on one.
#
# Ranks of one machine share its memory, its last-level cache and its kernel. An operator timed
# alone on an idle machine is faster than the same operator in a step, where every core runs one:
# on two cores of a virtual machine, 1.6 times faster for a small GPT-2 (2026-11). So a rank's
# operators are timed while its neighbours run the same ones.


START_S = 60.0  # a new process imports torch first
EACH_S = 0.02


@contextlib.contextmanager
def neighbours(count: int, signatures: Sequence[OpSignature]) -> Iterator[None]:
    """`count` processes that run the CPU operators of `signatures` in turn, until the block ends.

    Raises RuntimeError if they don't start. None outlives the block.
    """
    if not count or not signatures:
        yield
        return
    context = multiprocessing.get_context("spawn")
    texts = [one.text for one in signatures]
    started = [context.Event() for _ in range(count)]
    processes = [
        context.Process(target=_run_on, args=(texts, seed, event), daemon=True)
        for seed, event in enumerate(started)
    ]
    try:
        for process in processes:
            process.start()
        for event in started:
            if not event.wait(START_S):
                raise MeasuringError(
                    f"neighbours of a measurement did not start in {START_S:.0f} s",
                    place="profile: operators",
                    way_out="measure again when the machine is less busy",
                )
        yield
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()


def _run_on(texts: Sequence[str], seed: int, started: multiprocessing.synchronize.Event) -> None:
    torch.set_num_threads(1)
    signatures = [OpSignature.parse(text) for text in texts]
    random.Random(seed).shuffle(signatures)
    device = torch.device("cpu")
    started.set()
    for one in itertools.cycle(signatures):
        with contextlib.suppress(RuntimeError, ValueError, TypeError, IndexError):
            measure(one, device, budget_s=EACH_S)

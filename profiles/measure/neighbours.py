"""Background load on the other cores while operators are timed on one.

Ranks of one machine share its memory, its last-level cache and its kernel. An operator timed alone
on an idle machine is faster than the same operator in a step, where every core runs one: on two
cores of a virtual machine, 1.6 times faster for a small GPT-2 (2026-11). So a rank's operators are
timed while its neighbours run the same ones.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import random
from collections.abc import Iterator, Sequence

import torch

from meshwright.profiles.measure.errors import MeasuringError
from meshwright.profiles.measure.operators import measure
from meshwright.profiles.op_signature import OpSignature

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

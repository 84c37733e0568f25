"""Timing of collectives with the backend that will run, over message sizes and group shapes.

    torchrun --standalone --nproc-per-node N -m meshwright.profiles.measure.collectives --output
    FILE

Every rank takes part. The world is tiled by groups of one shape, which all talk at the same time,
as they do in a step: two groups on two cores are slower than one. Sizes are those of the full
tensor M, as the cost model counts (`costmodel/kernels/collectives.py`); of one message for "p2p".
What is timed is the call as the executor makes it: out of place, its result in fresh memory.

Repetitions follow one another without a barrier, because a collective waits for its ranks itself.
On GPUs, whose queues decouple them, the median of each rank is kept, of a group's ranks the
slowest. Ranks of CPUs compute in between, as in a step: their threads wake up late after it, and
never at the same time. What a collective adds to the work is kept, in the mean of all repetitions
but the slowest twentieth (on two cores twice to five times what calls in a row take).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.profiles.measure.local_ranks import run_local
from meshwright.profiles.timings import CollectiveTiming

SIZES_BYTES = tuple(4**k * 2**10 for k in range(9))  # 1 KiB to 64 MiB
BUDGET_S = 0.15  # per collective, size and shape
REPETITIONS = (7, 200)
WORK = 256  # of CPUs between two collectives: the sides of a product of matrices, some 0.3 ms
SHORTEST_S = 1e-6  # of a collective; the work varies by more
TIMEOUT_S = 60.0  # a rank that hangs stops the others after this long

# torch 2.13 renamed both and warns at the old names, which 2.11 has alone
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The shape of a process group: ranks {r, r + stride, ...}, `size` of them."""

    size: int
    stride: int

    def groups(self, ranks: int) -> list[list[int]]:
        """The groups of this shape that tile a world of `ranks`, which `size * stride` divides."""
        span = self.size * self.stride
        return [
            [start + offset + k * self.stride for k in range(self.size)]
            for start in range(0, ranks, span)
            for offset in range(self.stride)
        ]

    def per_node(self, devices_per_node: int) -> int:
        """The largest number of ranks of the first group on one node."""
        nodes = Counter(k * self.stride // devices_per_node for k in range(self.size))
        return max(nodes.values())


def shapes(ranks: int, devices_per_node: int) -> list[Shape]:
    """Every group shape that tiles the world, one for each (size, ranks per node)."""
    by_size: dict[tuple[int, int], Shape] = {}
    for size in range(2, ranks + 1):
        for stride in range(1, ranks // size + 1):
            if ranks % (size * stride) == 0:
                shape = Shape(size=size, stride=stride)
                by_size.setdefault((size, shape.per_node(devices_per_node)), shape)
    return list(by_size.values())


def launch_local(ranks: int, backend: str, *, budget_s: float) -> list[CollectiveTiming]:
    """Measure on `ranks` processes of this machine; none of them is left when this returns.

    Raises RuntimeError, with their first error, if they fail or take much longer than `budget_s`.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "collectives.json")
        run_local(
            "meshwright.profiles.measure.collectives",
            *("--backend", backend, "--budget", str(budget_s), "--output", str(output)),
            ranks=ranks,
            budget_s=budget_s,
            output=output,
            what=f"measuring collectives on {ranks} {backend} ranks",
            way_out="mend that, give --budget more seconds, or leave --collectives out",
        )
        return [CollectiveTiming(**row) for row in json.loads(output.read_text(encoding="utf-8"))]


# --- on every rank --------------------------------------------------------------------------------


def measure_collectives(
    device: torch.device,
    *,
    devices_per_node: int,
    budget_s: float,
    sizes_bytes: Sequence[int] = SIZES_BYTES,
) -> list[CollectiveTiming]:
    """Time all `COLLECTIVES` in the running process group; the same list on every rank.

    Small messages come first: where `budget_s` ends, the largest are left out of all curves alike.
    """
    ranks = dist.get_world_size()
    deadline = time.monotonic() + budget_s
    timings: list[CollectiveTiming] = []
    grouped = [(shape, _my_group(shape, ranks)) for shape in shapes(ranks, devices_per_node)]
    for nbytes in sorted(sizes_bytes):
        for shape, (group, members) in grouped:
            if _largest([time.monotonic()], device)[0] > deadline:
                return timings
            for kind in COLLECTIVES:
                numel = -(-nbytes // (4 * shape.size**2)) * shape.size**2
                call = COLLECTIVES[kind](numel, members, group, device)
                times = _timed(call, device, MESSAGES.get(kind, 1))
                seconds, spread = _largest([_typical(times, device), _spread(times)], device)
                timings.append(
                    CollectiveTiming(
                        backend=dist.get_backend(),
                        kind=kind,
                        ranks=ranks,
                        size=shape.size,
                        per_node=shape.per_node(devices_per_node),
                        nbytes=4 * numel,
                        seconds=seconds,
                        repetitions=len(times),
                        spread=spread,
                    )
                )
    return timings


def _my_group(shape: Shape, ranks: int) -> tuple[Any, list[int]]:
    """This rank's group of the shape; every rank makes all of them, in the same order."""
    mine: tuple[Any, list[int]] = (None, [])
    for members in shape.groups(ranks):
        group = dist.new_group(members)
        if dist.get_rank() in members:
            mine = group, members
    return mine


Call = Callable[[], None]


def _all_reduce(numel: int, members: list[int], group: Any, device: torch.device) -> Call:
    x = torch.ones(numel, device=device)
    return lambda: _discard(dist.all_reduce(x.clone(), group=group))


def _all_gather(numel: int, members: list[int], group: Any, device: torch.device) -> Call:
    x = torch.ones(numel // len(members), device=device)
    return lambda: _discard(_ALL_GATHER(torch.empty(numel, device=device), x, group=group))


def _reduce_scatter(numel: int, members: list[int], group: Any, device: torch.device) -> Call:
    x, shard = torch.ones(numel, device=device), numel // len(members)
    return lambda: _discard(_REDUCE_SCATTER(torch.empty(shard, device=device), x, group=group))


def _all_to_all(numel: int, members: list[int], group: Any, device: torch.device) -> Call:
    x = torch.ones(numel // len(members), device=device)
    return lambda: _discard(dist.all_to_all_single(torch.empty_like(x), x, group=group))


def _broadcast(numel: int, members: list[int], group: Any, device: torch.device) -> Call:
    x = torch.ones(numel, device=device)
    return lambda: _discard(dist.broadcast(x, src=members[0], group=group))


def _p2p(numel: int, members: list[int], group: Any, device: torch.device) -> Call:
    """The first rank sends and the last answers: two messages, one after the other."""
    first, last, me = members[0], members[-1], dist.get_rank()
    x = torch.ones(numel, device=device)

    def exchange() -> None:
        into = torch.empty_like(x)
        if me == first:
            dist.send(x, last, group=group)
            dist.recv(into, last, group=group)
        elif me == last:
            dist.recv(into, first, group=group)
            dist.send(x, first, group=group)

    return exchange


COLLECTIVES: dict[str, Callable[[int, list[int], Any, torch.device], Call]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "p2p": _p2p,
}
MESSAGES = {"p2p": 2}  # messages of one call, where it is not one


def _discard(_: object) -> None:
    """Ignore a blocking call's result."""


def _timed(call: Call, device: torch.device, messages: int) -> list[float]:
    """Seconds per message, as many times on every rank."""
    _once(call, device)
    once_s = _largest([_once(call, device)], device)[0]
    count = min(max(int(BUDGET_S / once_s), REPETITIONS[0]), REPETITIONS[1])
    if device.type == "cuda":
        return [_once(call, device) / messages for _ in range(count)]
    factor = torch.ones(WORK, WORK)

    def work() -> None:
        factor @ factor

    def both() -> None:
        work()
        call()

    alone_s = _typical([_once(work, device) for _ in range(count)], device)
    return [(_once(both, device) - alone_s) / messages for _ in range(count)]


def _typical(times: Sequence[float], device: torch.device) -> float:
    """Seconds of one of many repetitions."""
    if device.type == "cuda":
        return statistics.median(times)
    fastest = sorted(times)[: max(1, len(times) - len(times) // 20)]
    return max(statistics.fmean(fastest), SHORTEST_S)


def _once(call: Call, device: torch.device) -> float:
    _wait(device)
    started = time.perf_counter()
    call()
    _wait(device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _largest(values: Sequence[float], device: torch.device) -> list[float]:
    """The maximum over all ranks, element by element, so that all decide alike. Collective."""
    box = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return [float(x) for x in box]


def _spread(times: Sequence[float]) -> float:
    low, middle, high = statistics.quantiles(times, n=4)
    return (high - low) / max(middle, SHORTEST_S)


def main() -> None:
    """Measure on one rank, started by torchrun; rank 0 writes the timings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds")
    parser.add_argument("--output", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    local, per_node = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local) if args.backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(args.backend, timeout=timedelta(seconds=TIMEOUT_S))
    timings = measure_collectives(device, devices_per_node=per_node, budget_s=args.budget)
    if dist.get_rank() == 0:
        text = json.dumps([asdict(timing) for timing in timings])
        partial = Path(f"{args.output}.partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(args.output)
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
    time.sleep(0.3)  # gloo's threads must be gone before the interpreter is


if __name__ == "__main__":
    main()

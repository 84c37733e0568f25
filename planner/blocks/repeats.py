"""Block boundaries from the operator graph alone, for models and parts without module containers.

A *cut* is a position in the topological order of the operators; the activations made before it and
read at or after it cross it. Candidates are the narrow cuts, where few bytes cross. Among them the
starts of blocks are the periods of the longest tandem repeat of equal programs (found by a
structural hash of the runs between cuts), then, on both sides of it, the same again; where nothing
repeats, runs of about equal work.

`work` is FLOPs per operator, `bytes_at` the bytes that cross before each operator: both (n,) for n
operators.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence

from meshwright.costmodel.graph import Graph, Op

MAX_BLOCKS = 16  # that a model without repeats is cut into
MAX_PERIOD = 256  # narrow cuts in one repeat
NARROW = 1.5  # a cut is narrow where no more than this times the least nearby bytes cross


def structural_starts(
    graph: Graph, work: Sequence[float], first: int = 0, last: int | None = None
) -> dict[int, str]:
    """Start -> name of the blocks that operators `first` to `last` (exclusive) are cut into."""
    last = len(graph.ops) if last is None else last
    target = sum(work[first:last]) / MAX_BLOCKS
    bytes_at = bytes_at_cuts(graph)
    cuts = _narrow_cuts(bytes_at, work, first, last, target)
    starts, kept = _repeat_starts(graph, work, [first, *cuts, last], bytes_at, target)
    numbered = {at: f"block.{k}" for k, at in enumerate(sorted(starts))}
    shifted = merge_light(numbered, [*work[:last]], kept)
    return {at: f"block.{k}" for k, at in enumerate(sorted(shifted))}


def _narrow_cuts(
    bytes_at: Sequence[int], work: Sequence[float], first: int, last: int, target: float
) -> list[int]:
    """Positions where at most `NARROW` times the bytes of the narrowest cut within `target` work
    cross, on one of the two sides: where a wide part meets a narrow one, both keep their cuts."""
    done = [0.0, *itertools.accumulate(work)]
    lo, hi, cuts = first + 1, first + 1, []
    for i in range(first + 1, last):
        while done[i] - done[lo] > target:
            lo += 1
        while hi < last and done[hi] - done[i] <= target:
            hi += 1
        nearby = max(min(bytes_at[lo : i + 1]), min(bytes_at[i:hi], default=0))
        if bytes_at[i] <= NARROW * nearby:
            cuts.append(i)
    return cuts


def _repeat_starts(
    graph: Graph,
    work: Sequence[float],
    bounds: Sequence[int],
    bytes_at: Sequence[int],
    target: float,
) -> tuple[list[int], set[int]]:
    """Block starts among `bounds` (the first operator, narrow cuts, the end), and those of them
    that `merge_light` must keep: the first of a repeat and of the parts on both sides of it."""
    total = sum(work[bounds[0] : bounds[-1]])
    repeat = _longest_repeat(graph, bounds) if total > target else None
    if repeat is None:
        return _equal_work_starts(work, bounds, bytes_at, target), set()
    left, periods, right = repeat
    starts, kept = list(periods), set(periods[:1])
    for side in (left, right):
        if len(side) > 1:
            more, fixed = _repeat_starts(graph, work, side, bytes_at, target)
            starts += more
            kept |= fixed | {more[0]}
    return sorted(starts), kept


def _equal_work_starts(
    work: Sequence[float], bounds: Sequence[int], bytes_at: Sequence[int], target: float
) -> list[int]:
    """Starts of runs of about `target` work. Operators without work (activation functions, pools)
    may go to either side: the cut is where the fewest bytes cross, at a tie the last."""
    starts, filled = [bounds[0]], 0.0
    free: list[int] = []
    for start, stop in itertools.pairwise(bounds):
        load = sum(work[start:stop])
        free.append(start)
        if load == 0:
            continue
        if filled > 0 and filled + load / 2 > target:
            starts.append(min(reversed(free), key=bytes_at.__getitem__))
            filled = 0.0
        filled += load
        free = []
    return starts


def bytes_at_cuts(graph: Graph) -> list[int]:
    """(n,): bytes of the activations alive between operators i-1 and i."""
    position = {r: i for i, op in enumerate(graph.ops) for r in op.results}
    last: dict[str, int] = {}
    for i, op in enumerate(graph.ops):
        for name in op.operands:
            last[name] = i
    delta = [0] * (len(graph.ops) + 2)
    for name, maker in position.items():
        if last.get(name, maker) > maker:
            delta[maker + 1] += graph.values[name].nbytes
            delta[last[name] + 1] -= graph.values[name].nbytes
    return list(itertools.accumulate(delta[: len(graph.ops)]))


def _longest_repeat(
    graph: Graph, bounds: Sequence[int]
) -> tuple[Sequence[int], list[int], Sequence[int]] | None:
    """The tandem repeat of runs between bounds that covers most operators, of equal ones that with
    the shortest period: (bounds before it, starts of its periods, bounds after it). None where no
    three equal periods in a row cover half of the operators."""
    hashes = [structural_hash(graph, graph.ops[a:b]) for a, b in itertools.pairwise(bounds)]
    best: tuple[int, int, int, int] | None = None
    for period in range(1, min(len(hashes) // 3, MAX_PERIOD) + 1):
        run = 0
        for i in range(len(hashes) - period):
            run = run + 1 if hashes[i] == hashes[i + period] else 0
            repeats = run // period + 1
            if run and run % period == 0 and repeats >= 3:
                first = i + period - run - period + 1
                covered = bounds[first + repeats * period] - bounds[first]
                if best is None or (covered, -period) > (best[0], -best[1]):
                    best = (covered, period, first, repeats)
    if best is None or best[0] < 0.5 * (bounds[-1] - bounds[0]):
        return None
    _, period, first, repeats = best
    end = first + repeats * period
    starts = [bounds[first + k * period] for k in range(repeats)]
    return bounds[: first + 1], starts, bounds[end:]


def structural_hash(graph: Graph, ops: Sequence[Op]) -> str:
    """Hash of a run's operators and of the shapes that they take and make."""
    text = ";".join(
        f"{op.target}:{[graph.values[r].shape for r in (*op.operands, *op.results)]}" for op in ops
    )
    return hashlib.sha256(text.encode()).hexdigest()


def merge_light(starts: Mapping[int, str], work: Sequence[float], kept: set[int]) -> dict[int, str]:
    """Start -> name without the runs of no work (no matrix product), but for those in `kept`: they
    join the block before them, at the front the one after."""
    bounds = [*sorted(starts), len(work)]
    merged: dict[int, str] = {}
    carried: int | None = None
    for start, stop in itertools.pairwise(bounds):
        light = sum(work[start:stop]) == 0 and start not in kept
        if light and merged:
            continue
        if light:
            carried = start if carried is None else carried
            continue
        merged[start if carried is None else carried] = starts[start]
        carried = None
    return merged or {bounds[0]: starts[bounds[0]]}

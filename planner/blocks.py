"""Blocks of a graph: topological cuts at the boundaries of module containers.

Module containers (`layers.0`, `layers.1`, ...) give the boundaries where the model has them; the
operators before the first are the block `embed`, those after the last `head`, and those between two
containers (an encoder's last norm) a block named after its module. A model without containers, or a
heavy part of one outside them, is cut by its structure. Blocks that are the same program on
different parameters get the same `class_id`, a structural hash.

A *cut* is a position in the topological order of the operators; the activations made before it and
read at or after it cross it. By structure, candidates are the narrow cuts, where few bytes cross.
Among them the starts of blocks are the periods of the longest tandem repeat of equal programs
(found by a structural hash of the runs between cuts), then, on both sides of it, the same again;
where nothing repeats, runs of about equal work.

`work` is FLOPs per operator, `bytes_at` the bytes that cross before each operator: both (n,) for n
operators.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence

from meshwright.costmodel.graph import Block, Graph, Op, class_hash
from meshwright.costmodel.rules import inside_experts
from meshwright.costmodel.sharding import FactorTable
from meshwright.planner.branches import branch_starts, branches_of, op_work

DOMINANT = 0.5  # a container instance with a larger share of the work is opened
HEAVY = 1.5  # a part outside containers with more than this times an instance's work is cut
MAX_BLOCKS = 16  # that a model without repeats is cut into
MAX_PERIOD = 256  # narrow cuts in one repeat
NARROW = 1.5  # a cut is narrow where no more than this times the least nearby bytes cross


def cut_blocks(graph: Graph, factors: FactorTable, like: Graph | None = None) -> Graph:
    """A graph with its `blocks` filled in: contiguous runs of its operators.

    With `like`, the same model at another batch size, the cuts are those of its blocks; where its
    operators differ, it is ignored.
    """
    if like is not None and [op.target for op in like.ops] == [op.target for op in graph.ops]:
        sizes = itertools.accumulate((len(b.ops) for b in like.blocks), initial=0)
        starts = dict(zip(sizes, (b.name for b in like.blocks), strict=False))
        return dataclasses.replace(graph, blocks=blocks_from(graph, starts))
    work = [op_work(graph, factors, op) for op in graph.ops]
    starts = _container_starts(graph, work) or structural_starts(graph, work)
    inside = inside_experts(graph.ops)  # copies of tokens come home before a block ends
    starts = {at: name for at, name in starts.items() if at not in inside}
    if begins := branch_starts(graph, work):
        apart = _with_branches(graph, starts, begins)
        whole = dataclasses.replace(graph, blocks=blocks_from(graph, apart))
        starts = apart if branches_of(whole, factors) else starts
    return dataclasses.replace(graph, blocks=blocks_from(graph, starts))


def _with_branches(
    graph: Graph, starts: Mapping[int, str], begins: Sequence[int]
) -> dict[int, str]:
    """`starts`, with those of the model's branches, so that no block is of two."""
    apart = dict(starts)
    for k, (start, stop) in enumerate(itertools.pairwise(begins)):
        if start not in apart:
            name = _outside_name(graph, graph.ops[start:stop]) or f"branch.{k}"
            before = max((at for at in apart if at < start), default=start)
            if apart.get(before) == name:  # of what is no longer in it
                apart[before] = "tail"
            apart[start] = name
    return apart


def _container_starts(graph: Graph, work: Sequence[float]) -> dict[int, str] | None:
    """Start -> name of the blocks by `prefix.<int>` modules; None where less than half of the work
    is in such modules, or they are fewer than two."""
    labels = _labels(graph, work)
    labelled = sum(w for w, label in zip(work, labels, strict=True) if label)
    if labelled < 0.5 * sum(work) or len(set(labels) - {""}) < 2:
        return None
    runs = [(label, len(list(group))) for label, group in itertools.groupby(labels)]
    starts: dict[int, str] = {} if labels[0] else {0: "embed"}
    outside: set[int] = set(starts)
    current, position = "", 0
    for k, (label, length) in enumerate(runs):
        if label and label != current:
            starts[position] = current = label
        elif not label and current:
            later = {other for other, _ in runs[k + 1 :] if other}
            start = position + _tail(graph, labels, current, position, length)
            name = _outside_name(graph, graph.ops[start : position + length]) if later else "head"
            if start < position + length and name and not _recurs(current, later):
                starts[start] = name
                outside.add(start)
                current = ""
        position += length
    return _open_heavy(graph, work, merge_light(starts, work, outside), outside)


def _recurs(label: str, later: set[str]) -> bool:
    """Whether an instance, or another of its container, is among the `later` labels."""
    return label.rpartition(".")[0] in {other.rpartition(".")[0] for other in later}


def _tail(graph: Graph, labels: Sequence[str], label: str, position: int, length: int) -> int:
    """The number of operators after an instance that belong to it though its parent module calls
    them (the residual sum): the common prefix with those after the container's previous instance.
    """
    container = label.rpartition(".")[0]
    for i in reversed(range(1, position)):
        before = labels[i - 1]
        ends = before and before != label and labels[i] != before
        if ends and before.rpartition(".")[0] == container:
            gap = itertools.takewhile(lambda j: not labels[j], range(i, position))
            pairs = zip(gap, range(position, position + length), strict=False)
            same = (graph.ops[x].target == graph.ops[y].target for x, y in pairs)
            return sum(1 for _ in itertools.takewhile(bool, same))
    return 0


def _outside_name(graph: Graph, ops: Sequence[Op]) -> str:
    """The module of the first operator with a parameter; "" where none has one."""
    return next((op.module for op in ops if graph.parameters.keys() & set(op.operands)), "")


def _open_heavy(
    graph: Graph, work: Sequence[float], starts: dict[int, str], outside: set[int]
) -> dict[int, str]:
    """`starts`, with the parts outside containers that outweigh every instance cut by structure."""
    spans = dict(itertools.pairwise([*sorted(starts), len(graph.ops)]))
    loads = [sum(work[a:b]) for a, b in spans.items() if a not in outside]
    opened = dict(starts)
    for start in outside & set(starts):
        if sum(work[start : spans[start]]) > HEAVY * max(loads, default=math.inf):
            cuts = structural_starts(graph, work, start, spans[start])
            if len(cuts) > 1:
                opened |= {at: f"{starts[start]}.{k}" for k, at in enumerate(sorted(cuts))}
    return opened


def _labels(graph: Graph, work: Sequence[float]) -> list[str]:
    """(n,): the container instance that each operator's block is named after, "" outside of
    containers: the outermost one that is neither most of the model's work nor mostly a row of equal
    instances."""
    ops, total = graph.ops, sum(work) or 1.0
    bytes_at = bytes_at_cuts(graph)
    depth = [1] * len(ops)
    while True:
        labels = [_instance(op.module, d) for op, d in zip(ops, depth, strict=True)]
        inner = [_instance(op.module, d + 1) for op, d in zip(ops, depth, strict=True)]
        members: dict[str, list[int]] = {}
        for i, label in enumerate(labels):
            members.setdefault(label, []).append(i)
        opened = {
            label
            for label, indices in members.items()
            if label
            and (
                sum(work[i] for i in indices) > DOMINANT * total
                or _is_row(graph, work, bytes_at, indices, inner)
            )
        }
        deeper = [i for i, label in enumerate(labels) if label in opened and inner[i] != label]
        if not deeper:
            return labels
        for i in deeper:
            depth[i] += 1


def _is_row(
    graph: Graph,
    work: Sequence[float],
    bytes_at: Sequence[int],
    indices: Sequence[int],
    inner: Sequence[str],
) -> bool:
    """Whether an instance, operators `indices`, is mostly a row of three or more inner instances of
    equal structural hash, with narrow cuts between them: at most `NARROW` times the bytes that
    cross before or after it. `inner` are the labels one level deeper."""
    runs = [list(group) for _, group in itertools.groupby(indices, key=inner.__getitem__)]
    if len(runs) < 3 or len(indices) != indices[-1] - indices[0] + 1:
        return False
    around = max(bytes_at[indices[0]], *bytes_at[indices[-1] + 1 : indices[-1] + 2])
    by_hash: dict[str, list[list[int]]] = {}
    for run in runs:
        key = structural_hash(graph, graph.ops[run[0] : run[-1] + 1])
        if bytes_at[run[0]] <= NARROW * around:
            by_hash.setdefault(key, []).append(run)
    equal = max(by_hash.values(), key=lambda rs: sum(work[i] for r in rs for i in r), default=[])
    share = sum(work[i] for run in equal for i in run)
    return len(equal) >= 3 and share > DOMINANT * sum(work[i] for i in indices)


def _instance(module: str, depth: int) -> str:
    """`a.b.3.c.1.d` at depth 1 is `a.b.3`, at depth 2 `a.b.3.c.1`; "" outside containers."""
    parts = module.split(".")
    places = [i for i, part in enumerate(parts) if i and part.isdigit()]
    return ".".join(parts[: places[:depth][-1] + 1]) if places else ""


def blocks_from(graph: Graph, starts: Mapping[int, str]) -> tuple[Block, ...]:
    """Blocks from each start to the next; a name that recurs is numbered `name@2`."""
    order = sorted(starts)
    runs = [graph.ops[a:b] for a, b in itertools.pairwise([*order, len(graph.ops)])]
    owner = {r: k for k, run in enumerate(runs) for op in run for r in op.results}
    read = [dict.fromkeys(name for op in run for name in op.operands) for run in runs]
    last = {name: k for k, names in enumerate(read) for name in names}
    leaving = {graph.loss, *graph.updates.values()}
    state = {*graph.parameters, *graph.buffers}
    blocks: list[Block] = []
    names = Counter[str]()
    for k, (start, run, used) in enumerate(zip(order, runs, read, strict=True)):
        name = starts[start]
        names[name] += 1
        block = Block(
            name=name if names[name] == 1 else f"{name}@{names[name]}",
            ops=run,
            inputs=tuple(n for n in used if owner.get(n, k) != k),
            outputs=tuple(
                r for op in run for r in op.results if last.get(r, k) > k or r in leaving
            ),
            derived=tuple(n for n in used if n not in owner and n not in state),
            parameters=tuple(n for n in used if n in graph.parameters),
            buffers=tuple(n for n in used if n in graph.buffers),
            class_id="",
        )
        blocks.append(dataclasses.replace(block, class_id=class_hash(graph, block)))
    return tuple(blocks)


def activations_at_cuts(graph: Graph) -> list[tuple[str, ...]]:
    """For each cut k, before block k: the activations made before it and read at or after it."""
    earlier: list[str] = []
    cuts: list[tuple[str, ...]] = []
    last = {name: k for k, block in enumerate(graph.blocks) for name in block.inputs}
    for k, block in enumerate(graph.blocks):
        cuts.append(tuple(name for name in earlier if last.get(name, -1) >= k))
        earlier += block.outputs
    return cuts


# --- cuts by structure ---------------------------------------------------------------------------


def structural_starts(
    graph: Graph, work: Sequence[float], first: int = 0, last: int | None = None
) -> dict[int, str]:
    """Start -> name of the blocks that operators `first` to `last` (exclusive) are cut into."""
    last = len(graph.ops) if last is None else last
    target = sum(work[first:last]) / MAX_BLOCKS
    bytes_at = bytes_at_cuts(graph)
    cuts = _narrow_cuts(bytes_at, work, first, last, target)
    starts, fixed = _repeat_starts(graph, work, [first, *cuts, last], bytes_at, target)
    shifted = merge_light(dict.fromkeys(starts, ""), [*work[:last]], fixed)
    return {at: f"block.{k}" for k, at in enumerate(sorted(shifted))}


def _narrow_cuts(
    bytes_at: Sequence[int], work: Sequence[float], first: int, last: int, target: float
) -> list[int]:
    """Narrow cuts: at most `NARROW` times the bytes of the narrowest one within `target` work, on
    one of the two sides, cross; where a wide part meets a narrow one, both keep their cuts."""
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
    before, periods, after = repeat
    starts, fixed_starts = list(periods), set(periods[:1])
    for side in (before, after):
        if len(side) > 1:
            more, fixed = _repeat_starts(graph, work, side, bytes_at, target)
            starts += more
            fixed_starts |= fixed | {more[0]}
    return sorted(starts), fixed_starts


def _equal_work_starts(
    work: Sequence[float], bounds: Sequence[int], bytes_at: Sequence[int], target: float
) -> list[int]:
    """Starts of runs of about `target` work, at the last of the cuts where fewest bytes cross."""
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
    last = {name: i for i, op in enumerate(graph.ops) for name in op.operands}
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


def merge_light(
    starts: Mapping[int, str], work: Sequence[float], fixed: set[int]
) -> dict[int, str]:
    """Start -> name, with runs of no work merged into a neighbour but for those in `fixed`."""
    bounds = [*sorted(starts), len(work)]
    heavy = [a for a, b in itertools.pairwise(bounds) if sum(work[a:b]) or a in fixed]
    first, *later = heavy or bounds[:1]
    return {bounds[0]: starts[first]} | {start: starts[start] for start in later}

"""Cut a graph into blocks: contiguous runs of operators between narrow cuts, repeats found.

Module containers (`layers.0`, `layers.1`, ...) give the boundaries where the model has them; what runs
before the first is the block `embed`, what runs after the last is `head`. A model without containers
is cut where few bytes cross, into runs of about equal work, at the period of its repeats if it has one.
Blocks that are the same program on different parameters get the same `class_id`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Mapping, Sequence

from costmodel.factors import FactorTable
from costmodel.graph import Block, Graph, Op, map_refs

MAX_BLOCKS = 16  # of a model without containers
DOMINANT = 0.5  # a container instance with a larger share of the work is opened


def cut_blocks(graph: Graph, table: FactorTable) -> Graph:
    """The same graph with `blocks` filled in."""
    work = [op_flops(table, op) for op in graph.ops]
    starts = _container_starts(graph, work) or _structural_starts(graph, work)
    return dataclasses.replace(graph, blocks=_make_blocks(graph, starts))


def op_flops(table: FactorTable, op: Op) -> float:
    """Forward FLOPs of an operator at the traced sizes."""
    made = table.ops[op.name]
    return made.flops * math.prod(made.sizes[f] for f in made.flop_factors)


# --- boundaries from module containers -----------------------------------------------------------


def _container_starts(graph: Graph, work: Sequence[float]) -> dict[int, str] | None:
    """Start positions of blocks by `prefix.<int>` modules, with their names; None where there are none."""
    labels = _labels(graph.ops, work)
    total = sum(work) or 1.0
    if sum(w for w, label in zip(work, labels, strict=True) if label) < 0.5 * total:
        return None
    if len(set(labels) - {""}) < 2:
        return None
    starts: dict[int, str] = {}
    current = None
    last = max(i for i, label in enumerate(labels) if label)
    for i, label in enumerate(labels):
        if label and label != current:
            starts[i] = label
            current = label
        elif not label and i > last and current is not None:
            starts[i], current = "head", None
    if 0 not in starts:
        starts[0] = "embed"
    return _merge_light(starts, work)


def _labels(ops: Sequence[Op], work: Sequence[float]) -> list[str]:
    """Per operator its container instance: the outermost one that is not itself most of the model."""
    total = sum(work) or 1.0
    depth = [1] * len(ops)
    while True:
        labels = [_instance(op.module, d) for op, d in zip(ops, depth, strict=True)]
        share: dict[str, float] = {}
        for label, w in zip(labels, work, strict=True):
            share[label] = share.get(label, 0.0) + w / total
        opened = False
        for i, (op, label) in enumerate(zip(ops, labels, strict=True)):
            deeper = _instance(op.module, depth[i] + 1)
            if label and share[label] > DOMINANT and deeper != label:
                depth[i] += 1
                opened = True
        if not opened:
            return labels


def _instance(module: str, depth: int) -> str:
    """`a.b.3.c.1.d` at depth 1 is `a.b.3`, at depth 2 `a.b.3.c.1`; "" outside containers."""
    parts = module.split(".")
    places = [i for i, part in enumerate(parts) if i and part.isdigit()]
    if len(places) < depth:
        return ".".join(parts[: places[-1] + 1]) if places else ""
    return ".".join(parts[: places[depth - 1] + 1])


def _merge_light(starts: Mapping[int, str], work: Sequence[float]) -> dict[int, str]:
    """Runs without a matrix product join the block before them (or after, at the front)."""
    order = sorted(starts)
    merged: dict[int, str] = {}
    carried: int | None = None
    for i, start in enumerate(order):
        stop = order[i + 1] if i + 1 < len(order) else len(work)
        light = sum(work[start:stop]) == 0 and starts[start] not in ("embed", "head")
        if light and merged:
            continue
        if light:
            carried = start
            continue
        merged[start if carried is None else carried] = starts[start]
        carried = None
    return merged


# --- boundaries from the graph alone -------------------------------------------------------------


def _structural_starts(graph: Graph, work: Sequence[float]) -> dict[int, str]:
    """Cuts where the fewest bytes cross, spaced by work; whole periods where the graph repeats."""
    crossing = crossing_bytes(graph)
    narrow = min(crossing[1:], default=0)
    candidates = [i for i in range(1, len(graph.ops)) if crossing[i] <= 4 * narrow] or [0]
    segments = [0, *[i for i in candidates if i]]
    period = _repeat(graph, segments)
    if period:
        starts = period
    else:
        target = sum(work) / MAX_BLOCKS
        starts, filled = [0], 0.0
        bounds = [*segments[1:], len(graph.ops)]
        for start, stop in zip(segments, bounds, strict=True):
            if filled > 0 and filled + sum(work[start:stop]) / 2 > target:
                starts.append(start)
                filled = 0.0
            filled += sum(work[start:stop])
    return _merge_light({start: f"block.{k}" for k, start in enumerate(starts)}, work)


def crossing_bytes(graph: Graph) -> list[int]:
    """Bytes of activations alive between operator i-1 and i, for every i."""
    position = {r: i for i, op in enumerate(graph.ops) for r in op.results}
    last: dict[str, int] = {}
    for i, op in enumerate(graph.ops):
        for name in op.operands:
            last[name] = i
    delta = [0] * (len(graph.ops) + 2)
    for name, made in position.items():
        if last.get(name, made) > made:
            delta[made + 1] += graph.values[name].nbytes
            delta[last[name] + 1] -= graph.values[name].nbytes
    total, crossing = 0, []
    for i in range(len(graph.ops)):
        total += delta[i]
        crossing.append(total)
    return crossing


def _repeat(graph: Graph, segments: Sequence[int]) -> list[int] | None:
    """Start positions of the longest tandem repeat of segments (with what is before and after); None
    where no run of at least three equal periods covers half of the graph."""
    bounds = [*segments, len(graph.ops)]
    hashes = [_shape_hash(graph, graph.ops[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]
    best: tuple[int, int, int, int] | None = None
    for period in range(1, len(hashes) // 3 + 1):
        run = 0
        for i in range(len(hashes) - period):
            run = run + 1 if hashes[i] == hashes[i + period] else 0
            repeats = run // period + 1
            if run and run % period == 0 and repeats >= 3:
                first = i + period - run - period + 1
                covered = bounds[first + repeats * period] - bounds[first]
                if best is None or (covered, -period) > (best[0], -best[1]):
                    best = (covered, period, first, repeats)
    if best is None or best[0] < 0.5 * len(graph.ops):
        return None
    _, period, first, repeats = best
    starts = [bounds[first + k * period] for k in range(repeats)]
    end = bounds[first + repeats * period]
    return sorted({0, *starts, *([end] if end < len(graph.ops) else [])})


def _shape_hash(graph: Graph, ops: Sequence[Op]) -> str:
    text = ";".join(
        f"{op.target}:{[graph.values[r].shape for r in (*op.operands, *op.results)]}" for op in ops
    )
    return hashlib.sha256(text.encode()).hexdigest()


# --- blocks from boundaries ----------------------------------------------------------------------


def _make_blocks(graph: Graph, starts: Mapping[int, str]) -> tuple[Block, ...]:
    order = sorted(starts)
    owner: dict[str, int] = {}
    runs: list[tuple[Op, ...]] = []
    for k, start in enumerate(order):
        stop = order[k + 1] if k + 1 < len(order) else len(graph.ops)
        runs.append(graph.ops[start:stop])
        owner |= {r: k for op in runs[-1] for r in op.results}
    needed: list[dict[str, None]] = [{} for _ in runs]
    for k, run in enumerate(runs):
        for op in run:
            for name in op.operands:
                if owner.get(name, k) != k:
                    needed[k][name] = None
    kept = {graph.loss, *graph.updates.values()}
    blocks: list[Block] = []
    names: dict[str, int] = {}
    for k, run in enumerate(runs):
        used = dict.fromkeys(name for op in run for name in op.operands)
        later = {name for more in needed[k + 1 :] for name in more} | kept
        name = starts[order[k]]
        names[name] = names.get(name, 0) + 1
        block = Block(
            name=name if names[name] == 1 else f"{name}@{names[name]}",
            ops=run,
            inputs=tuple(needed[k]),
            outputs=tuple(r for op in run for r in op.results if r in later),
            derived=tuple(
                n for n in used
                if n not in owner and n not in graph.parameters and n not in graph.buffers
            ),
            parameters=tuple(n for n in used if n in graph.parameters),
            buffers=tuple(n for n in used if n in graph.buffers),
            class_id="",
        )  # fmt: skip
        blocks.append(dataclasses.replace(block, class_id=class_hash(graph, block)))
    return tuple(blocks)


def class_hash(graph: Graph, block: Block, *, exact: bool = False) -> str:
    """Hash of a block's program with local names; float scalars are masked unless `exact`."""
    local: dict[str, int] = {}

    def number(name: str) -> str:
        meta = graph.values[name]
        kind = "p" if name in graph.parameters else "b" if name in graph.buffers else "v"
        return f"{kind}{local.setdefault(name, len(local))}{meta.shape}{meta.dtype}{meta.requires_grad}"

    lines = [str([number(n) for n in block.inputs])]
    for op in block.ops:
        call = map_refs((op.args, op.kwargs), number)
        text = f"{op.target}{call}{[number(r) for r in op.results]}"
        lines.append(text if exact else re.sub(r"(?<![\w.])-?\d+\.\d+(e-?\d+)?", "#", text))
    lines.append(str([number(n) for n in block.outputs]))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def crossing(graph: Graph) -> list[tuple[str, ...]]:
    """Per cut k (before block k), the activations made before it and read at or after it."""
    made: list[str] = []
    cuts: list[tuple[str, ...]] = []
    last = {name: k for k, block in enumerate(graph.blocks) for name in block.inputs}
    for k, block in enumerate(graph.blocks):
        cuts.append(tuple(name for name in made if last.get(name, -1) >= k))
        made += block.outputs
    return cuts

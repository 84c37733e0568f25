"""What the ranks' plans for a checkpoint prove: every tensor is written, and every part of it once.

Ranks that hold a tensor must agree on its shape and on who writes it; somebody must; the writers'
layout must make up the whole; and what rehearsed ranks write must not overlap, nor leave out
anything where all of the writers were rehearsed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations

from meshwright.executor.checkpoint import SavedTensor
from meshwright.executor.rehearsal.events import RankLog
from meshwright.executor.rehearsal.proof import SHOWN, Mismatch

Views = Mapping[int, SavedTensor]  # of one tensor, by rank that holds it
Box = tuple[tuple[int, ...], tuple[int, ...]]
SEVERAL = 64  # boxes that are compared with each other; of more their volume is


def unlike_saves(logs: Mapping[int, RankLog], kind_of: Mapping[int, int]) -> list[Mismatch]:
    """Tensors of a checkpoint that are not written, or more than once; one mismatch for each."""
    views: dict[str, dict[int, SavedTensor]] = defaultdict(dict)
    for rank in sorted(logs):
        for saved in logs[rank].saved:
            views[saved.name][rank] = saved
    found = []
    for name, of_ranks in sorted(views.items()):
        ranks, text = _judged(of_ranks, kind_of)
        if text:
            text = f"{name!r} of a checkpoint: {text}"
            found.append(Mismatch(proof="checkpoint", ranks=ranks, text=text))
    return found


def _judged(views: Views, kind_of: Mapping[int, int]) -> tuple[tuple[int, ...], str]:
    """What is wrong with a tensor, of which ranks; an empty text where nothing is."""
    first, own = next(iter(views.items()))
    for rank, saved in views.items():
        if (saved.shape, saved.dtype) != (own.shape, own.dtype):
            text = f"{list(own.shape)} {own.dtype}, and {list(saved.shape)} {saved.dtype}"
            return (first, rank), text
        if saved.fault:
            return (rank,), saved.fault
    groups = {saved.group: rank for rank, saved in views.items()}
    if len(groups) > 1 and not own.merged:
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
    """What is wrong with what the ranks of one group write."""
    first, own = next(iter(views.items()))
    for rank, saved in views.items():
        if saved.writers != own.writers:
            text = f"to be written by {_several(own.writers)}, and by {_several(saved.writers)}"
            return (first, rank), text
        if saved.boxes and rank not in saved.writers:
            return (rank,), f"written twice: also by rank {rank}, beside {_several(own.writers)}"
    boxes = [(rank, box) for rank, saved in views.items() for box in saved.boxes]
    for (rank, a), (other, b) in combinations(boxes, 2) if len(boxes) <= SEVERAL else ():
        if _overlap(a, b):
            return (rank, other), f"written twice: {_said(a)}, and {_said(b)}"
    if set(own.writers) <= set(views):
        written = sum(math.prod(sizes) for _, (_, sizes) in boxes)
        if written != math.prod(own.shape):
            text = f"of {math.prod(own.shape)} elements {written} are written"
            return tuple(own.writers), text
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

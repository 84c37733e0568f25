"""An allocator over the tensors of recomputed blocks: what it takes from the device beyond them.

By the rules of torch's caching allocator for requests from 1 MiB on (`c10/core/AllocatorConfig.h`,
`CUDACachingAllocator`): the smallest free block that is large enough, of which the rest is split
off; free neighbours of a segment are one block. Where none is, a segment is taken from the device:
20 MiB, or from 10 MiB on the request rounded up to 2 MiB. An expandable segment grows by pages of
20 MiB at its end instead. Segments without a tensor go back to the device when it is full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from meshwright.costmodel.blocks.block_memory import block_memory
from meshwright.planner.overrides import Overrides
from meshwright.planner.search import Search
from scripts.drawing.searches import ROWS, problem
from scripts.drawing.svg import COLOURS, Axis, Picture, frame, legend

MIB = 2**20
PAGE, LARGE, ROUND, LEAST = 20 * MIB, 10 * MIB, 2 * MIB, 512  # torch's
BLOCKS = 32
EQUAL = (1.0,) * 12  # tokens of a step in parts of those that were traced
UNEQUAL = (0.62, 0.71, 0.55, 0.83, 0.67, 0.9, 0.58, 0.95, 0.78, 1.0, 0.73, 0.87)
GIB = 2**30


@dataclass(slots=True, eq=False)
class _Piece:
    """A block of a segment: its start, its bytes, whether a tensor lies in it."""

    start: int
    size: int
    taken: bool = False


@dataclass(slots=True)
class Allocator:
    """Segments as lists of blocks in the order of their addresses; `expandable`: one that grows;
    `full`: on a device that has no room beyond. `most` are the bytes of tensors at their peak,
    `peak` those taken from the device."""

    expandable: bool = False
    full: bool = False
    segments: list[list[_Piece]] = field(default_factory=list)
    held: int = 0
    most: int = 0
    peak: int = 0

    @property
    def reserved(self) -> int:
        """Bytes taken from the device."""
        return sum(piece.size for segment in self.segments for piece in segment)

    def take(self, nbytes: float) -> _Piece:
        """The block of a new tensor."""
        size = -int(-nbytes // LEAST) * LEAST
        room = self._room(size) or self._more(size)
        segment, at = room
        piece = segment[at]
        if piece.size > size:
            segment.insert(at + 1, _Piece(piece.start + size, piece.size - size))
            piece.size = size
        piece.taken = True
        self.held += size
        self.most = max(self.most, self.held)
        self.peak = max(self.peak, self.reserved)
        return piece

    def free(self, piece: _Piece) -> None:
        """Let a tensor go."""
        piece.taken = False
        self.held -= piece.size
        segment = next(s for s in self.segments if any(p is piece for p in s))
        joined: list[_Piece] = []
        for each in segment:
            if joined and not joined[-1].taken and not each.taken:
                joined[-1].size += each.size
            else:
                joined.append(each)
        segment[:] = joined

    def _room(self, size: int) -> tuple[list[_Piece], int] | None:
        fits = [
            (piece.size, k, at)
            for k, segment in enumerate(self.segments)
            for at, piece in enumerate(segment)
            if not piece.taken and piece.size >= size
        ]
        if not fits:
            return None
        _, k, at = min(fits)
        return self.segments[k], at

    def _more(self, size: int) -> tuple[list[_Piece], int]:
        if not self.expandable:
            if self.full:
                self.segments[:] = [s for s in self.segments if any(p.taken for p in s)]
            nbytes = PAGE if size < LARGE else -(-size // ROUND) * ROUND
            self.segments.append([_Piece(0, nbytes)])
            return self.segments[-1], 0
        if not self.segments:
            self.segments.append([])
        (segment,) = self.segments
        if not segment or segment[-1].taken:
            segment.append(_Piece(sum(p.size for p in segment), 0))
        segment[-1].size += -(-(size - segment[-1].size) // PAGE) * PAGE
        return segment, len(segment) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """Tensors of a block in the order in which its operators make them: bytes, the operator after
    which each is read no more in a forward, whether its backward needs it; bytes of the result."""

    made: Sequence[tuple[float, int, bool]]
    leaving: float


@cache
def tensors() -> Tensors:
    """Those of a layer of a GPT, as the price knows them."""
    overrides = Overrides(pp=1, dp=8, tp=1, recompute="full", forbid=("offload",))
    (stage,) = Search(problem(), ROWS, overrides).run().best.evaluation.priced
    entered = stage.blocks[len(stage.blocks) // 2]
    of, names = block_memory(stage.pricer, entered.steps), [op.name for op in entered.block.ops]
    last = {storage: k for k, name in enumerate(names) for storage in of.reads[name]}
    made = [
        (of.nbytes(storage), max(last.get(storage, 0), names.index(maker)), storage in of.kept)
        for storage, maker in sorted(of.makers.items(), key=lambda pair: names.index(pair[1]))
        if storage not in of.outside and of.nbytes(storage) >= MIB
    ]
    return Tensors(made=made, leaving=sum(value.nbytes for value in of.leaving.values()))


def step(of: Allocator, part: float, buffer: Allocator | None) -> None:
    """Forwards of all blocks, of which their results stay, in the `buffer` if there is one; then
    backwards, each of which makes its block's tensors again."""
    layer, checkpoints = tensors(), buffer or of
    results = list[_Piece]()
    for _ in range(BLOCKS):
        _forward(of, layer, part, keeping=False)
        results.append(checkpoints.take(layer.leaving * part))
    for result in reversed(results):
        kept = _forward(of, layer, part, keeping=True)
        for piece in reversed(kept):
            of.free(piece)
        checkpoints.free(result)


def _forward(of: Allocator, layer: Tensors, part: float, *, keeping: bool) -> list[_Piece]:
    """A forward; what its backward needs, where it is kept."""
    waiting, kept = list[tuple[int, _Piece]](), list[_Piece]()
    for k, (nbytes, last, needed) in enumerate(layer.made):
        for until, piece in [pair for pair in waiting if pair[0] < k]:
            of.free(piece)
            waiting.remove((until, piece))
        piece = of.take(nbytes * part)
        if keeping and needed:
            kept.append(piece)
        else:
            waiting.append((last, piece))
    for _, piece in waiting:
        of.free(piece)
    return kept


def peak_bytes(
    parts: Sequence[float], *, expandable: bool = False, full: bool = False, buffered: bool = False
) -> tuple[float, float]:
    """Bytes of tensors at their peak over the steps, and those taken from the device. A buffer of
    checkpoints is as large as the longest step's from the start."""
    of = Allocator(expandable=expandable, full=full)
    for part in parts:
        step(of, part, Allocator(expandable=True) if buffered else None)
    buffer = BLOCKS * tensors().leaving * max(parts) if buffered else 0.0
    return of.most + buffer, of.peak + buffer


WAYS = {
    "cached segments, nothing given back": {},
    "cached segments, given back when full": {"full": True},
    "the same, checkpoints in a buffer": {"full": True, "buffered": True},
    "expandable segments": {"expandable": True},
}


def fragments() -> str:
    """Bytes taken from the device by each way, beside those of the tensors."""
    title = f"Activations of {BLOCKS} recomputed blocks and what an allocator takes for them"
    picture = Picture(760, 290, title)
    picture.text(12, 20, title)
    ticks = [(gib * GIB, f"{gib} GiB") for gib in (0, 10, 20, 30)]
    x = Axis(low=0, high=40 * GIB, start=268, end=650, ticks=ticks)
    frame(picture, x, Axis(low=0, high=1, start=248, end=36, ticks=()), ("", ""))
    orders = {"12 equal steps": EQUAL, "12 steps of unequal rows": UNEQUAL}
    for k, (words, ways) in enumerate(WAYS.items()):
        picture.text(12, 60 + 52 * k, words)
        for j, parts in enumerate(orders.values()):
            held, taken = peak_bytes(parts, **ways)
            y = 42 + 52 * k + 20 * j
            picture.box(x(0), y, x(held) - x(0), 16, fill=COLOURS[j])
            picture.box(x(held), y, x(taken) - x(held), 16, fill=COLOURS[3])
            picture.text(x(taken) + 6, y + 12, f"{taken / GIB:.2f} GiB", font_size=10)
    colours = dict(zip(orders, COLOURS, strict=False))
    legend(picture, 560, 196, {**colours, "beyond the tensors": COLOURS[3]})
    return picture.svg()

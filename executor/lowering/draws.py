"""Random numbers by counter: every element's draw is a function of (seed, operator, its global
number), so that every plan, and one device, draws the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from meshwright.costmodel.graph import Graph, Op, Ref, argument
from meshwright.costmodel.rules import Draw, traits_of
from meshwright.costmodel.sharding import Placement
from meshwright.executor.resharding import Axis, into_zigzag, local_part
from meshwright.planner.plan import PlanError

_LOW = 0xFFFFFFFF
LEAST_PART, PARTS = 2**20, 32  # elements of a mask that are drawn at once, parts of a large one
_SECOND = 0x5851F42D  # tells the second stream of a pair from the first


@dataclass(frozen=True, slots=True)
class Cut:
    """An axis that splits a tensor, which the axes before it have split."""

    placement: Placement
    axis: Axis
    zigzag: bool = False

    def part(self, index: torch.Tensor) -> torch.Tensor:
        """This rank's part of a vector along the dim that is split."""
        along = Placement("S", 0, self.placement.split)
        if self.zigzag:
            index = into_zigzag(index, along, self.axis.size)
        return local_part(index, along, self.axis.size, self.axis.rank)


class IndexGrid(nn.Module):
    """Global element numbers of a local tensor: every plan sees the same number for the same
    element.

    `shape` is the global shape of one micro-batch; `cuts` what made it local, in order; `per_row`
    the elements of one batch row, by which the micro-batch's first row shifts the numbers. With the
    batch outermost, as in batch-first tensors, the numbers do not depend on how the batch is cut
    into micro-batches either.
    """

    def __init__(self, shape: tuple[int, ...], cuts: Sequence[Cut], per_row: int) -> None:
        super().__init__()
        self.shape, self.cuts, self.per_row = shape, cuts, per_row

    def forward(self, first_row: torch.Tensor) -> torch.Tensor:
        """The numbers."""
        total, stride = first_row * self.per_row, 1
        for d in reversed(range(len(self.shape))):
            index = self.along(d, first_row.device)
            total = total + (index * stride).view([-1] + [1] * (len(self.shape) - 1 - d))
            stride *= self.shape[d]
        return total

    def kept(
        self, rng: torch.Tensor, salt: int, p: float, dtype: torch.dtype, dims: int | None = None
    ) -> torch.Tensor:
        """1 with probability 1-p, else 0; with `dims` the same for all elements along later ones.
        In parts, since an element takes its number and what is mixed of it: 40 bytes."""
        shape, stride = self.shape[:dims], math.prod(self.shape[dims or len(self.shape) :])
        vectors = []
        for d in reversed(range(len(shape))):
            vectors.append(self.along(d, rng.device) * stride)
            stride *= shape[d]
        last = vectors[0] if vectors else rng.new_zeros(1)
        rows = rng[1:] * self.per_row
        for vector in reversed(vectors[1:]):
            rows = (rows.unsqueeze(-1) + vector).flatten()
        total = rows.numel() * last.numel()
        part = total if torch.compiler.is_compiling() else max(LEAST_PART, -(-total // PARTS))
        count = max(1, part // last.numel())
        mask = torch.empty(rows.numel(), last.numel(), dtype=dtype, device=rng.device)
        for k in range(0, rows.numel(), count):
            numbers = rows[k : k + count].unsqueeze(-1) + last
            mask[k : k + count] = keep_mask(numbers, rng[0], salt, p)
        sizes = [vector.numel() for vector in reversed(vectors)]
        return mask.view(sizes + [1] * (len(self.shape) - len(shape)))

    def along(self, d: int, device: torch.device) -> torch.Tensor:
        """The global numbers of this rank's elements along a dim."""
        index = torch.arange(self.shape[d], dtype=torch.int64, device=device)
        for cut in self.cuts:
            if cut.placement.sharded and cut.placement.dim == d:
                index = cut.part(index)
        return index


def random_bits(index: torch.Tensor, seed: torch.Tensor, salt: int) -> torch.Tensor:
    """32 random bits, a pure function of (seed, salt, index): 32-bit integer mixes, of the stream's
    number first, so that no stream is another one shifted, and of the index's high part, so that
    none repeats after 2^32 elements.

    Source of the mixer: the "lowbias32" constants of C. Wellons' hash prospector.
    """
    stream = _mixed(_mixed(seed & _LOW) ^ (salt * 0x9E3779B1 & _LOW))
    return _mixed((index & _LOW) ^ _mixed((index >> 32) + stream & _LOW))


def keep_mask(index: torch.Tensor, seed: torch.Tensor, salt: int, p: float) -> torch.Tensor:
    """True with probability 1-p."""
    return random_bits(index, seed, salt) >= int(p * 2**32)


def uniform(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In [0, 1): as many of the bits as `dtype` tells apart, so that none rounds up to 1."""
    digits = min(32, 1 - round(math.log2(torch.finfo(dtype).eps)))
    return (bits >> (32 - digits)).to(dtype) * 2.0**-digits


def _mixed(h: torch.Tensor) -> torch.Tensor:
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & _LOW
    h = ((h ^ (h >> 15)) * 0x846CA68B) & _LOW
    return h ^ (h >> 16)


class CounterDropout(nn.Module):
    """Dropout whose mask is the same under every plan: of elements, or of whole channels
    (`features`). `rng` is the pair (step seed, first row)."""

    def __init__(self, grid: IndexGrid, salt: int, p: float, *, features: bool = False) -> None:
        super().__init__()
        self.grid, self.salt, self.p, self.features = grid, salt, p, features

    def forward(self, rng: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        return _dropped(x, self.grid, rng, self.salt, self.p, 2 if self.features else None)


def _dropped(
    x: torch.Tensor,
    grid: IndexGrid,
    rng: torch.Tensor,
    salt: int,
    p: float,
    dims: int | None = None,
) -> torch.Tensor:
    if p == 1.0:
        return x * 0
    return x * grid.kept(rng, salt, p, x.dtype, dims) * (1.0 / (1.0 - p))


class CounterDraw(nn.Module):
    """The draws of one operator: uniform in [low, high), normal (mean `low`, deviation `high`),
    exponential of the rate `high` (and positive, as torch's are), integers from `low` below `high`,
    or flags that are up with a probability (a number or a tensor)."""

    def __init__(self, op: Op, dtype: torch.dtype, grid: IndexGrid, salt: int) -> None:
        super().__init__()
        draw = traits_of(op).draw
        assert draw is not None
        self.kind, self.dtype, self.grid, self.salt = draw.kind, dtype, grid, salt
        self.low, self.high = _bounds(op, draw)

    def forward(self, rng: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:
        index = self.grid(rng[1])
        bits = random_bits(index, rng[0], self.salt)
        if self.kind == "integers":
            return self._integers(index, bits, rng[0]).to(self.dtype)
        if self.kind == "flags":
            chance = operands[-1] if math.isnan(self.high) else self.high
            return (bits < torch.as_tensor(chance, dtype=torch.float64) * 2.0**32).to(self.dtype)
        if self.kind == "uniform":
            drawn = uniform(bits, self.dtype) * (self.high - self.low) + self.low
            return drawn
        wide = torch.promote_types(self.dtype, torch.float32)
        if self.kind == "exponential":
            drawn = -(1.0 - uniform(bits, wide)).log().clamp(max=-torch.finfo(wide).eps / 2)
            return (drawn / self.high).to(self.dtype)
        angle = uniform(random_bits(index, rng[0], self.salt ^ _SECOND), wide)
        radius = (-2.0 * (1.0 - uniform(bits, wide)).log()).sqrt()  # Box and Muller, 1958
        return (radius * (2 * math.pi * angle).cos() * self.high + self.low).to(self.dtype)

    def _integers(
        self, index: torch.Tensor, bits: torch.Tensor, seed: torch.Tensor
    ) -> torch.Tensor:
        low, span = int(self.low), int(self.high) - int(self.low)
        if span <= 2**31:
            return low + (bits * span >> 32)
        more = random_bits(index, seed, self.salt ^ _SECOND)  # 63 bits: the product has no room
        return low + (bits << 31 | more >> 1) % span


def _bounds(op: Op, draw: Draw) -> tuple[float, float]:
    """The numbers a call draws between; for flags 0 and their chance, NaN where a tensor holds
    it."""
    if draw.kind == "integers":
        numbers = [a for a in op.args if isinstance(a, int)]
        low, high = (0, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])
        if high - low >= 2**63:
            raise PlanError(
                f"{op.key} ({op.target}) draws integers from {low} below {high}",
                place="plan",
                legal="ranges of less than 2**63",
                way_out="draw from a smaller one",
            )
        return low, high
    if draw.kind == "flags":
        chance = argument(op, 1, "p", None)
        return 0.0, math.nan if chance is None or isinstance(chance, Ref) else chance
    if draw.kind == "exponential":
        return 0.0, argument(op, 1, "lambd", 1.0)
    names = ("mean", "std") if draw.kind == "normal" else ("from", "to")
    at = len(op.args) if draw.bounds is None else draw.bounds
    return argument(op, at, names[0], 0.0), argument(op, at + 1, names[1], 1.0)


def single_rows(graph: Graph) -> frozenset[str]:
    """Values that carry the batch of a micro-batch of one row, which no dim tells: they come of a
    batched input, or of none at all with a first dim of one."""
    if graph.batch_size != 1:
        return frozenset()
    values = set(graph.batched)
    for op in (*graph.derived, *graph.ops):
        if not op.operands:
            values |= {v for v in op.results if graph.values[v].shape[:1] == (1,)}
        elif not values.isdisjoint(op.operands):
            values |= set(op.results)
    return frozenset(values)


def drawn(op: Op, dtype: torch.dtype, grid: IndexGrid, salt: int) -> nn.Module:
    """The module that draws by counter in the place of an operator."""
    draw = traits_of(op).draw
    if draw is not None and draw.kind in ("dropout", "channel dropout"):
        p = float(argument(op, 1, "p", 0.0))
        return CounterDropout(grid, salt, p, features=draw.kind == "channel dropout")
    return CounterDraw(op, dtype, grid, salt)


class DropoutAttention(nn.Module):
    """Scaled dot-product attention with counter dropout on its probabilities, written out."""

    def __init__(self, grid: IndexGrid, salt: int) -> None:
        super().__init__()
        self.grid, self.salt = grid, salt

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        p: float,
        causal: bool,
        scale: float | None,
        rng: torch.Tensor,
    ) -> torch.Tensor:
        if q.shape[-3] != k.shape[-3]:  # groups of queries share keys and values
            k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
            v = v.repeat_interleave(q.shape[-3] // v.shape[-3], -3)
        scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
        if causal:
            rows = self.grid.along(len(self.grid.shape) - 2, q.device)
            future = rows.unsqueeze(-1) < torch.arange(scores.shape[-1], device=q.device)
            scores = scores.masked_fill(future, float("-inf"))
        if mask is not None:
            scores = (
                scores.masked_fill(~mask, float("-inf"))
                if mask.dtype == torch.bool
                else scores + mask
            )
        weights = scores.softmax(-1)
        if self.training:
            weights = _dropped(weights, self.grid, rng, self.salt, p)
        return weights @ v

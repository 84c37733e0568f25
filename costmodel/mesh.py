"""Mesh, rows and host memory of a stage: the values that plans and prices share."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, fields, replace
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

from meshwright.costmodel.sharing import Sharing

ContextKind = Literal["all_gather", "ring", "ulysses"]
CONTEXT_KINDS: tuple[ContextKind, ...] = ("all_gather", "ring", "ulysses")
ALL_GATHER, RING, ULYSSES = CONTEXT_KINDS


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Mesh:
    """Devices of one stage: (dp, cp, tp) with tp innermost. cp splits the sequence of every
    activation, with attention of the kind `cp_kind`; None where that is open (the cheapest one), or
    cp is 1. `ep` neighbours of that mesh share out the experts, which are whole or replicated on
    the other axes. Neighbours on the data axis are tp·`spread` ranks apart: 1 where the mesh is
    contiguous, more where so many stages lie between them."""

    dp: int
    tp: int
    cp: int = 1
    ep: int = 1
    spread: int = 1
    cp_kind: ContextKind | None = None

    @property
    def kind(self) -> ContextKind:
        """Kind of attention; all ranks gather its keys and values where nothing is said."""
        return self.cp_kind or ALL_GATHER

    @property
    def is_open(self) -> bool:
        """Whether it splits tokens, and leaves the kind of attention open."""
        return self.cp > 1 and self.cp_kind is None

    def of_kind(self, kind: ContextKind | None) -> Mesh:
        """The mesh with this kind of attention, or an open one, where it splits tokens."""
        return replace(self, cp_kind=kind) if self.cp > 1 else self

    @property
    def devices(self) -> int:
        return self.dp * self.cp * self.tp

    def ranks_of(self, group: int) -> tuple[int, ...]:
        """Ranks of a device group among others of this mesh, of which `spread` lie between each
        other's data ranks."""
        return _ranks_of(self.dp, self.tp * self.cp, self.spread, group)

    @property
    def alone(self) -> Mesh:
        """The mesh with the smallest data axis over which the experts can be shared out."""
        spread = self.spread if self.cp * self.ep > 1 else 1
        return replace(self, dp=self.ep // math.gcd(self.ep, self.cp), spread=spread)

    @property
    def holders(self) -> int:
        """Ranks that hold the same parts of weights: those of the data and the context axis."""
        return self.dp * self.cp


@lru_cache(maxsize=4096)
def _ranks_of(data: int, inner: int, spread: int, group: int) -> tuple[int, ...]:
    region, offset = divmod(group, spread)
    first = region * spread * data * inner + offset * inner
    return tuple(first + k * spread * inner + j for k in range(data) for j in range(inner))


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """`rows` of the batch on a device in each of so many `microbatches`; or in each of so many
    parts of them, where `slices` by tokens are one: the work of a slice is on average that of as
    many tokens in rows of their own."""

    rows: float
    microbatches: int = 1
    slices: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class HostParts:
    """Parts in host memory: of the optimizer `states`; of the `weights`, but while their block runs
    (0 with ZeRO-3); of the blocks those that send their saved `activations` there; and of the
    states those in `files` on the node's flash, no more than `states`."""

    states: float = 0.0
    weights: float = 0.0
    activations: float = 0.0
    files: float = 0.0

    def __bool__(self) -> bool:
        return self != NOT_AWAY

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of parts that lie there."""
        return frozenset(f.name for f in fields(self) if getattr(self, f.name))

    def exceeds(self, other: HostParts) -> bool:
        """Whether no less of anything is away than of another."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return all(part >= least for part, least in pairs)


NOT_AWAY = HostParts()


# how an optimizer steps: when all gradients are there; by stages that don't wait for each other,
# and may undo it; each parameter within the backward, as its gradient is whole; or with gradients
# of an earlier step, whose backwards the pipeline left to this one
Stepping: TypeAlias = Literal["at_end", "validated", "in_backward", "stale"]


class Parts(NamedTuple):
    """A `Setting` without its problem."""

    mesh: Mesh
    batch: Batch
    sharing: Sharing
    host: HostParts
    stepping: Stepping

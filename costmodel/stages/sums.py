"""Sums over runs of blocks: the columns that `stage.py` makes the costs of a stage of."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.blocks.policies import RECOMPUTE, segment_policy
from meshwright.costmodel.blocks.price import BlockPrice
from meshwright.costmodel.operators import Cost, Pricer
from meshwright.costmodel.sharding import Placement

Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Operators that blocks run again in their backward; arrays of one shape, 0-d of one run.

    Seconds per micro-batch (`seconds`, of which communication `comm_s`; the host's `host_s`), bytes
    per micro-batch that are no longer kept (`freed_bytes`), and the most that a block holds once
    all of it was run again (`largest_bytes`); `gather_s` of ZeRO-3's gathers for a forward more.
    """

    seconds: Floats
    comm_s: Floats
    host_s: Floats
    freed_bytes: Floats
    largest_bytes: Floats
    gather_s: Floats = field(default_factory=lambda: np.zeros(()))

    def __add__(self, other: Recompute) -> Recompute:
        return Recompute(
            seconds=self.seconds + other.seconds,
            comm_s=self.comm_s + other.comm_s,
            host_s=self.host_s + other.host_s,
            freed_bytes=self.freed_bytes + other.freed_bytes,
            largest_bytes=np.maximum(self.largest_bytes, other.largest_bytes),
            gather_s=self.gather_s + other.gather_s,
        )


_ZERO: Floats = np.zeros(())
NO_RECOMPUTE = Recompute(
    seconds=_ZERO, comm_s=_ZERO, host_s=_ZERO, freed_bytes=_ZERO, largest_bytes=_ZERO
)

# the first columns of Sums: of each policy seconds, comm_s, host_s and freed_bytes; the last ones:
# of each policy the most that it frees of one block
_POLICIES = RECOMPUTE[1:]
_RECOMPUTE = {policy: slice(4 * k, 4 * k + 4) for k, policy in enumerate(_POLICIES)}
_LARGEST = {policy: k - len(_POLICIES) for k, policy in enumerate(_POLICIES)}


class _Column:
    """A named column of `Sums`, numbered in the order of the class body."""

    numbers = itertools.count(4 * len(_RECOMPUTE))

    def __init__(self) -> None:
        self.at = next(self.numbers)

    def __get__(self, sums: Sums, owner: type[Sums]) -> Floats:
        column: Floats = sums.array[..., self.at]
        return column

    def __set__(self, sums: Sums, value: Floats | float) -> None:
        sums.array[..., self.at] = value


class Sums:
    """Sums over runs of blocks: `array` (..., COLUMNS), float64, with a run for every index of the
    leading axes; each named column has their shape.

    First what each recompute policy would run again, then seconds as in `Cost`, parameters and
    bytes as in `BlockPrice`. The last columns (`MAXIMA`) are no sums but the most of any block:
    the parameters that ZeRO moves at once, the gradients of one of its operators
    (`transient_bytes`), what is made again of it where its policy is no longer open
    (`decided_bytes`), and what each policy would.
    """

    __slots__ = ("array",)

    # --- in the order of Cost ---
    forward_s = _Column()
    backward_s = _Column()
    forward_comm_s = _Column()
    backward_comm_s = _Column()
    forward_exchange_s = _Column()
    backward_exchange_s = _Column()
    weight_s = _Column()
    forward_host_s = _Column()
    backward_host_s = _Column()
    measured_s = _Column()
    interpolated_s = _Column()
    reduce_s = _Column()
    scatter_s = _Column()
    gather_s = _Column()
    replicate_s = _Column()
    zero3_scatter_s = _Column()
    zero3_gather_s = _Column()
    zero3_secondary_s = _Column()
    zero3_replicate_s = _Column()
    optimizer_s = _Column()
    shard_s = _Column()

    parameters = _Column()
    shard_parameters = _Column()
    frozen_bytes = _Column()
    saved_bytes = _Column()
    input_bytes = _Column()
    blocks = _Column()

    # --- maxima ---
    largest_parameters = _Column()
    transient_bytes = _Column()
    decided_bytes = _Column()

    def __init__(self, array: Floats) -> None:
        self.array = array

    @staticmethod
    def zeros(*shape: int) -> Sums:
        return Sums(np.zeros((*shape, COLUMNS)))

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: Any) -> Sums:
        """Sums of the runs at `index` of the leading axes."""
        return Sums(self.array[index])

    def __sub__(self, shared: Sums) -> Sums:
        """Sums without what several blocks of a run share, counted too often; maxima stay."""
        less = self.array.copy()
        less[..., :-MAXIMA] -= shared.array[..., :-MAXIMA]
        return Sums(less)

    def then(self, following: Sums) -> Sums:
        """Sums of runs that are each followed by another."""
        together = self.array + following.array
        together[..., -MAXIMA:] = np.maximum(
            self.array[..., -MAXIMA:], following.array[..., -MAXIMA:]
        )
        return Sums(together)

    def times(self, factor: float) -> Sums:
        """Sums of so many equal runs one after the other, or of a fraction of one; maxima stay."""
        scaled = self.array.copy()
        scaled[..., :-MAXIMA] *= factor
        return Sums(scaled)

    def without_maxima(self) -> Sums:
        """The sums alone, maxima 0."""
        sums = self.array.copy()
        sums[..., -MAXIMA:] = 0.0
        return Sums(sums)

    def spans(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> Sums:
        """Sums of the runs start..stop-1, (N,), of these blocks one after the other, (K,)."""
        added = np.concatenate([self.array[:1] * 0.0, self.array.cumsum(axis=0)])
        sums = added[stops] - added[starts]
        ends = np.column_stack([starts, stops]).ravel()  # of every other span the maximum is asked
        padded = np.concatenate([self.array[:, -MAXIMA:], np.zeros((1, MAXIMA))])
        sums[:, -MAXIMA:] = np.maximum.reduceat(padded, ends)[::2]
        return Sums(sums)

    def shared_out(self, numbers: NDArray[np.int64]) -> Sums:
        """Sums of an equal part of one run, for each number of parts: (N,); maxima stay."""
        return Sums(np.stack([self.times(1 / number).array for number in numbers]))

    def scaled(self, *, compute: float, communication: float, data_axis: float) -> Sums:
        """Sums with all seconds of computing, of communication within a pass, and of the data
        axis' collectives multiplied."""
        scaled = Sums(self.array.copy())
        for whole, part in (("forward_s", "forward_comm_s"), ("backward_s", "backward_comm_s")):
            comm = getattr(self, part)
            setattr(scaled, whole, compute * (getattr(self, whole) - comm) + communication * comm)
        factors = dict.fromkeys(_COMPUTE, compute) | dict.fromkeys(_COMMUNICATION, communication)
        for name, factor in (factors | dict.fromkeys(_DATA_AXIS, data_axis)).items():
            setattr(scaled, name, factor * getattr(self, name))
        for columns in _RECOMPUTE.values():
            own = self.array[..., columns]
            computed = compute * (own[..., 0] - own[..., 1]) + communication * own[..., 1]
            parts = computed, communication * own[..., 1], compute * own[..., 2], own[..., 3]
            scaled.array[..., columns] = np.stack(parts, axis=-1)
        return scaled

    def recompute(self, policy: str) -> Recompute:
        """What the blocks run again where all of them follow one policy, or `in_segments`."""
        if "/" in policy:
            return self._in_segments(policy)
        if policy == "none":
            return NO_RECOMPUTE
        columns = self.array[..., _RECOMPUTE[policy]]
        return Recompute(
            seconds=columns[..., 0],
            comm_s=columns[..., 1],
            host_s=columns[..., 2],
            freed_bytes=columns[..., 3],
            largest_bytes=self.array[..., _LARGEST[policy]],
        )

    def _in_segments(self, policy: str) -> Recompute:
        """The same in segments, as if all blocks were alike (`planner/pricing/segments.py`)."""
        base, size = segment_policy(policy)
        own, blocks = self.recompute(base), np.maximum(self.blocks, 1.0)
        size_of = np.minimum(size, blocks)
        held = (self.saved_bytes - own.freed_bytes + self.input_bytes) * size_of / blocks
        return Recompute(
            seconds=self.forward_s + own.seconds,
            comm_s=self.forward_comm_s + own.comm_s,
            host_s=self.forward_host_s + own.host_s,
            freed_bytes=self.saved_bytes + self.input_bytes * (1 - 1 / size_of),
            largest_bytes=held + own.largest_bytes,
            gather_s=self.zero3_gather_s * (1 - 1 / size_of),
        )

    def recompute_by(self, policies: Sequence[str]) -> Recompute:
        """What the blocks run again under each of several policies: arrays (P, ...)."""
        shape, names = self.array.shape[:-1], [each.name for each in fields(Recompute)]
        if any("/" in policy for policy in policies):
            found = [self.recompute(policy) for policy in policies]
            values = {n: [np.broadcast_to(getattr(r, n), shape) for r in found] for n in names}
            return Recompute(**{name: np.stack(own) for name, own in values.items()})
        columns = np.zeros((len(RECOMPUTE), 6, *shape))  # nothing under the first, "none"
        own = self.array[..., : _COST.start].reshape(*shape, len(_POLICIES), 4)
        columns[1:, :4] = np.moveaxis(own, (-2, -1), (0, 1))
        columns[1:, 4] = np.moveaxis(self.array[..., -len(_POLICIES) :], -1, 0)
        chosen = columns[[RECOMPUTE.index(policy) for policy in policies]]
        return Recompute(**{name: chosen[:, k] for k, name in enumerate(names)})

    def with_policy(self, policy: str) -> Sums:
        """The sums of one block with its recompute policy decided: no policy changes them."""
        decided = Sums(self.array.copy())
        repeated = self.recompute(policy)
        decided.backward_s = self.backward_s + repeated.seconds
        decided.backward_comm_s = self.backward_comm_s + repeated.comm_s
        decided.backward_host_s = self.backward_host_s + repeated.host_s
        decided.saved_bytes = self.saved_bytes - repeated.freed_bytes
        decided.decided_bytes = repeated.largest_bytes
        decided.array[..., : _COST.start] = 0.0
        decided.array[..., -len(_POLICIES) :] = 0.0
        return decided

    def set_recompute(
        self, policy: str, seconds: float, comm_s: float, host_s: float, freed_bytes: float
    ) -> None:
        """What one block runs again under a policy: it holds what it frees while its backward
        lasts."""
        self.array[..., _RECOMPUTE[policy]] = seconds, comm_s, host_s, freed_bytes
        self.array[..., _LARGEST[policy]] = freed_bytes


_COMPUTE = ("weight_s", "forward_host_s", "backward_host_s", "optimizer_s", "shard_s")
_COMMUNICATION = ("forward_comm_s", "backward_comm_s", "forward_exchange_s", "backward_exchange_s")
_DATA_AXIS = (
    "reduce_s", "scatter_s", "gather_s", "replicate_s", "zero3_scatter_s", "zero3_gather_s",
    "zero3_secondary_s", "zero3_replicate_s",
)  # fmt: skip
MAXIMA = 3 + len(_POLICIES)
COLUMNS = Sums.__dict__["decided_bytes"].at + 1 + len(_POLICIES)
_COST = slice(4 * len(_RECOMPUTE), 4 * len(_RECOMPUTE) + len(Cost._fields))


def _sums_of(cost: Cost) -> Sums:
    sums = Sums.zeros()
    sums.array[_COST] = cost
    return sums


def block_sums(price: BlockPrice) -> Sums:
    """A block's contribution to the sums of its stage."""
    sums = _sums_of(price.cost)
    sums.parameters = price.parameters
    sums.largest_parameters = price.unit_parameters
    sums.shard_parameters = price.shard_parameters
    sums.frozen_bytes = price.frozen_bytes
    sums.saved_bytes = price.saved_bytes
    sums.input_bytes = price.input_bytes
    sums.blocks = 1.0
    sums.transient_bytes = price.transient_bytes
    for policy, own in price.repeats.items():
        sums.set_recompute(policy, own.seconds, own.comm_s, own.host_s, own.freed_bytes)
    return sums


def parameter_sums(pricer: Pricer, value: str, state: Placement) -> Sums:
    """A parameter's contribution to the sums of each block that reads it."""
    sums = _sums_of(pricer.parameter_cost(value, state))
    if pricer.graph.values[value].requires_grad:
        numel = pricer.numel(value, state)
        sums.parameters = numel
        sums.shard_parameters = numel / pricer.parameters.shard_count(value, state)
    else:
        sums.frozen_bytes = pricer.nbytes(value, state)
    return sums

"""Sums over runs of blocks, by columns, from which `stage.py` prices a stage.

The excess of a backward (`costmodel/blocks/excess.py`) is no sum: that of a run A that B follows is
max(excess(B), excess(A) - k(B)), as B's kept bytes k are let go first, less the gradients of its
parameters, or what it puts off. Under ZeRO-3 the gradients of B's first block are still scattered
while A's last block, at its `edge`, is in its backward.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.blocks.excess import Excess
from meshwright.costmodel.blocks.price import BlockPrice, Repeats
from meshwright.costmodel.operators import Cost, Pricer
from meshwright.costmodel.recompute import RECOMPUTE, parts_of, segment_policy
from meshwright.costmodel.sharding import Placement
from meshwright.costmodel.sharing import Sharing

Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Operators that blocks run again in their backward; arrays of one shape, 0-d of one run.

    Seconds per micro-batch (`seconds`, of which communication `comm_s`; the host's `host_s`), bytes
    per micro-batch that are no longer kept (`freed_bytes`), and the `excess` of the backward then,
    (kinds of it, ...), with what it puts off where it is split (`put_off_bytes`); `gather_s` of
    ZeRO-3's gathers for a forward more.
    """

    seconds: Floats
    comm_s: Floats
    host_s: Floats
    freed_bytes: Floats
    excess: Floats
    put_off_bytes: Floats = field(default_factory=lambda: np.zeros(()))
    gather_s: Floats = field(default_factory=lambda: np.zeros(()))

    def __add__(self, other: Recompute) -> Recompute:
        sums = {name: np.add(getattr(self, name), getattr(other, name)) for name in _REPEATED}
        return Recompute(**sums | {"excess": np.maximum(self.excess, other.excess)})

    def together(self) -> Recompute:
        """Sum over the blocks of the last axis."""
        sums = {name: getattr(self, name).sum(axis=-1) for name in _REPEATED}
        return Recompute(**sums | {"excess": self.excess.max(axis=-1)})


_REPEATED = tuple(column.name for column in fields(Recompute))
_ZERO: Floats = np.zeros(())
NO_RECOMPUTE = Recompute(
    **dict.fromkeys(("seconds", "comm_s", "host_s", "freed_bytes"), _ZERO),
    excess=np.zeros(len(Excess._fields)),
)

# the first columns of Sums: of each policy seconds, comm_s, host_s and freed_bytes; the last ones:
# each kind of excess under each policy, "none" first
_POLICIES = RECOMPUTE[1:]
_RECOMPUTE = {policy: slice(4 * k, 4 * k + 4) for k, policy in enumerate(_POLICIES)}
_FREED = slice(3, 4 * len(_POLICIES), 4)
_EXCESS = (len(Excess._fields), len(RECOMPUTE))
_GATHERS = np.array([parts_of(policy)[1] for policy in RECOMPUTE], dtype=float)
LATER, GROWN, FIRST, SECOND, INSIDE, EDGE, INNER = range(len(Excess._fields))


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
    bytes as in `BlockPrice` and `PassPrice`; of blocks that can't be in a segment the number and
    what they keep. The last columns (`MAXIMA`) are no sums: of all blocks the most parameters that
    ZeRO moves at once, with frozen ones where it gathers these, and elements of one of them, the
    parameters of the first block, and the excess of a backward.
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
    zero3_again_s = _Column()
    zero3_secondary_s = _Column()
    zero3_replicate_s = _Column()
    compress_s = _Column()
    optimizer_s = _Column()
    shard_s = _Column()

    parameters = _Column()
    gradients = _Column()
    shard_parameters = _Column()
    moments = _Column()
    shard_moments = _Column()
    frozen_parameters = _Column()
    frozen_bytes = _Column()
    frozen_shard_bytes = _Column()
    saved_bytes = _Column()
    input_bytes = _Column()
    put_off_bytes = _Column()
    regathered_bytes = _Column()
    blocks = _Column()
    alone_blocks = _Column()
    alone_bytes = _Column()

    # --- maxima ---
    largest_parameters = _Column()
    largest_gathered = _Column()
    largest_numel = _Column()
    first_gradients = _Column()

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
        """Sums without what several blocks of a run share, counted too often; maxima stay, but the
        last one that reads it has its gradient, not the first."""
        less = Sums(self.array.copy())
        less.array[..., :-MAXIMA] -= shared.array[..., :-MAXIMA]
        first = self.first_gradients - shared.first_gradients
        less.first_gradients = np.maximum(first, 0.0)
        return less

    @property
    def excess(self) -> Floats:
        """(..., kinds, policies): each kind of excess under each policy."""
        flat: Floats = self.array[..., COLUMNS - _EXCESS[0] * _EXCESS[1] :]
        return flat.reshape(*flat.shape[:-1], *_EXCESS)

    @excess.setter
    def excess(self, value: Floats) -> None:
        flat = value.reshape(*value.shape[:-2], -1)
        self.array[..., COLUMNS - flat.shape[-1] :] = flat

    def _let_go(self) -> Floats:
        """(..., kinds, policies): bytes behind a backward of these blocks, less those before."""
        freed = self.array[..., _FREED]
        unfreed = (self.saved_bytes + self.input_bytes)[..., None]
        kept = np.concatenate([unfreed, unfreed - freed], axis=-1)
        let_go = np.repeat(kept[..., None, :], _EXCESS[0], axis=-2)
        let_go[..., GROWN, :] -= self.gradients[..., None]
        put_off = self.put_off_bytes[..., None] - _GATHERS * self.regathered_bytes[..., None]
        let_go[..., FIRST, :] -= put_off
        let_go[..., SECOND, :] = 0.0
        return let_go

    def _followed(self, first_gradients: Floats) -> Floats:
        """Excess before blocks of which the first one has so many parameters."""
        excess: Floats = self.excess.copy()
        edge = excess[..., EDGE, :] + first_gradients[..., None]
        excess[..., INSIDE, :] = np.maximum(excess[..., INSIDE, :], edge)
        return excess

    def then(self, following: Sums) -> Sums:
        """Sums of runs that are each followed by another."""
        together = Sums(self.array + following.array)
        largest = np.maximum(self.array[..., _LARGEST], following.array[..., _LARGEST])
        together.array[..., _LARGEST] = largest
        first = np.where(self.blocks > 0, self.first_gradients, following.first_gradients)
        together.first_gradients = first
        before = self._followed(following.first_gradients) - following._let_go()
        excess = np.maximum(before, following.excess)
        last = (following.blocks > 0)[..., None]
        excess[..., EDGE, :] = np.where(
            last, following.excess[..., EDGE, :], self.excess[..., EDGE, :]
        )
        together.excess = excess
        return together

    def times(self, factor: float) -> Sums:
        """Sums of so many equal runs in a row; or of a fraction of one, whose maxima stay."""
        scaled = Sums(self.array.copy())
        scaled.array[..., :-MAXIMA] *= factor
        if factor > 1:
            let_go = self._let_go()
            before = self._followed(self.first_gradients) - let_go
            excess = np.maximum(self.excess, before - (factor - 2) * np.minimum(let_go, 0.0))
            excess[..., EDGE, :] = self.excess[..., EDGE, :]
            scaled.excess = excess
        return scaled

    def without_maxima(self) -> Sums:
        """The sums alone, maxima 0."""
        sums = self.array.copy()
        sums[..., -MAXIMA:] = 0.0
        return Sums(sums)

    def spans(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> Sums:
        """Sums of the runs start..stop-1, (N,), of these blocks one after the other, (K,)."""
        added = np.concatenate([self.array[:1] * 0.0, self.array.cumsum(axis=0)])
        sums = Sums(added[stops] - added[starts])
        ends = np.column_stack([starts, stops]).ravel()  # of every other span the maximum is asked

        def most(of_blocks: Floats) -> Floats:
            padded = np.concatenate([of_blocks, np.zeros((1, *of_blocks.shape[1:]))])
            maxima: Floats = np.maximum.reduceat(padded, ends)[::2]
            return maxima

        sums.array[..., _LARGEST] = most(self.array[..., _LARGEST])
        sums.first_gradients = self.first_gradients[starts]
        let_go = np.concatenate([np.zeros((1, *_EXCESS)), self._let_go().cumsum(axis=0)])
        followed = self._followed(np.append(self.first_gradients[1:], 0.0)) + let_go[1:]
        excess, last = self.excess[stops - 1], stops - starts > 1
        ends = np.column_stack([starts, stops - 1]).ravel()
        before = most(followed) - let_go[stops]
        excess = np.where(last[:, None, None], np.maximum(excess, before), excess)
        excess[:, EDGE] = self.excess[stops - 1, EDGE]
        sums.excess = excess
        return sums

    def joined(self) -> Sums:
        """Sums of all of these blocks one after the other, (K,): of one run, 0-d."""
        return self.spans(np.array([0]), np.array([len(self)]))[0]

    @staticmethod
    def shared_out(runs: Sequence[Sums], numbers: Floats | NDArray[np.int64]) -> Sums:
        """Sums of an equal part of each run, of so many: (N,); maxima stay."""
        parts = Sums(np.stack([run.array for run in runs]))
        parts.array[:, :-MAXIMA] *= (1 / numbers)[:, None]
        return parts

    def scaled(self, *, compute: float, communication: float, data_axis: float) -> Sums:
        """Sums with computing, communication of passes, and the data axis' multiplied."""
        scaled = Sums(self.array.copy())
        for both, part in (("forward_s", "forward_comm_s"), ("backward_s", "backward_comm_s")):
            comm = getattr(self, part)
            setattr(scaled, both, compute * (getattr(self, both) - comm) + communication * comm)
        factors = dict.fromkeys(_COMPUTE, compute) | dict.fromkeys(_COMMUNICATION, communication)
        for name, factor in (factors | dict.fromkeys(_DATA_AXIS, data_axis)).items():
            setattr(scaled, name, factor * getattr(self, name))
        for columns in _RECOMPUTE.values():
            seconds, comm, host, freed = np.moveaxis(self.array[..., columns], -1, 0)
            computed = compute * (seconds - comm) + communication * comm
            parts = computed, communication * comm, compute * host, freed
            scaled.array[..., columns] = np.stack(parts, axis=-1)
        return scaled

    def moved_weights(self, sharing: Sharing) -> tuple[Floats, Floats]:
        """Elements of the weights that ZeRO gathers, or a step casts, and the most at once."""
        if sharing.gathers:
            return self.parameters + self.frozen_parameters, self.largest_gathered
        return self.parameters, self.largest_parameters

    def recompute(self, policy: str) -> Recompute:
        """Recompute of the blocks where all of them follow one policy, or `in_segments`."""
        if "/" in policy:
            return self._in_segments(policy)
        k = RECOMPUTE.index(policy)
        again = self.array[..., _RECOMPUTE[policy]] if k else np.zeros((*self.array.shape[:-1], 4))
        return Recompute(
            **dict(zip(_REPEATED, np.moveaxis(again, -1, 0), strict=False)),
            excess=np.moveaxis(self.excess[..., k], -1, 0),
            put_off_bytes=self.put_off_bytes - _GATHERS[k] * self.regathered_bytes,
            gather_s=np.zeros(self.array.shape[:-1]),
        )

    def _in_segments(self, policy: str) -> Recompute:
        """Recompute in segments, as if all blocks were alike (`segment_costs.py`)."""
        base, size = segment_policy(policy)
        within, blocks = self.recompute(base), np.maximum(self.blocks - self.alone_blocks, 1.0)
        size_of = np.minimum(size, blocks)
        held_blocks = self.saved_bytes - within.freed_bytes
        alone = np.minimum(self.alone_bytes, held_blocks)
        # a last block by itself is in no segment
        alone = alone + (np.mod(blocks, size) == 1) * (held_blocks - alone) / blocks
        held = (held_blocks + self.input_bytes - alone) * size_of / blocks
        inside = held + within.excess[INNER] + np.maximum(within.excess - within.excess[LATER], 0.0)
        freed = self.saved_bytes + self.input_bytes * (1 - 1 / size_of) - alone
        some = size_of > 1  # one block by itself is no segment
        return Recompute(
            seconds=self.forward_s * some + within.seconds,
            comm_s=self.forward_comm_s * some + within.comm_s,
            host_s=self.forward_host_s * some + within.host_s,
            freed_bytes=np.where(some, freed, within.freed_bytes),
            excess=np.where(some, np.maximum(within.excess, inside), within.excess),
            put_off_bytes=within.put_off_bytes,
            gather_s=self.zero3_gather_s * (1 - 1 / size_of),
        )

    def recompute_by(self, policies: Sequence[str]) -> Recompute:
        """Recompute of the blocks under each of several policies: arrays (P, ...)."""
        shape = self.array.shape[:-1]
        if any("/" in policy for policy in policies):
            by_policy = [self.recompute(policy) for policy in policies]
            stacked = {
                name: np.stack([np.broadcast_to(getattr(r, name), shape) for r in by_policy])
                for name in _REPEATED
                if name != "excess"
            }
            return Recompute(**stacked, excess=np.stack([r.excess for r in by_policy], axis=1))
        columns = np.zeros((len(RECOMPUTE), 4, *shape))  # nothing under the first, "none"
        repeated = self.array[..., : _COST.start].reshape(*shape, len(_POLICIES), 4)
        columns[1:] = np.moveaxis(repeated, (-2, -1), (0, 1))
        chosen = [RECOMPUTE.index(policy) for policy in policies]
        excess = np.moveaxis(self.excess[..., chosen], (-2, -1), (0, 1))
        gathers = _GATHERS[chosen].reshape(-1, *(1 for _ in shape))
        return Recompute(
            **{name: columns[chosen, k] for k, name in enumerate(_REPEATED[:4])},
            excess=excess,
            put_off_bytes=self.put_off_bytes - gathers * self.regathered_bytes,
            gather_s=np.zeros((len(policies), *shape)),
        )

    def with_policies(self, policies: Sequence[str]) -> Sums:
        """The sums of blocks, (K,), each with its recompute policy decided."""
        decided = Sums(self.array.copy())
        for policy in dict.fromkeys(policies):
            members = [k for k, chosen in enumerate(policies) if chosen == policy]
            decided.array[members] = self[members].with_policy(policy).array
        return decided

    def with_policy(self, policy: str) -> Sums:
        """The sums of blocks with their recompute policy decided: no policy changes them."""
        decided = Sums(self.array.copy())
        repeated = self.recompute(policy)
        decided.backward_s = self.backward_s + repeated.seconds
        decided.backward_comm_s = self.backward_comm_s + repeated.comm_s
        decided.backward_host_s = self.backward_host_s + repeated.host_s
        decided.saved_bytes = self.saved_bytes - repeated.freed_bytes
        decided.put_off_bytes, decided.regathered_bytes = repeated.put_off_bytes, 0.0
        decided.array[..., : _COST.start] = 0.0
        same = np.moveaxis(repeated.excess, 0, -1)[..., None]
        decided.excess = np.broadcast_to(same, (*same.shape[:-1], len(RECOMPUTE)))
        return decided

    def costing(self, cost: Cost, repeats: Mapping[str, Repeats]) -> Sums:
        """Sums with these seconds, and these of what policies run again."""
        costed = Sums(self.array.copy())
        costed.array[..., _COST] = cost
        for policy, run in repeats.items():
            costed.set_recompute(policy, run.seconds, run.comm_s, run.host_s, run.freed_bytes)
        return costed

    def set_recompute(
        self, policy: str, seconds: float, comm_s: float, host_s: float, freed_bytes: float
    ) -> None:
        """Set what one block runs again under a policy."""
        self.array[..., _RECOMPUTE[policy]] = seconds, comm_s, host_s, freed_bytes


_COMPUTE = ("weight_s", "forward_host_s", "backward_host_s", "compress_s", "optimizer_s", "shard_s")
_COMMUNICATION = ("forward_comm_s", "backward_comm_s", "forward_exchange_s", "backward_exchange_s")
_DATA_AXIS = (
    "reduce_s", "scatter_s", "gather_s", "replicate_s", "zero3_scatter_s", "zero3_gather_s",
    "zero3_again_s", "zero3_secondary_s", "zero3_replicate_s",
)  # fmt: skip
MAXIMA = 4 + _EXCESS[0] * _EXCESS[1]
COLUMNS = Sums.__dict__["first_gradients"].at + 1 + _EXCESS[0] * _EXCESS[1]
_LARGEST = slice(COLUMNS - MAXIMA, COLUMNS - MAXIMA + 3)
_COST = slice(4 * len(_RECOMPUTE), 4 * len(_RECOMPUTE) + len(Cost._fields))


def block_sums(price: BlockPrice) -> Sums:
    """A block's contribution to the sums of its stage."""
    passes, sums = price.passes, Sums.zeros().costing(price.cost, price.passes.repeats)
    sums.parameters, sums.gradients = price.parameters, price.gradient_bytes
    sums.first_gradients = price.gradient_bytes
    sums.largest_parameters, sums.largest_gathered = price.unit_parameters, price.unit_gathered
    sums.largest_numel, sums.shard_parameters = price.largest_numel, price.shard_parameters
    sums.moments, sums.shard_moments = price.moments
    sums.frozen_parameters = price.frozen_parameters
    sums.frozen_bytes, sums.frozen_shard_bytes = price.frozen_bytes, price.frozen_shard_bytes
    sums.saved_bytes = passes.saved_bytes
    sums.input_bytes = passes.input_bytes
    sums.put_off_bytes, sums.regathered_bytes = passes.put_off_bytes
    sums.blocks = 1.0
    if not passes.segmented:
        sums.alone_blocks, sums.alone_bytes = 1.0, passes.saved_bytes
    sums.excess = np.array([passes.excess[policy] for policy in RECOMPUTE]).T
    return sums


def parameter_sums(pricer: Pricer, value: str, state: Placement) -> Sums:
    """A parameter's contribution to the sums of each block that reads it."""
    sums = Sums.zeros().costing(pricer.parameter_cost(value, state), {})
    numel = pricer.numel(value, state)
    if pricer.graph.values[value].requires_grad:
        sums.parameters = numel
        sums.gradients = sums.first_gradients = pricer.setting.kept_bytes * numel
        sums.shard_parameters = numel / pricer.parameters.shard_count(value, state)
        sums.moments, sums.shard_moments = pricer.parameters.moment_bytes(value, state)
    else:
        sums.frozen_parameters = numel
        held = pricer.parameters.frozen_bytes(value, state)
        sums.frozen_bytes, sums.frozen_shard_bytes = held
    return sums

"""The chain of a model's blocks in one setting, composed into every possible stage.

A block's table gives its seconds for every pair of boundary states on the tensor axis. The best
path of the whole model through them is that of every stage: stages on meshes of the same degrees
send activations in the states in which blocks leave them, so that a cut changes no block. Stages of
the same blocks are one run: 96 equal layers have 4,656 stages and 96 runs. Only the pairs of states
on that path are priced in detail.

Shapes: N runs, K blocks, C boundaries where stages may start and end, S boundary states at most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.graph import Block
from meshwright.costmodel.kernels import Hop, Hops
from meshwright.costmodel.memo import Memo
from meshwright.costmodel.operators import Setting
from meshwright.costmodel.sharding import Assignment, Placement, translate
from meshwright.costmodel.stages import Floats, Sums

if TYPE_CHECKING:
    from meshwright.planner.intra_op import BlockTable

Ints: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """All distinct runs of blocks: `sums` (N,), `seconds` per micro-batch with once-per-step work
    spread (N,), number of `blocks` (N,). The stage from boundary `at[i]` to `at[j]` is run
    `index[i, j]` of `index` (C, C); run 0 is no stage, with infinite seconds."""

    sums: Sums
    seconds: Floats
    blocks: Ints
    index: NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """The blocks of one kind (`Chain.kinds`): `count` of them, the typical sums of one, and the
    seconds per micro-batch (once-per-step work spread) that these are above the least there is."""

    number: int
    count: int
    sums: Sums
    more_s: float


@lru_cache(maxsize=8)
def _distinct(kinds: tuple[int, ...]) -> tuple[Sequence[Ints], NDArray[np.int32]]:
    """The first place, (runs,), of the distinct runs of 1, 2, ... pieces of these kinds, and the
    `index` of `Runs`."""
    row, count, different = np.array(kinds), len(kinds), max(kinds) + 1
    index = np.zeros((count + 1, count + 1), dtype=np.int32)
    of_start = np.zeros(count, dtype=np.int64)  # the run of this length from each start
    by_length, total = [], 1
    for length in range(1, count + 1):
        starts = np.arange(count - length + 1)
        step = of_start[starts] * different + row[starts + length - 1]
        _, first, of_start = np.unique(step, return_index=True, return_inverse=True)
        by_length.append(first)
        index[starts, starts + length] = total + of_start
        total += len(first)
    return by_length, index


@dataclass(kw_only=True, eq=False)
class Chain:
    """The K blocks of a model in one setting and mode, solved.

    `tables` are the solved programs of the blocks (None: no legal assignment), `forced` the
    recompute policies that the user decided; blocks of one of the `kinds`, numbered from 0 in the
    order of their first, have both and the numbers of states at their ends in common. `cuts` are
    the states that each of the K+1 boundaries may have, `sends` gives the seconds (K+1,) to send
    the activations there, split over the tensor axis or not, on average or over a hop
    (`StageCoster.send_seconds`). Parameters that several blocks read are `stored` in one state;
    `shared` has, of each, which blocks read it and the sums and seconds of one copy. `price` gives
    the sums of a block between two boundary states. Stages start and end `at` C of the boundaries;
    the blocks between two of those are a piece.
    """

    setting: Setting
    mode: str
    blocks: Sequence[Block]
    at: Sequence[int]
    forced: Sequence[str | None]
    tables: Sequence[BlockTable | None]
    kinds: Sequence[int]
    cuts: Sequence[Sequence[Placement]]
    stored: Mapping[str, Placement]
    sends: Callable[[Sequence[bool], Hop | None], Floats]
    shared: Sequence[tuple[Sequence[bool], Sums, float]]
    price: Callable[[BlockTable, tuple[int, ...]], Sums]
    # kind of block and its two boundary states: its sums
    _parts: dict[tuple[int, int, int], Sums] = field(default_factory=dict, init=False)
    # number of a block and its two boundary states
    _assignments: dict[tuple[int, int, int], Assignment] = field(default_factory=dict, init=False)
    _kinds: dict[int, Kind] = field(default_factory=dict, init=False)
    _typical: dict[int, Sums] = field(default_factory=dict, init=False)
    _sends: Memo[Hop | None, Floats] = field(default_factory=Memo, init=False)
    _typical_sends: Memo[Hops, tuple[float, float]] = field(default_factory=Memo, init=False)

    @cached_property
    def costs(self) -> list[Floats]:
        """(S, S): seconds of each block over its boundary states."""
        matrices: list[Floats] = []
        for j, (table, kind) in enumerate(zip(self.tables, self.kinds, strict=True)):
            if kind == len(matrices):
                matrices.append(_matrix(table, len(self.cuts[j]), len(self.cuts[j + 1])))
        return [matrices[kind] for kind in self.kinds]

    def typical_sends_s(self, hops: Hops) -> tuple[float, float]:
        """Seconds that a micro-batch is sent from the first of these stages to the last, and of the
        longest of its messages. Each stage is cut at the cheapest boundary within half a stage of
        where even ones end; there is no `Hop` between those of one device group."""

        def found() -> tuple[float, float]:
            at, size = np.array(self.at), len(self.blocks) / (len(hops) + 1)
            off = np.abs(at[None] - size * np.arange(1, len(hops) + 1)[:, None])  # (hops, C)
            near = off <= np.maximum(size / 2, off.min(axis=1, keepdims=True))
            sends = np.array([self.sends_s(hop)[at] if hop else 0.0 * at for hop in hops])
            least_s = np.where(near, sends, np.inf).min(axis=1)
            return float(least_s.sum()), float(least_s.max())

        return self._typical_sends.of(hops, found) if hops else (0.0, 0.0)

    # --- the whole model, roughly ---

    def typical(self, least: int = 1) -> Sums:
        """Sums over all blocks, each between the boundary states that are cheapest where blocks of
        its kind follow each other; maxima are those of kinds with so many blocks at `least`."""
        if least not in self._typical:
            total = Sums.zeros()
            for kind, count in Counter(self.kinds).items():
                part = self._typical_of(kind).sums.times(count)
                total = total.then(part if count >= least else part.without_maxima())
            self._typical[least] = total - self._counted_again()
        return self._typical[least]

    def _typical_of(self, number: int) -> Kind:
        if number not in self._kinds:
            j, count = self.kinds.index(number), self.kinds.count(number)
            turn = cost = self.costs[j]
            if cost.shape[0] == cost.shape[1] and count > 1:  # there and back again
                back = (cost + cost.T) / 2
                turn = back if np.isfinite(back).any() else cost
            s, t = map(int, np.unravel_index(int(turn.argmin()), cost.shape))
            legal = bool(np.isfinite(cost).any())
            part = self.parts(j, s, t) if legal else Sums.zeros()
            if turn is not cost and s != t:
                part = Sums((part.array + self.parts(j, t, s).array) / 2)
            more_s = float(turn[s, t] - cost.min()) if legal else 0.0
            self._kinds[number] = Kind(number=number, count=count, sums=part, more_s=more_s)
        return self._kinds[number]

    def kinds_typical(self) -> list[Kind]:
        """The kinds of blocks, that of the last block last, each between the boundary states that
        are cheapest where blocks of its kind follow each other; none where nothing is legal."""
        costs = dict(zip(self.kinds, self.costs, strict=True))
        legal = (kind for kind in costs if np.isfinite(costs[kind]).any())
        return [self._typical_of(k) for k in sorted(legal, key=lambda k: k == self.kinds[-1])]

    def typical_runs(self, ends: Sequence[int]) -> Runs:
        """Approximate stages that start and end at these boundaries, each a run of its own, from
        the sums of typical blocks; `seconds` only tell which are legal: 0 or inf."""
        starts, stops = np.triu_indices(len(ends), 1)
        index = np.zeros((len(ends), len(ends)), dtype=np.int32)
        index[starts, stops] = np.arange(1, len(starts) + 1)
        # run 0 is no stage
        first = np.concatenate([[0], np.array(ends)[starts]])
        last = np.concatenate([[1], np.array(ends)[stops]])
        blocks = Sums(np.stack([self._typical_of(kind).sums.array for kind in self.kinds]))
        copies, _ = self._copies(first, last)
        illegal = np.concatenate([[0], np.cumsum([not np.isfinite(c).any() for c in self.costs])])
        legal = (illegal[last] == illegal[first]) & (np.arange(len(first)) > 0)
        return Runs(
            sums=blocks.spans(first, last) - copies,
            seconds=np.where(legal, 0.0, np.inf),
            blocks=last - first,
            index=index,
        )

    def whole(self) -> Sums:
        """Sums of all blocks as one stage."""
        return self._all_blocks

    @cached_property
    def _all_blocks(self) -> Sums:
        if not np.isfinite(self.block_s).all():  # nothing is legal
            return self.typical()
        return self._of_blocks.joined() - self._counted_again()

    def _counted_again(self) -> Sums:
        """Sums of shared parameters that one stage of all blocks counts more than once."""
        total = Sums.zeros()
        for readers, copy, _ in self.shared:
            total = total.then(copy.times(max(0, sum(readers) - 1)))
        return total

    # --- every stage ---

    def parts(self, j: int, s: int, t: int) -> Sums:
        """Sums of block j between its boundary states s and t."""
        key = self.kinds[j], s, t
        if key not in self._parts:
            table = self.tables[j]
            assert table is not None  # no path leads through a block without one
            part = self.price(table, boundary_index(table, s, t))
            policy = self.forced[j]
            self._parts[key] = part.with_policy(policy) if policy else part
        return self._parts[key]

    @cached_property
    def runs(self) -> Runs:
        """All stages."""
        return self.runs_between(self.at)

    @property
    def sums(self) -> Sums:
        """(C, C): sums of the stages from boundary `at[i]` to `at[j]`."""
        return self.runs.sums[self.runs.index]

    @property
    def seconds(self) -> Floats:
        """(C, C): seconds per micro-batch, once-per-step work spread; inf where i >= j."""
        return np.asarray(self.runs.seconds[self.runs.index])

    def runs_between(self, ends: Sequence[int]) -> Runs:
        """All stages that start and end at these boundaries, in the states of the best path."""
        numbers: dict[tuple[object, ...], int] = {}
        pieces = [
            numbers.setdefault((*self.kinds[i:j], *self.states[i : j + 1]), len(numbers))
            for i, j in pairwise(ends)
        ]
        by_length, index = _distinct(tuple(pieces))
        at = np.array(ends)
        # run 0 is no stage
        starts = np.concatenate([[0], *(at[first] for first in by_length)])
        stops = np.concatenate([[1], *(at[first + n] for n, first in enumerate(by_length, 1))])
        copies, copies_s = self._copies(starts, stops)
        added_s, illegal = (
            np.concatenate([[0], np.cumsum(of_blocks)])
            for of_blocks in (np.nan_to_num(self.block_s, posinf=0.0), ~np.isfinite(self.block_s))
        )
        legal = (illegal[stops] == illegal[starts]) & (np.arange(len(starts)) > 0)
        return Runs(
            sums=self._of_blocks.spans(starts, stops) - copies,
            seconds=np.where(legal, added_s[stops] - added_s[starts] - copies_s, np.inf),
            blocks=stops - starts,
            index=index,
        )

    def _copies(self, starts: Ints, stops: Ints) -> tuple[Sums, Floats]:
        """Sums and seconds, (runs,), of shared parameters that runs count more than once."""
        sums, seconds = Sums.zeros(len(starts)), np.zeros(len(starts))
        for readers, copy, copy_s in self.shared:
            before = np.concatenate([[0], np.cumsum(readers)])  # readers among the first blocks
            times = np.maximum(before[stops] - before[starts] - 1, 0)
            sums.array += times[:, None] * copy.array
            seconds += times * copy_s
        return sums, seconds

    @cached_property
    def legal_whole(self) -> NDArray[np.bool_]:
        """(C, C): whether the stage from boundary `at[i]` to `at[j]` may get and send whole
        activations, as it does between stages of different meshes."""
        found = np.triu(np.ones((len(self.at),) * 2, dtype=bool), 1)
        legal = [np.isfinite(cost) for cost in self.costs]
        if all(of_block[0, 0] for of_block in legal):
            return found
        for i, start in enumerate(self.at):
            reached, there = np.arange(len(self.cuts[start])) == 0, {start: True}
            for j in range(start, self.at[-1]):
                reached = (reached[:, None] & legal[j]).any(axis=0)
                there[j + 1] = bool(reached[0])
            found[i, i + 1 :] = [there[stop] for stop in self.at[i + 1 :]]
        return found

    # --- the way back ---

    def path(self, start: int, stop: int, s: int = 0, t: int = 0) -> list[int]:
        """States at the boundaries start..stop of the best path from state s to state t; any path
        where none is legal. A block without an assignment takes no time on it."""
        best = np.where(np.arange(len(self.cuts[start])) == s, 0.0, np.inf)
        trail: list[NDArray[np.int64]] = []
        for j in range(start, stop):
            cost = self.costs[j]
            options = best[:, None] + (cost if np.isfinite(cost).any() else np.zeros_like(cost))
            trail.append(options.argmin(axis=0))
            best = options.min(axis=0)
        states = [t]
        for pick in reversed(trail):
            states.append(int(pick[states[-1]]))
        return states[::-1]

    @cached_property
    def states(self) -> list[int]:
        """(K+1,): states at the boundaries on the best path of the whole model. Stages on meshes
        of the same degrees send activations in these states: wherever the model is cut, its
        blocks take as long."""
        return self.path(0, len(self.tables))

    @cached_property
    def block_s(self) -> Floats:
        """(K,): seconds of each block on the best path; inf of one without a legal assignment."""
        pairs = pairwise(self.states)
        return np.array([self.costs[j][s, t] for j, (s, t) in enumerate(pairs)])

    @property
    def send_s(self) -> Floats:
        """(K+1,): seconds to send the activations at each boundary, in the state of the path, on
        average over all neighbours."""
        return self.sends_s(None)

    def sends_s(self, hop: Hop | None) -> Floats:
        """`send_s`, or what is sent over a hop at least."""
        states = zip(self.cuts, self.states, strict=True)
        return self._sends.of(hop, lambda: self.sends([c[s].sharded for c, s in states], hop))

    @cached_property
    def _of_blocks(self) -> Sums:
        """(K,): the sums of each block on the best path."""
        pairs = enumerate(pairwise(self.states))
        legal = np.isfinite(self.block_s)
        parts = (self.parts(j, s, t) if legal[j] else Sums.zeros() for j, (s, t) in pairs)
        return Sums(np.stack([part.array for part in parts]))

    def block_sums(self, start: int, stop: int) -> list[Sums]:
        """The sums of each block of a stage, on the best path."""
        return [self._of_blocks[j] for j in range(start, stop)]

    def assignments(
        self, start: int, stop: int, whole: tuple[bool, bool] = (False, False)
    ) -> dict[str, Assignment]:
        """The assignments of a stage's blocks on its best path, by block name; what it gets and
        sends is `whole` at an end, or as on the best path of the model."""
        s, t = (0 if w else self.states[k] for w, k in zip(whole, (start, stop), strict=True))
        states = pairwise(self.path(start, stop, s, t))
        assignments: dict[str, Assignment] = {}
        for j, between in enumerate(states, start):
            if (j, *between) not in self._assignments:
                table = self.tables[j]
                assert table is not None
                choices = table.program.assignment(table, boundary_index(table, *between))
                choices = translate(choices, table.program.block, self.blocks[j])
                self._assignments[j, *between] = choices
            assignments[self.blocks[j].name] = self._assignments[j, *between]
        return assignments


def boundary_index(table: BlockTable, s: int, t: int) -> tuple[int, ...]:
    """Index into a block table for input state `s` and output state `t`."""
    return tuple(s if name.startswith("in:") else t for name in table.keep)


def _matrix(table: BlockTable | None, ins: int, outs: int) -> Floats:
    """(ins, outs): seconds of a block over its boundary states; inf where it has no assignment."""
    if table is None:
        return np.full((ins, outs), np.inf)
    axes = ["in" if name.startswith("in:") else "out" for name in table.keep]
    costs = table.costs if axes == sorted(axes) else table.costs.T
    shape = (ins if "in" in axes else 1, outs if "out" in axes else 1)
    return np.array(np.broadcast_to(costs.reshape(shape), (ins, outs)))

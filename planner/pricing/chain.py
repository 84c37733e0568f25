"""All blocks of a model in one setting, composed into every possible stage.

A block's table gives its cost for every pair of boundary states. A stage is a chain of blocks: its
cost is the min-plus product of theirs, starting and ending replicated on the tensor axis (that is
how tensors cross stages). Stages of n blocks are made from those of n-1, all at once, and carry
their components (seconds, parameters, saved bytes) along. Stages of the same blocks one after the
other are the same run: 96 equal layers have 4,656 stages and 96 runs. Only the pairs of states
that some run's best path takes are ever priced in detail.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

import numpy as np

from meshwright.costmodel.blocks.stage import FIELDS, joined, scaled
from meshwright.costmodel.graph import Block
from meshwright.costmodel.operators.cost import Setting
from meshwright.costmodel.sharding.layouts import Assignment, translate
from meshwright.costmodel.sharding.strategies import Placement
from meshwright.planner.intra_op.program import BlockTable
from meshwright.planner.pricing.recompute_levels import settled


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """All distinct runs of blocks: `sums` (N, F), `seconds` (N,), number of `blocks` (N,). A stage
    from boundary `at[i]` to `at[j]` is run `index[i, j]`; run 0 is no stage, with infinite
    seconds."""

    sums: np.ndarray
    seconds: np.ndarray
    blocks: np.ndarray
    index: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class _Steps:
    """How the runs of a row of pieces come from each other: `levels` of equal length, each with the
    run before, the kind of piece added and where the first such run starts; the `index` of
    `Runs`."""

    levels: tuple[tuple[np.ndarray, np.ndarray, np.ndarray], ...]
    index: np.ndarray


@lru_cache(maxsize=8)
def _steps(kinds: tuple[int, ...]) -> _Steps:
    """Distinct runs of pieces, by the kinds in them."""
    row, count, different = np.array(kinds), len(kinds), max(kinds) + 1
    index = np.zeros((count + 1, count + 1), dtype=np.int32)
    of_start = np.zeros(count, dtype=np.int64)  # the run of this length from each start
    levels, total = [], 1
    for length in range(1, count + 1):
        starts = np.arange(count - length + 1)
        step = of_start[starts] * different + row[starts + length - 1]
        unique, first, of_start = np.unique(step, return_index=True, return_inverse=True)
        before, kind = np.divmod(unique, different)
        levels.append((before, kind, first))
        index[starts, starts + length] = total + of_start
        total += len(unique)
    return _Steps(levels=tuple(levels), index=index)


@dataclass(slots=True, kw_only=True, eq=False)
class Chain:
    """One setting and mode: the model's blocks with the solved table of each (None where it has no
    legal assignment) and the recompute policy that the user forced on it, the states each boundary
    may have, how parameters that several blocks read are `stored`, seconds to send what crosses
    each boundary; `again`, of such parameters, which blocks read them, and sums and seconds of one;
    `price`, the components of a block between two boundary states. Stages start and end `at` these
    boundaries; what lies between two of them is a piece."""

    setting: Setting
    mode: str
    blocks: Sequence[Block]
    at: Sequence[int]
    forced: Sequence[str | None]
    tables: Sequence[BlockTable | None]
    cuts: Sequence[Sequence[Placement]]
    stored: Mapping[str, Placement]
    send_s: np.ndarray
    again: Sequence[tuple[Sequence[bool], np.ndarray, float]]
    price: Callable[[BlockTable, tuple[int, ...]], np.ndarray]
    costs: list[np.ndarray] = field(init=False)
    kinds: list[int] = field(init=False)
    _parts: dict[tuple[int, int, int], np.ndarray] = field(default_factory=dict, init=False)
    _typical: np.ndarray | None = field(default=None, init=False)
    _whole: np.ndarray | None = field(default=None, init=False)
    _runs: Runs | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        numbers: dict[tuple[int, str | None, tuple[int, int]], int] = {}
        matrices: list[np.ndarray] = []
        self.kinds = []
        for j, (table, policy) in enumerate(zip(self.tables, self.forced, strict=True)):
            ends = len(self.cuts[j]), len(self.cuts[j + 1])
            kind = numbers.setdefault((id(table), policy, ends), len(numbers))
            if kind == len(matrices):
                matrices.append(_matrix(table, *ends))
            self.kinds.append(kind)
        self.costs = [matrices[kind] for kind in self.kinds]

    # --- the whole model, roughly ---

    def typical(self) -> np.ndarray:
        """Sums over all blocks, each between the states that it would keep among its likes."""
        if self._typical is None:
            self._typical = self._sum_typical()
        return self._typical

    def _sum_typical(self) -> np.ndarray:
        total = np.zeros(len(FIELDS))
        for kind, count in Counter(self.kinds).items():
            j = self.kinds.index(kind)
            cost = self.costs[j]
            if not np.isfinite(cost).any():
                continue
            turn = cost
            if cost.shape[0] == cost.shape[1] and count > 1:  # there and back again
                back = (cost + cost.T) / 2
                turn = back if np.isfinite(back).any() else cost
            s, t = map(int, np.unravel_index(int(turn.argmin()), cost.shape))
            part = self.parts(j, s, t)
            if turn is not cost and s != t:
                part = (part + self.parts(j, t, s)) / 2
            total = joined(total, scaled(part, count))
        return total - self._repeated()

    def whole(self) -> np.ndarray:
        """Sums of all blocks as one stage."""
        if self._whole is None:
            states, count = self.path(0, len(self.tables)), Counter[tuple[int, int, int]]()
            where: dict[tuple[int, int, int], int] = {}
            for j, (s, t) in enumerate(pairwise(states)):
                if not np.isfinite(self.costs[j][s, t]):  # nothing is legal
                    return self.typical()
                key = self.kinds[j], s, t
                count[key] += 1
                where.setdefault(key, j)
            total = np.zeros(len(FIELDS))
            for key, times in count.items():
                total = joined(total, scaled(self.parts(where[key], *key[1:]), times))
            self._whole = total - self._repeated()
        return self._whole

    def _repeated(self) -> np.ndarray:
        """Sums of parameters that one stage of all blocks would count again."""
        sums = np.zeros(len(FIELDS))
        for readers, extra, _ in self.again:
            sums += max(0, sum(readers) - 1) * extra
        return sums

    # --- every stage ---

    def parts(self, j: int, s: int, t: int) -> np.ndarray:
        """What block j adds to the sums of its stage between states s and t."""
        key = self.kinds[j], s, t
        if key not in self._parts:
            table = self.tables[j]
            assert table is not None  # no path leads through a block without one
            part = self.price(table, boundary_index(table, s, t))
            policy = self.forced[j]
            self._parts[key] = settled(part, policy) if policy else part
        return self._parts[key]

    @property
    def runs(self) -> Runs:
        """All stages, replicated at both ends."""
        if self._runs is None:
            self._runs = self._compose()
        return self._runs

    @property
    def sums(self) -> np.ndarray:
        """(C, C, F): sums of the stages from boundary `at[i]` to `at[j]`."""
        return self.runs.sums[self.runs.index]

    @property
    def seconds(self) -> np.ndarray:
        """(C, C): seconds per micro-batch, once-per-step work spread; inf where i >= j."""
        return self.runs.seconds[self.runs.index]

    def _compose(self) -> Runs:
        numbers: dict[tuple[int, ...], int] = {}
        pieces: list[_Piece] = []
        kinds: list[int] = []
        for start, stop in pairwise(self.at):
            own = numbers.setdefault(tuple(self.kinds[start:stop]), len(numbers))
            if own == len(pieces):
                pieces.append(_Piece(self, start, stop))
            kinds.append(own)
        steps = _steps(tuple(kinds))
        most = max(max(piece.cost.shape) for piece in pieces)
        costs = np.full((len(pieces), most, most), np.inf)
        for k, piece in enumerate(pieces):
            costs[k, : piece.cost.shape[0], : piece.cost.shape[1]] = piece.cost
        parts, priced = np.zeros((*costs.shape, len(FIELDS))), np.zeros(costs.shape, dtype=bool)
        at, ends = np.array(self.at), np.arange(most)
        sums, seconds = [np.zeros((1, len(FIELDS)))], [np.full(1, np.inf)]
        blocks = [np.ones(1, dtype=np.int64)]
        best = np.where(ends == 0, 0.0, np.inf)[None, :]  # [run, state at its end]
        carried = np.zeros((1, most, len(FIELDS)))
        for n, (before, kind, first) in enumerate(steps.levels, 1):
            options = best[before][:, :, None] + costs[kind]
            pick = options.argmin(axis=1)
            best = options[np.arange(len(kind))[:, None], pick, ends]
            new = np.isfinite(best) & ~priced[kind[:, None], pick, ends]
            for run, t in np.argwhere(new):
                where = kind[run], pick[run, t], t
                parts[where] = pieces[kind[run]].parts(int(pick[run, t]), int(t))
                priced[where] = True
            carried = joined(carried[before[:, None], pick], parts[kind[:, None], pick, ends])
            starts, stops = at[first], at[first + n]
            extra, once = self._again(starts, stops)
            sums.append(carried[:, 0] - extra)
            seconds.append(best[:, 0] - once)
            blocks.append(stops - starts)
        return Runs(
            sums=np.concatenate(sums),
            seconds=np.concatenate(seconds),
            blocks=np.concatenate(blocks),
            index=steps.index,
        )

    def _again(self, starts: np.ndarray, stops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sums and seconds of parameters that stages would count more than once."""
        sums, seconds = np.zeros((len(starts), len(FIELDS))), np.zeros(len(starts))
        for readers, extra, once in self.again:
            before = np.concatenate([[0], np.cumsum(readers)])
            times = np.maximum(before[stops] - before[starts] - 1, 0)
            sums += times[:, None] * extra
            seconds += times * once
        return sums, seconds

    # --- the way back ---

    def path(self, start: int, stop: int, s: int = 0, t: int = 0) -> list[int]:
        """States at the boundaries start..stop of the best path from state s to state t."""
        best = np.where(np.arange(len(self.cuts[start])) == s, 0.0, np.inf)
        trail: list[np.ndarray] = []
        for j in range(start, stop):
            options = best[:, None] + self.costs[j]
            trail.append(options.argmin(axis=0))
            best = options.min(axis=0)
        states = [t]
        for pick in reversed(trail):
            states.append(int(pick[states[-1]]))
        return states[::-1]

    def components(self, start: int, stop: int) -> list[np.ndarray]:
        """Components of each block of a stage, on its best path."""
        states = self.path(start, stop)
        return [self.parts(j, states[j - start], states[j - start + 1]) for j in range(start, stop)]

    def assignments(self, start: int, stop: int) -> dict[str, Assignment]:
        """The assignments behind a stage, by block name."""
        states = self.path(start, stop)
        found: dict[str, Assignment] = {}
        for j in range(start, stop):
            table = self.tables[j]
            assert table is not None
            index = boundary_index(table, states[j - start], states[j - start + 1])
            assignment = table.program.assignment(table, index)
            block = self.blocks[j]
            found[block.name] = translate(assignment, table.program.block, block)
        return found


class _Piece:
    """A few blocks one after the other, always in the same stage."""

    def __init__(self, chain: Chain, start: int, stop: int) -> None:
        self.chain, self.start, self.stop = chain, start, stop
        self.cost = chain.costs[start]
        for j in range(start + 1, stop):
            self.cost = (self.cost[:, :, None] + chain.costs[j][None]).min(axis=1)

    def parts(self, s: int, t: int) -> np.ndarray:
        """What the blocks add to the sums of their stage between states s and t."""
        states = self.chain.path(self.start, self.stop, s, t)
        total = self.chain.parts(self.start, states[0], states[1])
        for j in range(self.start + 1, self.stop):
            k = j - self.start
            total = joined(total, self.chain.parts(j, states[k], states[k + 1]))
        return total


def boundary_index(table: BlockTable, s: int, t: int) -> tuple[int, ...]:
    """Index into a block table for input state `s` and output state `t`."""
    return tuple(s if name.startswith("in:") else t for name in table.keep)


def _matrix(table: BlockTable | None, ins: int, outs: int) -> np.ndarray:
    """(ins, outs): seconds of a block over its boundary states; inf where it has no assignment."""
    if table is None:
        return np.full((ins, outs), np.inf)
    return np.array(
        [[table.costs[boundary_index(table, s, t)] for t in range(outs)] for s in range(ins)]
    )

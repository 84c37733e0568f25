"""Token slices: the work of each, and the sizes with which none takes longer than the others.

A slice of s tokens behind b others takes, of the seconds T of a micro-batch of L tokens, of which
the part a is causal attention (TeraPipe, arXiv 2102.07988, §3.3),

    t(b, s) = T ((1 - a) s/L + a (2 b s + s²)/L²)

and what kernels take to start, whatever their size. With a fixed number c of slices their sum does
not depend on how tokens are cut, so that TeraPipe's objective Σ t + (p - 1) max t is least where
the largest t is. The best cuts of the first n of N equal parts into c slices end with some part k,

    m(c, n) = min over k < n of max(m(c - 1, k), t(k, n - k))

in c·N² steps; the search over numbers of micro-batches has c.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.graph import Block
from meshwright.costmodel.operators import Cost, Pricer
from meshwright.costmodel.rules import is_causal, traits_of
from meshwright.costmodel.schedules import (
    Action,
    Pipeline,
    StageTimes,
    compute_orders,
    fewest_alike,
)
from meshwright.costmodel.sharding import Run, replicated
from meshwright.costmodel.stages import Floats, StageCosts
from meshwright.planner.plan import Plan
from meshwright.planner.pricing.stage_costs import StageCoster, stage_setting

Ints: TypeAlias = NDArray[np.int64]

PARTS = 256  # of a sequence, of which slices have whole ones
MOST = 0.95  # of a stage's seconds that count as attention


@dataclass(frozen=True, slots=True)
class SliceWork:
    """The seconds, and the tokens, of a slice over the mean of all."""

    seconds: float
    tokens: float

    def of(self, mean: StageTimes) -> StageTimes:
        """The times of a stage, of which these are the means."""
        backward_s, weight_s = mean.backward_s * self.seconds, mean.weight_s * self.tokens
        return replace(
            mean,
            forward_s=mean.forward_s * self.seconds,
            backward_s=backward_s,
            weight_s=min(weight_s, backward_s),
            overlap_s=mean.overlap_s * min(self.seconds, 1.0),
        )


def slice_works(sizes: Sequence[int], attention: float) -> list[SliceWork]:
    """The work of slices of so many tokens on a stage of which the part `attention` is that."""
    length, count = sum(sizes), len(sizes)
    ends = pairwise((0, *accumulate(sizes)))
    return [
        SliceWork(
            seconds=count * float(_part(np.array(a), np.array(b - a), length, attention)),
            tokens=count * (b - a) / length,
        )
        for a, b in ends
    ]


def _part(before: Ints, size: Ints, length: int, attention: float) -> Floats:
    """The part of a micro-batch's seconds that slices take behind so many tokens."""
    of_all, of_those = size / length, before / length
    part: Floats = (1 - attention) * of_all + attention * of_all * (2 * of_those + of_all)
    return part


def even_work(length: int, count: int, attention: float, multiple: int = 1) -> tuple[int, ...]:
    """The sizes of so many slices with the least largest work, to the hundredth of `attention`; of
    whole `multiple`s of tokens, of which the last one has what is left."""
    return _even_work(length, count, round(attention, 2), multiple)


@lru_cache(maxsize=1024)
def _even_work(length: int, count: int, attention: float, multiple: int) -> tuple[int, ...]:
    parts = min(max(1, length // multiple), max(PARTS, count))
    at = np.arange(parts + 1) * (length // multiple) // parts * multiple
    at[-1] = length
    work = np.full((parts + 1, parts + 1), np.inf)
    for k in range(parts):
        work[k, k + 1 :] = _part(at[k], at[k + 1 :] - at[k], length, attention)
    best, last = work[0], []
    for _ in range(count - 1):
        longest = np.maximum(best[:, None], work)
        last.append(longest.argmin(axis=0))
        best = longest.min(axis=0)
    ends = [parts]
    for before in reversed(last):
        ends.append(int(before[ends[-1]]))
    return tuple(int(at[b] - at[a]) for a, b in pairwise((0, *reversed(ends))))


def attention_part(
    pricer: Pricer,
    blocks: Iterable[Block],
    costs: StageCosts[float],
    cost_of: Callable[[Run], Cost] | None = None,
) -> float:
    """The part of a stage's seconds that its causal attention takes, its heads shared out evenly
    over the tensor axis; of operators that cost as `pricer` says, or `cost_of`."""
    cost_of, seconds = cost_of or pricer.step_cost, 0.0
    for block in blocks:
        for op in block.ops:
            if traits_of(op).kernel == "attention" and is_causal(op):
                cost = cost_of(Run(op, replicated(op)))
                seconds += cost.forward_s + cost.backward_s
    whole = costs.forward_s + costs.backward_s
    return min(MOST, seconds / pricer.setting.mesh.tp / whole) if whole else 0.0


def works_of_slices(
    plan: Plan, coster: StageCoster, stages: Sequence[StageCosts[float]]
) -> list[list[SliceWork]]:
    """The work of each slice on each stage of a plan; none where micro-batches are whole."""

    def parts() -> Iterator[float]:
        blocks = {block.name: block for block in coster.graph.blocks}
        for k, (stage, costs) in enumerate(zip(plan.stages, stages, strict=True)):
            pricer = coster.pricer(stage_setting(plan, k, coster))
            yield attention_part(pricer, [blocks[name] for name in stage.blocks], costs)

    return works_on_stages(plan.slices, parts())


def works_on_stages(sizes: Sequence[int], parts: Iterable[float]) -> list[list[SliceWork]]:
    """The work of each slice on each stage, of which attention is these parts; none, and no part
    is asked for, where micro-batches are whole."""
    if not sizes:
        return []
    works = [slice_works(sizes, part) for part in parts]
    return [list(of_slice) for of_slice in zip(*works, strict=True)]


def held_more(
    plan: Plan, stages: Sequence[StageCosts[float]], active: Sequence[int]
) -> list[StageCosts[float]]:
    """The costs of a plan's stages, whose `active` slices in flight have the most tokens that any
    have together, and the largest one passing."""
    if not plan.slices:
        return [*stages]
    mean = sum(plan.slices) / len(plan.slices)
    largest, most = max(plan.slices) / mean, most_tokens(plan.pipeline, plan.slices)
    held = []
    for costs, count, tokens in zip(stages, active, most, strict=True):
        times = tokens / mean / max(1, count)
        held.append(
            replace(
                costs,
                activation_bytes=costs.activation_bytes * times,
                later_bytes=costs.later_bytes * largest,
                first_bytes=costs.first_bytes + costs.later_bytes * (largest - 1),
                half_bytes=costs.half_bytes * largest,
            )
        )
    return held


@lru_cache(maxsize=256)
def most_tokens(pipeline: Pipeline, sizes: tuple[int, ...]) -> list[int]:
    """Per stage, the most tokens in flight, from the forward of a slice to the end of its
    backward: as the small last slices of a micro-batch leave, the large ones of the next come."""
    few = fewest_alike(pipeline)
    held, most = [0] * few.num_stages, [0] * few.num_stages
    for order in compute_orders(few):
        for action, stage, unit, _ in order:
            tokens = sizes[unit % len(sizes)]
            held[stage] += tokens * ((action is Action.FORWARD) - (action in _ENDS))
            most[stage] = max(most[stage], held[stage])
    return most


_ENDS = (Action.BACKWARD, Action.BACKWARD_WEIGHT)

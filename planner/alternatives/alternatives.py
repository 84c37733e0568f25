"""The best plan of each family that the chosen one is not in: why not something else, by a number.

A family's plan is what the same search finds under the overrides that ask for it, on what was
priced: who forces it finds it again. Where that fits no device, the answer is the bytes that it
lacks; where a smaller memory margin would have it faster than the chosen plan, or fit at all, what
is found with that; where the time ran out, that it was not searched.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from meshwright.planner.alternatives.families import Family
from meshwright.planner.drafts import Candidate
from meshwright.planner.overrides import OverrideError
from meshwright.planner.plan import InfeasibleError, margin_beside
from meshwright.planner.report import Excluded, excluded
from meshwright.planner.search import TIE, Search

MAX_MARGINS = 3  # tried, the largest
WORTH = 0.01  # of a step, where prices are taken for exact


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallerMargin:
    """A memory margin, and what the search finds with it."""

    memory_margin: float
    best: Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """What the search finds of a family, under the overrides `asks`: its `best` plan, or the bytes
    that the closest one lacks on its fullest stage; neither where the time ran out, only the
    seconds that any plan of it takes at least. `excluded` is what can't be split as the family
    asks."""

    family: str
    asks: Mapping[str, Any]
    best: Candidate | None = None
    shortfall_bytes: float | None = None
    bound_s: float = 0.0
    smaller: SmallerMargin | None = None
    excluded: tuple[Excluded, ...] = ()

    @property
    def searched(self) -> bool:
        """Whether the time was enough."""
        return self.best is not None or self.shortfall_bytes is not None


def alternative(search: Search, family: Family) -> Alternative | None:
    """The best of a family; None where the space holds none of it anyway."""
    graph, factors = search.problem.graph, search.problem.factors
    refused = excluded(graph, factors, (family.asks.get("tp", 1),))
    made = partial(Alternative, family=family.name, asks=family.asks, excluded=refused)
    limit = search.programs.time
    if limit.over():
        return made()
    try:
        found = family.within(search).run()
    except InfeasibleError as error:
        lacks = max(error.shortfall_bytes, default=0.0)
        return made() if limit.over() else made(shortfall_bytes=lacks)
    except OverrideError:
        return None
    if limit.ends_s < math.inf and not found.complete:
        return made(bound_s=found.bound_s)
    return made(best=found.best)


def with_margin(
    found: Alternative, search: Search, family: Family, below_s: float | None
) -> Alternative:
    """With the margin that a family needs to fit, or to take less than `below_s`, where that is
    smaller than the search's."""
    memory_bytes, lacks = search.problem.cluster.device.memory_bytes, found.shortfall_bytes
    if lacks is not None:
        below_s = math.inf if lacks <= search.memory_margin * memory_bytes else None
    if not found.searched or below_s is None:
        return found
    return replace(found, smaller=smaller_margin(family.within(search), below_s))


def smaller_margin(search: Search, below_s: float) -> SmallerMargin | None:
    """The largest margin below its own with which a search finds a plan that takes less than
    `below_s`, of the plans that fit without any; None where there is none."""
    memory_bytes = search.problem.cluster.device.memory_bytes
    if not search.memory_margin:
        return None
    whole = search.like(memory_margin=0.0)
    try:
        whole.run()
    except (InfeasibleError, OverrideError):
        return None
    drafts = [d for d in whole.drafts if d.fits and d.step_time_s < below_s]
    peaks = {d.evaluation.prediction.fullest_bytes for d in drafts}
    margins = sorted({margin_beside(peak, memory_bytes) for peak in peaks}, reverse=True)
    for margin in [m for m in margins if m < search.memory_margin][:MAX_MARGINS]:
        if search.programs.time.over():
            return None
        try:
            best = search.like(memory_margin=margin).run().best
        except (InfeasibleError, OverrideError):
            continue
        if best.step_time_s < below_s:
            return SmallerMargin(memory_margin=margin, best=best)
    return None


def worth_s(search: Search, step_s: float) -> float:
    """Below it another plan is faster than one of so many seconds by what is worth a line."""
    return step_s / (1 + (TIE if search.objective == "robust" else WORTH))

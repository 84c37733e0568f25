"""The best plan of each family that the chosen one is not in: why not something else, by a number.

What the search drafted counts; beyond that the most promising combinations of each family are cut
and simulated, whatever the chosen plan takes. Where nothing of a family fits, the answer is the
bytes it lacks; where the time ran out, the seconds it takes at least.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from meshwright.planner.alternatives.families import Family, families
from meshwright.planner.report.indivisible import Excluded, excluded
from meshwright.planner.search.candidates import Draft
from meshwright.planner.search.equal_stages import Drafted, EqualStages, Node, Slot
from meshwright.planner.search.least_memory import Lean, lean_slots, leanest, shortfall_bytes
from meshwright.planner.search.search import OPTIMISM, OVERSHOOT, Search, SearchResult

T = TypeVar("T")

MAX_SLOTS = 16  # meshes looked at per family, those with the least bounds
MAX_USELESS = 20  # meshes on which nothing fits, likewise
MAX_CUTS = 24  # combinations cut per family, those with the least estimates
MAX_SIMULATED = 6  # of those, the best of each schedule
MAX_LEAN = 8  # meshes looked at for the least memory, those that divide weights most


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """The best plan found of a family; without one, the bytes that its leanest plan lacks on the
    fullest stage. Where the time ran out, the seconds that any plan of it takes at least.
    `excluded` is what can't be split as the family asks."""

    family: str
    draft: Draft | None = None
    shortfall_bytes: float | None = None
    bound_s: float | None = None
    excluded: tuple[Excluded, ...] = ()


def alternatives(search: Search, result: SearchResult) -> tuple[Alternative, ...]:
    """The best of every family that the search could have chosen from and did not."""
    chosen = result.best.plan
    wanted = [family for family in families(search, result) if not family.has(chosen)]
    explorer = _Explorer(search=search, result=result)
    if result.complete:
        explorer.look(wanted)
    found = [explorer.best(family) for family in wanted]
    search.forget()
    graph, factors = search.problem.graph, search.problem.factors
    return tuple(
        replace(explorer.improved(a, f), excluded=excluded(graph, factors, (f.tp,)))
        for a, f in zip(found, wanted, strict=True)
        if a
    )


@dataclass(slots=True, kw_only=True)
class _Explorer:
    """Shared by all families: the combinations of `MAX_SLOTS` meshes of each, and the drafts that
    were simulated, by the recompute policies that were allowed. Nothing new is looked at where the
    search ran out of time."""

    search: Search
    result: SearchResult
    nodes: dict[Slot, Sequence[Node]] = field(default_factory=dict)
    drafts: dict[tuple[tuple[str, ...], Node], Draft] = field(default_factory=dict)

    def look(self, offered: Sequence[Family]) -> None:
        """Fill `nodes`; a mesh on which nothing fits does not count."""
        for family in offered:
            useful = 0
            for slot in self.slots(family)[: MAX_USELESS + MAX_SLOTS]:
                if slot not in self.nodes:
                    self.nodes[slot] = self.search.equal.nodes(slot)
                useful += bool(self.nodes[slot])
                if useful >= MAX_SLOTS:
                    break

    def slots(self, family: Family) -> list[Slot]:
        """Meshes that may hold plans of a family, the least bound of each number of micro-batches
        first: with few of them bounds know no bubble, and some schedules have one."""
        slots = filter(family.slot, self.result.meshes)
        return _diverse(slots, lambda s: s.bound_s, lambda s: s.num_microbatches)

    def best(self, family: Family) -> Alternative | None:
        """The best plan found, or why there is none; None where the space holds none anyway."""
        drafts = [d for d in self.result.drafts if d.fits and family.has(d.plan)]
        if not self.result.complete:
            bound_s = min((s.bound_s for s in self.slots(family)), default=None)
            draft = min(drafts, key=_step, default=None)
            if draft is None and bound_s is None:
                return None
            return Alternative(family=family.name, draft=draft, bound_s=bound_s)
        equal, known_s = self._equal(family), min(map(_step, drafts), default=math.inf)
        drafts += self._explored(family, equal, self._nodes(family, equal), known_s)
        lean = None if drafts else self._leanest(family, equal)
        if lean is not None and lean.excess_bytes <= 0:
            drafts += self._explored(family, equal, _of(family, equal.nodes(lean.slot)), math.inf)
        if drafts:
            return Alternative(family=family.name, draft=min(drafts, key=_step))
        if lean is None:
            return None
        lacks = shortfall_bytes(self.search.unequal, lean)
        return Alternative(family=family.name, shortfall_bytes=lacks)

    def improved(self, found: Alternative, family: Family) -> Alternative:
        """With what was drafted for other families, too."""
        drafts = [d for d in self.drafts.values() if d.fits and family.has(d.plan)]
        best = min([*drafts, *([found.draft] if found.draft else [])], key=_step, default=None)
        return found if best is None else replace(found, draft=best, shortfall_bytes=None)

    def _leanest(self, family: Family, equal: EqualStages) -> Lean | None:
        narrow = [slot for slot in lean_slots(self.search.space) if family.slot(slot)]
        return leanest(equal, narrow[:MAX_LEAN], family.way, family.schedule)

    def _equal(self, family: Family) -> EqualStages:
        """Stages under the family's recompute; with all policies, the search's own."""
        own = family.policies
        return self.search.equal if own is None else self.search.equal_with(own)

    def _explored(
        self, family: Family, equal: EqualStages, nodes: Iterable[Node], known_s: float
    ) -> list[Draft]:
        """Of the most promising combinations those that may take less than `known_s`: many are
        cut, few simulated."""
        cuts: list[tuple[float, Node, list[Drafted]]] = []
        for node in _diverse(nodes, lambda n: n.estimate_s, _shape)[:MAX_CUTS]:
            if max(node.bound_s, node.estimate_s * OPTIMISM) < known_s:
                found = equal.solve(node, known_s * OVERSHOOT)
                if found is not None:
                    cuts.append((found[0], node, found[1]))
        drafts: list[Draft] = []
        promising = _diverse(cuts, lambda cut: cut[0], lambda cut: cut[1].schedule)
        for objective_s, node, stages in promising[:MAX_SIMULATED]:
            if objective_s >= known_s:
                continue
            key = equal.space.restrictions.policies, node
            if key not in self.drafts:
                self.drafts[key] = self.search.draft(node, stages)
            draft = self.drafts[key]
            if draft.fits and family.has(draft.plan):
                drafts.append(draft)
                known_s = min(known_s, draft.step_time_s)
        return drafts

    def _nodes(self, family: Family, equal: EqualStages) -> list[Node]:
        """Combinations of a family; under its own recompute, on the meshes that promise most."""
        found = {
            slot: of
            for slot, nodes in self.nodes.items()
            if family.slot(slot) and (of := _of(family, nodes))
        }
        if equal is self.search.equal:
            return [node for nodes in found.values() for node in nodes]
        promising = sorted(found, key=lambda slot: min(n.estimate_s for n in found[slot]))
        return [n for slot in promising[:MAX_SLOTS] for n in _of(family, equal.nodes(slot))]


def _of(family: Family, nodes: Iterable[Node]) -> list[Node]:
    return [node for node in nodes if family.way(node.way) and family.schedule(node.schedule)]


def _diverse(
    items: Iterable[T], seconds: Callable[[T], float], kind: Callable[[T], Any]
) -> list[T]:
    """The fastest of each kind, then the second of each, and so on: estimates of one kind err
    alike."""
    rank: Counter[Any] = Counter()
    ranked = []
    for k, item in enumerate(sorted(items, key=seconds)):
        ranked.append((rank[kind(item)], k, item))
        rank[kind(item)] += 1
    return [item for _, _, item in sorted(ranked, key=lambda entry: entry[:2])]


def _shape(node: Node) -> tuple[int, int]:
    return node.groups, node.way.mesh.tp


def _step(draft: Draft) -> float:
    return draft.step_time_s

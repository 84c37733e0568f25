"""Plans that fit by the most of each kind of memory, by which drafts are compared, and not when
they are written out, whose steps are followed: the search goes on without them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from meshwright.planner.drafts import Combination, PlanDraft
from meshwright.planner.plan import InfeasibleError, sized
from meshwright.planner.search.activations import if_activations_pay, with_activations
from meshwright.planner.search.failure import failure
from meshwright.planner.search.offload import with_host
from meshwright.planner.search.relaxations import relaxations, way_out

if TYPE_CHECKING:
    from meshwright.planner.search.result import SearchResult
    from meshwright.planner.search.search import Search

TRIES = 8  # searches, each without what the ones before refused


def kind_of(one: Combination) -> Hashable:
    """What combinations of equal stages are refused by."""
    setup, m = one.setup, one.num_microbatches
    return setup.mesh, setup.sharing, one.groups, one.schedule, m


def kind_of_draft(draft: PlanDraft) -> Hashable:
    """The same of a draft, by its first stage."""
    setup, plan = draft.stages[0].setup, draft.plan
    groups, m = len(plan.devices), plan.num_microbatches
    return setup.mesh, setup.sharing, groups, plan.schedule, m


def without_refused(search: Search) -> SearchResult:
    """The result of a search that wrote out no plan that fits, of searches without what it refused,
    then of one that runs segments again, with host memory then. Raises as `Search.run` does."""
    found, excess = _without(search) if search.refused else (None, math.inf)
    if found is None and (segments := _segmented(search)):
        return if_activations_pay(search, segments)
    found = found or _on_hosts(search)
    if found is not None:
        return found
    if not search.refused or search.programs.time.over():
        raise failure(search, search.drafts)
    assert excess < math.inf
    # found by the most of each kind too: on more nodes alone there is surely less to hold
    helps = [each for each in relaxations(search) if each.more_nodes]
    raise InfeasibleError(
        f"the model does not fit {search.problem.cluster.describe()}: plans fit by the most of "
        f"each kind of memory, and in the course of its step the closest takes {sized(excess)} "
        f"more than there is. {way_out(helps)}",
        (excess,),
        helps,
    )


def _on_hosts(search: Search) -> SearchResult | None:
    """What fits with states and weights in host memory, or with activations there: the faster, as
    far as the former gives something else up for memory."""
    states = with_host(search, _otherwise)
    if states is not None and {*chain(*(s.policies for s in states.best.plan.stages))} == {"none"}:
        return states
    found = [each for each in (states, with_activations(search)) if each is not None]
    return min(found, key=lambda each: each.best.step_time_s, default=None)


def _segmented(search: Search) -> SearchResult | None:
    """What fits in segments; None where they, or whether blocks run again, aren't free."""
    over = search.restrictions
    free = all(own is None for own in over.segments) and "none" not in over.recompute
    free = free and not search.space.host.weights
    if search.segmented or not free or search.programs.time.over():
        return None
    return search.like(segmented=True).attempt()


def _otherwise(search: Search) -> SearchResult | None:
    """What fits in another way, of a search that found nothing."""
    found = _without(search)[0] if search.refused else None
    return found or _segmented(search)


def _without(search: Search) -> tuple[SearchResult | None, float]:
    """What fits without what was refused, and the bytes by which the closest does not."""
    spent, excess = Counter(search.phases_s), search.excess_bytes
    last = search
    for _ in range(TRIES):
        if search.programs.time.over():
            break
        known = last.refused
        last = search.like()
        last.refused = known
        found = last.attempt()
        spent.update(last.phases_s)
        excess = min(excess, last.excess_bytes)
        if found is not None:
            return replace(found, phases_s=dict(spent)), excess
        if last.refused == known:
            break
    return None, excess

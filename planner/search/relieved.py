"""Where no plan fits on the devices alone: segments that run again, and host memory."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from meshwright.planner.search.activations import if_activations_pay, with_activations
from meshwright.planner.search.failure import failure
from meshwright.planner.search.offload import with_host

if TYPE_CHECKING:
    from meshwright.planner.search.result import SearchResult
    from meshwright.planner.search.search import Search


def relieved(search: Search) -> SearchResult:
    """The result of a search that found no plan that fits: of one that runs segments again, then
    with host memory. Raises as `Search.run` does."""
    if segments := _segmented(search):
        return if_activations_pay(search, segments)
    found = _on_hosts(search)
    if found is None:
        raise failure(search, search.drafts)
    return found


def _on_hosts(search: Search) -> SearchResult | None:
    """What fits with states and weights in host memory, or with activations there: the faster, as
    far as the former gives something else up for memory."""
    states = with_host(search, _segmented)
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

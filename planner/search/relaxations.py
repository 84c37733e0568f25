"""The way out where nothing fits: every single thing to let go of, and what would then be possible.

An override may be dropped, what is forbidden allowed, or nodes added. Each relaxed problem is asked
for a plan that fits, on the meshes that need least memory. Numbers of nodes are tried in steps of
up to a quarter until something fits, and the last step is halved; they start at

    k  >=  bytes of all weights, gradients and optimizer states / usable bytes of a node

below which no way to divide them helps. Cheapest is what needs the fewest nodes, then the least
time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from meshwright.costmodel.memory.states import model_state_bytes
from meshwright.planner.overrides.overrides import Overrides
from meshwright.planner.overrides.values import OverrideError
from meshwright.planner.plan.words import describe, seconds
from meshwright.planner.search.candidates import PlanDraft
from meshwright.planner.search.least_memory import least_memory_choices, memory_needs

if TYPE_CHECKING:
    from meshwright.planner.search.search import Search

MOST = 64  # times as many nodes, at most
MAX_MESHES = 12  # looked at for a plan that fits, those that divide the weights most
MAX_CUTS = 6  # combinations cut after the first that fits, for a faster one
TOGETHER = ("num_microbatches", "microbatch_size")  # both fix what a device holds of the batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """What to let go of, how many nodes that adds, and a plan that is possible then."""

    what: str
    more_nodes: int
    plan: str
    step_time_s: float

    def __str__(self) -> str:
        return f"{self.what} ({self.plan}: {seconds(self.step_time_s)} a step)"


def relaxations(search: Search) -> tuple[Relaxation, ...]:
    """Everything that helps by itself, the cheapest first."""
    found = [*_freed(search), *_wider(search)]
    return tuple(sorted(found, key=lambda r: (r.more_nodes, r.step_time_s, r.what)))


def way_out(found: Sequence[Relaxation]) -> str:
    """The relaxations as a sentence."""
    if not found:
        return (
            f"Nothing was found with up to {MOST} times as many nodes, or by dropping one "
            "override: change the model, the optimizer or the precision."
        )
    first, *others = map(str, found)
    return f"Way out: {first}" + (f"; or {'; or '.join(others)}." if others else ".")


def varied(search: Search, **changes: Any) -> Search:
    """The same question with some changes, on what the search has priced."""
    return replace(search, **changes)


# --- one restriction less ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """The overrides without one: how that one was spelled, how to say that it goes."""

    said: str
    what: str
    left: Overrides


def each_dropped(overrides: Overrides) -> Iterator[Dropped]:
    """The overrides without one of them, for each; what is forbidden counts one by one."""
    given, empty = overrides.given(), Overrides()
    for name, value in given.items():
        if name != "forbid":
            left = replace(overrides, **{name: getattr(empty, name)})
            yield Dropped(said=f"{name}={value!r}", what=f"leave {name} free", left=left)
    for forbidden in overrides.forbid:
        kept = tuple(name for name in overrides.forbid if name != forbidden)
        left = replace(overrides, forbid=kept)
        yield Dropped(said=f"forbid={forbidden!r}", what=f"allow {forbidden}", left=left)


def _freed(search: Search) -> Iterator[Relaxation]:
    relaxed: list[tuple[str, dict[str, Any]]] = [
        (dropped.what, {"overrides": dropped.left}) for dropped in each_dropped(search.overrides)
    ]
    if all(getattr(search.overrides, name) is not None for name in TOGETHER):
        free = replace(search.overrides, **dict.fromkeys(TOGETHER))
        relaxed.append((f"leave {' and '.join(TOGETHER)} free", {"overrides": free}))
    if search.executable:
        relaxed.append(("plan what can't be run yet (executable=False)", {"executable": False}))
    for what, changes in relaxed:
        found = _possible(search, **changes)
        if found is not None:
            yield _relaxation(what, 0, found)


# --- more nodes ----------------------------------------------------------------------------------


def _wider(search: Search) -> Iterator[Relaxation]:
    """The fewest nodes with which something fits."""
    here = search.cluster.num_nodes
    found: dict[int, PlanDraft | None] = {}

    def fits(nodes: int) -> bool:
        if nodes not in found:
            cluster = replace(search.cluster, num_nodes=nodes)
            found[nodes] = _possible(search, cluster=cluster, programs=None)
        return found[nodes] is not None

    start = max(here + 1, _least_nodes(search))
    tries = _counts(start, here * MOST)
    enough = next((n for n in tries if fits(n)), None)
    if enough is None:
        return
    low, high = max((n for n in tries if n < enough), default=start - 1), enough
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    draft = found[high]
    assert draft is not None
    yield _relaxation(f"{high} nodes", high - here, draft)


def _counts(start: int, most: int) -> list[int]:
    """Numbers of nodes to try, rising by an eighth to a quarter: 4 to 7 times a power of two, which
    more splits divide than the numbers between them."""
    grid = {a << k for a in (1, 3, 5, 7) for k in range(most.bit_length())}
    return sorted(n for n in grid | {start, most} if start <= n <= most)


def _least_nodes(search: Search) -> int:
    """Nodes that the states alone fill, however they are divided."""
    states = min(
        model_state_bytes(
            search.graph.num_parameters(),
            precision=search.precision,
            zero=zero,
            dp=1,
            optimizer=search.optimizer,
            target=search.target,
        )
        for zero in (0, 3)
    )
    room = search.cluster.device.usable_bytes * search.cluster.devices_per_node
    return math.ceil(states / room)


# --- whether something fits ----------------------------------------------------------------------


def _possible(search: Search, **changes: Any) -> PlanDraft | None:
    """A plan that fits the relaxed problem, the fastest of the few that are looked at."""
    try:
        return _fitting(varied(search, **changes))
    except OverrideError:  # what is left contradicts itself, the cluster or the batch
        return None


def _fitting(search: Search) -> PlanDraft | None:
    equal, best, effort = search.equal, None, MAX_CUTS
    slots = [
        slot
        for slot in least_memory_choices(search.space)[:MAX_MESHES]
        if any(lean.excess_bytes <= 0 for lean in memory_needs(equal, slot))
    ]
    nodes = [node for slot in slots for node in equal.combinations(slot)]
    for node in sorted(nodes, key=lambda n: (n.estimate_s, n.setup.mesh, n.schedule)):
        if best is not None and (effort <= 0 or node.estimate_s >= best.step_time_s):
            break
        found = equal.solve(node, math.inf if best is None else best.step_time_s)
        draft = search.draft(node, found[1]) if found else None
        if draft is not None and draft.fits:
            best = min(best or draft, draft, key=lambda d: d.step_time_s)
        effort -= best is not None
    equal.forget()
    return best


def _relaxation(what: str, more_nodes: int, draft: PlanDraft) -> Relaxation:
    return Relaxation(
        what=what, more_nodes=more_nodes, plan=describe(draft.plan), step_time_s=draft.step_time_s
    )

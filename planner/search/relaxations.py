"""The way out where nothing fits: every single restriction to let go of, and a plan possible then.

An override may be dropped, what is forbidden allowed, or nodes added. Each relaxed problem is asked
for a plan that fits, on the meshes that need least memory. Numbers of nodes are tried in steps of
up to a quarter until something fits, and the last step is halved; they start at

    k  >=  bytes of all weights, gradients and optimizer states / usable bytes of a node

below which no way to divide them helps. Cheapest is what needs the fewest nodes, then the least
time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from meshwright.costmodel.memory import model_states
from meshwright.planner.drafts import Drafter, PlanDraft
from meshwright.planner.overrides import OverrideError, each_dropped, without
from meshwright.planner.plan import Relaxation, describe, margin_beside, sized
from meshwright.planner.search.least_memory import least_memory_choices, memory_needs

MOST = 64  # times as many nodes, at most
MAX_MESHES = 12  # looked at for a plan that fits, those that divide the weights most
MAX_CUTS = 6  # combinations cut after the first that fits, for a faster one
TOGETHER = ("num_microbatches", "microbatch_size")  # both fix what a device holds of the batch


def relaxations(drafter: Drafter) -> tuple[Relaxation, ...]:
    """Everything that helps by itself, the cheapest first."""
    found = [*_freed(drafter), *_wider(drafter)]
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


def _freed(drafter: Drafter) -> Iterator[Relaxation]:
    """Overrides dropped one at a time, and what the executor can't run yet allowed."""
    overrides, executable = drafter.overrides, drafter.executable
    relaxed = [(one.what, one.left, executable) for one in each_dropped(overrides)]
    if all(getattr(overrides, name) is not None for name in TOGETHER):
        free = without(overrides, *TOGETHER)
        relaxed.append((f"leave {' and '.join(TOGETHER)} free", free, executable))
    if drafter.memory_margin:
        found = _possible(partial(drafter.like, memory_margin=0.0))
        if found is not None:
            yield _relaxation(_smaller_margin(drafter, found), 0, found)
    if executable:
        relaxed.append(("plan what can't be run yet (executable=False)", overrides, False))
    for what, left, runs in relaxed:
        found = _possible(partial(drafter.like, overrides=left, executable=runs))
        if found is not None:
            yield _relaxation(what, 0, found)


def _smaller_margin(drafter: Drafter, draft: PlanDraft) -> str:
    """The memory margin that leaves room for a draft, with the numbers."""
    memory, peak = (
        drafter.problem.cluster.device.memory_bytes,
        draft.evaluation.prediction.fullest_bytes,
    )
    margin = margin_beside(peak, memory)
    return (
        f"memory_margin={margin:g} instead of {drafter.memory_margin:g} (a plan takes "
        f"{sized(peak)} of a device's {sized(memory)}, the margin leaves "
        f"{sized(drafter.space.memory_bytes)})"
    )


def _wider(drafter: Drafter) -> Iterator[Relaxation]:
    """The fewest nodes with which something fits."""
    here = drafter.problem.cluster.num_nodes
    found: dict[int, PlanDraft | None] = {}

    def fits(nodes: int) -> bool:
        if nodes not in found:
            found[nodes] = _possible(partial(drafter.on_nodes, nodes))
        return found[nodes] is not None

    start = max(here + 1, _least_nodes(drafter))
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


def _least_nodes(drafter: Drafter) -> int:
    """Nodes that the model's states alone fill, however they are divided."""
    problem = drafter.problem
    states = min(
        model_states(
            problem.graph.num_parameters(),
            precision=problem.precision,
            zero=zero,
            dp=1,
            optimizer=problem.optimizer,
            target=problem.target,
        ).nbytes
        for zero in (0, 3)
    )
    cluster = problem.cluster
    return math.ceil(float(states) / (cluster.device.usable_bytes * cluster.devices_per_node))


def _possible(relaxed: Callable[[], Drafter]) -> PlanDraft | None:
    """A plan that fits the relaxed problem, the fastest of the few that are looked at."""
    try:
        return plan_that_fits(relaxed())
    except OverrideError:  # what is left contradicts itself, the cluster or the batch
        return None


def plan_that_fits(drafter: Drafter) -> PlanDraft | None:
    """A plan that fits, the fastest of the few that are looked at; None where none is found."""
    equal, best, effort = drafter.equal, None, MAX_CUTS
    fitting = [
        choice
        for choice in least_memory_choices(drafter.space)[:MAX_MESHES]
        if any(need.excess_bytes <= 0 for need in memory_needs(equal, choice))
    ]
    combinations = [one for choice in fitting for one in equal.combinations(choice)]
    for one in sorted(combinations, key=lambda c: (c.estimate_s, c.setup.mesh, c.schedule)):
        if best is not None and (effort <= 0 or one.estimate_s >= best.step_time_s):
            break
        found = equal.solve(one, math.inf if best is None else best.step_time_s)
        draft = drafter.draft(one, found[1]) if found else None
        if draft is not None and draft.fits:
            best = min(best or draft, draft, key=lambda d: d.step_time_s)
        effort -= best is not None
    equal.forget()
    return best


def some_plan_fits(drafter: Drafter) -> bool:
    """Whether a draft is found that fits, as `plan_that_fits` does: no more meshes are asked than
    it takes."""
    equal = drafter.equal
    for choice in least_memory_choices(drafter.space)[:MAX_MESHES]:
        if not any(need.excess_bytes <= 0 for need in memory_needs(equal, choice)):
            continue
        for one in sorted(equal.combinations(choice), key=lambda c: (c.tight, c.estimate_s)):
            found = equal.solve(one, math.inf)
            draft = drafter.draft(one, found[1]) if found else None
            if draft is not None and draft.fits:
                equal.forget()
                return True
    equal.forget()
    return False


def _relaxation(what: str, more_nodes: int, draft: PlanDraft) -> Relaxation:
    return Relaxation(
        what=what, more_nodes=more_nodes, plan=describe(draft.plan), step_time_s=draft.step_time_s
    )

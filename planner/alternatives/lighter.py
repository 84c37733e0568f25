"""What to train otherwise where nothing fits: how many bytes it saves on the fullest stage.

Asked of the mesh whose leanest plan lacks least, an equal share of the model in each stage,
everything recomputed (`search/least_memory.py`): an optimizer with smaller states, adapters on a
frozen model, a loss in chunks, shorter sequences; each alone, then together until it fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from meshwright.costmodel.memory import model_states
from meshwright.costmodel.operators import Problem
from meshwright.planner.alternatives import what_if
from meshwright.planner.drafts import MeshChoice
from meshwright.planner.overrides import OverrideError
from meshwright.planner.plan import InfeasibleError, sized
from meshwright.planner.search import MemoryNeed, Search, least_memory, least_memory_choices

MAX_MESHES = 8  # looked at for the one that lacks least
WORTH = 0.02  # of what is lacking: who saves less is not named
LOGITS = 0.3  # of the memory: logits that take more are called by name
OPTIMIZERS = {
    "adamw_fused": "AdamW in one kernel (fused=True, planned as optimizer='adamw_fused')",
    "adamw_bf16": "AdamW with states in bf16 (optimizer='adamw_bf16')",
    "adamw8bit": "AdamW with 8-bit states (optimizer='adamw8bit')",
    "sgd": "SGD without momentum (optimizer='sgd')",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A way to train with less memory; changes of one `kind` exclude each other. `adds_bytes` are
    of a device, what it needs besides."""

    what: str
    kind: str
    apply: Callable[[Problem], Problem | None]
    adds_bytes: float = 0.0


def with_advice(search: Search, error: InfeasibleError) -> InfeasibleError:
    """The error of a search, with what to train otherwise."""
    advice = lighter(search)
    if not advice:
        return error
    return InfeasibleError(f"{error} {advice}", error.shortfall_bytes, error.relaxations)


def lighter(search: Search) -> str:
    """What helps, in a sentence or two; empty where nothing does."""
    need = _need(search, least_memory_choices(search.space)[:MAX_MESHES])
    if need is None or need.excess_bytes <= 0:
        return ""
    needs = _Needs(search, need.choice)
    lacking = need.excess_bytes
    found: list[tuple[float, Change]] = []
    for change in _changes(search.problem, need.choice):
        left = needs.excess_bytes(change)
        if left is not None and lacking - left >= WORTH * lacking:
            found.append((lacking - left, change))
    if not found:
        return ""
    found.sort(key=lambda each: -each[0])
    parts = [
        f"{change.what} {sized(saved)} less{', which fits' if saved >= lacking else ''}"
        for saved, change in found
    ]
    said = f"Train it otherwise (on the fullest stage): {'; '.join(parts)}"
    if found[0][0] < lacking:
        said += _together(needs, [change for _, change in found], lacking)
    return f"{_logits(needs, search.problem, lacking)}{said}."


@dataclass(slots=True)
class _Needs:
    """Bytes that a mesh lacks under changes of the problem."""

    search: Search
    choice: MeshChoice

    def excess_bytes(self, *changes: Change) -> float | None:
        """None where a change does not apply, or nothing runs then."""
        problem: Problem | None = self.search.problem
        for change in changes:
            problem = problem and change.apply(problem)
        if problem is None:
            return None
        try:
            need = _need(self.search.like(problem=problem), [self.choice])
        except OverrideError:
            return None
        if need is None:
            return None
        return need.excess_bytes + sum(change.adds_bytes for change in changes)


def _need(search: Search, choices: list[MeshChoice]) -> MemoryNeed | None:
    found = least_memory(search.equal, choices)
    search.forget()
    return found


def _changes(problem: Problem, choice: MeshChoice) -> Iterator[Change]:
    """What may be changed, for a mesh that shares the model out."""
    for name, what in OPTIMIZERS.items():
        if name != problem.optimizer:
            yield Change(what=what, kind="optimizer", apply=partial(replace, optimizer=name))
    adapters = model_states(
        float(what_if.adapter_numel(problem)),
        precision=problem.precision,
        zero=0,
        dp=1,
        optimizer=problem.optimizer,
        target=problem.target,
    ).nbytes
    yield Change(
        what=f"LoRA (matrices frozen, adapters of rank {what_if.RANK} trained)",
        kind="adapters",
        apply=what_if.with_adapters,
        adds_bytes=adapters / (choice.groups * choice.mesh.tp),
    )
    yield _CHUNKED
    yield Change(what="sequences half as long", kind="sequence", apply=what_if.with_half_sequences)


_CHUNKED = Change(
    what=f"a chunked or fused loss (logits in {what_if.CHUNKS} parts)",
    kind="loss",
    apply=what_if.with_chunked_loss,
)


def _together(needs: _Needs, changes: list[Change], lacking: float) -> str:
    """The first of them that fit together, those that save most first."""
    taken: list[Change] = []
    left = lacking
    for change in changes:
        if change.kind in {own.kind for own in taken}:
            continue
        now = needs.excess_bytes(*taken, change)
        if now is None or left - now < WORTH * lacking:
            continue
        taken, left = [*taken, change], now
        if left <= 0:
            names = " with ".join(own.what.split(" (")[0] for own in taken)
            return f"; {names} fits, with {sized(-left)} to spare"
    return f"; even together they lack {sized(left)}"


def _logits(needs: _Needs, problem: Problem, lacking: float) -> str:
    """A sentence where the logits are what does not fit."""
    left = needs.excess_bytes(_CHUNKED)
    if left is None:
        return ""
    taken = (lacking - left) / (1 - 1 / what_if.CHUNKS)
    if taken < LOGITS * problem.cluster.device.usable_bytes:
        return ""
    return f"The logits and their gradients alone take {sized(taken)}. "

"""Drafter: the plans of one problem under given overrides, and their price.

A search, its way out where nothing fits, and a report's alternatives all draw on one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self, TypedDict

from meshwright.costmodel.operators import Problem
from meshwright.costmodel.schedules import Pipeline
from meshwright.planner.drafts.away import brought_back
from meshwright.planner.drafts.candidates import Candidate, PlanDraft, make_candidate, make_draft
from meshwright.planner.drafts.combinations import StageDraft
from meshwright.planner.drafts.equal_stages import EqualStages
from meshwright.planner.drafts.space import Space
from meshwright.planner.drafts.unequal_stages import UnequalStages
from meshwright.planner.overrides import OverrideError, Overrides, Restrictions, restrict
from meshwright.planner.plan import resolve_shardings
from meshwright.planner.pricing import StageCoster
from meshwright.planner.stages import BlockPrograms


class Given(TypedDict, total=False):
    """What a drafter may be given beside the problem, as `Drafter` has it."""

    memory_margin: float
    programs: BlockPrograms | None


class Drafter:
    """Drafts plans for a problem, a global batch and overrides: its `space`, and stages of `equal`
    and `unequal` meshes.

    `memory_margin` is the part of a device's memory that stays free. `programs` are another
    drafter's of the same problem, to reuse what it priced. Raises `OverrideError` for overrides
    that contradict the model or each other.
    """

    def __init__(
        self,
        problem: Problem,
        global_batch_size: int,
        overrides: Overrides,
        *,
        memory_margin: float = 0.0,
        programs: BlockPrograms | None = None,
    ) -> None:
        graph = problem.graph
        self.problem = problem
        self.global_batch_size = global_batch_size
        self.overrides = overrides
        self.memory_margin = memory_margin
        self.restrictions = restrict(
            overrides,
            graph,
            target=problem.target,
            allow=problem.allow,
            precision=problem.precision,
        )
        _check_host(problem, overrides, self.restrictions)
        forced, entries = self.restrictions.shardings, {}
        if forced:
            entries = resolve_shardings(graph, graph.blocks, forced, "override shardings")
        self.space = Space(
            problem=problem,
            global_batch_size=global_batch_size,
            restrictions=self.restrictions,
            memory_margin=memory_margin,
        )
        at = self.space.cut_at
        if programs is None:
            self.programs = BlockPrograms(StageCoster(problem), entries, cut_at=at)
        else:
            self.programs = programs.deciding(entries, at)
        self.equal = EqualStages(self.space, self.programs)
        self.unequal = UnequalStages(self.space, self.equal)

    def like(self, **changes: Any) -> Self:
        """The same with other arguments, in the same time. What was priced is used again, for
        another problem nothing."""
        programs = None if "problem" in changes else self.programs
        made = type(self)(**{**self._arguments(), "programs": programs, **changes})
        made.programs.time = self.programs.time
        return made

    def _arguments(self) -> dict[str, Any]:
        """What it was made of, but for the programs."""
        return {
            "problem": self.problem,
            "global_batch_size": self.global_batch_size,
            "overrides": self.overrides,
            "memory_margin": self.memory_margin,
        }

    def on_nodes(self, num_nodes: int) -> Self:
        """The same on another number of nodes."""
        cluster = replace(self.problem.cluster, num_nodes=num_nodes)
        return self.like(problem=replace(self.problem, cluster=cluster))

    def simulated(
        self, stages: Sequence[StageDraft], pipeline: Pipeline, free_bytes: float = 0.0
    ) -> PlanDraft:
        """Stages of a pipeline, simulated; so many bytes of each device are to stay free."""
        batch, room = self.global_batch_size, self.space.memory_bytes
        return make_draft(self.programs.coster, stages, pipeline, batch, room, free_bytes)

    def written(self, draft: PlanDraft) -> Candidate:
        """The plan of a draft, written out and priced from what is written, with as little off its
        devices as fits."""
        found = make_candidate(self.programs.coster, draft)
        sends = draft.stages[0].setup.relief.sends
        return brought_back(found, self.programs, self.space, sends, draft.room_bytes)

    def forget(self) -> None:
        """Give back the memory of what was cut; prices stay."""
        self.equal.forget()


def _check_host(problem: Problem, overrides: Overrides, own: Restrictions) -> None:
    """Raise `OverrideError` for what is to lie in memory, or on flash, of which nothing is
    known."""
    host = problem.cluster.host
    given = overrides.given().items()
    parts = ", ".join(f"{name}={value!r}" for name, value in given if isinstance(value, dict))
    for wanted, known, what, legal in (
        (
            own.host_states or own.host_activations,
            host is not None,
            "memory",
            "a cluster with a host",
        ),
        (
            own.host_files,
            host is not None and host.has_flash,
            "flash",
            "a cluster with nvme_bytes, nvme_read_bandwidth and nvme_write_bandwidth",
        ),
    ):
        if wanted and not known:
            raise OverrideError(
                f"cluster {problem.cluster.name!r} says nothing of its hosts' {what}",
                place=f"override {parts}",
                legal=legal,
                way_out="give it one, in TOML as [host], or drop the override",
            )
